#pragma once
// What a reader gets back of the rows of one side (keys or values) of one KV head: quantised, then dequantised.

#include <cstdint>

namespace oscar::rivals {

class SideSimulator {
 public:
  virtual ~SideSimulator() = default;
  // Replaces rows [num_rows, head_dim] of the consecutive tokens from `first` on, keys in halves order. Finite rows.
  // Thread-safe.
  virtual void read_back(std::int64_t first, int num_rows, float* rows) const = 0;
  // Codes and parameters.
  virtual double bits_per_element() const = 0;
  // Tokens, aligned, that are quantised together; `first` is a multiple of it.
  virtual int group_tokens() const { return 1; }
};

}  // namespace oscar::rivals
