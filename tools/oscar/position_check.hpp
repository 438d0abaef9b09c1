#pragma once
// A check after calibration: that keys read back at far positions are as good as at near ones. RoPE turns what a
// transform was fitted to, so a fit that misses positions shows here and nowhere else before a long context does.

#include <cstdint>
#include <oscar/executor.hpp>
#include <oscar/rotation.hpp>
#include <oscar/samples.hpp>
#include <vector>

namespace oscar::tool {

struct PositionReport {
  static constexpr double kFlat = 0.10;  // the largest unevenness that passes

  struct Place {
    std::int64_t position = 0;
    // Mean squared error of a logit, each query's mean error taken off (softmax does not see it); mean over layers,
    // heads and texts.
    double error = 0;
  };
  std::int64_t end = 0;       // of the positions that were looked at
  std::vector<Place> places;  // ascending
  double unevenness = 0;      // largest |error / mean of the errors - 1|
};

class PositionCheck {
 public:
  // Texts of `length` tokens will be moved to places evenly spread from position 0 to where they end at the set's
  // max_context, or at the model's own context when that is shorter. Borrows the set.
  PositionCheck(const RotationSet& set, int length, Executor& executor);

  // One layer of a text that starts at position 0: its last queries meet its keys (sinks left out) at every place.
  // Layers that the set lacks are passed over.
  Status add(const SampleBlock& block);

  PositionReport report() const;

 private:
  const RotationSet& set_;
  Executor& executor_;
  std::int64_t end_;
  std::vector<std::int64_t> offsets_;
  std::vector<double> sums_;  // [offsets]
  int num_added_ = 0;         // heads
};

}  // namespace oscar::tool
