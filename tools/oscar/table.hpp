#pragma once
// What a verb prints on stdout: the same rows as an aligned table or as JSON.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace oscar::tool {

enum class Format { kTable, kJson };

class Table {
 public:
  // `headings` are the column titles; the first `num_text_columns` are aligned left, the others (numbers) right.
  Table(std::vector<std::string> headings, std::size_t num_text_columns);
  void add(std::vector<std::string> cells);  // one a heading
  std::string text() const;                  // lines end in '\n'

 private:
  std::vector<std::string> headings_;
  std::size_t num_text_columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "12.3 MiB": three digits in the largest binary unit that leaves a number of at least 1.
std::string bytes_text(double bytes);

void print(const std::string& text);                  // stdout
void print_json(const nlohmann::ordered_json& json);  // stdout, two spaces an indent
void note(const std::string& text);                   // stderr, one line

}  // namespace oscar::tool
