#pragma once
// Bounded reading and whole-or-nothing writing of files. POSIX.

#include <cstddef>
#include <cstdint>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <string_view>

namespace oscar::io {

// An open regular file. Every read is checked against the size that the file had when it was opened.
class FileReader {
 public:
  // Errors: kIo (missing, unreadable, not a regular file).
  static Result<FileReader> open(const std::string& path);
  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&& other) noexcept;
  ~FileReader();

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  // Fills `out` from byte `offset`. Errors: kBadInput (the range passes the file's end), kIo (the device failed).
  Status read(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  FileReader(std::string path, int descriptor, std::uint64_t size);
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

// A file that appears under its name only when it is complete: bytes go to a temporary file in the same folder, which
// commit() flushes to the device and renames. Without a successful commit() the temporary file is removed and a file
// that already had the name is left as it was.
class AtomicFile {
 public:
  // Errors: kIo with the path and the system's reason (no such folder, no permission, not a regular file).
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) = delete;
  ~AtomicFile();

  // Errors: kIo (full disk, ...).
  Status write(std::span<const std::byte> bytes);
  // Everything written reaches the device. For files that belong together: all flushed before the first commit, which
  // then has only names left to give.
  Status flush();
  Status commit();

 private:
  AtomicFile(std::string path, std::string temporary, int descriptor);
  tl::unexpected<Error> failure(std::string_view action) const;  // reads errno
  std::string path_;
  std::string temporary_;  // empty once renamed
  int descriptor_ = -1;
};

// The whole of a small file in one call.
Status write_file(const std::string& path, std::string_view content);
// Errors: those of FileReader, and kBadInput when the file is larger than `max_bytes`.
Result<std::string> read_file(const std::string& path, std::uint64_t max_bytes);

}  // namespace oscar::io
