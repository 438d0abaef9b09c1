#include "retrieval.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace oscar::tool {
namespace {

constexpr int kTail = 300;  // tokens of filler after the last key: it lies before a recent window of 256
constexpr int kDigits = 5;
constexpr int kNumDepths = 4;
constexpr const char* kIntroduction = "There are pass keys hidden in the text below. Find and memorise them.\n";
constexpr const char* kNames[kMostKeys] = {"Alice",  "Robert", "Maria", "Thomas",  "Susan", "Peter",  "Laura", "Henry",
                                           "Diana",  "George", "Helen", "Victor",  "Emma",  "Oscar",  "Grace", "Simon",
                                           "Julia",  "Martin", "Clara", "Edward",  "Nora",  "Walter", "Alma",  "Arthur",
                                           "Rose",   "Felix",  "Irene", "Leonard", "Vera",  "Hugo",   "Ellen", "Philip",
                                           "Sophia", "Daniel", "Ruth",  "Frank",   "Olga",  "Samuel", "Betty", "Ralph"};

struct Key {
  std::string name, digits;
};

std::vector<Key> draw_keys(int num_keys, int index) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(1000 * index + num_keys));
  std::vector<int> order(kMostKeys);
  std::iota(order.begin(), order.end(), 0);
  // The standard fixes the engine's numbers, not what its shuffles and distributions make of them.
  for (int i = kMostKeys - 1; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)], order[random() % static_cast<std::size_t>(i + 1)]);
  }
  std::vector<Key> keys;
  for (int i = 0; i < num_keys; ++i) {
    Key key{.name = kNames[order[static_cast<std::size_t>(i)]], .digits = {}};
    for (int d = 0; d < kDigits; ++d) key.digits.push_back(static_cast<char>('1' + random() % 9));
    keys.push_back(std::move(key));
  }
  return keys;
}

void append(std::vector<llama_token>& tokens, std::span<const llama_token> more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
}

}  // namespace

Result<RetrievalTask> retrieval_task(const Model& model, const TextFile& filler, int num_keys, int length, int index,
                                     int count, double offset) {
  const auto tokens_of = [&](const std::string& text) { return model.tokenize(text, false, false); };
  const std::vector<Key> keys = draw_keys(num_keys, index);
  OSCAR_ASSIGN(const auto introduction, tokens_of(kIntroduction));
  std::vector<std::vector<llama_token>> statements;
  int stated = static_cast<int>(introduction.size());
  for (const Key& key : keys) {
    OSCAR_ASSIGN(auto statement, tokens_of(fmt::format("\nThe pass key of {0} is {1}. Remember it: {1} is the pass key "
                                                       "of {0}.\n",
                                                       key.name, key.digits)));
    stated += static_cast<int>(statement.size());
    statements.push_back(std::move(statement));
  }
  const bool bos = llama_vocab_get_add_bos(model.vocab()) && llama_vocab_bos(model.vocab()) != LLAMA_TOKEN_NULL;
  const int num_filler = length - stated - (bos ? 1 : 0);
  const int spread = num_filler - kTail;  // filler before the keys and between them
  if (spread < num_keys) {
    return make_error(ErrorCode::kBadInput,
                      fmt::format("{} keys take {} tokens and the end of the text {}, which do not fit {}; raise "
                                  "--prefix or ask for fewer keys",
                                  num_keys, stated, kTail, length));
  }
  OSCAR_ASSIGN(auto text,
               model.window(filler, window_start(filler.content, index, count, offset), num_filler + (bos ? 1 : 0),
                            fmt::format("context {} of {}", index + 1, count), "a smaller --prefix"));
  RetrievalTask result;
  std::vector<llama_token>& prefix = result.task.prefix;
  if (bos) {
    prefix.push_back(text.front());
    text.erase(text.begin());
  }
  append(prefix, introduction);
  int used = 0;
  for (int i = 0; i < num_keys; ++i) {
    const int until = spread * (i + 1) / (num_keys + 1);
    append(prefix, std::span(text).subspan(static_cast<std::size_t>(used), static_cast<std::size_t>(until - used)));
    used = until;
    result.depths.push_back(static_cast<double>(prefix.size()) / length);
    append(prefix, statements[static_cast<std::size_t>(i)]);
  }
  append(prefix, std::span(text).subspan(static_cast<std::size_t>(used)));

  for (const Key& key : keys) {
    Continuation& c = result.task.continuations.emplace_back();
    OSCAR_ASSIGN(c.tokens, tokens_of(fmt::format("\n\nQuestion: What is the pass key of {0}?\nAnswer: The pass key of "
                                                 "{0} is",
                                                 key.name)));
    const auto asked = static_cast<int>(c.tokens.size());
    OSCAR_ASSIGN(const auto answer, tokens_of(" " + key.digits));
    append(c.tokens, answer);
    for (int i = asked - 1; i + 1 < static_cast<int>(c.tokens.size()); ++i) c.scored.push_back(i);
  }
  return result;
}

void add_answers(const RetrievalTask& task, std::span<const TokenScores> answers, RetrievalScore& score) {
  if (score.depths.empty()) {
    for (int i = 0; i < kNumDepths; ++i) score.depths.push_back({.from = static_cast<double>(i) / kNumDepths});
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const TokenScores& answer = answers[i];
    const int exact = std::ranges::all_of(answer.hit, std::identity()) ? 1 : 0;
    const int baseline_exact = std::ranges::all_of(answer.baseline_hit, std::identity()) ? 1 : 0;
    RetrievalScore::Depth& depth =
        score.depths[std::min(static_cast<std::size_t>(task.depths[i] * kNumDepths), score.depths.size() - 1)];
    ++depth.questions;
    depth.exact += exact;
    depth.baseline_exact += baseline_exact;
    // Means of what is there so far.
    const auto mean = [&](double& sum, const std::vector<double>& nll) {
      sum += (-std::accumulate(nll.begin(), nll.end(), 0.0) - sum) / (score.questions + 1);
    };
    mean(score.log_p, answer.nll);
    mean(score.baseline_log_p, answer.baseline_nll);
    ++score.questions;
    score.exact += exact;
    score.baseline_exact += baseline_exact;
  }
}

}  // namespace oscar::tool
