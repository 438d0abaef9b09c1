#pragma once
// Finished rows of `oscar eval`, as printed and as kept in its row file between runs.

#include <map>
#include <nlohmann/json.hpp>
#include <oscar/result.hpp>
#include <string>
#include <vector>

#include "metrics.hpp"

namespace oscar::tool {

// Answers of a retrieval task: `exact` would be generated without a fault, with this cache and with the 16-bit one;
// log_p: mean log-probability of a whole answer, nats.
struct RetrievalScore {
  int keys = 0;  // in the text at once; 0: the row is of running text
  int questions = 0, exact = 0, baseline_exact = 0;
  double log_p = 0, baseline_log_p = 0;
  struct Depth {
    double from = 0;  // share of the text before the key: this quarter's start
    int questions = 0, exact = 0, baseline_exact = 0;
  };
  std::vector<Depth> depths;  // four quarters
};

struct EvalRow {
  std::string model, text, method;
  std::string mode;  // "prefix" or "full"
  int prefix = 0, sink = 0, recent = 0;
  double bits = 16, bits_at_length = 16, bits_at_8k = 16, bits_at_32k = 16, bits_at_128k = 16;
  ScoreSummary summary;
  std::vector<PositionScore> positions;
  RetrievalScore retrieval;
  double seconds = 0;
};

nlohmann::ordered_json row_json(const EvalRow& row);
// A row as row_json wrote it. Throws nlohmann::json::exception when a field is missing or of another kind.
EvalRow row_of(const nlohmann::json& json);
std::string rows_table(const std::vector<EvalRow>& rows);
// One line a row, the names of row_json in the first; without the positions.
std::string rows_csv(const std::vector<EvalRow>& rows);

// Rows by key; a key holds everything that decides a row (model, text, method, settings, rotation hash).
class RowFile {
 public:
  // No path: nothing is kept. Error kBadInput when the file exists and is not one of these.
  static Result<RowFile> open(const std::string& path);
  const EvalRow* find(const std::string& key) const;
  Status add(const std::string& key, const EvalRow& row);  // written at once, whole or not at all

 private:
  std::string path_;
  std::map<std::string, EvalRow> rows_;
};

}  // namespace oscar::tool
