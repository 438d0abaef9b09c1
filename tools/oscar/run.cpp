// `oscar run`: text from a model, with its cache in 2 bits.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <oscar/ggml.hpp>

#include "cache_size.hpp"
#include "interrupt.hpp"
#include "llama_session.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "progress.hpp"

namespace oscar::tool {
namespace {

using Clock = std::chrono::steady_clock;

struct RunOptions {
  std::string model, prompt, rotation, cache = "int2";
  int num_predict = 128, context = 0, sink = 64, recent = 256, threads = 1;
  double temperature = 0;
  std::uint32_t seed = 0;
  bool chat = false, raw = false;
};

struct SamplerDeleter {
  void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerDeleter>;

SamplerPtr make_sampler(const RunOptions& options) {
  SamplerPtr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
  if (options.temperature <= 0) {
    llama_sampler_chain_add(chain.get(), llama_sampler_init_greedy());
  } else {
    llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(static_cast<float>(options.temperature)));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(options.seed));
  }
  return chain;
}

// The prompt as the model wants it: in its chat template when it has one, unless --raw.
Result<std::string> shape_prompt(const RunOptions& options, const Model& model) {
  const char* chat_template = llama_model_chat_template(model.get(), nullptr);
  if (options.raw || (chat_template == nullptr && !options.chat)) return options.prompt;
  if (chat_template == nullptr) {
    return make_error(ErrorCode::kBadInput, options.model + ": the model has no chat template; leave out --chat");
  }
  const llama_chat_message message = {"user", options.prompt.c_str()};
  std::string text(options.prompt.size() * 2 + 1024, '\0');
  const auto apply = [&] {
    return llama_chat_apply_template(chat_template, &message, 1, true, text.data(),
                                     static_cast<std::int32_t>(text.size()));
  };
  std::int32_t length = apply();
  if (length > static_cast<std::int32_t>(text.size())) {
    text.resize(static_cast<std::size_t>(length));
    length = apply();
  }
  if (length < 0) {
    return make_error(ErrorCode::kUnsupported,
                      options.model +
                          ": llama.cpp does not know the model's chat template; pass the prompt "
                          "as the model wants it with --raw");
  }
  text.resize(static_cast<std::size_t>(length));
  return text;
}

struct Timing {
  std::size_t prompt_tokens = 0, decoded_tokens = 0;
  double prompt_seconds = 0, decode_seconds = 0;
};

std::string piece_of(const llama_vocab* vocab, llama_token token) {
  std::string piece(64, '\0');
  std::int32_t length =
      llama_token_to_piece(vocab, token, piece.data(), static_cast<std::int32_t>(piece.size()), 0, false);
  if (length < 0) {
    piece.resize(static_cast<std::size_t>(-length));
    length = llama_token_to_piece(vocab, token, piece.data(), static_cast<std::int32_t>(piece.size()), 0, false);
  }
  piece.resize(static_cast<std::size_t>(std::max(0, length)));
  return piece;
}

Status generate(const RunOptions& options, const Model& model, llama_context* context, const ggml::Cache* cache,
                const std::vector<llama_token>& prompt, Timing& timing) {
  const auto check = [cache]() -> Status { return cache != nullptr ? cache->status() : Status(); };
  const auto start = Clock::now();
  {
    Progress progress("reading the prompt");
    const std::span<const llama_token> all = prompt;
    for (std::size_t first = 0; first < all.size(); first += kDefaultUbatch) {
      const std::size_t count = std::min<std::size_t>(kDefaultUbatch, all.size() - first);
      const auto last = static_cast<int>(all.size() - first) - 1;
      OSCAR_TRY(
          decode(context, all.subspan(first, count), static_cast<int>(first), [last](int i) { return i == last; }));
      progress.update(static_cast<double>(first + count) / static_cast<double>(all.size()));
    }
    OSCAR_TRY(check());
  }
  timing.prompt_tokens = prompt.size();
  timing.prompt_seconds = std::chrono::duration<double>(Clock::now() - start).count();

  const SamplerPtr sampler = make_sampler(options);
  const auto decode_start = Clock::now();
  int position = static_cast<int>(prompt.size());
  for (int i = 0; i < options.num_predict; ++i) {
    const llama_token token = llama_sampler_sample(sampler.get(), context, -1);
    if (llama_vocab_is_eog(model.vocab(), token)) break;
    print(piece_of(model.vocab(), token));
    std::fflush(stdout);
    if (i + 1 == options.num_predict) break;
    OSCAR_TRY(decode(context, std::span(&token, 1), position++, [](int) { return true; }));
    OSCAR_TRY(check());
    ++timing.decoded_tokens;
  }
  timing.decode_seconds = std::chrono::duration<double>(Clock::now() - decode_start).count();
  print("\n");
  std::fflush(stdout);  // before the report on stderr
  return {};
}

double rate(std::size_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

void report(const Timing& timing, const ggml::Cache* cache, std::int64_t stock, int context) {
  std::string cache_text = fmt::format("{} in 16 bits", bytes_text(static_cast<double>(stock)));
  if (cache != nullptr) {
    const auto bytes = static_cast<double>(cache->usage().buffer_bytes);
    cache_text = fmt::format("{} (16 bits: {}, ratio {:.2f})", bytes_text(bytes),
                             bytes_text(static_cast<double>(stock)), static_cast<double>(stock) / bytes);
  }
  note(fmt::format("prompt {} tokens, {:.1f} tokens/s; decode {} tokens, {:.1f} tokens/s; cache for {} tokens {}",
                   timing.prompt_tokens, rate(timing.prompt_tokens, timing.prompt_seconds), timing.decoded_tokens,
                   rate(timing.decoded_tokens, timing.decode_seconds), context, cache_text));
}

Result<int> run_run(const RunOptions& options, bool verbose) {
  const bool int2 = options.cache == "int2";
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.model));
  std::shared_ptr<const RotationSet> rotation;
  if (int2) {
    OSCAR_ASSIGN(rotation, find_rotation(options.rotation, options.model, geometry));
  }
  start_llama(verbose);
  OSCAR_ASSIGN(const Model model, Model::load(options.model));
  OSCAR_ASSIGN(const std::string text, shape_prompt(options, model));
  OSCAR_ASSIGN(const std::vector<llama_token> prompt, model.tokenize(text, true, true));
  if (prompt.empty()) return make_error(ErrorCode::kBadInput, "the prompt is empty; pass some text with -p");
  const int needed = static_cast<int>(prompt.size()) + options.num_predict;
  const int context_length = options.context > 0 ? options.context : needed;
  if (context_length < needed) {
    return make_error(ErrorCode::kInvalidArgument,
                      fmt::format("the prompt's {} tokens and {} more do not fit a context of {}; raise -c to {}",
                                  prompt.size(), options.num_predict, context_length, needed));
  }

  std::shared_ptr<ggml::Cache> cache;
  if (int2) {
    ggml::CacheConfig config;
    config.rotation = rotation;
    config.sink = options.sink;
    config.recent = options.recent;
    config.num_threads = options.threads;
    OSCAR_ASSIGN(cache, ggml::configure(config));
  }
  OSCAR_ASSIGN(const ContextPtr context, make_context(model, int2 ? CacheKind::kOscar : CacheKind::kStock,
                                                      context_length, kDefaultUbatch, options.threads));
  Timing timing;
  OSCAR_TRY(generate(options, model, context.get(), cache.get(), prompt, timing));
  OSCAR_ASSIGN(const std::int64_t stock,
               stock_bytes(rotation != nullptr ? rotation->geometry : geometry, llama_n_ctx(context.get())));
  report(timing, cache.get(), stock, static_cast<int>(llama_n_ctx(context.get())));
  return kExitDone;
}

}  // namespace

Verb add_run(CLI::App& app, const Globals& globals) {
  constexpr int kMostTokens = 1 << 24;
  auto options = std::make_shared<RunOptions>();
  CLI::App* verb = app.add_subcommand("run", "Answer a prompt with a model whose cache is in 2 bits");
  add_model_option(*verb, options->model)->required();
  verb->add_option("-p,--prompt", options->prompt, "Prompt")->required()->type_name("TEXT");
  verb->add_option("-r,--rotation", options->rotation,
                   "Rotation file (default: beside the model, MODEL.oscar.safetensors)")
      ->type_name("FILE");
  verb->add_option("-n,--predict", options->num_predict, "Tokens to generate at most")
      ->check(CLI::Range(1, kMostTokens))
      ->type_name("N");
  verb->add_option("--cache", options->cache, "Cache: int2, or f16 for llama.cpp's own")
      ->check(CLI::IsMember({"int2", "f16"}).description(""))
      ->type_name("KIND");
  verb->add_option("-c,--context", options->context, "Context length; 0: as long as the prompt and the answer need")
      ->check(CLI::Range(0, kMostTokens))
      ->type_name("TOKENS");
  add_window_options(*verb, options->sink, options->recent);
  verb->add_option("--temp", options->temperature, "Temperature; 0: always the likeliest token")
      ->check(CLI::Range(0.0, 100.0))
      ->type_name("T");
  verb->add_option("--seed", options->seed, "Seed of the random choice when the temperature is above 0")
      ->type_name("N");
  auto* chat =
      verb->add_flag("--chat", options->chat, "Apply the model's chat template (done by default where it has one)");
  verb->add_flag("--raw", options->raw, "Pass the prompt as it is")->excludes(chat);
  add_threads_option(*verb, options->threads);
  return {verb, [options, &globals] { return run_run(*options, globals.verbose); }};
}

}  // namespace oscar::tool
