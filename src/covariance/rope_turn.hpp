#pragma once
// RoPE in double, on rows in halves order: pair p = channels p and p + rotary_dim / 2, turned by position *
// inv_freq[p].

#include <cmath>
#include <oscar/model.hpp>
#include <span>
#include <vector>

namespace oscar {

class RopeTurn {
 public:
  // `rope` is read here only; the engine's channel order plays no part, for rows are in halves order by now.
  explicit RopeTurn(const RopeSpec& rope)
      : frequencies_(rope.order == RopeOrder::kNone ? std::vector<double>{} : rope.inv_freq),
        cosines_(frequencies_.size(), 1.0),
        sines_(frequencies_.size(), 0.0) {}

  // Later turns move rows by `position` tokens; a negative one moves them back.
  void set_position(double position) {
    for (std::size_t p = 0; p < frequencies_.size(); ++p) {
      cosines_[p] = std::cos(position * frequencies_[p]);
      sines_[p] = std::sin(position * frequencies_[p]);
    }
  }

  // row <- row R, in place. Channels from rotary_dim on stay.
  void turn(double* row) const {
    const std::size_t half = frequencies_.size();
    for (std::size_t p = 0; p < half; ++p) {
      const double first = row[p];
      const double second = row[p + half];
      row[p] = first * cosines_[p] - second * sines_[p];
      row[p + half] = second * cosines_[p] + first * sines_[p];
    }
  }

  // sum += row R^T: a row taken back from the position, added up. Both have head_dim channels.
  void add_turned_back(const float* row, std::span<double> sum) const {
    const std::size_t half = frequencies_.size();
    for (std::size_t p = 0; p < half; ++p) {
      const double first = row[p];
      const double second = row[p + half];
      sum[p] += first * cosines_[p] + second * sines_[p];
      sum[p + half] += second * cosines_[p] - first * sines_[p];
    }
    for (std::size_t c = 2 * half; c < sum.size(); ++c) sum[c] += row[c];
  }

 private:
  std::vector<double> frequencies_, cosines_, sines_;  // [rotary_dim / 2]
};

}  // namespace oscar
