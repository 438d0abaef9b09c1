#include "checks.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "table.hpp"

namespace oscar::tool {

std::string_view verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk: return "ok";
    case Verdict::kWarning: return "warning";
    case Verdict::kFailed: return "failed";
  }
  return "?";
}

int exit_code_of(const std::vector<Check>& checks) {
  int exit_code = kExitDone;
  for (const Check& check : checks) {
    if (check.verdict == Verdict::kFailed) exit_code = std::max(exit_code, check.exit_code);
  }
  return exit_code;
}

std::string checks_text(const std::vector<Check>& checks) {
  Table table({"check", "found", "verdict"}, 3);
  std::string remedies;
  for (const Check& check : checks) {
    table.add({check.name, check.found, std::string(verdict_text(check.verdict))});
    if (!check.remedy.empty()) remedies += fmt::format("{}: {}\n", check.name, check.remedy);
  }
  return table.text() + (remedies.empty() ? "" : "\n" + remedies);
}

nlohmann::ordered_json checks_json(const std::vector<Check>& checks) {
  auto json = nlohmann::ordered_json::array();
  for (const Check& check : checks) {
    json.push_back({{"check", check.name},
                    {"found", check.found},
                    {"verdict", verdict_text(check.verdict)},
                    {"remedy", check.remedy}});
  }
  return json;
}

}  // namespace oscar::tool
