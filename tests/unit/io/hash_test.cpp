#include "io/hash.hpp"

#include <gtest/gtest.h>

namespace oscar::io {
namespace {

std::string hash_text(std::string_view text) { return hash_hex(std::as_bytes(std::span(text))); }

// The first is XXH3-128's published value for no input; the second fixes the canonical order of digits.
TEST(Hash, IsXxh3InCanonicalForm) {
  EXPECT_EQ(hash_text(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hash_text("oscar"), "57ca0f09696bef838b3804cd09141b93");
}

TEST(Hash, DoesNotDependOnHowTheBytesAreCut) {
  const std::string text(1000, 'k');
  Hasher hasher;
  hasher.update(std::as_bytes(std::span(text)).first(333));
  hasher.update(std::as_bytes(std::span(text)).subspan(333));
  EXPECT_EQ(hasher.hex(), hash_text(text));
}

TEST(Hash, TextsCarryTheirLength) {
  Hasher first;
  first.update_text("ab");
  first.update_text("c");
  Hasher second;
  second.update_text("a");
  second.update_text("bc");
  EXPECT_NE(first.hex(), second.hex());
}

}  // namespace
}  // namespace oscar::io
