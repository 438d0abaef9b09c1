#pragma once
// KIVI (arXiv 2402.02750): 2 bits between the smallest and the largest of a group; keys grouped by channel over 32
// tokens, values by token over 32 channels; both ends of a group kept in half precision.

#include "rivals/side_simulator.hpp"

namespace oscar::rivals {

inline constexpr int kKiviGroup = 32;

class KiviKeys final : public SideSimulator {
 public:
  explicit KiviKeys(int head_dim) : head_dim_(head_dim) {}
  void read_back(std::int64_t first, int num_rows, float* rows) const override;
  double bits_per_element() const override;
  int group_tokens() const override { return kKiviGroup; }

 private:
  int head_dim_;
};

class KiviValues final : public SideSimulator {
 public:
  explicit KiviValues(int head_dim) : head_dim_(head_dim) {}
  void read_back(std::int64_t first, int num_rows, float* rows) const override;
  double bits_per_element() const override;

 private:
  int head_dim_;
};

}  // namespace oscar::rivals
