#pragma once
// Host side of the store: which instance serves a shape, how a batch is cut, and what it refuses. Plain C++, tested
// without a GPU.

#include <oscar/result.hpp>
#include <oscar/rotation.hpp>
#include <vector>

#include "params.hpp"

namespace oscar::cuda {

struct StoreShape {
  int num_tokens = 0;  // rows of the batch; 0 is an empty launch
  int num_layers = 1;
  int num_kv_heads = 0, head_dim = 0;
  Quantizer quantizer = Quantizer::kFeedback;
  // Codes equal the CPU's bit for bit. Otherwise matrix products use tensor cores: the metric error is within 1 % of
  // the exact one's. head_dim 256 is always exact.
  bool exact = false;
};

struct StorePlan {
  bool tensor_cores;
  int tile_tokens;    // tokens of a tile, 16 or 64
  int num_tiles;      // of one head, side and layer, at most
  int blocks_a_head;  // thread blocks that share the tiles of one head, side and layer
};

// `num_sms`: multiprocessors of the device, of which the tensor-core blocks make one wave.
Result<StorePlan> plan_store(const StoreShape& shape, int num_sms);

// Errors of values that would read out of bounds or give a wrong answer. Layers in device memory are not looked at.
Status check_store(const StoreParams& params, const StoreShape& shape);

// Tables that kFeedback reads besides T and M: row_sum [head_dim] and inverse_diagonal [head_dim] of one head's M
// [head_dim, head_dim], and total, in the order of the format's arithmetic.
struct MetricTables {
  std::vector<float> row_sum, inverse_diagonal;
  float total = 0;
};
MetricTables metric_tables(const float* metric, int head_dim);

}  // namespace oscar::cuda
