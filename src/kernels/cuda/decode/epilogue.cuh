#pragma once
// What a block does at the end of a row: joins its warps' parts, turns the INT2 part back (x = y A_v^{-1}), joins the
// window's, and writes the output; or, where the row goes on in the next block, publishes its part. The block that
// holds a row's end waits for the parts of the blocks before it, after the last row of its own: blocks start in order,
// so it never waits for one that cannot run.
//
// Published words are their own flags: zero means not written yet (a value of zero is written as -0), and the reader
// puts the zeros back.

#include "history.cuh"
#include "product.cuh"
#include "segments.cuh"
#include "window.cuh"

namespace oscar::cuda {

// (max, sum, sum p v) of a few channels, max in log2, the rest relative to it.
struct Sum4 {
  float4 acc = make_float4(0, 0, 0, 0);
  float max = -INFINITY, sum = 0;
  __device__ __forceinline__ void add(const float4& value, float2 max_sum) {
    const float top = fmaxf(max, max_sum.x), reference = top == -INFINITY ? 0.0f : top;
    const float keep = exp2_fast(max - reference), factor = exp2_fast(max_sum.x - reference);
    acc.x = acc.x * keep + value.x * factor;
    acc.y = acc.y * keep + value.y * factor;
    acc.z = acc.z * keep + value.z * factor;
    acc.w = acc.w * keep + value.w * factor;
    sum = sum * keep + max_sum.y * factor;
    max = top;
  }
};

// The output of a request without any key.
template <typename Config>
__device__ __forceinline__ void write_empty(const DecodeParams& p, int request) {
  constexpr int kWords = Config::kHeadDim / 2;
#pragma unroll 1
  for (int k = threadIdx.x; k < p.query_length * p.num_qo_heads * kWords; k += Config::kNumThreads) {
    const int word = k % kWords, head = k / kWords % p.num_qo_heads, token = k / kWords / p.num_qo_heads;
    const std::int64_t query = static_cast<std::int64_t>(request) * p.query_length + token;
    *reinterpret_cast<std::uint32_t*>(p.out + query * p.out_token_stride + head * p.out_head_stride + 2 * word) = 0;
    if (p.lse != nullptr && word == 0) p.lse[query * p.num_qo_heads + head] = -INFINITY;
  }
}

template <typename Config>
class Epilogue {
  static constexpr int kD = Config::kHeadDim, kR = Config::kRows, kWarps = Config::kNumWarps;
  static constexpr int kQuads = kR * kD / 4;  // work of four channels of a row each
  static constexpr int kAThread = (kQuads + Config::kNumThreads - 1) / Config::kNumThreads;
  static constexpr int kGroups = Config::kNumThreads / kQuads > 1 ? Config::kNumThreads / kQuads : 1;
  using Shared = typename Config::Shared;
  using Part = typename Config::Part;

 public:
  __device__ __forceinline__ Epilogue(const DecodeParams& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void stage(const HistoryState<Config>& state) {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < Config::kColumnTiles; ++n) {
      float sum = state.sum[n], offset = state.offset[n];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        offset += __shfl_xor_sync(~0u, offset, step);
      }
      const int row = 4 * n + t;
#pragma unroll
      for (int v = 0; v < Config::kValueTiles; ++v) {
        const float(&acc)[4] = state.acc[n][v];
        *reinterpret_cast<float4*>(&shared_.acc[warp][row][32 * v + 4 * g]) =
            make_float4(acc[0] * kValueScale + offset, acc[1] * kValueScale + offset, acc[2] * kValueScale + offset,
                        acc[3] * kValueScale + offset);
      }
      if (g == 0) shared_.max_sum[warp][row] = make_float2(sum > 0 ? state.max[n] : -INFINITY, sum);
    }
  }
  __device__ __forceinline__ void stage(const WindowState<Config>& state) {
    const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * t + i;
      float sum = state.sum[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (row >= kR) continue;
#pragma unroll
      for (int c = 0; c < kD / 16; ++c) {
        shared_.acc[warp][row][16 * c + g] = state.acc[c][i];
        shared_.acc[warp][row][16 * c + 8 + g] = state.acc[c][2 + i];
      }
      if (g == 0) shared_.max_sum[warp][row] = make_float2(sum > 0 ? state.max[i] : -INFINITY, sum);
    }
  }

  // Called after every warp's stage(HistoryState) of the row.
  __device__ __forceinline__ void add_history(const float* matrix) {
    Product<Config> product;
    __syncthreads();
    float2 max_sum[kAThread];
    for_quads([&](int i, int row, int channel) {
      const Sum4 sum = sum_warps(row, channel, Sum4{});
      max_sum[i] = make_float2(sum.max, sum.sum);
      shared_.columns[channel][row] = sum.acc.x;
      shared_.columns[channel + 1][row] = sum.acc.y;
      shared_.columns[channel + 2][row] = sum.acc.z;
      shared_.columns[channel + 3][row] = sum.acc.w;
    });
    product.load(matrix);
    __syncthreads();
    product.multiply(shared_);
    __syncthreads();
    for_quads([&](int i, int row, int channel) {
      total_[i].acc = sum_shares<Config>(shared_, row, channel);
      total_[i].max = max_sum[i].x;
      total_[i].sum = max_sum[i].y;
    });
  }
  __device__ __forceinline__ void add_window(const WindowState<Config>& state) {
    __syncthreads();
    stage(state);
    __syncthreads();
    for_quads([&](int i, int row, int channel) { total_[i] = sum_warps(row, channel, total_[i]); });
  }

  __device__ __forceinline__ void write(const Row& row) {
    for_quads([&](int i, int r, int channel) { write_quad(row, r, channel, total_[i]); });
  }
  // For finish(): the row's end, whose beginning an earlier block holds.
  __device__ __forceinline__ void keep(const Row& row) {
    if (threadIdx.x == 0) shared_.kept_row = row;
    for_quads([&](int i, int row, int channel) {
      *reinterpret_cast<float4*>(&shared_.kept[row][channel]) = total_[i].acc;
      if (channel == 0) shared_.kept_max_sum[row] = make_float2(total_[i].max, total_[i].sum);
    });
  }
  __device__ __forceinline__ void publish(Part& part) {
    for_quads([&](int i, int row, int channel) {
      const float4 x = total_[i].acc;
      store_relaxed(&part.acc[row][channel], make_float4(written(x.x), written(x.y), written(x.z), written(x.w)));
      if (channel == 0) store_relaxed(&part.max_sum[row], make_float2(written(total_[i].max), written(total_[i].sum)));
    });
  }
  // The kept part of the block's first row and the parts of the `count` blocks before it, in the blocks' order.
  __device__ __forceinline__ void finish(const Row& row, Part* parts, int count) {
    __syncthreads();
    const int group = kGroups > 1 ? threadIdx.x / kQuads : 0;
    for_quads([&](int i, int r, int channel) { total_[i] = gather(parts, count, group, r, channel); }, group);
    if constexpr (kGroups > 1) {
      if (group > 0 && group < kGroups)
        for_quads(
            [&](int i, int r, int channel) {
              *reinterpret_cast<float4*>(&shared_.acc[group][r][channel]) = total_[i].acc;
              if (channel == 0) shared_.max_sum[group][r] = make_float2(total_[i].max, total_[i].sum);
            },
            group);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < count * kR; k += Config::kNumThreads)
      store_relaxed(&parts[k / kR].max_sum[k % kR], make_float2(0, 0));
    for_quads([&](int i, int r, int channel) {
      if constexpr (kGroups > 1)
        for (int other = 1; other < kGroups; ++other)
          total_[i].add(*reinterpret_cast<const float4*>(&shared_.acc[other][r][channel]), shared_.max_sum[other][r]);
      total_[i].add(*reinterpret_cast<const float4*>(&shared_.kept[r][channel]), shared_.kept_max_sum[r]);
      write_quad(row, r, channel, total_[i]);
    });
  }

 private:
  // action(i, row, first channel) for this thread's quads; `group` of the block's threads does all of them.
  template <typename Action>
  __device__ __forceinline__ void for_quads(const Action& action, int group = 0) {
    const int thread = fresh_thread();
#pragma unroll
    for (int i = 0; i < kAThread; ++i) {
      const int quad = thread - group * kQuads + i * Config::kNumThreads;
      if (quad < kQuads) action(i, quad / (kD / 4), 4 * (quad % (kD / 4)));
    }
  }
  __device__ __forceinline__ Sum4 sum_warps(int row, int channel, Sum4 total) const {
    float max = total.max;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, shared_.max_sum[w][row].x);
    const float reference = max == -INFINITY ? 0.0f : max, keep = exp2_fast(total.max - reference);
    float4 acc = make_float4(total.acc.x * keep, total.acc.y * keep, total.acc.z * keep, total.acc.w * keep);
    float sum = total.sum * keep;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = shared_.max_sum[w][row];
      const float factor = exp2_fast(part.x - reference);
      const float4 value = *reinterpret_cast<const float4*>(&shared_.acc[w][row][channel]);
      acc.x += value.x * factor;
      acc.y += value.y * factor;
      acc.z += value.z * factor;
      acc.w += value.w * factor;
      sum += part.y * factor;
    }
    return {acc, max, sum};
  }
  __device__ __forceinline__ void write_quad(const Row& row, int r, int channel, const Sum4& x) const {
    const QueryRow query = query_row<Config>(p_, row, r);
    if (!query.valid) return;
    const float inverse = x.sum > 0 ? __fdividef(1.0f, x.sum) : 0.0f;
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.acc.x * inverse, x.acc.y * inverse);
    const __nv_bfloat162 high = __floats2bfloat162_rn(x.acc.z * inverse, x.acc.w * inverse);
    const std::int64_t token = static_cast<std::int64_t>(row.request) * p_.query_length + query.token;
    auto* out = reinterpret_cast<__nv_bfloat162*>(p_.out + token * p_.out_token_stride +
                                                  query.head * p_.out_head_stride + channel);
    out[0] = low;
    out[1] = high;
    if (p_.lse != nullptr && channel == 0)
      p_.lse[token * p_.num_qo_heads + query.head] =
          x.sum > 0 ? (x.max + log2f(x.sum)) * 0.6931471805599453f : -INFINITY;
  }
  __device__ static __forceinline__ float written(float x) { return x == 0 ? -0.0f : x; }
  __device__ static __forceinline__ bool is_written(float x) { return __float_as_uint(x) != 0; }

  // Parts group, group + kGroups, ... of the blocks before; all loads of a batch are in flight together.
  __device__ __forceinline__ Sum4 gather(Part* parts, int count, int group, int row, int channel) const {
    constexpr int kBatch = 6;
    Sum4 total;
    for (int first = group; first < count; first += kBatch * kGroups) {
      float4 value[kBatch];
      float2 max_sum[kBatch];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int part = min(first + j * kGroups, count - 1);
          value[j] = load_relaxed<float4>(&parts[part].acc[row][channel]);
          max_sum[j] = load_relaxed<float2>(&parts[part].max_sum[row]);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (first + j * kGroups < count)
            all = all && is_written(value[j].x) && is_written(value[j].y) && is_written(value[j].z) &&
                  is_written(value[j].w) && is_written(max_sum[j].x) && is_written(max_sum[j].y);
      } while (!all);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j * kGroups >= count) break;
        total.add(value[j], max_sum[j]);
        store_relaxed(&parts[first + j * kGroups].acc[row][channel], make_float4(0, 0, 0, 0));
      }
    }
    return total;
  }

  const DecodeParams& p_;
  Shared& shared_;
  Sum4 total_[kAThread];
};

}  // namespace oscar::cuda
