#pragma once
// How far one model's next-token distributions are from another's, over the same tokens.

#include <cstddef>
#include <span>
#include <vector>

namespace oscar::tool {

// log p of every token of the vocabulary, natural logarithm, from logits. `out` has the size of `logits`.
void log_softmax(std::span<const float> logits, std::span<float> out);

// KL(p || q) in nats, both given as log-probabilities.
double kl_divergence(std::span<const float> log_p, std::span<const float> log_q);

std::size_t argmax(std::span<const float> values);

// Per scored token.
struct TokenScores {
  std::vector<int> position;              // of the token whose successor is predicted
  std::vector<double> kl;                 // nats
  std::vector<bool> same_top;             // both put the same token first
  std::vector<double> nll, baseline_nll;  // -log p of the token that followed
  std::vector<bool> hit, baseline_hit;    // the token that followed was the first choice
  void add(int at, std::span<const float> baseline_log_p, std::span<const float> log_p, std::size_t next_token);
  void append(const TokenScores& other);
};

struct ScoreSummary {
  double kl = 0, kl_error = 0, kl_p99 = 0;  // mean, standard error of it, 99th percentile (interpolated)
  double top1 = 0;                          // share of tokens with the same first choice
  double perplexity = 0, baseline_perplexity = 0;
  double ratio = 0, ratio_error = 0;  // of the perplexities, and its standard error (tokens taken as independent)
  std::size_t num_tokens = 0;
};
// `scores` has at least one token.
ScoreSummary summarise(const TokenScores& scores);

// Mean KL of the tokens at positions [first, first + width of the call), in the order of the positions.
struct PositionScore {
  int first = 0;
  double kl = 0;
  std::size_t num_tokens = 0;
};
std::vector<PositionScore> by_position(const TokenScores& scores, int width);

}  // namespace oscar::tool
