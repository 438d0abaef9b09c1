// `oscar eval`: accuracy of cache methods on text, against llama.cpp's own 16-bit cache.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <oscar/version.hpp>

#include "cache_size.hpp"
#include "eval_rows.hpp"
#include "evaluation.hpp"
#include "io/hash.hpp"
#include "llama_session.hpp"
#include "method_source.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "progress.hpp"
#include "prompts.hpp"
#include "retrieval.hpp"
#include "text.hpp"

namespace oscar::tool {
namespace {

struct EvalOptions {
  MethodSourceOptions source;
  std::string row_file;
  std::vector<std::string> texts, methods = {"f16", "ours"}, window_list;
  EvalSettings settings;
  std::vector<int> prefixes = {1536};  // tokens before the scored ones
  int score = 256;      // tokens of the scored part; its last one has no successor: score - 1 predictions at stride 1
  int stride = 1;       // score every stride-th position
  int num_windows = 1;  // of each text
  int num_keys = 0;     // retrieval; 0: running text
  double offset = 0.05;
  WindowSize windows;  // where there is no list of them
  Format format = Format::kTable;
};

constexpr int kPositionBucket = 64;  // KL by position is told as means over so many positions

std::string mode_name(EvalMode mode) { return mode == EvalMode::kPrefix ? "prefix" : "full"; }

// Everything that decides a row.
std::string row_key(const EvalOptions& options, const ModelGeometry& geometry, const TextFile& text, int prefix,
                    const EvalCase& one) {
  io::Hasher hasher;
  for (const std::string& field : {std::string(OSCAR_VERSION_STRING), geometry.fingerprint, text.name, text.content,
                                   one.method.name, one.method.identity}) {
    hasher.update_text(field);
  }
  const WindowSize windows = one.method.has_windows() ? one.windows : WindowSize{.sink = 0, .recent = 0};
  for (const int field : {prefix, options.score, options.stride, windows.sink, windows.recent,
                          static_cast<int>(options.settings.mode), options.num_windows, options.num_keys}) {
    hasher.update_number(static_cast<std::uint64_t>(field));
  }
  hasher.update_text(fmt::format("{}", options.offset));
  return hasher.hex();
}

// What the rows of one case add up over the windows of a text.
struct CaseSum {
  TokenScores scores;
  RetrievalScore retrieval;
  double seconds = 0;
};

EvalRow finish_row(const EvalOptions& options, const ModelGeometry& geometry, const TextFile& text, int prefix,
                   const EvalCase& one, const CaseSum& sum) {
  const EvalMethod& method = one.method;
  EvalRow row;
  row.model = std::filesystem::path(options.source.model).stem().string();
  row.text = text.name;
  row.method = method.name;
  row.mode = mode_name(options.settings.mode);
  row.prefix = prefix;
  row.sink = one.windows.sink;
  row.recent = one.windows.recent;
  const auto at = [&](std::int64_t context) {
    if (method.rotation != nullptr) return bits_at(geometry, *method.rotation, row.sink, row.recent, context);
    if (method.simulator != nullptr) return method.simulator->bits_per_element(row.sink, row.recent, context);
    return method.stock_bits;
  };
  row.bits = method.rotation != nullptr    ? page_bits(geometry, *method.rotation)
             : method.simulator != nullptr ? method.simulator->bits_per_element()
                                           : method.stock_bits;
  row.bits_at_length = at(prefix + (options.num_keys > 0 ? 0 : options.score));
  row.bits_at_8k = at(8 << 10);
  row.bits_at_32k = at(32 << 10);
  row.bits_at_128k = at(128 << 10);
  row.summary = summarise(sum.scores);
  row.positions = by_position(sum.scores, kPositionBucket);
  row.retrieval = sum.retrieval;
  row.retrieval.keys = options.num_keys;
  row.seconds = sum.seconds;
  return row;
}

// Every window of one text through the cases that have no finished row yet.
Result<std::vector<CaseSum>> evaluate_text(const EvalOptions& options, const Model& model,
                                           const ModelGeometry& geometry, const TextFile& text, int prefix,
                                           const std::vector<EvalCase>& cases) {
  std::vector<CaseSum> sums(cases.size());
  Progress progress(fmt::format("evaluating {} at {}", text.name, prefix));
  for (int i = 0; i < options.num_windows; ++i) {
    RetrievalTask task;
    if (options.num_keys > 0) {
      OSCAR_ASSIGN(task, retrieval_task(model, text, options.num_keys, prefix, i, options.num_windows, options.offset));
    } else {
      OSCAR_ASSIGN(
          const auto tokens,
          model.window(text, window_start(text.content, i, options.num_windows, options.offset), prefix + options.score,
                       fmt::format("window {} of {}", i + 1, options.num_windows), "a smaller --prefix"));
      task.task = running_text_task(tokens, prefix, options.stride);
    }
    const auto advance = [&](double share) { progress.update((i + share) / options.num_windows); };
    OSCAR_ASSIGN(const auto scores, evaluate(model, geometry, task.task, cases, options.settings, advance));
    for (std::size_t c = 0; c < cases.size(); ++c) {
      for (const TokenScores& part : scores[c].continuations) sums[c].scores.append(part);
      if (options.num_keys > 0) add_answers(task, scores[c].continuations, sums[c].retrieval);
      sums[c].seconds += scores[c].seconds;
    }
  }
  return sums;
}

// Finished rows of one text and prefix, methods within windows. A method without windows is run once for all of them.
Result<std::vector<EvalRow>> rows_of(const EvalOptions& options, const Model& model, const ModelGeometry& geometry,
                                     const TextFile& text, int prefix, const std::vector<EvalMethod>& methods,
                                     const std::vector<WindowSize>& windows, RowFile& finished) {
  std::vector<EvalCase> open;
  for (const EvalMethod& method : methods) {
    for (const WindowSize& size : windows) {
      const EvalCase one{method, size};
      if (finished.find(row_key(options, geometry, text, prefix, one)) != nullptr) continue;
      open.push_back(one);
      if (!method.has_windows()) break;
    }
  }
  if (!open.empty()) {
    OSCAR_ASSIGN(const auto sums, evaluate_text(options, model, geometry, text, prefix, open));
    for (std::size_t i = 0; i < open.size(); ++i) {
      OSCAR_TRY(finished.add(row_key(options, geometry, text, prefix, open[i]),
                             finish_row(options, geometry, text, prefix, open[i], sums[i])));
    }
  }
  std::vector<EvalRow> rows;
  for (const WindowSize& size : windows) {
    for (const EvalMethod& method : methods) {
      rows.push_back(*finished.find(row_key(options, geometry, text, prefix, {method, size})));
      rows.back().sink = size.sink;
      rows.back().recent = size.recent;
    }
  }
  return rows;
}

Result<int> run_eval(const EvalOptions& options, bool verbose) {
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.source.model));
  OSCAR_ASSIGN(std::vector<TextFile> texts, read_texts(options.texts));
  OSCAR_ASSIGN(RowFile finished, RowFile::open(options.row_file));
  if (!options.row_file.empty()) OSCAR_TRY(check_writable(options.row_file));
  std::vector<WindowSize> windows;
  for (const std::string& text : options.window_list) {
    WindowSize size;
    OSCAR_TRY(parse_windows(text, size.sink, size.recent));
    windows.push_back(size);
  }
  if (windows.empty()) windows.push_back(options.windows);
  std::vector<EvalMethod> methods;
  {
    OSCAR_ASSIGN(const MethodSource source, MethodSource::open(options.source, geometry));
    for (const std::string& name : options.methods) {
      OSCAR_ASSIGN(EvalMethod method, source.method(name));
      methods.push_back(std::move(method));
    }
  }
  start_llama(verbose);
  OSCAR_ASSIGN(const Model model, Model::load(options.source.model));
  for (TextFile& text : texts) OSCAR_TRY(render_prompts(text, model));

  std::vector<EvalRow> rows;
  for (const TextFile& text : texts) {
    for (const int prefix : options.prefixes) {
      OSCAR_ASSIGN(const auto more, rows_of(options, model, geometry, text, prefix, methods, windows, finished));
      rows.insert(rows.end(), more.begin(), more.end());
    }
  }

  if (options.format == Format::kTable) {
    print(rows_table(rows));
    return kExitDone;
  }
  auto json_rows = nlohmann::ordered_json::array();
  for (const EvalRow& row : rows) json_rows.push_back(row_json(row));
  print_json(nlohmann::ordered_json{{"mode", mode_name(options.settings.mode)},
                                    {"prefixes", options.prefixes},
                                    {"score", options.score},
                                    {"stride", options.stride},
                                    {"windows", options.num_windows},
                                    {"offset", options.offset},
                                    {"keys", options.num_keys},
                                    {"rows", json_rows}});
  return kExitDone;
}

}  // namespace

Verb add_eval(CLI::App& app, const Globals& globals) {
  constexpr int kMostTokens = 1 << 22;
  auto options = std::make_shared<EvalOptions>();
  const std::vector<std::string> names = eval_method_names();
  CLI::App* verb = app.add_subcommand("eval", "Accuracy of cache methods on text, against a 16-bit cache");
  add_model_option(*verb, options->source.model)->required();
  verb->add_option("-f,--file", options->texts, "Text files, UTF-8, or .jsonl of prompts")
      ->required()
      ->type_name("TEXT")
      ->default_str("");
  verb->add_option("-r,--rotation", options->source.rotations,
                   "Rotation files, one a method (default: the one beside the model)")
      ->type_name("FILE")
      ->default_str("");
  verb->add_option("--statistics", options->source.statistics,
                   "Fit methods that have no rotation file from these statistics")
      ->type_name("FILE");
  verb->add_option("--max-context", options->source.max_context,
                   "With --statistics: longest context to fit for; 0: the model's own")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->type_name("TOKENS");
  verb->add_option("--method", options->methods,
                   fmt::format("Methods, comma separated; docs/cli.md says what they are: {}", fmt::join(names, ", ")))
      ->delimiter(',')
      ->check(method_validator(names))
      ->type_name("METHOD");
  verb->add_option("--prefix", options->prefixes, "Tokens before the scored ones; several, comma separated")
      ->delimiter(',')
      ->check(CLI::Range(1, kMostTokens))
      ->type_name("N");
  verb->add_option("--retrieval", options->num_keys,
                   "Ask for so many pass keys stated in --prefix tokens of the text, instead of scoring the text")
      ->check(CLI::Range(1, kMostKeys))
      ->type_name("N_KEYS")
      ->default_str("");
  verb->add_option("--score", options->score, "Tokens scored a window")->check(CLI::Range(2, 8192))->type_name("N");
  verb->add_option("--windows", options->num_windows, "Windows of each text")
      ->check(CLI::Range(1, 10000))
      ->type_name("N");
  verb->add_option("--offset", options->offset, "Where the first window starts, as a share of the text")
      ->check(CLI::Range(0.0, 0.99))
      ->type_name("SHARE");
  verb->add_option("--stride", options->stride, "Score every N-th position")
      ->check(CLI::Range(1, 8192))
      ->type_name("N");
  static const std::map<std::string, EvalMode> kModes = {{"prefix", EvalMode::kPrefix}, {"full", EvalMode::kFull}};
  verb->add_option("--mode", options->settings.mode,
                   "prefix: exact prompt, then 2 bits; full: every token reads the 2-bit cache")
      ->transform(CLI::CheckedTransformer(kModes).description(""))
      ->type_name("MODE")
      ->default_str("prefix");
  add_window_options(*verb, options->windows.sink, options->windows.recent);
  verb->add_option("--window-list", options->window_list,
                   "16-bit windows to compare, SINK+RECENT comma separated, instead of one: 64+256,16+128")
      ->delimiter(',')
      ->type_name("LIST")
      ->default_str("");
  verb->add_option("--cache-file", options->row_file, "Keep finished rows here and reuse them")->type_name("FILE");
  add_threads_option(*verb, options->settings.num_threads);
  add_format_option(*verb, options->format);
  return {verb, [options, &globals] { return run_eval(*options, globals.verbose); }};
}

}  // namespace oscar::tool
