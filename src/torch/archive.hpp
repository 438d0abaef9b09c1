#pragma once
// The zip archives of torch.save: entries stored as they are, under one folder of any name: data.pkl (the pickle) and
// data/0, data/1, ... (the storages). Entries are looked up by name and read into memory; nothing is ever extracted to
// disk, so a name with ".." in it leads nowhere.

#include <cstdint>
#include <map>
#include <memory>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct zip;

namespace oscar::torch {

class Archive {
 public:
  static constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;  // 96 layers of 8 heads of 256: 201 MB
  static constexpr std::int64_t kMaxEntries = 1 << 16;

  // Reads the file and its central directory. Errors: kIo; kBadInput: larger than kMaxBytes, not a zip archive (torch
  // before 1.6 wrote none), damaged, no or several data.pkl, a name twice.
  static Result<Archive> open(const std::string& path);

  const std::string& path() const { return path_; }
  bool has(std::string_view name) const { return entries_.contains(name); }
  // Bytes of entry `name` (without the folder), 0 when there is none.
  std::uint64_t size(std::string_view name) const;
  // All of it, held against its CRC-32. Errors: kBadInput: missing, compressed or encrypted, damaged.
  Result<std::string> read(std::string_view name) const;

 private:
  struct Close {
    void operator()(zip* archive) const;
  };
  struct Entry {
    std::uint64_t index = 0, num_bytes = 0;
    bool is_stored = false;
  };
  Archive(std::string path, std::unique_ptr<std::string> bytes) : path_(std::move(path)), bytes_(std::move(bytes)) {}
  Status list_entries();
  tl::unexpected<Error> bad(const std::string& reason) const;

  std::string path_;
  std::unique_ptr<std::string> bytes_;  // the address stays when the archive moves: libzip reads from here
  std::unique_ptr<zip, Close> zip_;
  std::map<std::string, Entry, std::less<>> entries_;
};

// An entry to write. Borrows.
struct ArchiveEntry {
  std::string name;  // without the folder
  std::span<const std::byte> bytes;
};

// An archive of stored entries, each starting at a multiple of 64 bytes, as torch wants it for memory maps. The same
// entries give the same bytes: no times are kept. Errors: kInternal (libzip failed).
Result<std::string> build_archive(std::string_view folder, const std::vector<ArchiveEntry>& entries);

}  // namespace oscar::torch
