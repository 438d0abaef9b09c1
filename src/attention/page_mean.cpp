#include "attention/page_mean.hpp"

#include <cmath>
#include <oscar/cache.hpp>

namespace oscar::attention {

BlockMeanCursor::BlockMeanCursor(const LayerRotation& layer, const HeadRotation& head, int head_dim)
    : inv_freq_(layer.rope.inv_freq),
      page_mean_(head.page_mean),
      head_dim_(head_dim),
      num_pairs_(layer.rope.order == RopeOrder::kNone ? 0 : static_cast<int>(layer.rope.inv_freq.size())),
      has_mean_(!head.page_mean.empty()) {
  if (!has_mean_) return;
  for (int p = 0; p < num_pairs_; ++p) {
    cos_[p] = 1;
    sin_[p] = 0;
    step_cos_[p] = std::cos(inv_freq_[static_cast<std::size_t>(p)] * kPageTokens);
    step_sin_[p] = std::sin(inv_freq_[static_cast<std::size_t>(p)] * kPageTokens);
  }
}

void BlockMeanCursor::seek(std::int64_t block) {
  if (block == block_) return;
  if (block == block_ + 1) {
    for (int p = 0; p < num_pairs_; ++p) {
      const double c = cos_[p] * step_cos_[p] - sin_[p] * step_sin_[p];
      sin_[p] = sin_[p] * step_cos_[p] + cos_[p] * step_sin_[p];
      cos_[p] = c;
    }
  } else {
    const auto position = static_cast<double>(block * kPageTokens);
    for (int p = 0; p < num_pairs_; ++p) {
      cos_[p] = std::cos(inv_freq_[static_cast<std::size_t>(p)] * position);
      sin_[p] = std::sin(inv_freq_[static_cast<std::size_t>(p)] * position);
    }
  }
  block_ = block;
}

void BlockMeanCursor::mean(std::int64_t block, float* mean) {
  seek(block);
  const double* mu = page_mean_.data();
  for (int p = 0; p < num_pairs_; ++p) {
    const double first = mu[p], second = mu[p + num_pairs_];
    mean[p] = static_cast<float>(first * cos_[p] - second * sin_[p]);
    mean[p + num_pairs_] = static_cast<float>(second * cos_[p] + first * sin_[p]);
  }
  for (int c = 2 * num_pairs_; c < head_dim_; ++c) mean[c] = static_cast<float>(mu[c]);
}

}  // namespace oscar::attention
