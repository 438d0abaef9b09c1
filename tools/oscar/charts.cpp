#include "charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace oscar::tool {
namespace {

constexpr double kWidth = kChartWidth, kHeight = kChartHeight, kLeft = 58, kRight = 18, kTop = 40, kBottom = 46;
constexpr double kLeastKl = 1e-5;     // zero has no place on a log scale
constexpr double kLabelHeight = 14;   // a line of text, so that labels do not cover each other
constexpr double kLetterWidth = 6.4;  // of 12-point text, on average
constexpr double kRounding = 1e-6;    // of a height that was just set

std::string colour_of(const std::string& method) {
  static const std::map<std::string, std::string> kColours = {{"f16", "#3f7f3a"},
                                                              {"q8_0", "#5b8c2a"},
                                                              {"q4_0", "#b8860b"},
                                                              {"naive", "#777777"},
                                                              {"hadamard", "#9467a8"},
                                                              {"published", "#d1423f"},
                                                              {"published-per-head", "#e0803f"},
                                                              {"published-lloyd-max", "#a83279"},
                                                              {"kivi", "#8c564b"},
                                                              {"turbo2", "#c2569b"},
                                                              {"turbo3", "#7a3f98"},
                                                              {"ours-fast", "#2f9c95"},
                                                              {"ours", "#1f5fa8"},
                                                              {"ours-nom", "#4a7fb5"},
                                                              {"ours-1.6", "#5aa0d0"},
                                                              {"ours-mix25", "#174a86"},
                                                              {"ours-k3", "#123a6b"},
                                                              {"ours-k4", "#0d2a50"}};
  const auto found = kColours.find(method);
  return found != kColours.end() ? found->second : "#333333";
}

// Linear or logarithmic map from values to the page.
class Axis {
 public:
  Axis(double low, double high, double from, double to, bool log) : log_(log), low_(at(low)), from_(from), to_(to) {
    scale_ = (to - from) / (at(high) - low_);
  }
  double operator()(double value) const { return from_ + (at(value) - low_) * scale_; }

 private:
  double at(double value) const { return log_ ? std::log10(value) : value; }
  bool log_;
  double low_, from_, to_, scale_ = 1;
};

// Whole decades around the values.
std::pair<double, double> decades(const std::vector<double>& values) {
  const auto [low, high] = std::ranges::minmax(values);
  const double bottom = std::floor(std::log10(low)), top = std::ceil(std::log10(high));
  return {std::pow(10, bottom), std::pow(10, std::max(top, bottom + 1))};
}

std::string text_at(double x, double y, std::string_view anchor, std::string_view colour, std::string_view text) {
  return fmt::format(
      "<text x='{:.1f}' y='{:.1f}' text-anchor='{}' fill='{}' stroke='white' stroke-width='3' "
      "paint-order='stroke'>{}</text>\n",
      x, y, anchor, colour, escape_markup(text));
}

// Frame of every chart: title, decades of KL with their lines, and the label of the x axis.
std::string frame(const std::string& title, const std::string& x_label, std::pair<double, double> range,
                  const Axis& y) {
  std::string svg = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} {}' font-family='system-ui, sans-serif' font-size='12' "
      "role='img' aria-label='{}'>\n<rect width='{}' height='{}' fill='white'/>\n",
      kWidth, kHeight, escape_markup(title), kWidth, kHeight);
  svg += fmt::format("<text x='{}' y='20' font-weight='600' fill='#222'>{}</text>\n", kLeft, escape_markup(title));
  for (double decade = range.first; decade <= range.second * 1.001; decade *= 10) {
    svg += fmt::format("<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' stroke='#e3e3e3'/>\n", kLeft, kWidth - kRight,
                       y(decade));
    svg += text_at(kLeft - 6, y(decade) + 4, "end", "#555", fmt::format("{:g}", decade));
  }
  svg += text_at((kLeft + kWidth - kRight) / 2, kHeight - 8, "middle", "#555", x_label);
  svg += fmt::format(
      "<text transform='translate(13 {:.1f}) rotate(-90)' text-anchor='middle' fill='#555'>KL, nats a token</text>\n",
      (kTop + kHeight - kBottom) / 2);
  return svg;
}

// Heights of labels beside points at `wanted`, moved down as little as keeps them apart.
std::vector<double> spread_labels(const std::vector<double>& wanted) {
  std::vector<std::size_t> order(wanted.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) { return wanted[i]; });
  std::vector<double> result(wanted.size());
  double last = -kLabelHeight;
  for (const std::size_t i : order) result[i] = last = std::max(wanted[i], last + kLabelHeight);
  // Those that ran out of the frame go up again, in the other order.
  double next = kHeight - kBottom + kLabelHeight;
  for (std::size_t i = order.size(); i-- > 0;) {
    double& y = result[order[i]];
    next = y = std::min(y, next - kLabelHeight);
  }
  return result;
}

// A line of text beside its point; it ends there when `left`.
struct Label {
  double from = 0, to = 0, y = 0;
  bool left = false;
  std::string text;
};

// Moves labels down as little as keeps those apart that would cover each other, from the highest on.
void place_labels(std::vector<Label>& labels) {
  std::vector<Label*> order;
  for (Label& label : labels) order.push_back(&label);
  std::ranges::sort(order, {}, &Label::y);
  for (std::size_t i = 0; i < order.size(); ++i) {
    Label& label = *order[i];
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t j = 0; j < i; ++j) {
        const Label& placed = *order[j];
        const bool covers =
            label.from < placed.to && placed.from < label.to && std::abs(label.y - placed.y) < kLabelHeight - kRounding;
        if (covers) label.y = placed.y + kLabelHeight;
        moved |= covers;
      }
    }
  }
}

}  // namespace

std::string escape_markup(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else if (c == '\'') {
      result += "&#39;";
    } else {
      result += c;
    }
  }
  return result;
}

std::string accuracy_chart(std::span<const EvalRow> rows, const std::string& title) {
  std::vector<double> kls;
  double most_bits = 3, least_bits = 2;
  for (const EvalRow& row : rows) {
    kls.push_back(std::max(row.summary.kl, kLeastKl));
    if (row.method == "f16") continue;
    most_bits = std::max(most_bits, row.bits);
    least_bits = std::min(least_bits, row.bits);
  }
  const auto range = decades(kls);
  const Axis y(range.first, range.second, kHeight - kBottom, kTop, true);
  // From 2 bits or the least up; wide ranges (q8_0 at 8.5 bits beside 2.25) need a log scale to keep the low end apart.
  const double low = least_bits * 0.95, high = most_bits * 1.06;
  const Axis x(low, high, kLeft, kWidth - kRight, true);
  std::string svg = frame(title, "bits an element (codes and parameters)", range, y);
  for (const double tick : {1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 4.0, 6.0, 8.0}) {
    if (tick > high) break;
    if (tick < low) continue;
    if (tick == 2.25 && high > 5) continue;
    svg += text_at(x(tick), kHeight - kBottom + 16, "middle", "#555", fmt::format("{:g}", tick));
  }
  std::vector<const EvalRow*> points;
  for (const EvalRow& row : rows) {
    if (row.method != "f16") {
      points.push_back(&row);
      continue;
    }
    const double height = y(std::max(row.summary.kl, kLeastKl));
    svg += fmt::format("<line x1='{0}' x2='{1}' y1='{2:.1f}' y2='{2:.1f}' stroke='{3}' stroke-dasharray='5 4'/>\n",
                       kLeft, kWidth - kRight, height, colour_of("f16"));
    svg += text_at(kLeft + 4, height + 14, "start", colour_of("f16"), "16 bits: noise floor");
  }
  // Many points: their names alone, the figures are in the table. Points are drawn over labels, never hidden by them.
  constexpr std::size_t kMostFigures = 8;
  std::vector<Label> labels;
  for (const EvalRow* row : points) {
    const ScoreSummary& s = row->summary;
    const double at = x(row->bits);
    const bool left = at > (kLeft + kWidth - kRight) / 2;
    const std::string text =
        points.size() > kMostFigures ? row->method : fmt::format("{} {:.3g}, PPL x{:.3g}", row->method, s.kl, s.ratio);
    const double width = kLetterWidth * static_cast<double>(text.size()), from = left ? at - 9 - width : at + 9;
    labels.push_back(
        {.from = from, .to = from + width, .y = y(std::max(s.kl, kLeastKl)) + 4, .left = left, .text = text});
  }
  place_labels(labels);
  for (std::size_t i = 0; i < points.size(); ++i) {
    svg += text_at(labels[i].left ? labels[i].to : labels[i].from, labels[i].y, labels[i].left ? "end" : "start",
                   colour_of(points[i]->method), labels[i].text);
  }
  for (const EvalRow* row : points) {
    const ScoreSummary& s = row->summary;
    const double at = x(row->bits), kl = std::max(s.kl, kLeastKl);
    svg += fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1:.1f}' y2='{2:.1f}' stroke='{3}' stroke-width='2'/>\n",
                       at, y(kl + s.kl_error), y(std::max(kl - s.kl_error, range.first)), colour_of(row->method));
    svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='5' fill='{}'/>\n", at, y(kl), colour_of(row->method));
  }
  return svg + "</svg>\n";
}

std::string position_chart(std::span<const EvalRow> rows, const std::string& title) {
  std::map<std::string, std::map<int, PositionScore>> lines;
  std::vector<double> kls, positions;
  for (const EvalRow& row : rows) {
    for (const PositionScore& point : row.positions) {
      lines[row.method].insert_or_assign(point.first, point);
      kls.push_back(std::max(point.kl, kLeastKl));
      positions.push_back(point.first);
    }
  }
  if (kls.empty()) return {};
  const auto range = decades(kls);
  const auto [first, last] = std::ranges::minmax(positions);
  const Axis y(range.first, range.second, kHeight - kBottom, kTop, true);
  const Axis x(first, std::max(last, first + 1), kLeft + 8, kWidth - 110, false);
  std::string svg = frame(title, "position in the text, tokens", range, y);
  for (int i = 0; i <= 3; ++i) {
    const double tick = first + (last - first) * i / 3;
    svg += text_at(x(tick), kHeight - kBottom + 16, "middle", "#555", fmt::format("{:.0f}", tick));
  }
  std::vector<double> ends;
  for (const auto& [method, line] : lines) ends.push_back(y(std::max(line.rbegin()->second.kl, kLeastKl)) + 4);
  ends = spread_labels(ends);
  std::size_t i = 0;
  for (const auto& [method, line] : lines) {
    std::string path;
    for (const auto& [position, point] : line) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : " L", x(position), y(std::max(point.kl, kLeastKl)));
    }
    svg += fmt::format("<path d='{}' fill='none' stroke='{}' stroke-width='2'/>\n", path, colour_of(method));
    svg += text_at(kWidth - 104, ends[i++], "start", colour_of(method), method);
  }
  return svg + "</svg>\n";
}

std::string retrieval_map(std::span<const EvalRow> rows, const std::string& title) {
  struct Cell {
    int exact = 0, questions = 0;
    std::vector<std::pair<int, int>> depths;  // exact, questions
  };
  std::vector<std::string> methods = {"16 bits"};
  std::map<std::pair<std::string, int>, Cell> cells;  // method, prefix
  std::vector<int> lengths;
  for (const EvalRow& row : rows) {
    const RetrievalScore& r = row.retrieval;
    Cell cell{.exact = r.exact, .questions = r.questions, .depths = {}};
    Cell baseline{.exact = r.baseline_exact, .questions = r.questions, .depths = {}};
    for (const RetrievalScore::Depth& depth : r.depths) {
      cell.depths.emplace_back(depth.exact, depth.questions);
      baseline.depths.emplace_back(depth.baseline_exact, depth.questions);
    }
    cells[{row.method, row.prefix}] = cell;
    cells[{methods.front(), row.prefix}] = baseline;
    if (std::ranges::find(methods, row.method) == methods.end()) methods.push_back(row.method);
    if (std::ranges::find(lengths, row.prefix) == lengths.end()) lengths.push_back(row.prefix);
  }
  std::ranges::sort(lengths);
  constexpr double kLabels = 132, kRow = 27, kHead = 54, kGap = 6;
  const double column = (kWidth - kLabels) / static_cast<double>(std::max<std::size_t>(lengths.size(), 1));
  const double height = kHead + kRow * static_cast<double>(methods.size()) + 8;
  std::string svg = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0} {1}' font-family='system-ui, sans-serif' "
      "font-size='12' role='img' aria-label='{2}'>\n<rect width='{0}' height='{1}' fill='white'/>\n<text x='4' y='18' "
      "font-weight='600' fill='#222'>{2}</text>\n",
      kWidth, height, escape_markup(title));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const double middle = kLabels + column * (static_cast<double>(i) + 0.5);
    svg += text_at(middle, kHead - 8, "middle", "#555", fmt::format("{}", lengths[i]));
  }
  for (std::size_t m = 0; m < methods.size(); ++m) {
    const double top = kHead + kRow * static_cast<double>(m);
    svg += text_at(kLabels - 8, top + 17, "end", m == 0 ? "#222" : colour_of(methods[m]), methods[m]);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto found = cells.find({methods[m], lengths[i]});
      if (found == cells.end()) continue;
      const Cell& cell = found->second;
      const double left = kLabels + column * static_cast<double>(i);
      const double strip = (column - kGap) / static_cast<double>(std::max<std::size_t>(cell.depths.size(), 1));
      for (std::size_t d = 0; d < cell.depths.size(); ++d) {
        const auto [exact, questions] = cell.depths[d];
        if (questions == 0) continue;
        const double share = static_cast<double>(exact) / questions;
        svg += fmt::format(
            "<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{}' fill='#1f5fa8' fill-opacity='{:.2f}' "
            "stroke='#dddddd' stroke-width='.5'/>\n",
            left + strip * static_cast<double>(d), top, strip, kRow - 5, 0.06 + 0.8 * share);
      }
      svg += text_at(left + (column - kGap) / 2, top + 16, "middle", "#222",
                     fmt::format("{}/{}", cell.exact, cell.questions));
    }
  }
  return svg + "</svg>\n";
}

}  // namespace oscar::tool
