#pragma once
// Non-uniform levels for rows that a rotation has made Gaussian.

#include <cstdint>
#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>
#include <vector>

#include "rivals/side_simulator.hpp"

namespace oscar::rivals {

// The 2^bits levels that leave a unit Gaussian the smallest mean squared error, ascending. bits 1..8.
std::vector<float> lloyd_max_levels(int bits);

// Orthogonal [head_dim, head_dim], row-major, drawn evenly from the orthogonal group.
std::vector<float> random_rotation(int head_dim, std::uint64_t seed);

// TurboQuant (arXiv 2504.19874) for the mean squared error: a random rotation, Lloyd-Max levels times the row's root
// mean square, which is kept in half precision.
class TurboRows final : public SideSimulator {
 public:
  TurboRows(int head_dim, int bits, std::uint64_t seed, Isa isa);
  void read_back(std::int64_t first, int num_rows, float* rows) const override;
  double bits_per_element() const override;

 private:
  int head_dim_, bits_;
  Isa isa_;
  std::vector<float> rotation_, levels_;
};

// The published method's own Lloyd-Max option (SGLANG_LLOYD_MAX of its code): its rotation and clip, the row's mean and
// deviation, Lloyd-Max thresholds, but evenly spaced values read back, 1.16 times wider than Lloyd-Max's outermost
// ones, so that scores are unbiased. A float32 pair a row.
class PublishedLloydMaxRows final : public SideSimulator {
 public:
  // Borrows the side.
  PublishedLloydMaxRows(const SideRotation& side, int head_dim, Isa isa)
      : side_(side), head_dim_(head_dim), isa_(isa) {}
  void read_back(std::int64_t first, int num_rows, float* rows) const override;
  double bits_per_element() const override { return 2 + 64.0 / head_dim_; }

 private:
  const SideRotation& side_;
  int head_dim_;
  Isa isa_;
};

}  // namespace oscar::rivals
