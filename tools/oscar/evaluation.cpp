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

class WindowEvaluation {
 public:
  WindowEvaluation(const Model& model, const ModelGeometry& geometry, const std::vector<llama_token>& tokens,
                   const EvalSettings& settings, const std::function<void(double)>& advance,
                   const std::vector<EvalMethod>& methods)
      : model_(model),
        geometry_(geometry),
        tokens_(tokens),
        settings_(settings),
        advance_(advance),
        vocab_(static_cast<std::size_t>(model.vocab_size())) {
    // Work in tokens: the baseline, then one prefix for all methods (prefix mode) or one each (full mode).
    const double whole = settings.prefix + settings.score;
    total_work_ = whole;
    double shared = settings.mode == EvalMode::kPrefix ? settings.prefix : 0;
    for (const EvalMethod& method : methods) {
      const bool alone = settings.mode == EvalMode::kFull || method.cache != CacheKind::kOscar;
      total_work_ += alone ? whole : shared + settings.score;
      if (!alone) shared = 0;
    }
  }

  // Log-probabilities of the scored positions with llama.cpp's own cache.
  Status run_baseline() {
    OSCAR_ASSIGN(const ContextPtr context,
                 make_context(model_, CacheKind::kStock, num_tokens(), ubatch(), settings_.num_threads));
    OSCAR_TRY(decode_prefix(context.get()));
    OSCAR_TRY(decode_scored(context.get()));
    baseline_.resize(scored().size() * vocab_);
    for (std::size_t i = 0; i < scored().size(); ++i) {
      OSCAR_ASSIGN(const auto logits, logits_of(context.get(), scored()[i]));
      log_softmax(logits, std::span(baseline_).subspan(i * vocab_, vocab_));
    }
    return {};
  }

  // llama.cpp's own quantised caches.
  Status run_stock(const EvalMethod& method, MethodScores& result) {
    const auto start = Clock::now();
    OSCAR_ASSIGN(const ContextPtr context,
                 make_context(model_, method.cache, num_tokens(), ubatch(), settings_.num_threads));
    OSCAR_TRY(decode_prefix(context.get()));
    OSCAR_TRY(decode_scored(context.get()));
    OSCAR_TRY(score(context.get(), result.scores));
    result.seconds += seconds_since(start);
    return {};
  }

  // One exact prefix for all methods; each encodes it anew, scores, and is rolled back.
  Status run_prefix_mode(const std::vector<EvalMethod>& methods, std::vector<MethodScores>& results) {
    ggml::CacheConfig config = base_config();
    OSCAR_ASSIGN(config.rotation, widest_rotation(methods));
    config.keep_exact_rows = true;
    config.encode_on_store = false;
    config.exact_batch = true;
    OSCAR_ASSIGN(const auto cache, ggml::configure(config));
    OSCAR_ASSIGN(const ContextPtr context,
                 make_context(model_, CacheKind::kOscar, num_tokens(), ubatch(), settings_.num_threads));
    cache->set_exact_all(true);
    OSCAR_TRY(decode_prefix(context.get()));
    for (std::size_t m = 0; m < methods.size(); ++m) {
      if (methods[m].cache != CacheKind::kOscar) continue;
      const auto start = Clock::now();
      const bool exact = methods[m].rotation == nullptr;
      if (!exact) OSCAR_TRY(cache->encode_again(methods[m].rotation, settings_.prefix));
      cache->set_exact_all(exact);
      cache->set_exact_batch(exact);
      cache->set_encode_on_store(!exact);
      OSCAR_TRY(decode_scored(context.get()));
      OSCAR_TRY(cache->status());
      OSCAR_TRY(score(context.get(), results[m].scores));
      results[m].seconds += seconds_since(start);
      if (!llama_memory_seq_rm(llama_get_memory(context.get()), 0, settings_.prefix, -1)) {
        return make_error(ErrorCode::kUnsupported,
                          "this model's cache cannot be rolled back; evaluate with --mode full");
      }
    }
    return {};
  }

  Status run_full_mode(const EvalMethod& method, MethodScores& result) {
    const auto start = Clock::now();
    const bool exact = method.rotation == nullptr;
    ggml::CacheConfig config = base_config();
    OSCAR_ASSIGN(config.rotation, widest_rotation({method}));
    config.keep_exact_rows = exact;
    config.encode_on_store = !exact;
    config.exact_batch = exact;
    OSCAR_ASSIGN(const auto cache, ggml::configure(config));
    OSCAR_ASSIGN(const ContextPtr context,
                 make_context(model_, CacheKind::kOscar, num_tokens(), ubatch(), settings_.num_threads));
    cache->set_exact_all(exact);
    OSCAR_TRY(decode_prefix(context.get()));
    OSCAR_TRY(decode_scored(context.get()));
    OSCAR_TRY(cache->status());
    OSCAR_TRY(score(context.get(), result.scores));
    result.seconds += seconds_since(start);
    return {};
  }

 private:
  int num_tokens() const { return settings_.prefix + settings_.score; }
  // The scored tokens go through in one pass, so that logits of all of them are there at once.
  int ubatch() const { return std::max(kDefaultUbatch, settings_.score); }

  // Indices within the scored part whose next token is known, every stride-th.
  const std::vector<int>& scored() {
    if (scored_.empty()) {
      for (int i = 0; i + 1 < settings_.score; i += settings_.stride) scored_.push_back(i);
    }
    return scored_;
  }

  ggml::CacheConfig base_config() const {
    ggml::CacheConfig config;
    config.mode = ggml::CacheMode::kInt2;
    config.sink = settings_.sink;
    config.recent = settings_.recent;
    config.num_threads = settings_.num_threads;
    return config;
  }

  // The set that the cache is allocated for: one with the largest parameters among the methods (float pairs), else the
  // first.
  Result<std::shared_ptr<const RotationSet>> widest_rotation(const std::vector<EvalMethod>& methods) const {
    std::shared_ptr<const RotationSet> widest;
    for (const EvalMethod& method : methods) {
      if (method.rotation == nullptr) continue;
      if (widest == nullptr || method.rotation->parameter_format() == ParameterFormat::kFloatPair)
        widest = method.rotation;
    }
    if (widest != nullptr) return widest;
    return fit_rotation(geometry_, Method::kHadamard);  // "f16" alone: never read
  }

  Status decode_prefix(llama_context* context) {
    const std::span<const llama_token> all = tokens_;
    for (int first = 0; first < settings_.prefix;) {
      const int count = std::min(ubatch(), settings_.prefix - first);
      OSCAR_TRY(decode(context, all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), first,
                       [](int) { return false; }));
      first += count;
      worked(count);
    }
    return {};
  }

  Status decode_scored(llama_context* context) {
    const auto part = std::span<const llama_token>(tokens_).subspan(static_cast<std::size_t>(settings_.prefix));
    OSCAR_TRY(decode(context, part, settings_.prefix,
                     [this](int i) { return i % settings_.stride == 0 && i + 1 < settings_.score; }));
    worked(settings_.score);
    return {};
  }

  Result<std::span<const float>> logits_of(llama_context* context, int index) const {
    const float* logits = llama_get_logits_ith(context, index);
    if (logits == nullptr)
      return make_error(ErrorCode::kInternal, fmt::format("llama.cpp kept no logits of token {}", index));
    return std::span<const float>(logits, vocab_);
  }

  Status score(llama_context* context, TokenScores& scores) {
    std::vector<float> log_p(vocab_);
    for (std::size_t i = 0; i < scored().size(); ++i) {
      const int index = scored()[i];
      OSCAR_ASSIGN(const auto logits, logits_of(context, index));
      log_softmax(logits, log_p);
      const llama_token next = tokens_[static_cast<std::size_t>(settings_.prefix + index + 1)];
      scores.add(settings_.prefix + index, std::span<const float>(baseline_).subspan(i * vocab_, vocab_), log_p,
                 static_cast<std::size_t>(next));
    }
    return {};
  }

  void worked(int tokens) {
    done_work_ += tokens;
    advance_(done_work_ / total_work_);
  }

  const Model& model_;
  const ModelGeometry& geometry_;
  const std::vector<llama_token>& tokens_;
  const EvalSettings& settings_;
  const std::function<void(double)>& advance_;
  std::size_t vocab_;
  std::vector<int> scored_;
  std::vector<float> baseline_;  // [scored, vocab] log-probabilities
  double total_work_ = 1, done_work_ = 0;
};

}  // namespace

Result<std::vector<MethodScores>> evaluate_window(const Model& model, const ModelGeometry& geometry,
                                                  const std::vector<llama_token>& tokens,
                                                  const std::vector<EvalMethod>& methods, const EvalSettings& settings,
                                                  const std::function<void(double)>& advance) {
  WindowEvaluation window(model, geometry, tokens, settings, advance, methods);
  std::vector<MethodScores> results(methods.size());
  OSCAR_TRY(window.run_baseline());
  bool ours = false;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    if (methods[m].cache != CacheKind::kOscar) {
      OSCAR_TRY(window.run_stock(methods[m], results[m]));
    } else if (settings.mode == EvalMode::kFull) {
      OSCAR_TRY(window.run_full_mode(methods[m], results[m]));
    } else {
      ours = true;
    }
  }
  if (ours) OSCAR_TRY(window.run_prefix_mode(methods, results));
  return results;
}

}  // namespace oscar::tool
