#include "text.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "io/hash.hpp"

namespace oscar::tool {
namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

}  // namespace

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const int length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || i + static_cast<std::size_t>(length) > text.size()) return false;
    for (int k = 1; k < length; ++k) {
      if (!is_continuation(text[i + static_cast<std::size_t>(k)])) return false;
    }
    if (length >= 3) {
      const auto second = static_cast<unsigned char>(text[i + 1]);
      const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
      const bool surrogate = lead == 0xED && second >= 0xA0;
      const bool beyond = lead == 0xF4 && second >= 0x90;
      if (overlong || surrogate || beyond) return false;
    }
    i += static_cast<std::size_t>(length);
  }
  return true;
}

Result<TextFile> read_text(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return make_error(ErrorCode::kIo, path + ": no such file; pass a text file");
  if (fs::is_directory(path, ignored)) {
    return make_error(ErrorCode::kIo, path + ": is a folder; pass text files one by one");
  }
  std::ifstream in(path, std::ios::binary);
  TextFile file{.path = path, .name = fs::path(path).stem().string(), .content = {}, .has_control_tokens = false};
  file.content.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  if (!in) return make_error(ErrorCode::kIo, path + ": cannot be read; check its permissions");
  if (file.content.empty()) return make_error(ErrorCode::kBadInput, path + ": the text is empty");
  if (!is_utf8(file.content)) {
    return make_error(ErrorCode::kBadInput, path + ": is not UTF-8 text; convert it, for example with iconv -t UTF-8");
  }
  return file;
}

Result<std::vector<TextFile>> read_texts(const std::vector<std::string>& paths) {
  std::vector<TextFile> texts;
  for (const std::string& path : paths) {
    OSCAR_ASSIGN(TextFile text, read_text(path));
    texts.push_back(std::move(text));
  }
  return texts;
}

std::size_t window_start(std::string_view text, int i, int n, double offset) {
  const auto length = static_cast<double>(std::ranges::count_if(text, [](char c) { return !is_continuation(c); }));
  auto characters = static_cast<std::int64_t>(std::floor(length * (offset + 0.9 * i / n)));
  std::size_t at = 0;
  for (; at < text.size(); ++at) {
    if (!is_continuation(text[at]) && characters-- == 0) break;
  }
  const std::size_t line_break = text.find('\n', at);
  return line_break == std::string_view::npos ? at : line_break + 1;
}

std::string hash_texts(const std::vector<TextFile>& texts) {
  io::Hasher hasher;
  for (const TextFile& text : texts) hasher.update_text(text.content);
  return hasher.hex();
}

}  // namespace oscar::tool
