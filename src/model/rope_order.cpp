#include <numeric>
#include <oscar/model.hpp>

namespace oscar {

std::vector<int> halves_permutation(const RopeSpec& rope, int head_dim) {
  std::vector<int> permutation(static_cast<std::size_t>(head_dim));
  std::iota(permutation.begin(), permutation.end(), 0);
  if (rope.order != RopeOrder::kInterleaved) return permutation;
  const int num_pairs = rope.rotary_dim / 2;
  for (int p = 0; p < num_pairs; ++p) {
    permutation[static_cast<std::size_t>(p)] = 2 * p;
    permutation[static_cast<std::size_t>(p + num_pairs)] = 2 * p + 1;
  }
  return permutation;
}

}  // namespace oscar
