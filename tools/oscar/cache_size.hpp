#pragma once
// Bits and bytes of a model's cache, for tables.

#include <oscar/ggml.hpp>
#include <oscar/rotation.hpp>

namespace oscar::tool {

// KvSpec of one layer under a rotation set.
KvSpec layer_spec(const LayerGeometry& layer, const RotationSet& rotation, int sink, int recent);

// Bits a K or V element takes in the layers that `rotation` covers, mean over their elements.
double page_bits(const ModelGeometry& geometry, const RotationSet& rotation);  // codes and parameters
double bits_at(const ModelGeometry& geometry, const RotationSet& rotation, int sink, int recent,
               std::int64_t context);  // windows too

// A set that has the sizes of `method` and no transforms: enough to predict memory before a model is calibrated.
Result<std::shared_ptr<const RotationSet>> sizing_set(const ModelGeometry& geometry, Method method);

// llama.cpp's own 16-bit cache, bytes.
Result<std::int64_t> stock_bytes(const ModelGeometry& geometry, std::int64_t context);

}  // namespace oscar::tool
