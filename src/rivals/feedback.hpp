#pragma once
// The encoder of method `ours` at 1 to 4 bits, with or without a zero point: what its page format could become.

#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>
#include <vector>

#include "rivals/side_simulator.hpp"

namespace oscar::rivals {

struct FeedbackOptions {
  int bits = 2;            // 1..4
  bool zero_point = true;  // false: a row has a scale only, 8 bits less
};

// Rows of one side: page mean off (keys), transform, error feedback, refit, two coordinate sweeps, 8-bit parameters;
// and all the way back. At 2 bits with a zero point what docs/format.md, "Feedback", says, up to the order of the sums.
class FeedbackRows final : public SideSimulator {
 public:
  // Borrows the head and the RoPE. `is_key`: the head's key side, its page mean taken off; else its value side.
  FeedbackRows(const HeadRotation& head, const RopeSpec& rope, bool is_key, int head_dim,
               const FeedbackOptions& options, Isa isa);
  void read_back(std::int64_t first, int num_rows, float* rows) const override;
  double bits_per_element() const override { return options_.bits + (options_.zero_point ? 16.0 : 8.0) / head_dim_; }

  // One transformed row [head_dim] -> what the decoder reads of it.
  void read_back_transformed(float* y) const;

 private:
  struct MeanAndScale {
    float mean = 0, scale = 1;
  };
  float nearest_level(float u) const;
  MeanAndScale start(const float* y) const;
  // Levels of the row, each rounding error carried into the channels after it.
  void round_with_feedback(const float* y, MeanAndScale fit, float* levels) const;
  MeanAndScale refit(const float* y, const float* levels, MeanAndScale fit) const;
  MeanAndScale stored(MeanAndScale exact) const;
  void sweep(const float* y, MeanAndScale fit, float* levels) const;

  const HeadRotation& head_;
  const RopeSpec& rope_;
  bool is_key_;
  int head_dim_;
  FeedbackOptions options_;
  Isa isa_;
  const SideRotation& side_;
  std::vector<float> row_sums_;  // M 1
  double total_ = 0;             // 1 M 1
};

}  // namespace oscar::rivals
