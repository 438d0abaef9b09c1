#pragma once
// Writes a published rotation file of one side (torch/published_file.hpp), for the published code's
// torch.load(weights_only=True): a zip archive, a pickle of protocol 2 with names that this mode allows.

#include <cstdint>
#include <map>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::torch {

struct PublishedLayerContent {
  int width = 0;  // head_dim
  // One matrix [width, width] for all heads, or one a head. Borrows.
  std::vector<std::span<const float>> rotation;
  std::vector<std::span<const float>> inverse_transposed;  // empty when the rotation is orthogonal
};

struct PublishedContent {
  int format_version = 1;
  std::string objective;
  bool per_head = false;
  std::string_view inverse_name;                // what inverse_transposed is called: "q_rotation" or "o_rotation"
  std::string model_name, fitter, corpus_hash;  // provenance, UTF-8, kept under `calibration`
  std::int64_t num_tokens = 0;
  std::map<int, PublishedLayerContent> layers;
};

// The file's bytes; `folder` is the archive's top folder, by custom the file's name without extension. A layer whose
// matrices equal those of the layer before shares their storage. Errors: kInternal.
Result<std::string> published_archive(const PublishedContent& content, std::string_view folder);

}  // namespace oscar::torch
