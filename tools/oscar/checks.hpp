#pragma once
// Findings of `doctor` and `verify`: what was looked at, what was found, and a remedy for all that is not ok.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "outcome.hpp"

namespace oscar::tool {

enum class Verdict { kOk, kWarning, kFailed };
std::string_view verdict_text(Verdict verdict);  // "ok", "warning", "failed"

struct Check {
  std::string name, found;
  Verdict verdict = Verdict::kOk;
  std::string remedy;                // empty when ok
  int exit_code = kExitCheckFailed;  // when it failed
};

// The largest exit code of the failed ones, kExitDone when none failed.
int exit_code_of(const std::vector<Check>& checks);

// A line a check, then the remedies.
std::string checks_text(const std::vector<Check>& checks);
nlohmann::ordered_json checks_json(const std::vector<Check>& checks);

}  // namespace oscar::tool
