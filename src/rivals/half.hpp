#pragma once
// Rounding of parameters that a method stores in IEEE half precision.

namespace oscar::rivals {

// The half nearest to `value`, ties to even; beyond the range the largest one (65504): a parameter must stay finite.
float round_to_half(float value);

}  // namespace oscar::rivals
