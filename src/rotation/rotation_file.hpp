#pragma once
// The rotation file's content in memory.

#include <oscar/rotation.hpp>
#include <string>

#include "io/safetensors.hpp"

namespace oscar {

// Tensors and metadata of `set`, content_hash included. Borrows from `set`, which must be sound (rotation_fault).
io::SafetensorsContent rotation_content(const RotationSet& set);

// The hash that a set's content_hash must hold.
std::string rotation_hash(const RotationSet& set);

}  // namespace oscar
