#include "torch/archive.hpp"

#include <zip.h>

#include <utility>

#include "io/file.hpp"
#include "io/safetensors.hpp"

namespace oscar::torch {
namespace {

constexpr std::string_view kPickleName = "data.pkl";
constexpr std::string_view kRemedy = "fetch it anew or write it again with torch.save";

struct ErrorText {
  zip_error_t error;
  ErrorText() { zip_error_init(&error); }
  ~ErrorText() { zip_error_fini(&error); }
  ErrorText(const ErrorText&) = delete;
  ErrorText& operator=(const ErrorText&) = delete;
  std::string text() { return zip_error_strerror(&error); }
};

struct CloseFile {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};
struct FreeSource {
  void operator()(zip_source_t* source) const { zip_source_free(source); }
};
using Source = std::unique_ptr<zip_source_t, FreeSource>;

bool is_pickle(std::string_view name) {
  const std::size_t slash = name.find('/');
  return slash != std::string_view::npos && slash > 0 && name.substr(slash + 1) == kPickleName;
}

}  // namespace

void Archive::Close::operator()(zip* archive) const { zip_discard(archive); }

tl::unexpected<Error> Archive::bad(const std::string& reason) const {
  return make_error(ErrorCode::kBadInput, path_ + ": " + reason + "; " + std::string(kRemedy));
}

Result<Archive> Archive::open(const std::string& path) {
  OSCAR_ASSIGN(std::string bytes, io::read_file(path, kMaxBytes));
  Archive archive(path, std::make_unique<std::string>(std::move(bytes)));
  if (!archive.bytes_->starts_with("PK\x03\x04")) {
    return archive.bad("is not a zip archive, as torch.save writes since torch 1.6");
  }
  ErrorText error;
  Source source(zip_source_buffer_create(archive.bytes_->data(), archive.bytes_->size(), 0, &error.error));
  if (source == nullptr) return make_error(ErrorCode::kInternal, path + ": " + error.text());
  archive.zip_.reset(zip_open_from_source(source.get(), ZIP_RDONLY, &error.error));
  if (archive.zip_ == nullptr) return archive.bad("the zip archive is damaged or cut short (" + error.text() + ")");
  std::ignore = source.release();  // the archive's own from here on
  OSCAR_TRY(archive.list_entries());
  return archive;
}

Status Archive::list_entries() {
  const zip_int64_t count = zip_get_num_entries(zip_.get(), 0);
  if (count > kMaxEntries) {
    return bad("has " + std::to_string(count) + " entries, at most " + std::to_string(kMaxEntries) + " are read");
  }
  constexpr zip_uint64_t kNeeded =
      ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
  std::string folder;
  std::map<std::string, Entry> all;
  for (zip_int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<zip_uint64_t>(i);
    zip_stat_t stat;
    if (zip_stat_index(zip_.get(), index, ZIP_FL_ENC_RAW, &stat) != 0 || (stat.valid & kNeeded) != kNeeded) {
      return bad("entry " + std::to_string(i) + " of the zip archive is damaged");
    }
    const std::string name = stat.name;
    const bool is_stored = stat.comp_method == ZIP_CM_STORE && stat.encryption_method == ZIP_EM_NONE &&
                           stat.size == stat.comp_size && stat.size <= bytes_->size();
    if (!all.emplace(name, Entry{index, stat.size, is_stored}).second) {
      return bad("entry " + io::quote(name) + " is there twice");
    }
    if (!is_pickle(name)) continue;
    if (!folder.empty()) return bad("has more than one " + std::string(kPickleName));
    folder = name.substr(0, name.size() - kPickleName.size());
  }
  if (folder.empty()) return bad("has no " + std::string(kPickleName) + " in a folder: torch.save did not write it");
  for (auto& [name, entry] : all) {
    if (name.starts_with(folder)) entries_.emplace(name.substr(folder.size()), entry);
  }
  return {};
}

std::uint64_t Archive::size(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? 0 : found->second.num_bytes;
}

Result<std::string> Archive::read(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return bad("entry " + io::quote(name) + " is missing");
  const Entry& entry = found->second;
  if (!entry.is_stored) return bad("entry " + io::quote(name) + " is compressed, encrypted or larger than the file");
  const auto damaged = [&](const char* reason) {
    return bad("entry " + io::quote(name) + " is damaged (" + reason + ")");
  };
  const std::unique_ptr<zip_file_t, CloseFile> file(zip_fopen_index(zip_.get(), entry.index, 0));
  if (file == nullptr) return damaged(zip_strerror(zip_.get()));
  std::string bytes(static_cast<std::size_t>(entry.num_bytes), '\0');
  for (std::size_t done = 0; done < bytes.size();) {
    const zip_int64_t count = zip_fread(file.get(), bytes.data() + done, bytes.size() - done);
    if (count < 0) return damaged(zip_file_strerror(file.get()));
    if (count == 0) return damaged("cut short");
    done += static_cast<std::size_t>(count);
  }
  char beyond = 0;  // the checksum is compared when the end is reached
  if (zip_fread(file.get(), &beyond, 1) != 0) return damaged(zip_file_strerror(file.get()));
  return bytes;
}

namespace {

constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kLocalHeaderBytes = 30;
constexpr std::uint64_t kExtraHeaderBytes = 4;
constexpr zip_uint16_t kPaddingField = 0x4246;  // "FB", as torch names its own
constexpr zip_uint16_t kFirstDay = 0x21;        // 1980-01-01

// Adds one entry whose bytes begin at a multiple of kAlignment; `offset` is where its header will stand.
bool add_entry(zip* archive, const std::string& name, std::span<const std::byte> bytes, std::uint64_t& offset) {
  zip_source_t* source = zip_source_buffer(archive, bytes.data(), bytes.size(), 0);
  if (source == nullptr) return false;
  const zip_int64_t added = zip_file_add(archive, name.c_str(), source, 0);
  if (added < 0) {
    zip_source_free(source);
    return false;
  }
  const auto index = static_cast<zip_uint64_t>(added);
  const std::uint64_t start = offset + kLocalHeaderBytes + name.size() + kExtraHeaderBytes;
  const std::string padding(static_cast<std::size_t>((kAlignment - start % kAlignment) % kAlignment), 'Z');
  offset = start + padding.size() + bytes.size();
  return zip_set_file_compression(archive, index, ZIP_CM_STORE, 0) == 0 &&
         zip_file_set_dostime(archive, index, 0, kFirstDay, 0) == 0 &&
         zip_file_extra_field_set(archive, index, kPaddingField, ZIP_EXTRA_FIELD_NEW,
                                  reinterpret_cast<const zip_uint8_t*>(padding.data()),
                                  static_cast<zip_uint16_t>(padding.size()), ZIP_FL_LOCAL) == 0;
}

Result<std::string> content_of(zip_source_t* source) {
  zip_stat_t stat;
  if (zip_source_stat(source, &stat) != 0 || (stat.valid & ZIP_STAT_SIZE) == 0 || zip_source_open(source) != 0) {
    return make_error(ErrorCode::kInternal, "the zip archive cannot be read back from memory");
  }
  std::string bytes(static_cast<std::size_t>(stat.size), '\0');
  const zip_int64_t count = zip_source_read(source, bytes.data(), bytes.size());
  zip_source_close(source);
  if (count == static_cast<zip_int64_t>(bytes.size())) return bytes;
  return make_error(ErrorCode::kInternal, "the zip archive cannot be read back from memory");
}

}  // namespace

Result<std::string> build_archive(std::string_view folder, const std::vector<ArchiveEntry>& entries) {
  ErrorText error;
  const Source buffer(zip_source_buffer_create(nullptr, 0, 0, &error.error));
  zip* archive = buffer ? zip_open_from_source(buffer.get(), ZIP_CREATE | ZIP_TRUNCATE, &error.error) : nullptr;
  if (archive == nullptr) return make_error(ErrorCode::kInternal, "the zip archive cannot be made: " + error.text());
  zip_source_keep(buffer.get());
  std::uint64_t offset = 0;
  bool added = true;
  for (const ArchiveEntry& entry : entries) {
    added = added && add_entry(archive, std::string(folder) + "/" + entry.name, entry.bytes, offset);
  }
  if (!added || zip_close(archive) != 0) {
    const std::string reason = zip_strerror(archive);
    zip_discard(archive);
    return make_error(ErrorCode::kInternal, "the zip archive cannot be made: " + reason);
  }
  return content_of(buffer.get());
}

}  // namespace oscar::torch
