#pragma once
// XXH3-128 of a stream of fields. Fast integrity check against damage and mix-ups, not against forgery.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace oscar::io {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void update(std::span<const std::byte> bytes);
  void update_number(std::uint64_t value);  // 8 bytes, little-endian
  void update_text(std::string_view text);  // its length as a number, then its bytes: no two lists of texts look alike
  std::string hex() const;                  // 32 lower-case digits, most significant first (XXH's canonical form)

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hash_hex(std::span<const std::byte> bytes);

}  // namespace oscar::io
