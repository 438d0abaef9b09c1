// Mutations of a valid GGUF file: the reader ends in a header or an error that names the file, never in a crash, and a
// header that it accepts only describes bytes that exist. Run under OSCAR_SANITIZE=address to make stray reads fatal.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <oscar/model.hpp>
#include <random>
#include <sstream>

#include "model/gguf.hpp"
#include "unit/model/gguf_builder.hpp"

namespace oscar {
namespace {

constexpr int kNumMutants = 20000;
constexpr int kNumFileMutants = 500;  // through the file system, geometry included

std::string mutate(std::string bytes, std::mt19937& random) {
  // The header is what is parsed; most mutations go there.
  const auto pick = [&](std::size_t limit) { return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random); };
  constexpr std::size_t kHeaderBytes = 800;
  const std::size_t num_edits = 1 + pick(4);
  for (std::size_t edit = 0; edit < num_edits && !bytes.empty(); ++edit) {
    const std::size_t at = pick(std::min(bytes.size(), kHeaderBytes));
    switch (pick(6)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << pick(8))); break;
      case 1: bytes[at] = static_cast<char>(pick(256)); break;
      case 2: bytes.resize(pick(bytes.size() + 1)); break;
      case 3: bytes.erase(at, 1 + pick(16)); break;
      case 4: bytes.insert(at, std::string(1 + pick(16), static_cast<char>(pick(256)))); break;
      case 5:  // a number at its limits
        for (std::size_t i = at; i < std::min(bytes.size(), at + 8); ++i) bytes[i] = static_cast<char>(0xFF);
        break;
    }
  }
  return bytes;
}

TEST(GgufFuzz, NoMutationCrashesTheReaderOrPassesABadTensor) {
  const std::string seed = test::tiny_model().u32s("qwen2.attention.list", {1, 2, 3}).build();
  std::mt19937 random(20260101);
  int accepted = 0;
  for (int i = 0; i < kNumMutants; ++i) {
    const std::string bytes = mutate(seed, random);
    std::istringstream in(bytes);
    const auto header = gguf::read_header(in, bytes.size(), "mutant.gguf");
    if (!header) {
      ASSERT_EQ(header.error().message.rfind("mutant.gguf: ", 0), 0U) << header.error().message;
      continue;
    }
    ++accepted;
    for (const auto& [name, tensor] : header->tensors) {
      ASSERT_LE(tensor.offset, bytes.size()) << name;
      ASSERT_LE(tensor.num_bytes, bytes.size() - tensor.offset) << name;
    }
  }
  EXPECT_GT(accepted, 0) << "every mutant was refused: the mutations no longer reach the parser's depth";
  EXPECT_LT(accepted, kNumMutants);
}

TEST(GgufFuzz, NoMutationCrashesTheGeometryReader) {
  const std::string seed = test::tiny_model().build();
  std::mt19937 random(20260102);
  const std::string path = ::testing::TempDir() + "gguf_fuzz_" + std::to_string(::getpid()) + ".gguf";
  for (int i = 0; i < kNumFileMutants; ++i) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << mutate(seed, random);
    const auto geometry = read_gguf_geometry(path);
    if (!geometry) continue;
    for (const LayerGeometry& layer : geometry->layers) {
      if (layer.kind == LayerKind::kNoCache) continue;
      ASSERT_GT(layer.num_kv_heads, 0);
      ASSERT_EQ(layer.num_qo_heads % layer.num_kv_heads, 0);
      ASSERT_EQ(layer.head_dim % 16, 0);
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace oscar
