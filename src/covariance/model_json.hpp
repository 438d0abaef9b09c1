#pragma once
// Geometry and RoPE of a model as metadata text of rotation and statistics files.

#include <map>
#include <optional>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <string>

namespace oscar {

// Why a geometry cannot be used; empty when it is sound. Layers with a cache have head_dim a multiple of 16 in 16..256
// and num_qo_heads a multiple of num_kv_heads.
std::optional<std::string> geometry_fault(const ModelGeometry& geometry);
// Likewise for a RoPE: rotary_dim is even, in 0..head_dim, 0 for kNone, with rotary_dim / 2 finite frequencies.
std::optional<std::string> rope_fault(const RopeSpec& rope, int head_dim);

std::string geometry_to_json(const ModelGeometry& geometry);
// Errors: kBadInput with a bare reason (no path).
Result<ModelGeometry> geometry_from_json(const std::string& text);

// Order and rotary_dim by layer index; the frequencies are a tensor.
std::string ropes_to_json(const std::map<int, RopeSpec>& ropes);
// Indices are those of `geometry`'s layers with a cache. Errors as above.
Result<std::map<int, RopeSpec>> ropes_from_json(const std::string& text, const ModelGeometry& geometry);

}  // namespace oscar
