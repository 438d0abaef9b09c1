#pragma once
// Multi-key retrieval: pass keys stated at even depths of a filler text, then asked for one after the other.

#include <span>
#include <vector>

#include "eval_rows.hpp"
#include "evaluation.hpp"
#include "text.hpp"

namespace oscar::tool {

inline constexpr int kMostKeys = 40;  // names to tell them apart

struct RetrievalTask {
  EvalTask task;               // the text; a question and its answer in each continuation, the answer's tokens scored
  std::vector<double> depths;  // share of the text before each continuation's key
};

// Context `index` of `count`: its filler starts at that window of the text (window_start), its keys are drawn anew, the
// same for every model and run. `length`: tokens of the text, the last 300 of which state no key. Error kBadInput: the
// text has too few tokens, or the keys do not fit the length.
Result<RetrievalTask> retrieval_task(const Model& model, const TextFile& filler, int num_keys, int length, int index,
                                     int count, double offset);

// Adds the answers of one context. An answer is exact when each of its tokens was the first choice after the ones
// before it: then it is what the model would have written.
void add_answers(const RetrievalTask& task, std::span<const TokenScores> answers, RetrievalScore& score);

}  // namespace oscar::tool
