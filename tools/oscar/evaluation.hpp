#pragma once
// Scores of cache methods on one text against llama.cpp's own 16-bit cache.

#include <functional>
#include <memory>
#include <oscar/rotation.hpp>
#include <string>
#include <vector>

#include "llama_session.hpp"
#include "metrics.hpp"
#include "rivals/simulator.hpp"

namespace oscar::tool {

enum class EvalMode {
  kPrefix,  // the prefix is decoded exactly, then stored in 2 bits; what follows reads it (prompt, then answer)
  kFull,    // every token reads the 2-bit cache outside its windows
};

struct EvalSettings {
  EvalMode mode = EvalMode::kPrefix;
  int num_threads = 1;
};

// Tokens that follow the prefix, in one batch; the prefix alone is there again for the next ones.
struct Continuation {
  std::vector<llama_token> tokens;
  std::vector<int> scored;  // ascending indices i < tokens.size() - 1: the prediction of tokens[i + 1] is scored
};

struct EvalTask {
  std::vector<llama_token> prefix;
  std::vector<Continuation> continuations;  // at least one
};

// A window of running text: the first `prefix` tokens, then every stride-th position of the rest whose successor is
// known.
EvalTask running_text_task(const std::vector<llama_token>& tokens, int prefix, int stride);

// A method under test: a rotation set; or a simulator of a method that has no page format; or neither for "f16", our
// cache with every row kept exact, the noise floor. Or one of llama.cpp's own caches, which quantises every row as it
// is written: the same in both modes.
struct EvalMethod {
  std::string name;
  std::shared_ptr<const RotationSet> rotation = nullptr;
  std::shared_ptr<const rivals::Simulator> simulator = nullptr;
  CacheKind cache = CacheKind::kOscar;
  double stock_bits = 16;     // of an element, where there is neither rotation nor simulator
  std::string identity = "";  // everything that decides what it does, beside the model and the name
  bool has_windows() const { return rotation != nullptr || simulator != nullptr; }
};

// 16-bit rows: of the first and of the latest tokens.
struct WindowSize {
  int sink = 64, recent = 256;
  bool operator==(const WindowSize&) const = default;
};

struct EvalCase {
  EvalMethod method;
  WindowSize windows;
};

struct CaseScores {
  std::vector<TokenScores> continuations;
  double seconds = 0;  // without the baseline and the shared prefix
};

// One entry a case, in order; cases of one method that follow each other are encoded once. `advance` is called as work
// is done, with the share of the whole.
Result<std::vector<CaseScores>> evaluate(const Model& model, const ModelGeometry& geometry, const EvalTask& task,
                                         const std::vector<EvalCase>& cases, const EvalSettings& settings,
                                         const std::function<void(double)>& advance);

}  // namespace oscar::tool
