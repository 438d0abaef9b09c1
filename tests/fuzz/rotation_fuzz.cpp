// Mutations of a valid rotation file: the reader gives an error, or, where a mutation changes nothing that counts (a
// blank in the header), the identical set; never a crash. Run under OSCAR_SANITIZE=address to make stray reads fatal.

#include <gtest/gtest.h>

#include <oscar/rotation.hpp>
#include <random>

#include "rotation/rotation_file.hpp"
#include "support/statistics.hpp"
#include "support/temp_folder.hpp"

namespace oscar {
namespace {

constexpr std::size_t kTruncationStep = 97;
constexpr int kNumEdits = 2000;

class RotationFuzz : public testing::Test {
 protected:
  void SetUp() override {
    const ModelStatistics statistics = test::statistics_of({.num_layers = 1, .num_kv_heads = 1});
    set_ = fit_rotation(statistics, {.method = Method::kOurs}).value();
    ASSERT_TRUE(save_rotation(*set_, path_));
    seed_ = test::read_bytes(path_);
    ASSERT_TRUE(load_rotation(path_));
    header_size_ = 8 + static_cast<std::uint8_t>(seed_[0]) + 256U * static_cast<std::uint8_t>(seed_[1]);
    ASSERT_LT(header_size_, seed_.size());
  }

  // True when the mutant was read, which must then be the set itself.
  bool read(const std::string& mutant) {
    test::write_bytes(path_, mutant);
    const auto got = load_rotation(path_);
    if (!got) {
      EXPECT_EQ(got.error().message.rfind(path_ + ": ", 0), 0U) << got.error().message;
      return false;
    }
    EXPECT_EQ((*got)->content_hash, set_->content_hash);
    EXPECT_EQ(rotation_hash(**got), set_->content_hash);
    return true;
  }

  test::TempFolder folder_;
  std::string path_ = folder_.file("mutant.safetensors");
  std::shared_ptr<const RotationSet> set_;
  std::string seed_;
  std::size_t header_size_ = 0;
};

TEST_F(RotationFuzz, NoTruncationIsRead) {
  for (std::size_t size = 0; size < seed_.size(); size += kTruncationStep) {
    ASSERT_FALSE(read(seed_.substr(0, size))) << size;
  }
}

TEST_F(RotationFuzz, NoFlippedBitOfTheHeaderChangesTheSet) {
  for (std::size_t i = 0; i < header_size_; ++i) {
    std::string mutant = seed_;
    mutant[i] = static_cast<char>(mutant[i] ^ (1 << (i * 5 % 8)));
    read(mutant);
  }
}

TEST_F(RotationFuzz, NoFlippedBitOfTheDataIsRead) {
  for (std::size_t i = header_size_; i < seed_.size(); i += 7) {
    std::string mutant = seed_;
    mutant[i] = static_cast<char>(mutant[i] ^ (1 << (i % 8)));
    ASSERT_FALSE(read(mutant)) << i;
  }
}

TEST_F(RotationFuzz, NoEditOfTheHeaderChangesTheSet) {
  std::mt19937 random(20260103);
  const auto pick = [&](std::size_t limit) { return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random); };
  const std::string structure = "{}[]\":,0123456789-e \\";
  for (int i = 0; i < kNumEdits; ++i) {
    std::string mutant = seed_;
    const std::size_t num_edits = 1 + pick(3);
    for (std::size_t edit = 0; edit < num_edits; ++edit) {
      const std::size_t at = pick(header_size_);
      switch (pick(4)) {
        case 0: mutant[at] = structure[pick(structure.size())]; break;
        case 1: mutant.erase(at, 1 + pick(8)); break;
        case 2: mutant.insert(at, 1 + pick(8), structure[pick(structure.size())]); break;
        case 3: {  // one part of the header over another
          const std::size_t from = pick(header_size_);
          const std::string part = mutant.substr(from, 1 + pick(64));
          mutant.replace(at, std::min(part.size(), mutant.size() - at), part);
          break;
        }
      }
    }
    read(mutant);
  }
}

}  // namespace
}  // namespace oscar
