#pragma once
// Charts of evaluation rows as SVG text: self-contained, readable on paper and on a narrow screen.

#include <span>
#include <string>

#include "eval_rows.hpp"

namespace oscar::tool {

inline constexpr int kChartWidth = 440, kChartHeight = 330;  // of every chart's view box

// "<svg ...>...</svg>": KL (log scale, bars of one standard error) against bits an element, one point a row; rows of
// method "f16" as the line of the noise floor. `rows`: of one model and text. `title` is drawn above.
std::string accuracy_chart(std::span<const EvalRow> rows, const std::string& title);

// KL (log scale) by position, one line a method. `rows`: of one model and text; several of a method (other prefixes)
// join in one line.
std::string position_chart(std::span<const EvalRow> rows, const std::string& title);

// Answers by context length (columns), method (rows) and depth of the key (the four strips of a cell, from the start of
// the text to its end): the darker, the larger the share of exact ones. The first row is the 16-bit cache. `rows`: of
// one model, text, number of keys, mode and windows, any prefix lengths.
std::string retrieval_map(std::span<const EvalRow> rows, const std::string& title);

// Text for HTML and SVG: & < > " escaped.
std::string escape_markup(std::string_view text);

}  // namespace oscar::tool
