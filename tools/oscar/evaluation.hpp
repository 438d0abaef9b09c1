#pragma once
// Scores of cache methods on one window of text against llama.cpp's own 16-bit cache.

#include <functional>
#include <memory>
#include <oscar/rotation.hpp>
#include <string>
#include <vector>

#include "llama_session.hpp"
#include "metrics.hpp"

namespace oscar::tool {

enum class EvalMode {
  kPrefix,  // the prefix is decoded exactly, then stored in 2 bits; the scored tokens read it (prompt, then answer)
  kFull,    // every token reads the 2-bit cache outside its windows
};

struct EvalSettings {
  int prefix = 1536;  // tokens before the scored ones
  int score = 256;    // tokens of the scored part; its last one has no successor: score - 1 predictions at stride 1
  int stride = 1;     // score every stride-th position
  int sink = 64, recent = 256;
  EvalMode mode = EvalMode::kPrefix;
  int num_threads = 1;
};

// A method under test: a rotation set, or none for "f16": our cache with every row kept exact, the noise floor. Or one
// of llama.cpp's own caches, which quantises every row as it is written: the same in both modes.
struct EvalMethod {
  std::string name;
  std::shared_ptr<const RotationSet> rotation;
  CacheKind cache = CacheKind::kOscar;
};

struct MethodScores {
  TokenScores scores;
  double seconds = 0;
};

// `tokens`: prefix + score ids. One entry a method, in order. `advance` is called as work is done, with the share of
// the window.
Result<std::vector<MethodScores>> evaluate_window(const Model& model, const ModelGeometry& geometry,
                                                  const std::vector<llama_token>& tokens,
                                                  const std::vector<EvalMethod>& methods, const EvalSettings& settings,
                                                  const std::function<void(double)>& advance);

}  // namespace oscar::tool
