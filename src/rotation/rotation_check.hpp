#pragma once
// Whether a rotation set hangs together: what the encoder and every cache rely on.

#include <optional>
#include <oscar/rotation.hpp>
#include <string>

namespace oscar {

// Why a set cannot be used, naming the tensor; empty when it is sound.
std::optional<std::string> rotation_fault(const RotationSet& set);

}  // namespace oscar
