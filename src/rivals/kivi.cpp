#include "rivals/kivi.hpp"

#include <algorithm>
#include <cmath>

#include "rivals/half.hpp"

namespace oscar::rivals {
namespace {

constexpr int kLastCode = 3;
constexpr float kSmallestScale = 0x1p-24f;  // the smallest half above zero

// `count` numbers, `stride` apart.
void read_back_group(float* values, int count, int stride) {
  float low = values[0], high = values[0];
  for (int i = 1; i < count; ++i) {
    low = std::min(low, values[i * stride]);
    high = std::max(high, values[i * stride]);
  }
  low = round_to_half(low);
  const float scale = std::max(round_to_half((high - low) / kLastCode), kSmallestScale);
  for (int i = 0; i < count; ++i) {
    float& value = values[i * stride];
    const float code = std::clamp(std::floor((value - low) / scale + 0.5f), 0.0f, static_cast<float>(kLastCode));
    value = low + code * scale;
  }
}

constexpr double bits(double group) { return 2 + 2 * 16 / group; }

}  // namespace

void KiviKeys::read_back(std::int64_t /*first*/, int num_rows, float* rows) const {
  for (int row = 0; row < num_rows; row += kKiviGroup) {
    const int count = std::min(kKiviGroup, num_rows - row);
    for (int channel = 0; channel < head_dim_; ++channel)
      read_back_group(rows + row * head_dim_ + channel, count, head_dim_);
  }
}

double KiviKeys::bits_per_element() const { return bits(kKiviGroup); }

void KiviValues::read_back(std::int64_t /*first*/, int num_rows, float* rows) const {
  for (int row = 0; row < num_rows; ++row) {
    for (int channel = 0; channel < head_dim_; channel += kKiviGroup)
      read_back_group(rows + row * head_dim_ + channel, std::min(kKiviGroup, head_dim_ - channel), 1);
  }
}

double KiviValues::bits_per_element() const {
  return bits(static_cast<double>(head_dim_) / ((head_dim_ + kKiviGroup - 1) / kKiviGroup));
}

}  // namespace oscar::rivals
