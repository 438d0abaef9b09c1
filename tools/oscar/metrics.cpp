#include "metrics.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace oscar::tool {
namespace {

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_error(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double m = mean(values);
  double squares = 0;
  for (const double v : values) squares += (v - m) * (v - m);
  const auto n = static_cast<double>(values.size());
  return std::sqrt(squares / (n - 1) / n);
}

double quantile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  const double at = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

}  // namespace

void log_softmax(std::span<const float> logits, std::span<float> out) {
  const float top = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float logit : logits) sum += static_cast<double>(std::exp(logit - top));
  const double log_sum = static_cast<double>(top) + std::log(sum);
  for (std::size_t i = 0; i < logits.size(); ++i) out[i] = static_cast<float>(static_cast<double>(logits[i]) - log_sum);
}

double kl_divergence(std::span<const float> log_p, std::span<const float> log_q) {
  double sum = 0;
  for (std::size_t i = 0; i < log_p.size(); ++i) {
    const auto p = static_cast<double>(std::exp(log_p[i]));
    if (p > 0) sum += p * (static_cast<double>(log_p[i]) - static_cast<double>(log_q[i]));
  }
  return sum;
}

std::size_t argmax(std::span<const float> values) {
  return static_cast<std::size_t>(std::ranges::max_element(values) - values.begin());
}

void TokenScores::add(int at, std::span<const float> baseline_log_p, std::span<const float> log_p,
                      std::size_t next_token) {
  position.push_back(at);
  kl.push_back(kl_divergence(baseline_log_p, log_p));
  const std::size_t top = argmax(log_p), baseline_top = argmax(baseline_log_p);
  same_top.push_back(baseline_top == top);
  hit.push_back(top == next_token);
  baseline_hit.push_back(baseline_top == next_token);
  nll.push_back(-static_cast<double>(log_p[next_token]));
  baseline_nll.push_back(-static_cast<double>(baseline_log_p[next_token]));
}

void TokenScores::append(const TokenScores& other) {
  position.insert(position.end(), other.position.begin(), other.position.end());
  kl.insert(kl.end(), other.kl.begin(), other.kl.end());
  same_top.insert(same_top.end(), other.same_top.begin(), other.same_top.end());
  hit.insert(hit.end(), other.hit.begin(), other.hit.end());
  baseline_hit.insert(baseline_hit.end(), other.baseline_hit.begin(), other.baseline_hit.end());
  nll.insert(nll.end(), other.nll.begin(), other.nll.end());
  baseline_nll.insert(baseline_nll.end(), other.baseline_nll.begin(), other.baseline_nll.end());
}

ScoreSummary summarise(const TokenScores& scores) {
  ScoreSummary summary;
  summary.num_tokens = scores.kl.size();
  summary.kl = mean(scores.kl);
  summary.kl_error = standard_error(scores.kl);
  summary.kl_p99 = quantile(scores.kl, 0.99);
  summary.top1 =
      static_cast<double>(std::ranges::count(scores.same_top, true)) / static_cast<double>(summary.num_tokens);
  summary.perplexity = std::exp(mean(scores.nll));
  summary.baseline_perplexity = std::exp(mean(scores.baseline_nll));
  std::vector<double> differences(summary.num_tokens);
  for (std::size_t i = 0; i < differences.size(); ++i) differences[i] = scores.nll[i] - scores.baseline_nll[i];
  summary.ratio = std::exp(mean(differences));
  summary.ratio_error = standard_error(differences) * summary.ratio;
  return summary;
}

std::vector<PositionScore> by_position(const TokenScores& scores, int width) {
  std::map<int, PositionScore> buckets;
  for (std::size_t i = 0; i < scores.position.size(); ++i) {
    const int first = scores.position[i] / width * width;
    PositionScore& bucket = buckets[first];
    bucket.first = first;
    bucket.kl += scores.kl[i];
    ++bucket.num_tokens;
  }
  std::vector<PositionScore> result;
  for (auto& [first, bucket] : buckets) {
    bucket.kl /= static_cast<double>(bucket.num_tokens);
    result.push_back(bucket);
  }
  return result;
}

}  // namespace oscar::tool
