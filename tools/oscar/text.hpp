#pragma once
// Text files and the places in them where windows of tokens start.

#include <cstddef>
#include <oscar/result.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::tool {

struct TextFile {
  std::string path;
  std::string name;                 // file name without folder and extension
  std::string content;              // UTF-8
  bool has_control_tokens = false;  // control tokens in it are read as such
};

// Errors: kIo (missing, unreadable, a folder), kBadInput (empty, not UTF-8).
Result<TextFile> read_text(const std::string& path);
Result<std::vector<TextFile>> read_texts(const std::vector<std::string>& paths);

// Byte offset of the start of window i of n: after the first line break at or past character
// floor(length * (offset + .9 i / n)), or at that character when no line break follows.
std::size_t window_start(std::string_view text, int i, int n, double offset);

// 32 hex digits, XXH3-128 of the texts in order.
std::string hash_texts(const std::vector<TextFile>& texts);

// True for well-formed UTF-8 (shortest forms, no surrogates).
bool is_utf8(std::string_view text);

}  // namespace oscar::tool
