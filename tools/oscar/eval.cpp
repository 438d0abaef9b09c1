// `oscar eval`: accuracy of cache methods on text, against llama.cpp's own 16-bit cache.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <oscar/version.hpp>

#include "cache_size.hpp"
#include "eval_rows.hpp"
#include "evaluation.hpp"
#include "io/hash.hpp"
#include "llama_session.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "progress.hpp"
#include "prompts.hpp"
#include "text.hpp"

namespace oscar::tool {
namespace {

struct EvalOptions {
  std::string model, statistics, row_file;
  std::vector<std::string> texts, rotations, methods = {"f16", "ours"};
  EvalSettings settings;
  std::int64_t max_context = 0;
  int num_windows = 1;
  double offset = 0.05;
  Format format = Format::kTable;
};

constexpr std::string_view kExactMethod = "f16";
constexpr int kPositionBucket = 64;  // KL by position is told as means over so many positions

// llama.cpp's own quantised caches: bits an element of their blocks of 32 (an fp16 scale each).
struct StockCache {
  CacheKind kind;
  double bits;
};
const std::map<std::string, StockCache> kStockCaches = {{"q8_0", {CacheKind::kStockQ8_0, 8.5}},
                                                        {"q4_0", {CacheKind::kStockQ4_0, 4.5}}};

// Finds or fits the rotation of every method named.
class MethodSource {
 public:
  static Result<MethodSource> open(const EvalOptions& options, const ModelGeometry& geometry) {
    MethodSource source(options, geometry);
    std::vector<std::string> paths = options.rotations;
    const std::string beside = default_rotation_path(options.model);
    std::error_code ignored;
    if (paths.empty() && options.statistics.empty() && std::filesystem::exists(beside, ignored))
      paths.push_back(beside);
    for (const std::string& path : paths) {
      OSCAR_ASSIGN(auto set, find_rotation(path, options.model, geometry));
      if (!source.files_.emplace(set->method, set).second) {
        return make_error(
            ErrorCode::kInvalidArgument,
            fmt::format("two rotation files have the method {}; pass one a method", method_name(set->method)));
      }
    }
    if (!options.statistics.empty()) {
      OSCAR_ASSIGN(source.statistics_, load_statistics(options.statistics));
      if (source.statistics_->geometry.fingerprint != geometry.fingerprint) {
        return make_error(ErrorCode::kMismatch,
                          fmt::format("{} was sampled from another model than {}; sample this one with oscar calibrate "
                                      "--statistics",
                                      options.statistics, options.model));
      }
    }
    return source;
  }

  Result<EvalMethod> method(const std::string& name) const {
    if (name == kExactMethod) return EvalMethod{.name = name, .rotation = nullptr};
    if (const auto stock = kStockCaches.find(name); stock != kStockCaches.end())
      return EvalMethod{.name = name, .rotation = nullptr, .cache = stock->second.kind};
    const Method method = *parse_method(name);
    if (const auto file = files_.find(method); file != files_.end())
      return EvalMethod{.name = name, .rotation = file->second};
    if (method == Method::kNaive || method == Method::kHadamard) {
      OSCAR_ASSIGN(auto set, fit_rotation(geometry_, method));
      return EvalMethod{.name = name, .rotation = std::move(set)};
    }
    if (!statistics_) {
      return make_error(
          ErrorCode::kBadInput,
          fmt::format("method {0} needs a rotation file of that method (-r) or --statistics; make them with "
                      "'oscar calibrate -m {1} -f TEXT --method {0} --statistics FILE'",
                      name, options_.model));
    }
    FitOptions fit;
    fit.method = method;
    fit.max_context = options_.max_context;
    OSCAR_ASSIGN(auto set, fit_rotation(*statistics_, fit));
    return EvalMethod{.name = name, .rotation = std::move(set)};
  }

 private:
  MethodSource(const EvalOptions& options, const ModelGeometry& geometry) : options_(options), geometry_(geometry) {}

  const EvalOptions& options_;
  const ModelGeometry& geometry_;
  std::map<Method, std::shared_ptr<const RotationSet>> files_;
  std::optional<ModelStatistics> statistics_;
};

// Everything that decides a row.
std::string row_key(const EvalOptions& options, const ModelGeometry& geometry, const TextFile& text,
                    const EvalMethod& method) {
  const EvalSettings& s = options.settings;
  io::Hasher hasher;
  for (const std::string& field :
       {std::string(OSCAR_VERSION_STRING), geometry.fingerprint, text.name, text.content, method.name,
        method.rotation != nullptr ? method.rotation->content_hash : std::string()}) {
    hasher.update_text(field);
  }
  for (const int field :
       {s.prefix, s.score, s.stride, s.sink, s.recent, static_cast<int>(s.mode), options.num_windows}) {
    hasher.update_number(static_cast<std::uint64_t>(field));
  }
  hasher.update_text(fmt::format("{}", options.offset));
  return hasher.hex();
}

EvalRow finish_row(const EvalOptions& options, const ModelGeometry& geometry, const TextFile& text,
                   const EvalMethod& method, const MethodScores& scores) {
  EvalRow row;
  row.model = std::filesystem::path(options.model).stem().string();
  row.text = text.name;
  row.method = method.name;
  const EvalSettings& s = options.settings;
  row.mode = s.mode == EvalMode::kPrefix ? "prefix" : "full";
  row.prefix = s.prefix;
  row.sink = s.sink;
  row.recent = s.recent;
  if (method.rotation != nullptr) {
    const auto at = [&](std::int64_t context) {
      return bits_at(geometry, *method.rotation, s.sink, s.recent, context);
    };
    row.bits = page_bits(geometry, *method.rotation);
    row.bits_at_length = at(s.prefix + s.score);
    row.bits_at_8k = at(8 << 10);
    row.bits_at_32k = at(32 << 10);
    row.bits_at_128k = at(128 << 10);
  } else if (const auto stock = kStockCaches.find(method.name); stock != kStockCaches.end()) {
    row.bits = row.bits_at_length = row.bits_at_8k = row.bits_at_32k = row.bits_at_128k = stock->second.bits;
  }
  row.summary = summarise(scores.scores);
  row.positions = by_position(scores.scores, kPositionBucket);
  row.seconds = scores.seconds;
  return row;
}

// Every window of one text through the methods that have no finished row yet.
Result<std::vector<MethodScores>> evaluate_text(const EvalOptions& options, const Model& model,
                                                const ModelGeometry& geometry, const TextFile& text,
                                                const std::vector<EvalMethod>& methods) {
  std::vector<MethodScores> sums(methods.size());
  Progress progress("evaluating " + text.name);
  const int length = options.settings.prefix + options.settings.score;
  for (int i = 0; i < options.num_windows; ++i) {
    OSCAR_ASSIGN(const auto tokens,
                 model.window(text, window_start(text.content, i, options.num_windows, options.offset), length,
                              fmt::format("window {} of {}", i + 1, options.num_windows), "a smaller --prefix"));
    const auto advance = [&](double share) { progress.update((i + share) / options.num_windows); };
    OSCAR_ASSIGN(const auto scores, evaluate_window(model, geometry, tokens, methods, options.settings, advance));
    for (std::size_t m = 0; m < methods.size(); ++m) {
      sums[m].scores.append(scores[m].scores);
      sums[m].seconds += scores[m].seconds;
    }
  }
  return sums;
}

Result<int> run_eval(const EvalOptions& options, bool verbose) {
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.model));
  OSCAR_ASSIGN(std::vector<TextFile> texts, read_texts(options.texts));
  OSCAR_ASSIGN(RowFile finished, RowFile::open(options.row_file));
  if (!options.row_file.empty()) OSCAR_TRY(check_writable(options.row_file));
  std::vector<EvalMethod> methods;
  {
    OSCAR_ASSIGN(const MethodSource source, MethodSource::open(options, geometry));
    for (const std::string& name : options.methods) {
      OSCAR_ASSIGN(EvalMethod method, source.method(name));
      methods.push_back(std::move(method));
    }
  }
  start_llama(verbose);
  OSCAR_ASSIGN(const Model model, Model::load(options.model));
  for (TextFile& text : texts) OSCAR_TRY(render_prompts(text, model));

  std::vector<EvalRow> rows;
  for (const TextFile& text : texts) {
    std::vector<EvalMethod> open;
    for (const EvalMethod& method : methods) {
      if (finished.find(row_key(options, geometry, text, method)) == nullptr) open.push_back(method);
    }
    if (!open.empty()) {
      OSCAR_ASSIGN(const auto scores, evaluate_text(options, model, geometry, text, open));
      for (std::size_t m = 0; m < open.size(); ++m) {
        OSCAR_TRY(finished.add(row_key(options, geometry, text, open[m]),
                               finish_row(options, geometry, text, open[m], scores[m])));
      }
    }
    for (const EvalMethod& method : methods) rows.push_back(*finished.find(row_key(options, geometry, text, method)));
  }

  if (options.format == Format::kTable) {
    print(rows_table(rows));
    return kExitDone;
  }
  const EvalSettings& s = options.settings;
  auto json_rows = nlohmann::ordered_json::array();
  for (const EvalRow& row : rows) json_rows.push_back(row_json(row));
  print_json(nlohmann::ordered_json{{"mode", s.mode == EvalMode::kPrefix ? "prefix" : "full"},
                                    {"prefix", s.prefix},
                                    {"score", s.score},
                                    {"stride", s.stride},
                                    {"windows", options.num_windows},
                                    {"offset", options.offset},
                                    {"sink", s.sink},
                                    {"recent", s.recent},
                                    {"rows", json_rows}});
  return kExitDone;
}

}  // namespace

Verb add_eval(CLI::App& app, const Globals& globals) {
  constexpr int kMostTokens = 1 << 22;
  auto options = std::make_shared<EvalOptions>();
  EvalSettings& s = options->settings;
  CLI::App* verb = app.add_subcommand("eval", "Accuracy of cache methods on text, against a 16-bit cache");
  add_model_option(*verb, options->model)->required();
  verb->add_option("-f,--file", options->texts, "Text files, UTF-8, or .jsonl of prompts")
      ->required()
      ->type_name("TEXT")
      ->default_str("");
  verb->add_option("-r,--rotation", options->rotations,
                   "Rotation files, one a method (default: the one beside the model)")
      ->type_name("FILE")
      ->default_str("");
  verb->add_option("--statistics", options->statistics, "Fit methods that have no rotation file from these statistics")
      ->type_name("FILE");
  verb->add_option("--max-context", options->max_context,
                   "With --statistics: longest context to fit for; 0: the model's own")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->type_name("TOKENS");
  verb->add_option("--method", options->methods,
                   "Methods, comma separated: f16 (our cache, all rows exact), naive, hadamard, published, "
                   "published-per-head, ours-fast, ours; q8_0 and q4_0: llama.cpp's own caches")
      ->delimiter(',')
      ->check(method_validator(
          {"f16", "q8_0", "q4_0", "naive", "hadamard", "published", "published-per-head", "ours-fast", "ours"}))
      ->type_name("METHOD");
  verb->add_option("--prefix", s.prefix, "Tokens before the scored ones")
      ->check(CLI::Range(1, kMostTokens))
      ->type_name("N");
  verb->add_option("--score", s.score, "Tokens scored a window")->check(CLI::Range(2, 8192))->type_name("N");
  verb->add_option("--windows", options->num_windows, "Windows of each text")
      ->check(CLI::Range(1, 10000))
      ->type_name("N");
  verb->add_option("--offset", options->offset, "Where the first window starts, as a share of the text")
      ->check(CLI::Range(0.0, 0.99))
      ->type_name("SHARE");
  verb->add_option("--stride", s.stride, "Score every N-th position")->check(CLI::Range(1, 8192))->type_name("N");
  static const std::map<std::string, EvalMode> kModes = {{"prefix", EvalMode::kPrefix}, {"full", EvalMode::kFull}};
  verb->add_option("--mode", s.mode, "prefix: exact prompt, then 2 bits; full: every token reads the 2-bit cache")
      ->transform(CLI::CheckedTransformer(kModes).description(""))
      ->type_name("MODE")
      ->default_str("prefix");
  add_window_options(*verb, s.sink, s.recent);
  verb->add_option("--cache-file", options->row_file, "Keep finished rows here and reuse them")->type_name("FILE");
  add_threads_option(*verb, s.num_threads);
  add_format_option(*verb, options->format);
  return {verb, [options, &globals] { return run_eval(*options, globals.verbose); }};
}

}  // namespace oscar::tool
