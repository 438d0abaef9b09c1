#pragma once
// A published rotation file of one side (keys or values), formats 1 to 3, as torch.save writes it:
//   {format_version, objective, source_grouping, layers: {index: {layer_id, rotation, eigenvalues, ...}}, ...}
// Only layers[index].rotation must be there. Shapes decide what is shared by a layer's heads ([D, D]) and what is per
// head ([H, D, D]); the version does not ("identity-v1" exists). Layer keys are integers or texts of digits; layers may
// share storages, with offsets and strides.

#include <cstdint>
#include <map>
#include <optional>
#include <oscar/result.hpp>
#include <string>
#include <vector>

#include "torch/archive.hpp"
#include "torch/pickle.hpp"

namespace oscar::torch {

struct PublishedLayer {
  Tensor rotation;                           // R, rows are vectors: x R is what is quantised
  std::optional<Tensor> inverse_transposed;  // R^-T where R is not orthogonal: `q_rotation` (keys), `o_rotation`
  std::optional<Tensor> key_mean;            // `k_mean`, subtracted before R: [D] or [H, D]
};

class PublishedFile {
 public:
  static constexpr int kMaxLayers = 4096;

  // Reads all but the matrices. Errors: those of Archive::open; kBadInput: the pickle is refused, not the structure
  // above, a big-endian file.
  static Result<PublishedFile> open(const std::string& path);

  const std::string& path() const { return archive_.path(); }
  const std::string& objective() const { return objective_; }      // "qqt_r_h_pbr", "hadamard"; may be empty
  std::int64_t num_tokens() const { return num_tokens_; }          // behind the calibration; 0 when not told
  const std::string& corpus_hash() const { return corpus_hash_; }  // may be empty
  const std::map<int, PublishedLayer>& layers() const { return layers_; }

  // The elements of a tensor of layers(), row-major, as float32. The caller has looked at the shape: it says how much
  // memory this takes. Errors: kBadInput: storage missing, damaged or of another size, NaN or infinity.
  Result<std::vector<float>> read(const Tensor& tensor);

 private:
  explicit PublishedFile(Archive archive) : archive_(std::move(archive)) {}
  tl::unexpected<Error> bad(const std::string& reason) const;
  Status read_header(const Value& root);
  Status read_layer(const Value& key, const Value& value);

  Archive archive_;
  std::string objective_, corpus_hash_;
  std::int64_t num_tokens_ = 0;
  std::map<int, PublishedLayer> layers_;
  // The storage read last: files exist in which all layers share one.
  std::string storage_key_, storage_bytes_;
};

}  // namespace oscar::torch
