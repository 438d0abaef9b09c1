#include "eval_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "io/file.hpp"
#include "table.hpp"

namespace oscar::tool {
namespace {

constexpr int kRowFileVersion = 3;

}  // namespace

EvalRow row_of(const nlohmann::json& json) {
  EvalRow row;
  row.model = json.at("model").get<std::string>();
  row.text = json.at("text").get<std::string>();
  row.method = json.at("method").get<std::string>();
  row.mode = json.at("mode").get<std::string>();
  row.prefix = json.at("prefix").get<int>();
  row.sink = json.at("sink").get<int>();
  row.recent = json.at("recent").get<int>();
  row.bits = json.at("bits_per_element").get<double>();
  row.bits_at_length = json.at("bits_at_length").get<double>();
  row.bits_at_8k = json.at("bits_at_8k").get<double>();
  row.bits_at_32k = json.at("bits_at_32k").get<double>();
  row.bits_at_128k = json.at("bits_at_128k").get<double>();
  ScoreSummary& s = row.summary;
  s.kl = json.at("kl").get<double>();
  s.kl_error = json.at("kl_error").get<double>();
  s.kl_p99 = json.at("kl_p99").get<double>();
  s.top1 = json.at("top1").get<double>();
  s.perplexity = json.at("perplexity").get<double>();
  s.baseline_perplexity = json.at("baseline_perplexity").get<double>();
  s.ratio = json.at("ratio").get<double>();
  s.ratio_error = json.at("ratio_error").get<double>();
  s.num_tokens = json.at("tokens").get<std::size_t>();
  row.seconds = json.at("seconds").get<double>();
  for (const auto& position : json.at("positions")) {
    row.positions.push_back(
        {position.at("first").get<int>(), position.at("kl").get<double>(), position.at("tokens").get<std::size_t>()});
  }
  RetrievalScore& r = row.retrieval;
  r.keys = json.at("keys").get<int>();
  r.questions = json.at("questions").get<int>();
  r.exact = json.at("exact").get<int>();
  r.baseline_exact = json.at("baseline_exact").get<int>();
  r.log_p = json.at("answer_log_p").get<double>();
  r.baseline_log_p = json.at("baseline_answer_log_p").get<double>();
  for (const auto& depth : json.at("depths")) {
    r.depths.push_back({depth.at("from").get<double>(), depth.at("questions").get<int>(), depth.at("exact").get<int>(),
                        depth.at("baseline_exact").get<int>()});
  }
  return row;
}

nlohmann::ordered_json row_json(const EvalRow& row) {
  const ScoreSummary& s = row.summary;
  auto positions = nlohmann::ordered_json::array();
  for (const PositionScore& p : row.positions)
    positions.push_back({{"first", p.first}, {"kl", p.kl}, {"tokens", p.num_tokens}});
  const RetrievalScore& r = row.retrieval;
  auto depths = nlohmann::ordered_json::array();
  for (const RetrievalScore::Depth& d : r.depths) {
    depths.push_back(
        {{"from", d.from}, {"questions", d.questions}, {"exact", d.exact}, {"baseline_exact", d.baseline_exact}});
  }
  return {{"model", row.model},
          {"text", row.text},
          {"method", row.method},
          {"mode", row.mode},
          {"prefix", row.prefix},
          {"sink", row.sink},
          {"recent", row.recent},
          {"bits_per_element", row.bits},
          {"bits_at_length", row.bits_at_length},
          {"bits_at_8k", row.bits_at_8k},
          {"bits_at_32k", row.bits_at_32k},
          {"bits_at_128k", row.bits_at_128k},
          {"kl", s.kl},
          {"kl_error", s.kl_error},
          {"kl_p99", s.kl_p99},
          {"top1", s.top1},
          {"perplexity", s.perplexity},
          {"baseline_perplexity", s.baseline_perplexity},
          {"ratio", s.ratio},
          {"ratio_error", s.ratio_error},
          {"tokens", s.num_tokens},
          {"seconds", row.seconds},
          {"keys", r.keys},
          {"questions", r.questions},
          {"exact", r.exact},
          {"baseline_exact", r.baseline_exact},
          {"answer_log_p", r.log_p},
          {"baseline_answer_log_p", r.baseline_log_p},
          {"positions", positions},
          {"depths", depths}};
}

std::string rows_csv(const std::vector<EvalRow>& rows) {
  const auto cell = [](const nlohmann::ordered_json& value) {
    if (!value.is_string()) return value.dump();
    std::string quoted(1, '"');
    for (const char c : value.get<std::string>()) quoted.append(c == '"' ? 2 : 1, c);
    quoted.push_back('"');
    return quoted;
  };
  std::string csv;
  for (const EvalRow& row : rows) {
    const nlohmann::ordered_json json = row_json(row);
    std::string names, values;
    for (const auto& [name, value] : json.items()) {
      if (value.is_array()) continue;
      if (!names.empty()) names.push_back(','), values.push_back(',');
      names += name;
      values += cell(value);
    }
    if (csv.empty()) csv = names.append(1, '\n');
    csv += values.append(1, '\n');
  }
  return csv;
}

std::string rows_table(const std::vector<EvalRow>& rows) {
  // A column that is the same in every row says nothing.
  const auto varies = [&](auto value) {
    return std::ranges::any_of(rows, [&](const EvalRow& row) { return value(row) != value(rows.front()); });
  };
  const bool prefixes = varies([](const EvalRow& r) { return r.prefix; });
  const bool windows = varies([](const EvalRow& r) { return std::pair(r.sink, r.recent); });
  const bool retrieval = std::ranges::any_of(rows, [](const EvalRow& r) { return r.retrieval.keys > 0; });
  std::vector<std::string> names = {"model", "text", "method"};
  if (prefixes) names.emplace_back("prefix");
  if (windows) names.emplace_back("windows");
  const std::size_t text_columns = names.size();
  names.insert(names.end(), {"bits/elt", "bits@32K"});
  if (retrieval) names.insert(names.end(), {"exact", "16-bit", "log p"});
  names.insert(names.end(), {"KL", "p99", "top-1", "PPL", "ratio", "tokens", "seconds"});
  Table table(names, static_cast<int>(text_columns));
  for (const EvalRow& row : rows) {
    const ScoreSummary& s = row.summary;
    const RetrievalScore& r = row.retrieval;
    std::vector<std::string> cells = {row.model, row.text, row.method};
    if (prefixes) cells.push_back(fmt::format("{}", row.prefix));
    if (windows) cells.push_back(fmt::format("{}+{}", row.sink, row.recent));
    cells.insert(cells.end(), {fmt::format("{:.3f}", row.bits), fmt::format("{:.3f}", row.bits_at_32k)});
    if (retrieval) {
      cells.insert(cells.end(), {fmt::format("{}/{}", r.exact, r.questions), fmt::format("{}", r.baseline_exact),
                                 fmt::format("{:.3f}", r.log_p)});
    }
    cells.insert(cells.end(), {fmt::format("{:.4f} ± {:.4f}", s.kl, s.kl_error), fmt::format("{:.3f}", s.kl_p99),
                               fmt::format("{:.3f}", s.top1), fmt::format("{:.3f}", s.perplexity),
                               fmt::format("{:.4f} ± {:.4f}", s.ratio, s.ratio_error), fmt::format("{}", s.num_tokens),
                               fmt::format("{:.1f}", row.seconds)});
    table.add(cells);
  }
  return table.text();
}

Result<RowFile> RowFile::open(const std::string& path) {
  RowFile file;
  file.path_ = path;
  std::error_code ignored;
  if (path.empty() || !std::filesystem::exists(path, ignored)) return file;
  std::ifstream in(path);
  const auto json = nlohmann::json::parse(in, nullptr, false);
  const auto foreign = [&] {
    return make_error(ErrorCode::kBadInput,
                      path + ": is not a row file of oscar eval; choose another --cache-file or delete it");
  };
  if (!json.is_object() || json.value("format", "") != "oscar-eval-rows" || !json.contains("rows") ||
      !json["rows"].is_object() || json.value("version", 0) > kRowFileVersion) {
    return foreign();
  }
  if (json.value("version", 0) < kRowFileVersion) return file;  // an older program's rows lack fields: measured again
  try {
    for (const auto& [key, row] : json["rows"].items()) file.rows_.emplace(key, row_of(row));
  } catch (const nlohmann::json::exception&) {
    return foreign();
  }
  return file;
}

const EvalRow* RowFile::find(const std::string& key) const {
  const auto found = rows_.find(key);
  return found != rows_.end() ? &found->second : nullptr;
}

Status RowFile::add(const std::string& key, const EvalRow& row) {
  rows_.insert_or_assign(key, row);
  if (path_.empty()) return {};
  nlohmann::ordered_json json = {
      {"format", "oscar-eval-rows"}, {"version", kRowFileVersion}, {"rows", nlohmann::ordered_json::object()}};
  for (const auto& [name, kept] : rows_) json["rows"][name] = row_json(kept);
  return io::write_file(path_, json.dump(1) + "\n");
}

}  // namespace oscar::tool
