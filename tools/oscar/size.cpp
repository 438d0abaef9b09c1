// `oscar size`: what a model's cache takes, before anything is loaded.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <sstream>

#include "cache_size.hpp"
#include "options.hpp"
#include "outcome.hpp"

namespace oscar::tool {
namespace {

struct SizeOptions {
  std::string model, rotation, method = "ours", memory;
  std::vector<std::string> contexts;
  int sink = 64, recent = 256;
  Format format = Format::kTable;
};

constexpr std::int64_t kCellStep = 256;  // llama.cpp pads contexts to this
constexpr std::int64_t kMostTokens = 1LL << 30;

struct Sizer {
  ModelGeometry geometry;
  std::shared_ptr<const RotationSet> rotation;
  ggml::CacheConfig config;

  Result<ggml::CacheUsage> usage(std::int64_t context) const {
    return ggml::predict_usage(geometry, rotation.get(), config, context, 1);
  }
  // The most tokens, in steps of kCellStep, whose cache takes at most `bytes`; `of` gives the bytes of a context.
  static Result<std::int64_t> tokens_that_fit(std::int64_t bytes,
                                              const std::function<Result<std::int64_t>(std::int64_t)>& of) {
    std::int64_t fits = 0;
    std::int64_t beyond = kMostTokens / kCellStep + 1;
    while (beyond - fits > 1) {
      const std::int64_t middle = fits + (beyond - fits) / 2;
      OSCAR_ASSIGN(const std::int64_t taken, of(middle * kCellStep));
      (taken <= bytes ? fits : beyond) = middle;
    }
    return fits * kCellStep;
  }
};

Result<std::vector<std::int64_t>> contexts_of(const SizeOptions& options, const ModelGeometry& geometry) {
  std::vector<std::int64_t> contexts;
  for (const std::string& text : options.contexts) {
    OSCAR_ASSIGN(const std::int64_t tokens, parse_tokens(text));
    contexts.push_back(tokens);
  }
  if (!contexts.empty()) return contexts;
  for (const std::int64_t usual : {std::int64_t{4096}, std::int64_t{32768}}) {
    if (usual < geometry.context_length) contexts.push_back(usual);
  }
  contexts.push_back(geometry.context_length);
  return contexts;
}

Result<int> run_size(const SizeOptions& options) {
  Sizer sizer;
  OSCAR_ASSIGN(sizer.geometry, read_gguf_geometry(options.model));
  if (options.rotation.empty()) {
    OSCAR_ASSIGN(sizer.rotation, sizing_set(sizer.geometry, *parse_method(options.method)));
  } else {
    OSCAR_ASSIGN(sizer.rotation, find_rotation(options.rotation, options.model, sizer.geometry));
    sizer.geometry = sizer.rotation->geometry;  // as sampled: which layers slide
  }
  sizer.config.rotation = sizer.rotation;
  sizer.config.sink = options.sink;
  sizer.config.recent = options.recent;
  OSCAR_ASSIGN(const auto contexts, contexts_of(options, sizer.geometry));

  Table table({"context", "cache", "16-bit cache", "ratio", "bits/elt", "with windows"}, 0);
  auto rows = nlohmann::ordered_json::array();
  for (const std::int64_t context : contexts) {
    OSCAR_ASSIGN(const ggml::CacheUsage usage, sizer.usage(context));
    OSCAR_ASSIGN(const std::int64_t stock, stock_bytes(sizer.geometry, context));
    const double ratio = static_cast<double>(stock) / static_cast<double>(usage.buffer_bytes);
    const double bits = page_bits(sizer.geometry, *sizer.rotation);
    const double with_windows = bits_at(sizer.geometry, *sizer.rotation, options.sink, options.recent, context);
    table.add({fmt::format("{}", context), fmt::format("{} B", usage.buffer_bytes), fmt::format("{} B", stock),
               fmt::format("{:.2f}", ratio), fmt::format("{:.3f}", bits), fmt::format("{:.3f}", with_windows)});
    rows.push_back({{"context", context},
                    {"cache_bytes", usage.buffer_bytes},
                    {"page_bytes", usage.page_bytes},
                    {"window_bytes", usage.window_bytes},
                    {"delegated_bytes", usage.delegated_bytes},
                    {"bookkeeping_bytes", usage.bookkeeping_bytes},
                    {"stock_bytes", stock},
                    {"ratio", ratio},
                    {"bits_per_element", bits},
                    {"bits_per_element_with_windows", with_windows},
                    {"quantized_layers", usage.quantized_layers},
                    {"delegated_layers", usage.delegated_layers}});
  }
  nlohmann::ordered_json json = {{"model", options.model},
                                 {"method", method_name(sizer.rotation->method)},
                                 {"sink", options.sink},
                                 {"recent", options.recent},
                                 {"contexts", std::move(rows)}};
  std::string fits;
  if (!options.memory.empty()) {
    OSCAR_ASSIGN(const std::int64_t memory, parse_bytes(options.memory));
    OSCAR_ASSIGN(const std::int64_t ours,
                 Sizer::tokens_that_fit(memory, [&](std::int64_t context) -> Result<std::int64_t> {
                   OSCAR_ASSIGN(const ggml::CacheUsage usage, sizer.usage(context));
                   return usage.buffer_bytes;
                 }));
    OSCAR_ASSIGN(const std::int64_t stock, Sizer::tokens_that_fit(memory, [&](std::int64_t context) {
                   return stock_bytes(sizer.geometry, context);
                 }));
    fits = fmt::format("\n{} hold {} tokens ({} with a 16-bit cache)\n", options.memory, ours, stock);
    json["memory_bytes"] = memory;
    json["tokens_that_fit"] = ours;
    json["stock_tokens_that_fit"] = stock;
  }
  if (options.format == Format::kJson) {
    print_json(json);
  } else {
    print(table.text() + fits);
  }
  return kExitDone;
}

}  // namespace

Verb add_size(CLI::App& app) {
  auto options = std::make_shared<SizeOptions>();
  CLI::App* verb = app.add_subcommand("size", "Memory of a model's cache, to the byte, and how many tokens fit");
  add_model_option(*verb, options->model)->required();
  verb->add_option("-c,--context", options->contexts,
                   "Context lengths, comma separated (default: 4096, 32768 and the model's own)")
      ->delimiter(',')
      ->type_name("TOKENS")
      ->default_str("");
  auto* rotation =
      verb->add_option("-r,--rotation", options->rotation, "Rotation file; without one, the sizes of --method")
          ->type_name("FILE");
  verb->add_option("--method", options->method, "Method to size when there is no rotation file")
      ->check(method_validator({"naive", "hadamard", "published", "published-per-head", "ours-fast", "ours"}))
      ->excludes(rotation)
      ->type_name("METHOD");
  verb->add_option("--memory", options->memory, "Also say how many tokens a cache of this size holds, for example 8GiB")
      ->type_name("SIZE");
  add_window_options(*verb, options->sink, options->recent);
  add_format_option(*verb, options->format);
  return {verb, [options] { return run_size(*options); }};
}

}  // namespace oscar::tool
