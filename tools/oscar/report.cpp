// `oscar report`: rows of `oscar eval` as one HTML page (charts inline, no network), and as CSV.

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <oscar/version.hpp>
#include <tuple>

#include "charts.hpp"
#include "eval_rows.hpp"
#include "io/file.hpp"
#include "options.hpp"
#include "outcome.hpp"

namespace oscar::tool {
namespace {

struct ReportOptions {
  std::vector<std::string> rows;
  std::string output = "report.html", csv, figure, title = "KV cache accuracy";
};

// The rows of one section: of running text at one prefix length, or (keys > 0) of retrieval at all of them.
struct Group {
  std::string model, text, mode;
  int keys = 0, prefix = 0, sink = 0, recent = 0;
  std::vector<EvalRow> rows;
};

Result<std::vector<EvalRow>> read_rows(const std::string& path) {
  std::ifstream in(path);
  if (!in)
    return make_error(ErrorCode::kBadInput,
                      path + ": cannot be opened; pass a file that 'oscar eval --format json' printed");
  const auto json = nlohmann::json::parse(in, nullptr, false);
  if (!json.is_object() || !json.contains("rows") || (!json["rows"].is_array() && !json["rows"].is_object())) {
    return make_error(ErrorCode::kBadInput,
                      path + ": has no rows; pass the output of 'oscar eval --format json' or its --cache-file");
  }
  std::vector<EvalRow> rows;
  try {
    for (const auto& [key, row] : json["rows"].items()) rows.push_back(row_of(row));
  } catch (const nlohmann::json::exception& error) {
    return make_error(ErrorCode::kBadInput,
                      fmt::format("{}: row {} is not one of 'oscar eval' of this version ({}); run it again", path,
                                  rows.size() + 1, error.what()));
  }
  if (rows.empty())
    return make_error(ErrorCode::kBadInput, path + ": has no rows; 'oscar eval' has not finished one yet");
  return rows;
}

std::vector<Group> group_rows(const std::vector<EvalRow>& rows) {
  std::vector<Group> groups;
  for (const EvalRow& row : rows) {
    Group own{.model = row.model,
              .text = row.text,
              .mode = row.mode,
              .keys = row.retrieval.keys,
              .prefix = row.retrieval.keys > 0 ? 0 : row.prefix,
              .sink = row.sink,
              .recent = row.recent,
              .rows = {}};
    const auto key = [](const Group& g) {
      return std::tie(g.model, g.text, g.mode, g.keys, g.prefix, g.sink, g.recent);
    };
    auto found = std::ranges::find_if(groups, [&](const Group& group) { return key(group) == key(own); });
    if (found == groups.end()) found = groups.insert(groups.end(), std::move(own));
    found->rows.push_back(row);
  }
  return groups;
}

std::string table_html(const Group& group) {
  std::string html =
      "<table><thead><tr><th>cache</th><th>bits</th><th>8K</th><th>32K</th><th>128K</th><th>KL</th><th>p99</"
      "th><th>top-1</th>"
      "<th>perplexity x</th></tr></thead><tbody>\n";
  for (const EvalRow& row : group.rows) {
    const ScoreSummary& s = row.summary;
    html += fmt::format(
        "<tr{}><td>{}</td><td>{:.3g}</td><td>{:.3g}</td><td>{:.3g}</td><td>{:.3g}</td><td>{:.4f} ± "
        "{:.4f}</td><td>{:.3f}</td>"
        "<td>{:.1f} %</td><td>{:.4g} ± {:.2g}</td></tr>\n",
        row.method == "ours" ? " class='ours'" : "", escape_markup(row.method), row.bits, row.bits_at_8k,
        row.bits_at_32k, row.bits_at_128k, s.kl, s.kl_error, s.kl_p99, 100 * s.top1, s.ratio, s.ratio_error);
  }
  return html + "</tbody></table>\n";
}

// One column a context length: exact answers, and the mean log-probability of an answer.
std::string retrieval_table_html(const Group& group) {
  std::string html =
      "<table><thead><tr><th>cache</th><th>bits</th><th>32K</th><th>tokens</th><th>exact</th><th>16 bits</th>"
      "<th>log p of an answer</th><th>16 bits</th><th>KL</th></tr></thead><tbody>\n";
  for (const EvalRow& row : group.rows) {
    const RetrievalScore& r = row.retrieval;
    html += fmt::format(
        "<tr{}><td>{}</td><td>{:.3g}</td><td>{:.3g}</td><td>{}</td><td>{} of "
        "{}</td><td>{}</td><td>{:.3f}</td><td>{:.3f}"
        "</td><td>{:.4f} ± {:.4f}</td></tr>\n",
        row.method == "ours" ? " class='ours'" : "", escape_markup(row.method), row.bits, row.bits_at_32k, row.prefix,
        r.exact, r.questions, r.baseline_exact, r.log_p, r.baseline_log_p, row.summary.kl, row.summary.kl_error);
  }
  return html + "</tbody></table>\n";
}

std::string conditions(const Group& group) {
  const std::string windows = fmt::format("{} mode, 16-bit windows {} + {}", group.mode, group.sink, group.recent);
  if (group.keys > 0) {
    return fmt::format(
        "{} pass keys stated in the text, each asked for; {}. Strips: quarters of the text that hold the "
        "key, from its start on",
        group.keys, windows);
  }
  return fmt::format("{} tokens of prefix, {}, {} scored tokens", group.prefix, windows,
                     group.rows.front().summary.num_tokens);
}

constexpr std::string_view kStyle = R"(
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 0 auto; padding: 12px 16px 48px; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.8em 0 .2em; border-top: 1px solid #ddd; padding-top: .8em; }
.charts { display: flex; flex-wrap: wrap; gap: 12px; } .charts svg { flex: 1 1 340px; max-width: 480px; width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88em; white-space: nowrap; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #e6e6e6; } th:first-child, td:first-child { text-align: left; }
tr.ours { background: #eef4fb; font-weight: 600; } p.how, footer { color: #555; font-size: .9em; }
@media print { body { max-width: none; padding: 0; } section { break-inside: avoid; } .wide { overflow: visible; } }
)";

std::string page(const ReportOptions& options, const std::vector<Group>& groups, const std::vector<EvalRow>& rows) {
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, "
      "initial-scale=1'>\n<title>{0}</title><style>{1}</style></head><body>\n<h1>{0}</h1>\n",
      escape_markup(options.title), kStyle);
  html +=
      "<p class='how'>KL: mean over the scored tokens of KL(16-bit cache || this cache), nats, over the whole "
      "vocabulary; lower is "
      "better. Bits: an element of K or V, with its parameters; the columns 8K, 32K and 128K also count the 16-bit "
      "windows at that "
      "context. ± is one standard error.</p>\n";
  for (const Group& group : groups) {
    if (group.keys > 0) {
      html += fmt::format(
          "<section><h2>{}, {}: retrieval</h2>\n<p class='how'>{}</p>\n<div class='charts'>\n{}</div>\n<div "
          "class='wide'>"
          "{}</div></section>\n",
          escape_markup(group.model), escape_markup(group.text), escape_markup(conditions(group)),
          retrieval_map(group.rows, "Exact answers by context length"), retrieval_table_html(group));
      continue;
    }
    html += fmt::format("<section><h2>{}, {}</h2>\n<p class='how'>{}</p>\n<div class='charts'>\n{}",
                        escape_markup(group.model), escape_markup(group.text), escape_markup(conditions(group)),
                        accuracy_chart(group.rows, "Accuracy against bits"));
    // Positions of every prefix length of the same model, text, mode and windows: one line a method.
    std::vector<EvalRow> lengths;
    for (const EvalRow& row : rows) {
      if (std::tie(row.model, row.text, row.mode, row.retrieval.keys, row.sink, row.recent) ==
          std::tie(group.model, group.text, group.mode, group.keys, group.sink, group.recent))
        lengths.push_back(row);
    }
    html += position_chart(lengths, "KL by position");
    html += "</div>\n<div class='wide'>" + table_html(group) + "</div></section>\n";
  }
  return html + fmt::format("<footer>Made by oscar {} from {} rows.</footer>\n</body></html>\n", OSCAR_VERSION_STRING,
                            rows.size());
}

// The accuracy charts of all groups of running text side by side, for a README.
std::string figure(const std::vector<Group>& groups) {
  std::string charts;
  int count = 0;
  for (const Group& group : groups) {
    if (group.keys > 0) continue;
    charts += fmt::format("<svg x='{}' width='{}' height='{}'>\n{}</svg>\n", count++ * kChartWidth, kChartWidth,
                          kChartHeight, accuracy_chart(group.rows, group.model + ", " + group.text));
  }
  return fmt::format("<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} {}'>\n{}</svg>\n", kChartWidth * count,
                     kChartHeight, charts);
}

Result<int> run_report(const ReportOptions& options) {
  for (const std::string& path : {options.output, options.csv, options.figure}) {
    if (!path.empty()) OSCAR_TRY(check_writable(path));
  }
  std::vector<EvalRow> rows;
  for (const std::string& path : options.rows) {
    OSCAR_ASSIGN(const auto more, read_rows(path));
    rows.insert(rows.end(), more.begin(), more.end());
  }
  const std::vector<Group> groups = group_rows(rows);
  OSCAR_TRY(io::write_file(options.output, page(options, groups, rows)));
  if (!options.csv.empty()) OSCAR_TRY(io::write_file(options.csv, rows_csv(rows)));
  if (!options.figure.empty()) OSCAR_TRY(io::write_file(options.figure, figure(groups)));
  note(fmt::format("{}: {} rows in {} sections", options.output, rows.size(), groups.size()));
  return kExitDone;
}

}  // namespace

Verb add_report(CLI::App& app) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* verb = app.add_subcommand("report", "Rows of oscar eval as one HTML page with charts");
  verb->add_option("rows", options->rows, "What 'oscar eval --format json' printed, or its --cache-file")
      ->required()
      ->type_name("FILE");
  verb->add_option("-o,--output", options->output, "HTML page, self-contained")->type_name("FILE");
  verb->add_option("--csv", options->csv, "Also write the rows as CSV")->type_name("FILE");
  verb->add_option("--figure", options->figure, "Also write the accuracy charts as one SVG")->type_name("FILE");
  verb->add_option("--title", options->title, "Title of the page")->type_name("TEXT");
  return {verb, [options] { return run_report(*options); }};
}

}  // namespace oscar::tool
