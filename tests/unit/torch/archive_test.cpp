// The zip reader: what torch.save writes is read, everything damaged or hostile is refused, whatever the bytes.

#include "torch/archive.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "unit/torch/published_builder.hpp"

namespace oscar::torch {
namespace {

using namespace std::string_literals;
using test::archive_of;

constexpr int kNumMutants = 3000;
constexpr std::string_view kCentralMagic = "PK\x01\x02";

class ArchiveTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "oscar_archive_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ + "/a.pt"; }
  Result<Archive> open(const std::string& bytes) const {
    test::write_test_file(path(), bytes);
    return Archive::open(path());
  }
  // The message of opening, or of reading data/0.
  std::string refusal(const std::string& bytes) const {
    const auto archive = open(bytes);
    if (!archive) return archive.error().message;
    const auto entry = archive->read("data/0");
    return entry ? "accepted" : entry.error().message;
  }
  void expect_refused(const std::string& bytes, const std::string& part) const {
    const std::string message = refusal(bytes);
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(message.find(path()), 0U) << message;
  }

  std::string folder_;
};

const std::string kStorage = "sixteen bytes...";
std::string sound() { return archive_of({{"data.pkl", "\x80\x02N."}, {"data/0", kStorage}, {"data/1", kStorage}}); }

// Overwrites `value` at `offset` of the central directory's entry `index`.
template <typename T>
std::string with_central_field(std::string bytes, int index, std::size_t offset, T value) {
  std::size_t at = bytes.find(kCentralMagic);
  for (int i = 0; i < index; ++i) at = bytes.find(kCentralMagic, at + 1);
  std::memcpy(bytes.data() + at + offset, &value, sizeof value);
  return bytes;
}

TEST_F(ArchiveTest, EntriesComeBackAndTheSameContentGivesTheSameBytes) {
  const auto archive = open(sound());
  ASSERT_TRUE(archive) << archive.error().message;
  EXPECT_TRUE(archive->has("data.pkl"));
  EXPECT_FALSE(archive->has("any_folder/data.pkl"));
  EXPECT_EQ(archive->size("data/0"), kStorage.size());
  EXPECT_EQ(archive->read("data/0").value(), kStorage);
  EXPECT_EQ(sound(), sound());
}

TEST_F(ArchiveTest, EveryEntryStartsAtAMultipleOf64Bytes) {
  for (const std::size_t size : {0U, 1U, 63U, 64U, 65U, 100000U}) {
    const std::string filler(size, 'f');
    const std::string bytes = archive_of({{"data.pkl", filler}, {"data/0", "needle"}});
    ASSERT_NE(bytes.find("needle"), std::string::npos);
    EXPECT_EQ(bytes.find("needle") % 64, 0U) << size;
  }
}

TEST_F(ArchiveTest, EveryTruncationIsRefused) {
  const std::string whole = sound();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    ASSERT_NE(refusal(whole.substr(0, size)), "accepted") << size;
  }
  expect_refused(whole.substr(0, whole.size() / 2), "damaged or cut short");
  expect_refused("", "not a zip archive");
  expect_refused("\x80\x02}q\0."s, "torch 1.6");
}

TEST_F(ArchiveTest, AChangedByteOfAStorageIsFoundByItsChecksum) {
  std::string bytes = sound();
  bytes[bytes.find(kStorage) + 3] ^= 1;
  expect_refused(bytes, "'data/0' is damaged");
}

TEST_F(ArchiveTest, CompressedEncryptedAndOversizedEntriesAreRefusedBeforeTheyAreRead) {
  constexpr int kStorageEntry = 1;
  constexpr std::size_t kFlags = 8;
  constexpr std::size_t kMethod = 10;
  constexpr std::size_t kPackedSize = 20;
  constexpr std::size_t kSize = 24;
  const std::uint32_t huge = 0xFFFFFFF0;
  expect_refused(with_central_field(sound(), kStorageEntry, kMethod, std::uint16_t{8}), "compressed");
  expect_refused(with_central_field(sound(), kStorageEntry, kFlags, std::uint16_t{1}), "data/0");
  expect_refused(with_central_field(sound(), kStorageEntry, kSize, huge), "larger than the file");
  const std::string both = with_central_field(sound(), kStorageEntry, kSize, huge);
  expect_refused(with_central_field(both, kStorageEntry, kPackedSize, huge), "larger than the file");
}

TEST_F(ArchiveTest, ANameThatComesTwiceIsRefused) {
  std::string bytes = sound();
  for (std::size_t at = 0; (at = bytes.find("data/1", at)) != std::string::npos;) bytes[at + 5] = '0';
  expect_refused(bytes, "'any_folder/data/0' is there twice");
}

TEST_F(ArchiveTest, AnArchiveOfSomethingElseIsRefused) {
  expect_refused(archive_of({{"readme.txt", "hello"}}), "has no data.pkl");
  expect_refused(archive_of({{"inner/data.pkl", "x"}}), "has no data.pkl");
  expect_refused(archive_of({{"data.pkl", "x"}}), "'data/0' is missing");
}

TEST_F(ArchiveTest, NamesThatClimbOutOfTheFolderWriteNothing) {
  const auto archive = open(archive_of({{"data.pkl", "x"}, {"../../escaped", "x"}, {"data/../../up", "x"}}));
  ASSERT_TRUE(archive) << archive.error().message;
  EXPECT_FALSE(archive->has("escaped"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(ArchiveTest, NoMutationCrashesTheReaderOrPassesWrongBytes) {
  const std::string whole = sound();
  std::mt19937 random(20261201);
  const auto pick = [&](std::size_t limit) { return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random); };
  for (int i = 0; i < kNumMutants; ++i) {
    std::string bytes = whole;
    for (std::size_t edit = 1 + pick(3); edit > 0; --edit) bytes[pick(bytes.size())] = static_cast<char>(pick(256));
    const auto archive = open(bytes);
    if (!archive || !archive->has("data/0")) continue;
    ASSERT_EQ(archive->read("data/0").value_or(kStorage), kStorage) << i;
  }
}

}  // namespace
}  // namespace oscar::torch
