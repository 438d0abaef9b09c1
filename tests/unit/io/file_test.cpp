#include "io/file.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>

#include "support/temp_folder.hpp"

namespace oscar::io {
namespace {

using test::TempFolder;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  const TempFolder folder;
  const std::string path = folder.file("out.bin");
  auto file = AtomicFile::create(path);
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE(file->write(bytes_of("half ")));
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(file->write(bytes_of("and half")));
  ASSERT_TRUE(file->commit());
  EXPECT_EQ(test::read_bytes(path), "half and half");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.bin"});
}

TEST(AtomicFile, AbandonedLeavesTheOldFileAndNothingElse) {
  const TempFolder folder;
  const std::string path = folder.file("out.bin");
  test::write_bytes(path, "old");
  {
    auto file = AtomicFile::create(path);
    ASSERT_TRUE(file) << file.error().message;
    ASSERT_TRUE(file->write(bytes_of("new")));
  }
  EXPECT_EQ(test::read_bytes(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.bin"});
}

TEST(AtomicFile, TwoOfOneNameDoNotMix) {
  const TempFolder folder;
  const std::string path = folder.file("out.bin");
  auto first = AtomicFile::create(path);
  auto second = AtomicFile::create(path);
  ASSERT_TRUE(first && second);
  ASSERT_TRUE(first->write(bytes_of("first")));
  ASSERT_TRUE(second->write(bytes_of("second")));
  ASSERT_TRUE(second->commit());
  ASSERT_TRUE(first->commit());
  EXPECT_EQ(test::read_bytes(path), "first");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.bin"});
}

TEST(AtomicFile, ReplacesTheTargetOfALinkAndKeepsTheLink) {
  const TempFolder folder;
  test::write_bytes(folder.file("target"), "old");
  std::filesystem::create_symlink(folder.file("target"), folder.file("link"));
  ASSERT_TRUE(write_file(folder.file("link"), "new"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_EQ(test::read_bytes(folder.file("target")), "new");
}

TEST(AtomicFile, RefusesWhatIsNoRegularFile) {
  const TempFolder folder;
  for (const std::string& path : {folder.path(), std::string("/dev/null")}) {
    const Status status = write_file(path, "text");
    ASSERT_FALSE(status) << path;
    EXPECT_EQ(status.error().code, ErrorCode::kIo);
    EXPECT_NE(status.error().message.find(path), std::string::npos) << status.error().message;
  }
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(AtomicFile, AMissingFolderIsAnErrorWithPathAndReason) {
  const TempFolder folder;
  const std::string path = folder.file("no/such/folder/out.bin");
  const Status status = write_file(path, "text");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kIo);
  EXPECT_NE(status.error().message.find(path), std::string::npos) << status.error().message;
  EXPECT_NE(status.error().message.find("No such file or directory"), std::string::npos) << status.error().message;
}

// A file size limit fails a write half-way, as a full disk does.
TEST(AtomicFile, AFullDiskLeavesNothingBehind) {
  const TempFolder folder;
  const std::string path = folder.file("out.bin");
  test::write_bytes(path, "old");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit small_limit{64 * 1024, old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small_limit), 0);
  const Status status = write_file(path, std::string(1024 * 1024, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kIo);
  EXPECT_NE(status.error().message.find("File too large"), std::string::npos) << status.error().message;
  EXPECT_EQ(test::read_bytes(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.bin"});
}

TEST(FileReader, ReadsWhatWasAskedAndNoMore) {
  const TempFolder folder;
  const std::string path = folder.file("in.bin");
  test::write_bytes(path, "0123456789");
  const auto file = FileReader::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->size(), 10U);
  std::string part(4, ' ');
  const auto out = std::as_writable_bytes(std::span(part));
  ASSERT_TRUE(file->read(6, out));
  EXPECT_EQ(part, "6789");
  for (const std::uint64_t offset : {std::uint64_t{7}, std::uint64_t{11}, ~std::uint64_t{0}}) {
    const Status status = file->read(offset, out);
    ASSERT_FALSE(status) << offset;
    EXPECT_EQ(status.error().code, ErrorCode::kBadInput);
  }
}

TEST(FileReader, RefusesFoldersPipesAndMissingFiles) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  for (const std::string& path : {folder.path(), folder.file("pipe"), folder.file("missing")}) {
    const auto file = FileReader::open(path);
    ASSERT_FALSE(file) << path;
    EXPECT_EQ(file.error().code, ErrorCode::kIo);
    EXPECT_NE(file.error().message.find(path), std::string::npos) << file.error().message;
  }
}

TEST(AtomicFile, AFlushedFileStillHasNoNameUntilItIsCommitted) {
  const TempFolder folder;
  const std::string path = folder.file("out.txt");
  auto file = AtomicFile::create(path);
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->write(std::as_bytes(std::span(std::string_view("12345")))));
  ASSERT_TRUE(file->flush());
  EXPECT_FALSE(FileReader::open(path));
  ASSERT_TRUE(file->commit());
  EXPECT_EQ(read_file(path, 5).value(), "12345");
}

TEST(ReadFile, RefusesALargerFileThanAllowed) {
  const TempFolder folder;
  const std::string path = folder.file("in.txt");
  test::write_bytes(path, "12345");
  EXPECT_EQ(read_file(path, 5).value(), "12345");
  const auto refused = read_file(path, 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
}

}  // namespace
}  // namespace oscar::io
