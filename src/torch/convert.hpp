#pragma once
// Between the published rotation files (torch, one a side) and the rotation file.

#include <memory>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <oscar/rotation.hpp>
#include <string>

#include "torch/published_file.hpp"

namespace oscar::torch {

struct FromPublishedOptions {
  float key_clip_ratio = 0.96F;  // the files hold none; these are the published defaults. 0 = no clip
  float value_clip_ratio = 0.92F;
  bool drop_key_mean = false;  // convert files of centred keys (`k_mean`) without the mean
};

// Method `hadamard` when both files say so, `published` when all matrices are [D, D], else `published-per-head`. A
// published file does not say which model it belongs to: layers, KV heads and head_dim must fit `geometry`, every
// full-attention layer must be there, other layers may be (those that are not keep their 16-bit cache).
// Errors: kMismatch (another geometry, the two files swapped or of different layers), kBadInput (not orthogonal, R^-T
// no inverse, damaged), kUnsupported (k_mean without drop_key_mean).
Result<std::shared_ptr<const RotationSet>> from_published(PublishedFile& keys, PublishedFile& values,
                                                          const ModelGeometry& geometry,
                                                          const FromPublishedOptions& options);

struct PublishedPair {
  std::string key_archive, value_archive;  // the files' bytes
};

// Format 1 for shared, 2 for per-head, 3 where a transform is not orthogonal. Errors: kUnsupported: a method that the
// published code cannot serve (ours, ours-fast) or that has no rotation (naive).
Result<PublishedPair> to_published(const RotationSet& set);

}  // namespace oscar::torch
