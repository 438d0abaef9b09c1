#include "eval_rows.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>

#include "io/file.hpp"
#include "table.hpp"

namespace oscar::tool {
namespace {

constexpr int kRowFileVersion = 1;

EvalRow row_of(const nlohmann::json& json) {
  EvalRow row;
  row.model = json.at("model").get<std::string>();
  row.text = json.at("text").get<std::string>();
  row.method = json.at("method").get<std::string>();
  row.bits = json.at("bits_per_element").get<double>();
  row.bits_at_length = json.at("bits_at_length").get<double>();
  row.bits_at_32k = json.at("bits_at_32k").get<double>();
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
  return row;
}

}  // namespace

nlohmann::ordered_json row_json(const EvalRow& row) {
  const ScoreSummary& s = row.summary;
  return {{"model", row.model},
          {"text", row.text},
          {"method", row.method},
          {"bits_per_element", row.bits},
          {"bits_at_length", row.bits_at_length},
          {"bits_at_32k", row.bits_at_32k},
          {"kl", s.kl},
          {"kl_error", s.kl_error},
          {"kl_p99", s.kl_p99},
          {"top1", s.top1},
          {"perplexity", s.perplexity},
          {"baseline_perplexity", s.baseline_perplexity},
          {"ratio", s.ratio},
          {"ratio_error", s.ratio_error},
          {"tokens", s.num_tokens},
          {"seconds", row.seconds}};
}

std::string rows_table(const std::vector<EvalRow>& rows) {
  Table table(
      {"model", "text", "method", "bits/elt", "bits@32K", "KL", "p99", "top-1", "PPL", "ratio", "tokens", "seconds"},
      3);
  for (const EvalRow& row : rows) {
    const ScoreSummary& s = row.summary;
    table.add({row.model, row.text, row.method, fmt::format("{:.3f}", row.bits), fmt::format("{:.3f}", row.bits_at_32k),
               fmt::format("{:.4f} ± {:.4f}", s.kl, s.kl_error), fmt::format("{:.3f}", s.kl_p99),
               fmt::format("{:.3f}", s.top1), fmt::format("{:.3f}", s.perplexity),
               fmt::format("{:.4f} ± {:.4f}", s.ratio, s.ratio_error), fmt::format("{}", s.num_tokens),
               fmt::format("{:.1f}", row.seconds)});
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
      !json["rows"].is_object() || json.value("version", 0) != kRowFileVersion) {
    return foreign();
  }
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
