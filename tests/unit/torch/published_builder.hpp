#pragma once
// Builds small files as torch.save writes them, piece by piece, sound unless a test breaks them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rotation/hadamard.hpp"
#include "torch/archive.hpp"

namespace oscar::test {

// A new file each time: some file systems flush one that is cut short and written again, at milliseconds a time.
inline void write_test_file(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  EXPECT_TRUE(out.good()) << path;
}

// Pieces of a pickle of protocol 2.
inline std::string pickled(const std::string& value) {
  const auto size = static_cast<std::uint32_t>(value.size());
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  return "X" + bytes + value;
}
inline std::string pickled(int value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return "J" + bytes;
}
inline std::string pickled(const std::vector<int>& values) {
  std::string bytes = "(";
  for (const int value : values) bytes += pickled(value);
  return bytes + "t";
}
// Key, value, key, value, ... each already pickled.
inline std::string pickled_dict(const std::vector<std::string>& items) {
  std::string bytes = "}(";
  for (const std::string& item : items) bytes += item;
  return bytes + "u";
}

struct TensorPiece {
  std::string storage = "0";
  int num_elements = 0;  // of the storage
  std::vector<int> shape, strides;
  int offset = 0;
  std::string type = "FloatStorage";
};
inline std::string pickled(const TensorPiece& piece) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + pickled("storage") + "ctorch\n" + piece.type + "\n" +
         pickled(piece.storage) + pickled("cpu") + pickled(piece.num_elements) + "tQ" + pickled(piece.offset) +
         pickled(piece.shape) + pickled(piece.strides) + "\x89" + "ccollections\nOrderedDict\n)RtR";
}
// A contiguous square matrix that is all of its storage.
inline TensorPiece square_piece(const std::string& storage, int width) {
  return {.storage = storage, .num_elements = width * width, .shape = {width, width}, .strides = {width, 1}};
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

using Entries = std::vector<std::pair<std::string, std::string>>;

inline std::string archive_of(const Entries& entries) {
  std::vector<torch::ArchiveEntry> list;
  for (const auto& [name, bytes] : entries) list.push_back({name, std::as_bytes(std::span(bytes))});
  const auto built = torch::build_archive("any_folder", list);
  EXPECT_TRUE(built) << built.error().message;
  return built.value_or("");
}

// data.pkl of `root`, then the storages 0, 1, ...
inline std::string torch_file(const std::string& root, const std::vector<std::string>& storages,
                              const Entries& more = {}) {
  Entries entries{{"data.pkl", "\x80\x02" + root + "."}};
  entries.insert(entries.end(), more.begin(), more.end());
  for (std::size_t i = 0; i < storages.size(); ++i) entries.emplace_back("data/" + std::to_string(i), storages[i]);
  return archive_of(entries);
}

// {layers: {...}} of (pickled key, rotation) pairs, with an objective when there is one.
inline std::string published_root(const std::vector<std::string>& layers, const std::string& objective = "") {
  std::vector<std::string> items{pickled("layers"), pickled_dict(layers)};
  if (!objective.empty()) items.insert(items.end(), {pickled("objective"), pickled(objective)});
  return pickled_dict(items);
}

// An orthogonal matrix [width, width], row-major: Hadamard with random signs of rows and columns, rows shuffled.
inline std::vector<float> random_rotation(int width, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const Eigen::MatrixXd h = *hadamard(width);
  std::vector<int> rows(static_cast<std::size_t>(width));
  for (int i = 0; i < width; ++i) rows[static_cast<std::size_t>(i)] = i;
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<double> signs(static_cast<std::size_t>(2 * width));
  for (double& sign : signs) sign = (random() & 1) != 0 ? 1 : -1;
  std::vector<float> values;
  for (int i = 0; i < width; ++i) {
    for (int j = 0; j < width; ++j) {
      const double sign = signs[static_cast<std::size_t>(i)] * signs[static_cast<std::size_t>(width + j)];
      values.push_back(static_cast<float>(h(rows[static_cast<std::size_t>(i)], j) * sign));
    }
  }
  return values;
}

}  // namespace oscar::test
