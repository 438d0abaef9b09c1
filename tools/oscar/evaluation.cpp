#include "evaluation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <oscar/ggml.hpp>
#include <span>

namespace oscar::tool {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::shared_ptr<const ggml::Simulation> simulation_of(std::shared_ptr<const rivals::Simulator> simulator) {
  if (simulator == nullptr) return nullptr;
  auto simulation = std::make_shared<ggml::Simulation>();
  simulation->group_tokens = simulator->group_tokens();
  simulation->read_back = [simulator = std::move(simulator)](int layer, std::int32_t first, int num_rows, float* k,
                                                             float* v) {
    simulator->read_back(layer, first, num_rows, k, v);
  };
  return simulation;
}

class Evaluation {
 public:
  Evaluation(const Model& model, const ModelGeometry& geometry, const EvalTask& task, const EvalSettings& settings,
             const std::function<void(double)>& advance, const std::vector<EvalCase>& cases)
      : model_(model),
        geometry_(geometry),
        task_(task),
        settings_(settings),
        advance_(advance),
        vocab_(static_cast<std::size_t>(model.vocab_size())) {
    for (const Continuation& c : task.continuations) {
      continued_ += static_cast<int>(c.tokens.size());
      longest_ = std::max(longest_, static_cast<int>(c.tokens.size()));
    }
    // Work in tokens: the baseline, then one prefix for all cases (prefix mode) or one each (full mode).
    const double whole = prefix() + continued_;
    total_work_ = whole;
    double shared = settings.mode == EvalMode::kPrefix ? prefix() : 0;
    for (const EvalCase& c : cases) {
      const bool alone = settings.mode == EvalMode::kFull || c.method.cache != CacheKind::kOscar;
      total_work_ += alone ? whole : shared + continued_;
      if (!alone) shared = 0;
    }
  }

  // Log-probabilities of the scored positions with llama.cpp's own cache.
  Status run_baseline() {
    OSCAR_ASSIGN(const ContextPtr context, context_of(CacheKind::kStock));
    OSCAR_TRY(decode_prefix(context.get()));
    for (const Continuation& c : task_.continuations) {
      if (!baseline_.empty()) OSCAR_TRY(roll_back(context.get()));
      OSCAR_TRY(decode_continuation(context.get(), c));
      const std::size_t begin = baseline_.size();
      baseline_.resize(begin + c.scored.size() * vocab_);
      for (std::size_t i = 0; i < c.scored.size(); ++i) {
        OSCAR_ASSIGN(const auto logits, logits_of(context.get(), c.scored[i]));
        log_softmax(logits, std::span(baseline_).subspan(begin + i * vocab_, vocab_));
      }
    }
    return {};
  }

  // llama.cpp's own quantised caches.
  Status run_stock(const EvalMethod& method, CaseScores& result) {
    const auto start = Clock::now();
    OSCAR_ASSIGN(const ContextPtr context, context_of(method.cache));
    OSCAR_TRY(decode_prefix(context.get()));
    OSCAR_TRY(score_all(context.get(), result));
    result.seconds += seconds_since(start);
    return {};
  }

  // One exact prefix for all cases; each method encodes it anew.
  Status run_prefix_mode(const std::vector<EvalCase>& cases, std::vector<CaseScores>& results) {
    ggml::CacheConfig config = base_config();
    OSCAR_ASSIGN(config.rotation, widest_rotation(cases));
    config.keep_exact_rows = true;
    config.encode_on_store = false;
    config.exact_batch = true;
    OSCAR_ASSIGN(const auto cache, ggml::configure(config));
    OSCAR_ASSIGN(const ContextPtr context, context_of(CacheKind::kOscar));
    cache->set_exact_all(true);
    OSCAR_TRY(decode_prefix(context.get()));
    std::string encoded;  // name of the method
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const EvalMethod& method = cases[i].method;
      if (method.cache != CacheKind::kOscar) continue;
      const auto start = Clock::now();
      if (method.name != encoded) {
        if (method.rotation != nullptr) OSCAR_TRY(cache->encode_again(method.rotation, prefix()));
        if (method.simulator != nullptr) OSCAR_TRY(cache->simulate(simulation_of(method.simulator), prefix()));
        encoded = method.name;
      }
      OSCAR_TRY(cache->set_window(cases[i].windows.sink, cases[i].windows.recent));
      cache->set_exact_all(!method.has_windows());
      cache->set_exact_batch(!method.has_windows());
      cache->set_encode_on_store(method.has_windows());
      const Status scored = score_all(context.get(), results[i]);
      OSCAR_TRY(cache->status());
      OSCAR_TRY(scored);
      results[i].seconds += seconds_since(start);
    }
    return {};
  }

  Status run_full_mode(const EvalCase& one, CaseScores& result) {
    const auto start = Clock::now();
    const bool exact = !one.method.has_windows();
    ggml::CacheConfig config = base_config();
    OSCAR_ASSIGN(config.rotation, widest_rotation({one}));
    config.simulation = simulation_of(one.method.simulator);
    config.sink = one.windows.sink;
    // Rolled back, a continuation must find the rows that the one before it pushed out of the ring.
    config.recent = one.windows.recent + (task_.continuations.size() > 1 ? longest_ : 0);
    config.keep_exact_rows = exact || config.simulation != nullptr;
    config.encode_on_store = !exact;
    config.exact_batch = exact;
    OSCAR_ASSIGN(const auto cache, ggml::configure(config));
    OSCAR_ASSIGN(const ContextPtr context, context_of(CacheKind::kOscar));
    OSCAR_TRY(cache->set_window(one.windows.sink, one.windows.recent));
    cache->set_exact_all(exact);
    const Status read = decode_prefix(context.get());
    OSCAR_TRY(cache->status());
    OSCAR_TRY(read);
    const Status scored = score_all(context.get(), result);
    OSCAR_TRY(cache->status());
    OSCAR_TRY(scored);
    result.seconds += seconds_since(start);
    return {};
  }

 private:
  int prefix() const { return static_cast<int>(task_.prefix.size()); }
  // A continuation goes through in one pass, so that logits of all of it are there at once.
  int ubatch() const { return std::max(kDefaultUbatch, longest_); }

  Result<ContextPtr> context_of(CacheKind kind) const {
    return make_context(model_, kind, prefix() + longest_, ubatch(), settings_.num_threads);
  }

  ggml::CacheConfig base_config() const {
    ggml::CacheConfig config;
    config.mode = ggml::CacheMode::kInt2;
    config.num_threads = settings_.num_threads;
    return config;
  }

  // The set that the cache is allocated for: one with the largest parameters among the methods (float pairs), else the
  // first.
  Result<std::shared_ptr<const RotationSet>> widest_rotation(const std::vector<EvalCase>& cases) const {
    std::shared_ptr<const RotationSet> widest;
    for (const EvalCase& c : cases) {
      const auto& rotation = c.method.rotation;
      if (rotation == nullptr) continue;
      if (widest == nullptr || rotation->parameter_format() == ParameterFormat::kFloatPair) widest = rotation;
    }
    if (widest != nullptr) return widest;
    return fit_rotation(geometry_, Method::kNaive);  // "f16" or simulated: its pages are never read
  }

  Status decode_prefix(llama_context* context) {
    const std::span<const llama_token> all = task_.prefix;
    for (int first = 0; first < prefix();) {
      const int count = std::min(ubatch(), prefix() - first);
      OSCAR_TRY(decode(context, all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), first,
                       [](int) { return false; }));
      first += count;
      worked(count);
    }
    return {};
  }

  Status decode_continuation(llama_context* context, const Continuation& c) {
    OSCAR_TRY(decode(context, c.tokens, prefix(), [&](int i) { return std::ranges::binary_search(c.scored, i); }));
    worked(static_cast<int>(c.tokens.size()));
    return {};
  }

  bool continued(llama_context* context) const {
    return llama_memory_seq_pos_max(llama_get_memory(context), 0) >= prefix();
  }

  Status roll_back(llama_context* context) const {
    if (llama_memory_seq_rm(llama_get_memory(context), 0, prefix(), -1)) return {};
    return make_error(ErrorCode::kUnsupported,
                      "this model's cache cannot be rolled back; evaluate one method at a time with --mode full");
  }

  Result<std::span<const float>> logits_of(llama_context* context, int index) const {
    const float* logits = llama_get_logits_ith(context, index);
    if (logits == nullptr)
      return make_error(ErrorCode::kInternal, fmt::format("llama.cpp kept no logits of token {}", index));
    return std::span<const float>(logits, vocab_);
  }

  // Every continuation, each after the prefix alone.
  Status score_all(llama_context* context, CaseScores& result) {
    std::vector<float> log_p(vocab_);
    std::span<const float> baseline = baseline_;
    for (const Continuation& c : task_.continuations) {
      // Whatever another case or continuation left behind.
      if (continued(context)) OSCAR_TRY(roll_back(context));
      OSCAR_TRY(decode_continuation(context, c));
      TokenScores& scores = result.continuations.emplace_back();
      for (const int index : c.scored) {
        OSCAR_ASSIGN(const auto logits, logits_of(context, index));
        log_softmax(logits, log_p);
        scores.add(prefix() + index, baseline.first(vocab_), log_p,
                   static_cast<std::size_t>(c.tokens[static_cast<std::size_t>(index) + 1]));
        baseline = baseline.subspan(vocab_);
      }
    }
    return {};
  }

  void worked(int tokens) {
    done_work_ += tokens;
    advance_(done_work_ / total_work_);
  }

  const Model& model_;
  const ModelGeometry& geometry_;
  const EvalTask& task_;
  const EvalSettings& settings_;
  const std::function<void(double)>& advance_;
  std::size_t vocab_;
  int continued_ = 0, longest_ = 0;  // tokens of all continuations, of the longest
  std::vector<float> baseline_;      // [scored of every continuation, vocab] log-probabilities
  double total_work_ = 1, done_work_ = 0;
};

}  // namespace

EvalTask running_text_task(const std::vector<llama_token>& tokens, int prefix, int stride) {
  EvalTask task;
  task.prefix.assign(tokens.begin(), tokens.begin() + prefix);
  Continuation& rest = task.continuations.emplace_back();
  rest.tokens.assign(tokens.begin() + prefix, tokens.end());
  for (int i = 0; i + 1 < static_cast<int>(rest.tokens.size()); i += stride) rest.scored.push_back(i);
  return task;
}

Result<std::vector<CaseScores>> evaluate(const Model& model, const ModelGeometry& geometry, const EvalTask& task,
                                         const std::vector<EvalCase>& cases, const EvalSettings& settings,
                                         const std::function<void(double)>& advance) {
  Evaluation evaluation(model, geometry, task, settings, advance, cases);
  std::vector<CaseScores> results(cases.size());
  OSCAR_TRY(evaluation.run_baseline());
  bool ours = false;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (cases[i].method.cache != CacheKind::kOscar) {
      OSCAR_TRY(evaluation.run_stock(cases[i].method, results[i]));
    } else if (settings.mode == EvalMode::kFull) {
      OSCAR_TRY(evaluation.run_full_mode(cases[i], results[i]));
    } else {
      ours = true;
    }
  }
  if (ours) OSCAR_TRY(evaluation.run_prefix_mode(cases, results));
  return results;
}

}  // namespace oscar::tool
