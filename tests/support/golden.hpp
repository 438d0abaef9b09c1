#pragma once
// Golden vectors: safetensors files of the folder OSCAR_VECTORS, trusted and read whole. Needs nlohmann_json.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace oscar::test {

class GoldenFile {
 public:
  // `name` without folder and ending: "bp64_smollm2_layer0". Throws when the file cannot be read.
  explicit GoldenFile(const std::string& name) {
    const char* folder = std::getenv("OSCAR_VECTORS");
    const std::string path =
        std::string(folder != nullptr ? folder : "tests/golden/vectors") + "/" + name + ".safetensors";
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " is missing; set OSCAR_VECTORS to the folder of golden vectors");
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes_.data(), sizeof header_bytes);
    header_ = nlohmann::json::parse(bytes_.substr(8, header_bytes));
    data_ = 8 + header_bytes;
  }

  std::vector<std::size_t> shape(const std::string& tensor) const { return header_.at(tensor).at("shape"); }

  // All elements in row-major order, converted to T from whatever type is stored.
  template <typename T>
  std::vector<T> read(const std::string& tensor) const {
    const nlohmann::json& entry = header_.at(tensor);
    const std::string dtype = entry.at("dtype");
    const std::size_t begin = data_ + entry.at("data_offsets").at(0).get<std::size_t>();
    const std::size_t end = data_ + entry.at("data_offsets").at(1).get<std::size_t>();
    if (dtype == "F32") return convert<float, T>(begin, end);
    if (dtype == "F64") return convert<double, T>(begin, end);
    if (dtype == "I32") return convert<std::int32_t, T>(begin, end);
    if (dtype == "I8") return convert<std::int8_t, T>(begin, end);
    if (dtype == "U8") return convert<std::uint8_t, T>(begin, end);
    if (dtype == "BF16") return convert<Bf16, T>(begin, end);
    throw std::runtime_error(tensor + " has the unexpected type " + dtype);
  }

 private:
  struct Bf16 {
    std::uint16_t bits;
    explicit operator float() const {
      const std::uint32_t word = std::uint32_t{bits} << 16;
      float value;
      std::memcpy(&value, &word, sizeof value);
      return value;
    }
    explicit operator double() const { return static_cast<float>(*this); }
  };

  template <typename Stored, typename T>
  std::vector<T> convert(std::size_t begin, std::size_t end) const {
    std::vector<T> out((end - begin) / sizeof(Stored));
    for (std::size_t i = 0; i < out.size(); ++i) {
      Stored value;
      std::memcpy(&value, bytes_.data() + begin + i * sizeof(Stored), sizeof value);
      if constexpr (std::is_same_v<Stored, Bf16>) {
        out[i] = static_cast<T>(static_cast<float>(value));
      } else {
        out[i] = static_cast<T>(value);
      }
    }
    return out;
  }

  std::string bytes_;
  nlohmann::json header_;
  std::size_t data_ = 0;
};

}  // namespace oscar::test
