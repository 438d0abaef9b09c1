#pragma once
// Builds small GGUF files in memory for the tests, field by field, valid unless a test breaks them.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar::test {

class GgufBuilder {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;

  GgufBuilder& text(const std::string& key, const std::string& value) {
    return entry(key, 8, number<std::uint64_t>(value.size()) + value);
  }
  GgufBuilder& u32(const std::string& key, std::uint32_t value) { return entry(key, 4, number(value)); }
  GgufBuilder& u64(const std::string& key, std::uint64_t value) { return entry(key, 10, number(value)); }
  GgufBuilder& f32(const std::string& key, float value) { return entry(key, 6, number(value)); }
  GgufBuilder& flag(const std::string& key, bool value) { return entry(key, 7, std::string(1, value ? '\1' : '\0')); }
  GgufBuilder& u32s(const std::string& key, const std::vector<std::uint32_t>& values) {
    std::string body = number<std::uint32_t>(4) + number<std::uint64_t>(values.size());
    for (const std::uint32_t value : values) body += number(value);
    return entry(key, 9, body);
  }
  GgufBuilder& texts(const std::string& key, const std::vector<std::string>& values) {
    std::string body = number<std::uint32_t>(8) + number<std::uint64_t>(values.size());
    for (const std::string& value : values) body += number<std::uint64_t>(value.size()) + value;
    return entry(key, 9, body);
  }
  // Any value type with any bytes behind it.
  GgufBuilder& entry(const std::string& key, std::uint32_t type, const std::string& value) {
    entries_.push_back(number<std::uint64_t>(key.size()) + key + number(type) + value);
    return *this;
  }
  GgufBuilder& remove(const std::string& key) {
    std::erase_if(entries_, [&](const std::string& e) {
      return e.substr(8, key.size()) == key && e[0] == static_cast<char>(key.size());
    });
    return *this;
  }
  // F16 (type 1) unless said otherwise; data bytes count up from `seed`.
  GgufBuilder& tensor(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint64_t bytes,
                      std::uint32_t type = 1, int seed = 0) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    std::string info = number<std::uint64_t>(name.size()) + name + number(static_cast<std::uint32_t>(shape.size()));
    for (const std::uint64_t extent : shape) info += number(extent);
    info += number(type) + number<std::uint64_t>(data_.size());
    tensors_.push_back(info);
    for (std::uint64_t i = 0; i < bytes; ++i) data_ += static_cast<char>((static_cast<std::uint64_t>(seed) + i) & 0xFF);
    return *this;
  }

  std::string build() const {
    std::string file =
        "GGUF" + number(version) + number<std::uint64_t>(tensors_.size()) + number<std::uint64_t>(entries_.size());
    for (const std::string& e : entries_) file += e;
    for (const std::string& t : tensors_) file += t;
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data_;
  }

  template <typename T>
  static std::string number(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }

 private:
  std::vector<std::string> entries_, tensors_;
  std::string data_;
};

// A two-layer model of 4 query heads, 2 KV heads, head_dim 16.
inline GgufBuilder tiny_model(const std::string& architecture = "qwen2") {
  GgufBuilder builder;
  builder.text("general.architecture", architecture).text("general.name", "tiny").u32(architecture + ".block_count", 2);
  builder.u32(architecture + ".context_length", 2048).u32(architecture + ".embedding_length", 64);
  builder.u32(architecture + ".attention.head_count", 4).u32(architecture + ".attention.head_count_kv", 2);
  builder.texts("tokenizer.ggml.tokens", {"a", "b", "c"}).f32(architecture + ".rope.freq_base", 10000.0F);
  for (int layer = 0; layer < 2; ++layer) {
    builder.tensor("blk." + std::to_string(layer) + ".attn_k.weight", {64, 32}, 64 * 32 * 2, 1, layer);
  }
  return builder;
}

}  // namespace oscar::test
