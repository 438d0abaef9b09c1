// `oscar calibrate`: text through the model, statistics, a fit, one rotation file.

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <oscar/covariance.hpp>
#include <oscar/version.hpp>

#include "cache_size.hpp"
#include "interrupt.hpp"
#include "llama_session.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "position_check.hpp"
#include "predicted_error.hpp"
#include "progress.hpp"
#include "prompts.hpp"
#include "text.hpp"

namespace oscar::tool {
namespace {

struct CalibrateOptions {
  std::string model, output, method = "ours", statistics_out;
  std::vector<std::string> texts, statistics_in;
  int num_tokens = 12288, window = 1536, threads = 1;
  std::int64_t max_context = 0;
  bool per_layer = false, no_check = false;
  Format format = Format::kTable;
};

constexpr double kFirstWindow = 0.05;  // share of a text that is left out at its start: titles, licences

// A model and the texts that go through it. Its file is read by us first: llama.cpp only says that it cannot load one.
struct Source {
  ModelGeometry geometry;
  Model model;
  std::vector<TextFile> texts;
};

Result<Source> open_source(const CalibrateOptions& options, bool verbose) {
  OSCAR_ASSIGN(ModelGeometry geometry, read_gguf_geometry(options.model));
  OSCAR_ASSIGN(std::vector<TextFile> texts, read_texts(options.texts));
  start_llama(verbose);
  OSCAR_ASSIGN(Model model, Model::load(options.model));
  for (TextFile& text : texts) OSCAR_TRY(render_prompts(text, model));
  return Source{std::move(geometry), std::move(model), std::move(texts)};
}

// Windows of token ids, spread evenly over the texts.
Result<std::vector<std::vector<llama_token>>> cut_windows(const CalibrateOptions& options, const Model& model,
                                                          const std::vector<TextFile>& texts) {
  const int num_windows = (options.num_tokens + options.window - 1) / options.window;
  const int num_texts = static_cast<int>(texts.size());
  if (num_windows < num_texts) {
    return make_error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} tokens are {} windows of {}, too few for {} texts; raise --tokens to {} or lower --window",
                    options.num_tokens, num_windows, options.window, num_texts, num_texts * options.window));
  }
  std::vector<std::vector<llama_token>> windows;
  int left = options.num_tokens;
  for (int t = 0; t < num_texts; ++t) {
    const int count = num_windows / num_texts + (t < num_windows % num_texts ? 1 : 0);
    for (int i = 0; i < count; ++i) {
      const TextFile& text = texts[static_cast<std::size_t>(t)];
      OSCAR_ASSIGN(auto window, model.window(text, window_start(text.content, i, count, kFirstWindow), options.window,
                                             fmt::format("window {} of {}", i + 1, count), "a smaller --window"));
      window.resize(static_cast<std::size_t>(std::min(left, options.window)));
      left -= static_cast<int>(window.size());
      windows.push_back(std::move(window));
    }
  }
  return windows;
}

// What is sampled with: the texts' windows go through the model.
ggml::SampleOptions sample_options(const CalibrateOptions& options, Progress& progress) {
  ggml::SampleOptions sampling;
  sampling.num_threads = options.threads;
  sampling.progress = [&progress](double fraction) {
    progress.update(fraction);
    return !interrupted();
  };
  return sampling;
}

Result<ModelStatistics> sample_texts(const CalibrateOptions& options, const Source& source) {
  ModelStatistics statistics;
  statistics.geometry = source.geometry;
  OSCAR_ASSIGN(const auto windows, cut_windows(options, source.model, source.texts));
  for (const auto& window : windows) statistics.num_tokens += static_cast<std::int64_t>(window.size());
  statistics.corpus_hash = hash_texts(source.texts);

  Progress progress(fmt::format("sampling {} tokens", statistics.num_tokens));
  const ggml::SampleOptions sampling = sample_options(options, progress);
  const auto add = [&](const SampleBlock& block) { return accumulate(statistics.layers[block.layer], block); };
  if (const Status sampled = ggml::sample_model(source.model.get(), windows, sampling, statistics.geometry, add);
      !sampled) {
    return tl::unexpected(interrupted() ? interrupted_error() : sampled.error());
  }
  OSCAR_TRY(ggml::add_output_gram(options.model, statistics));
  return statistics;
}

// Several files are runs of one model on different texts, or on different machines: their sums are added.
Result<ModelStatistics> read_statistics(const CalibrateOptions& options) {
  OSCAR_ASSIGN(ModelStatistics statistics, load_statistics(options.statistics_in.front()));
  for (std::size_t i = 1; i < options.statistics_in.size(); ++i) {
    OSCAR_ASSIGN(const ModelStatistics more, load_statistics(options.statistics_in[i]));
    if (const Status merged = merge(statistics, more); !merged) {
      return make_error(merged.error().code, fmt::format("{} cannot be added to {}: {}", options.statistics_in[i],
                                                         options.statistics_in.front(), merged.error().message));
    }
  }
  if (options.model.empty()) return statistics;
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.model));
  if (geometry.fingerprint != statistics.geometry.fingerprint) {
    return make_error(ErrorCode::kMismatch,
                      fmt::format("{} was sampled from another model (fingerprint {}) than {} ({}); sample this model",
                                  options.statistics_in.front(), statistics.geometry.fingerprint, options.model,
                                  geometry.fingerprint));
  }
  return statistics;
}

// Logit errors by position of a stretch of each text: between the sampled ones where the text is long enough.
Result<PositionReport> check_positions(const CalibrateOptions& options, const Source& source, const RotationSet& set) {
  constexpr int kLength = 1024;  // tokens; a model with a wider sliding window needs the whole --window
  const bool slides = std::ranges::any_of(set.geometry.layers,
                                          [](const LayerGeometry& layer) { return layer.sliding_window >= kLength; });
  const int length = slides ? options.window : std::min(options.window, kLength);
  const double spacing = 0.9 * options.window * static_cast<double>(source.texts.size()) / options.num_tokens;
  std::vector<std::vector<llama_token>> windows;
  for (const TextFile& text : source.texts) {
    const auto from = [&](double share) {
      return source.model.window(text, window_start(text.content, 0, 1, share), length, "the check", "--no-check");
    };
    auto window = from(std::min(kFirstWindow + spacing / 2, 0.99));
    if (!window) window = from(kFirstWindow);
    if (!window) return tl::unexpected(window.error());
    windows.push_back(*std::move(window));
  }
  const auto pool = make_thread_pool(options.threads);
  PositionCheck check(set, length, *pool);
  Progress progress("checking positions");
  ModelGeometry geometry = set.geometry;
  const auto add = [&](const SampleBlock& block) { return check.add(block); };
  const Status sampled =
      ggml::sample_model(source.model.get(), windows, sample_options(options, progress), geometry, add);
  if (!sampled) return tl::unexpected(interrupted() ? interrupted_error() : sampled.error());
  return check.report();
}

void warn_if_uneven(const PositionReport& positions, const RotationSet& set) {
  if (positions.unevenness <= PositionReport::kFlat) return;
  const auto [low, high] = std::ranges::minmax(positions.places, {}, &PositionReport::Place::error);
  std::string remedy = "calibrate with more --tokens, on texts like those that will be served";
  if (set.method != Method::kOurs && set.method != Method::kOursFast) {
    remedy = "this method does not follow positions, use --method ours";
  } else if (high.position == positions.places.back().position) {
    // The last positions are at the edge of what the moments are averaged over.
    remedy =
        fmt::format("calibrate with --max-context {}, a quarter beyond what will be served", positions.end * 5 / 4);
  }
  note(fmt::format(
      "warning: the squared error of a logit is {:.3g} at position {} but {:.3g} at {}, {:.0f} % off its mean "
      "over positions, more than {:.0f} %: contexts that long are read worse; {}",
      low.error, low.position, high.error, high.position, 100 * positions.unevenness, 100 * PositionReport::kFlat,
      remedy));
}

void report(const CalibrateOptions& options, const ModelStatistics& statistics, const RotationSet& set,
            const std::optional<PositionReport>& positions, double seconds) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double peak_bytes = static_cast<double>(usage.ru_maxrss) * 1024;
  const std::vector<PredictedError> errors =
      options.per_layer ? predict_errors(statistics, set) : std::vector<PredictedError>();
  const double bits = page_bits(set.geometry, set);
  if (options.format == Format::kJson) {
    auto layers = nlohmann::ordered_json::array();
    for (const PredictedError& e : errors)
      layers.push_back({{"layer", e.layer}, {"key_error", e.key}, {"value_error", e.value}});
    nlohmann::ordered_json json = {
        {"file", options.output},      {"model", set.geometry.name},       {"method", method_name(set.method)},
        {"layers", set.layers.size()}, {"tokens", set.num_tokens},         {"max_context", set.max_context},
        {"bits_per_element", bits},    {"content_hash", set.content_hash}, {"seconds", seconds},
        {"peak_bytes", peak_bytes}};
    if (options.per_layer) json["per_layer"] = layers;
    if (positions) {
      auto places = nlohmann::ordered_json::array();
      for (const auto& place : positions->places)
        places.push_back({{"position", place.position}, {"logit_error", place.error}});
      json["position_check"] = {{"flat", positions->unevenness <= PositionReport::kFlat},
                                {"unevenness", positions->unevenness},
                                {"places", places}};
    }
    print_json(json);
    return;
  }
  std::string text = fmt::format(
      "model     {} ({} layers, {} with a 2-bit cache)\nmethod    {}, {:.3f} bits an element\n"
      "tokens    {}, for contexts to {}\nfile      {}\nhash      {}\ntime      {:.1f} s, peak memory {}\n",
      set.geometry.name, set.geometry.layers.size(), set.layers.size(), method_name(set.method), bits, set.num_tokens,
      set.max_context, options.output, set.content_hash, seconds, bytes_text(peak_bytes));
  if (positions && !positions->places.empty()) {
    const auto [low, high] = std::ranges::minmax(positions->places, {}, &PositionReport::Place::error);
    text += fmt::format(
        "positions mean squared logit error {:.3g} to {:.3g} from position 0 to {}, {:.1f} % off its mean at "
        "most ({})\n",
        low.error, high.error, positions->end, 100 * positions->unevenness,
        positions->unevenness <= PositionReport::kFlat ? "flat" : "not flat");
  }
  if (options.per_layer) {
    Table table({"layer", "K error", "V error"}, 1);
    for (const PredictedError& e : errors)
      table.add({std::to_string(e.layer), fmt::format("{:.4f}", e.key), fmt::format("{:.4f}", e.value)});
    text += "\n" + table.text() + "\npredicted error energy over signal energy, as attention weighs them\n";
  }
  print(text);
}

Result<int> run_calibrate(CalibrateOptions options, bool verbose) {
  const auto start = std::chrono::steady_clock::now();
  const bool sample = options.statistics_in.empty();
  if (sample && (options.model.empty() || options.texts.empty())) {
    return make_error(ErrorCode::kInvalidArgument, "calibrate needs -m MODEL and -f TEXT, or --from-statistics FILE");
  }
  if (options.output.empty()) {
    if (options.model.empty()) return make_error(ErrorCode::kInvalidArgument, "name the rotation file with -o");
    options.output = default_rotation_path(options.model);
  }
  OSCAR_TRY(check_writable(options.output));
  if (!options.statistics_out.empty()) OSCAR_TRY(check_writable(options.statistics_out));

  std::optional<Source> source;
  if (!options.model.empty() && !options.texts.empty()) {
    OSCAR_ASSIGN(source, open_source(options, verbose));
  }
  OSCAR_ASSIGN(const ModelStatistics statistics, sample ? sample_texts(options, *source) : read_statistics(options));
  if (!options.statistics_out.empty()) OSCAR_TRY(save_statistics(statistics, options.statistics_out));
  FitOptions fit;
  fit.method = *parse_method(options.method);
  fit.max_context = options.max_context;
  OSCAR_ASSIGN(const auto set, fit_rotation(statistics, fit));
  if (interrupted()) return tl::unexpected(interrupted_error());
  std::optional<PositionReport> positions;
  if (source && !options.no_check) {
    OSCAR_ASSIGN(positions, check_positions(options, *source, *set));
  }
  OSCAR_TRY(save_rotation(*set, options.output));
  if (positions) warn_if_uneven(*positions, *set);
  report(options, statistics, *set, positions,
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return kExitDone;
}

}  // namespace

Verb add_calibrate(CLI::App& app, const Globals& globals) {
  constexpr int kMostTokens = 1 << 24;
  constexpr int kLeastWindow = 256;      // the first 64 positions are skipped; fewer give no mean worth having
  constexpr int kLargestWindow = 32768;  // one pass through the model a window
  auto options = std::make_shared<CalibrateOptions>();
  CLI::App* verb = app.add_subcommand("calibrate", "Measure a model on text and write its rotation file");
  add_model_option(*verb, options->model);
  verb->add_option("-f,--file", options->texts,
                   "Text files, UTF-8, or .jsonl of prompts; mix prose and code as the model will see them")
      ->type_name("TEXT")
      ->default_str("");
  verb->add_option("-o,--output", options->output, "Rotation file (default: beside the model, MODEL.oscar.safetensors)")
      ->type_name("FILE");
  verb->add_option("--method", options->method, "Method to fit")
      ->check(method_validator({"ours", "ours-fast", "published", "published-per-head"}))
      ->type_name("METHOD");
  verb->add_option("--tokens", options->num_tokens, "Tokens to sample, over all texts")
      ->check(CLI::Range(kLeastWindow, kMostTokens))
      ->type_name("N");
  verb->add_option("--window", options->window, "Tokens of one window of text")
      ->check(CLI::Range(kLeastWindow, kLargestWindow))
      ->type_name("N");
  verb->add_option("--max-context", options->max_context, "Longest context to calibrate for; 0: the model's own")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->type_name("TOKENS");
  verb->add_option("--statistics", options->statistics_out, "Also write what was measured, to fit other methods from")
      ->type_name("FILE");
  verb->add_option("--from-statistics", options->statistics_in,
                   "Fit from such files instead of running the model; several are added up")
      ->type_name("FILE ...")
      ->default_str("");
  verb->add_flag("--per-layer", options->per_layer, "Also print the predicted error of each layer");
  verb->add_flag("--no-check", options->no_check,
                 "Leave out the check that far positions are read as well as near ones");
  add_threads_option(*verb, options->threads);
  add_format_option(*verb, options->format);
  return {verb, [options, &globals] { return run_calibrate(*options, globals.verbose); }};
}

}  // namespace oscar::tool
