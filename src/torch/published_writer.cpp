#include "torch/published_writer.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "torch/archive.hpp"

namespace oscar::torch {
namespace {

// A pickle of protocol 2, without memo: every name and text is written where it stands.
class PickleWriter {
 public:
  PickleWriter() { bytes_ = "\x80\x02"; }

  void text(std::string_view value) {
    bytes_ += 'X';
    raw(static_cast<std::uint32_t>(value.size()));
    bytes_ += value;
  }
  void integer(std::int64_t value) {
    if (value >= 0 && value <= std::numeric_limits<std::int32_t>::max()) {
      bytes_ += 'J';
      raw(static_cast<std::int32_t>(value));
    } else {
      bytes_ += '\x8a';
      bytes_ += '\x08';
      raw(value);
    }
  }
  void truth(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void begin_dict() { bytes_ += "}("; }  // then key, value, key, value, ...
  void end_dict() { bytes_ += 'u'; }
  void key(std::string_view name) { text(name); }
  // A contiguous float32 tensor over the whole of storage `storage_key`.
  void tensor(std::string_view storage_key, const std::vector<std::int64_t>& shape) {
    std::int64_t num_elements = 1;
    for (const std::int64_t extent : shape) num_elements *= extent;
    bytes_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
    text("storage");
    bytes_ += "ctorch\nFloatStorage\n";
    text(storage_key);
    text("cpu");
    integer(num_elements);
    bytes_ += "tQ";
    integer(0);
    tuple(shape);
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    tuple(strides);
    truth(false);  // requires_grad
    bytes_ += "ccollections\nOrderedDict\n)RtR";
  }
  std::string finish() && { return std::move(bytes_) + '.'; }

 private:
  template <typename T>
  void raw(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void tuple(const std::vector<std::int64_t>& values) {
    bytes_ += '(';
    for (const std::int64_t value : values) integer(value);
    bytes_ += 't';
  }
  std::string bytes_;
};

std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

using Matrices = std::vector<std::span<const float>>;

bool same(const Matrices& a, const Matrices& b) {
  return std::ranges::equal(a, b, [](std::span<const float> x, std::span<const float> y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size_bytes()) == 0;
  });
}

// The storages written so far. Matrices that come twice in a row (Hadamard: in every layer) are written once.
class Storages {
 public:
  const std::string& add(const Matrices& matrices) {
    if (last_ == nullptr || !same(*last_, matrices)) {
      std::string bytes;
      for (const std::span<const float> matrix : matrices) {
        bytes.append(reinterpret_cast<const char*>(matrix.data()), matrix.size_bytes());
      }
      key_ = std::to_string(bytes_.size());
      bytes_.push_back(std::move(bytes));
    }
    last_ = &matrices;
    return key_;
  }
  const std::vector<std::string>& bytes() const { return bytes_; }

 private:
  std::vector<std::string> bytes_;
  std::string key_;
  const Matrices* last_ = nullptr;
};

void write_matrices(PickleWriter& pickle, std::string_view name, const Matrices& matrices, int width, bool per_head,
                    Storages& storages) {
  std::vector<std::int64_t> shape{width, width};
  if (per_head) shape.insert(shape.begin(), static_cast<std::int64_t>(matrices.size()));
  pickle.key(name);
  pickle.tensor(storages.add(matrices), shape);
}

void write_calibration(PickleWriter& pickle, const PublishedContent& content) {
  pickle.key("calibration");
  pickle.begin_dict();
  pickle.key("model_path");
  pickle.text(content.model_name);
  pickle.key("tokens");
  pickle.integer(content.num_tokens);
  pickle.key("corpus_hash");
  pickle.text(content.corpus_hash);
  pickle.key("fitter");
  pickle.text(content.fitter);
  pickle.end_dict();
}

}  // namespace

Result<std::string> published_archive(const PublishedContent& content, std::string_view folder) {
  Storages storages;
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.key("format_version");
  pickle.integer(content.format_version);
  pickle.key("objective");
  pickle.text(content.objective);
  pickle.key("source_grouping");
  pickle.text(content.per_head ? "per_kv_head" : "layer");
  write_calibration(pickle, content);
  pickle.key("layers");
  pickle.begin_dict();
  for (const auto& [index, layer] : content.layers) {
    pickle.integer(index);
    pickle.begin_dict();
    pickle.key("layer_id");
    pickle.integer(index);
    write_matrices(pickle, "rotation", layer.rotation, layer.width, content.per_head, storages);
    if (!layer.inverse_transposed.empty()) {
      write_matrices(pickle, content.inverse_name, layer.inverse_transposed, layer.width, content.per_head, storages);
    }
    pickle.end_dict();
  }
  pickle.end_dict();
  pickle.end_dict();
  const std::string bytes = std::move(pickle).finish();

  std::vector<ArchiveEntry> entries{{"data.pkl", as_bytes(bytes)}, {"byteorder", as_bytes("little")}};
  for (std::size_t i = 0; i < storages.bytes().size(); ++i) {
    entries.push_back({"data/" + std::to_string(i), as_bytes(storages.bytes()[i])});
  }
  entries.push_back({"version", as_bytes("3\n")});
  return build_archive(folder, entries);
}

}  // namespace oscar::torch
