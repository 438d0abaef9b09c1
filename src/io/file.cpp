#include "io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace oscar::io {
namespace {

constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;  // Linux moves at most 2 GiB a call
constexpr int kMaxNameAttempts = 100;

std::string reason(int error_number) { return std::generic_category().message(error_number); }

// Where `path` leads through symbolic links, so that a link stays a link when its target is replaced.
std::string follow_links(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, error);
  return error ? path : target.string();
}

}  // namespace

FileReader::FileReader(std::string path, int descriptor, std::uint64_t size)
    : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

FileReader::FileReader(FileReader&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

FileReader& FileReader::operator=(FileReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

FileReader::~FileReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Result<FileReader> FileReader::open(const std::string& path) {
  // O_NONBLOCK: a named pipe must be refused below, not waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return make_error(ErrorCode::kIo, path + ": cannot open: " + reason(errno));
  FileReader reader(path, descriptor, 0);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return make_error(ErrorCode::kIo, path + ": cannot read: " + reason(errno));
  if (!S_ISREG(status.st_mode)) return make_error(ErrorCode::kIo, path + ": is not a regular file");
  reader.size_ = static_cast<std::uint64_t>(status.st_size);
  return reader;
}

Status FileReader::read(std::uint64_t offset, std::span<std::byte> out) const {
  const auto truncated = [&] {
    return make_error(ErrorCode::kBadInput, path_ + ": ends at byte " + std::to_string(size_) + " but bytes " +
                                                std::to_string(offset) + " to " + std::to_string(offset + out.size()) +
                                                " are needed; the file is truncated, copy or make it again");
  };
  if (offset > size_ || out.size() > size_ - offset) return truncated();
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t part = std::min(out.size() - done, kMaxTransfer);
    const ssize_t count = ::pread(descriptor_, out.data() + done, part, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return make_error(ErrorCode::kIo, path_ + ": cannot read: " + reason(errno));
    if (count == 0) return truncated();  // cut short after it was opened
    done += static_cast<std::size_t>(count);
  }
  return {};
}

AtomicFile::AtomicFile(std::string path, std::string temporary, int descriptor)
    : path_(std::move(path)), temporary_(std::move(temporary)), descriptor_(descriptor) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

tl::unexpected<Error> AtomicFile::failure(std::string_view action) const {
  return make_error(ErrorCode::kIo, path_ + ": cannot " + std::string(action) + ": " + reason(errno) +
                                        "; nothing was written under this name");
}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  static std::atomic<unsigned> counter{0};  // two files of one process in one folder
  AtomicFile file(follow_links(path), {}, -1);
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return make_error(ErrorCode::kIo, path + ": is not a regular file; choose the name of a new file");
  }
  for (int attempt = 0; attempt < kMaxNameAttempts; ++attempt) {
    std::string temporary =
        file.path_ + "." + std::to_string(::getpid()) + "-" + std::to_string(counter.fetch_add(1)) + ".partial";
    const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor >= 0) {
      file.temporary_ = std::move(temporary);
      file.descriptor_ = descriptor;
      return file;
    }
    if (errno != EEXIST) break;
  }
  return file.failure("create a file in its folder");
}

Status AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxTransfer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failure("write");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return {};
}

Status AtomicFile::flush() {
  if (::fsync(descriptor_) != 0) return failure("write");
  return {};
}

Status AtomicFile::commit() {
  OSCAR_TRY(flush());
  if (::close(std::exchange(descriptor_, -1)) != 0) return failure("write");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return failure("rename the finished file to it");
  temporary_.clear();
  // The name itself reaches the device with its folder. The file is complete either way, so a folder that cannot be
  // opened or synchronised (some network file systems) is no failure.
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  const int folder_descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_descriptor >= 0) {
    ::fsync(folder_descriptor);
    ::close(folder_descriptor);
  }
  return {};
}

Status write_file(const std::string& path, std::string_view content) {
  OSCAR_ASSIGN(AtomicFile file, AtomicFile::create(path));
  OSCAR_TRY(file.write(std::as_bytes(std::span(content))));
  return file.commit();
}

Result<std::string> read_file(const std::string& path, std::uint64_t max_bytes) {
  OSCAR_ASSIGN(const FileReader file, FileReader::open(path));
  if (file.size() > max_bytes) {
    return make_error(ErrorCode::kBadInput, path + ": has " + std::to_string(file.size()) + " bytes, at most " +
                                                std::to_string(max_bytes) + " are accepted");
  }
  std::string content(static_cast<std::size_t>(file.size()), '\0');
  OSCAR_TRY(file.read(0, std::as_writable_bytes(std::span(content))));
  return content;
}

}  // namespace oscar::io
