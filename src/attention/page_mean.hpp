#pragma once
// The mean key of a block of 64 positions, R_{64 block} mu0, which left the keys before they were encoded and comes
// back here as one dot product a page and query.
//
// Evaluating cos and sin of D/2 angles costs about as much as a quarter of a page of work, so the cursor keeps cos and
// sin of its block in double and turns them by R_64 when the next block follows, as it nearly always does: D complex
// products a page. 2048 steps (131072 positions) lose 2048 * 1e-16, far below the float that is handed out. The cursor
// belongs to one work item: no table to share, to bound or to lock.

#include <cstdint>
#include <oscar/rotation.hpp>

namespace oscar::attention {

class BlockMeanCursor {
 public:
  // Borrows both. A head without page mean yields has_mean() == false and no other call is allowed.
  BlockMeanCursor(const LayerRotation& layer, const HeadRotation& head, int head_dim);

  bool has_mean() const { return has_mean_; }
  // mean [head_dim] of the block `block` = floor(position / 64).
  void mean(std::int64_t block, float* mean);

 private:
  static constexpr int kMaxPairs = 128;
  void seek(std::int64_t block);

  const std::vector<double>& inv_freq_;
  const std::vector<double>& page_mean_;
  int head_dim_;
  int num_pairs_;
  bool has_mean_;
  std::int64_t block_ = 0;
  double cos_[kMaxPairs], sin_[kMaxPairs];            // of the angles of block_
  double step_cos_[kMaxPairs], step_sin_[kMaxPairs];  // of 64 positions
};

}  // namespace oscar::attention
