#pragma once
// Host side of decode: which instance serves a shape, how many blocks, how much workspace. Plain C++, tested without a
// GPU.

#include <oscar/result.hpp>

#include "params.hpp"

namespace oscar::cuda {

struct DecodeShape {
  int num_requests = 0;
  int query_length = 1;
  int num_qo_heads = 0, num_kv_heads = 0, head_dim = 0;
  int max_pages = 0;  // of 64 tokens, of the longest sequence that the plan will meet
};

// `num_sms`: multiprocessors of the device; the kernel is persistent, one block each.
Result<DecodePlan> plan_decode(const DecodeShape& shape, int num_sms);

// Errors of values that would read out of bounds or give a wrong answer; called once when a layer's parameters are
// made.
Status check_decode(const DecodeParams& params, const DecodeShape& shape);

// DecodeParams::key_matrix or value_matrix of [num_kv_heads, head_dim, head_dim] floats, in host memory [num_kv_heads,
// matrix_bytes]: 16-bit fixed point, each output channel (last index) with its own step, in the kernel's order.
void fill_matrices(const float* matrices, int num_kv_heads, int head_dim, std::uint8_t* out);

// DecodeParams::page_angles for sequences of up to max_pages, in host memory [page_angle_floats]. inverse_frequency
// [rotary_dim / 2]: as the engine's RoPE uses it, scaling included. Angles are evaluated in double.
std::size_t page_angle_floats(int head_dim, int max_pages);
void fill_page_angles(const float* inverse_frequency, int head_dim, int rotary_dim, int max_pages, float* angles);

}  // namespace oscar::cuda
