#pragma once
// What a block does once its warps have streamed the rows of a pass: joins their parts, turns the INT2 part back
// (x = y A_v^{-1}), joins the window's, and writes the output; or, where a row goes on in the next block, publishes its
// part. The block that holds a row's end waits for the parts of the blocks before it, after the last row of its own:
// blocks start in order, so it never waits for one that cannot run.
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

// A warp's part of a row, for the block to join.
template <typename Config>
__device__ __forceinline__ void stage(const HistoryState<Config>& state, typename Config::Part& part) {
  const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
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
      *reinterpret_cast<float4*>(&part.acc[row][32 * v + 4 * g]) =
          make_float4(acc[0] * kValueScale + offset, acc[1] * kValueScale + offset, acc[2] * kValueScale + offset,
                      acc[3] * kValueScale + offset);
    }
    if (g == 0) part.max_sum[row] = make_float2(sum > 0 ? state.max[n] : -INFINITY, sum);
  }
}
template <typename Config>
__device__ __forceinline__ void stage(const WindowState<Config>& state, typename Config::Part& part) {
  const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * t + i;
    float sum = state.sum[i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (row >= Config::kRows) continue;
#pragma unroll
    for (int c = 0; c < Config::kHeadDim / 16; ++c) {
      part.acc[row][16 * c + g] = state.acc[c][i];
      part.acc[row][16 * c + 8 + g] = state.acc[c][2 + i];
    }
    if (g == 0) part.max_sum[row] = make_float2(sum > 0 ? state.max[i] : -INFINITY, sum);
  }
}

template <typename Config>
__device__ __forceinline__ void add_part(Sum4& sum, const typename Config::Part& part, int r, int channel) {
  sum.add(*reinterpret_cast<const float4*>(&part.acc[r][channel]), part.max_sum[r]);
}
// Adds the warps' parts of a row, in the warps' order. A warp's last part is in its ring, one that ends inside its
// range in shared.parts[index].
template <typename Config>
__device__ __forceinline__ void join(const typename Config::Shared& shared, const typename Config::Parts& parts,
                                     int index, int r, int channel, Sum4& sum) {
#pragma unroll 1
  for (int warp = parts.first; warp <= parts.last; ++warp) {
    const bool inside = warp == parts.last && parts.ends_inside;
    add_part<Config>(sum,
                     inside ? shared.parts[index] : *reinterpret_cast<const typename Config::Part*>(shared.ring[warp]),
                     r, channel);
  }
}

// A query row's INT2 part, relative to its maximum, as the operand of the product, by one warp.
template <typename Config>
__device__ __forceinline__ void join_history(const typename Config::Shared& shared, typename Config::Parts parts,
                                             int index, int r, typename Config::RowData& data, float2& max_sum) {
  WarpRow<Config> y;
#pragma unroll
  for (int v = 0; v < WarpRow<Config>::kVectors; ++v) {
    Sum4 sum;
    if (WarpRow<Config>::exists(v)) join<Config>(shared, parts, index, r, WarpRow<Config>::channel(v), sum);
    if (v == 0 && fresh_thread() % 32 == 0) max_sum = make_float2(sum.max, sum.sum);
    y.value[v][0] = sum.acc.x, y.value[v][1] = sum.acc.y, y.value[v][2] = sum.acc.z, y.value[v][3] = sum.acc.w;
  }
  y.to_digits(data, r);
}

__device__ __forceinline__ float written(float x) { return x == 0 ? -0.0f : x; }
__device__ __forceinline__ bool is_written(float x) { return __float_as_uint(x) != 0; }

// Four channels of a query row's output.
template <typename Config>
__device__ __forceinline__ void write_output(const DecodeParams& p, const DecodePlan& plan, const Row& row, int r,
                                             int channel, Sum4 x) {
  const QueryRow query = query_row<Config>(p, plan, row, r);
  if (!query.valid) return;
  const float inverse = x.sum > 0 ? __fdividef(1.0f, x.sum) : 0.0f;
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.acc.x * inverse, x.acc.y * inverse);
  const __nv_bfloat162 high = __floats2bfloat162_rn(x.acc.z * inverse, x.acc.w * inverse);
  const std::int64_t token = static_cast<std::int64_t>(row.request) * p.query_length + query.token;
  auto* out =
      reinterpret_cast<__nv_bfloat162*>(p.out + token * p.out_token_stride + query.head * p.out_head_stride + channel);
  out[0] = low;
  out[1] = high;
  if (p.lse != nullptr && channel == 0)
    p.lse[token * p.num_qo_heads + query.head] = x.sum > 0 ? (x.max + log2f(x.sum)) * 0.6931471805599453f : -INFINITY;
}

template <typename Config>
class Epilogue {
  static constexpr int kD = Config::kHeadDim, kR = Config::kRows;
  static constexpr int kQuads = kR * kD / 4;  // of a row: four channels of a query row each
  static constexpr int kGroups = Config::kNumThreads / kQuads > 1 ? Config::kNumThreads / kQuads : 1;
  using Shared = typename Config::Shared;
  using Part = typename Config::Part;

 public:
  __device__ __forceinline__ Epilogue(const DecodeParams& p, const DecodePlan& plan, Shared& shared)
      : p_(p), plan_(plan), shared_(shared) {}

  // Where the warps' parts of each row of the pass will lie: a lane a row and kind of item.
  __device__ __forceinline__ void find_parts(int begin) {
    const BlockShare& share = shared_.share;
    const int lane = fresh_thread() % 32, slot = lane / 2;
    if (slot >= share.num_rows) return;
    const Row& row = share.row[slot];
    const int from = max(lane % 2 == 0 ? row.begin : row.history_end(), begin);
    const int to = min(lane % 2 == 0 ? row.history_end() : row.end, share.pass_end);
    typename Config::Parts parts{0, -1, false};
    if (from < to) {
      for (int warp = 1; warp < Config::kNumWarps; ++warp) {
        parts.first += share.warp_begin[warp] <= from;
        parts.last += share.warp_begin[warp] < to;
      }
      ++parts.last;
      parts.ends_inside = share.warp_begin[parts.last + 1] != to;
    }
    shared_.parts_of[lane] = parts;
  }
  // INT2 parts of all rows of the pass; a warp a query row.
  __device__ __forceinline__ void join_rows() {
#pragma unroll 1
    for (int k = fresh_thread() / 32; k < shared_.share.num_rows * kR; k += Config::kNumWarps)
      join_history<Config>(shared_, shared_.parts_of[2 * (k / kR)], 2 * (k / kR), k % kR, shared_.data[k / kR],
                           shared_.history_max_sum[k / kR][k % kR]);
  }
  // After the product: joins the window parts and hands every row on.
  __device__ __forceinline__ void finish_rows(bool has_history, Part& published) {
    const int first = shared_.share.first, end = shared_.share.end;
#pragma unroll 1
    for (int quad = fresh_thread(); quad < shared_.share.num_rows * kQuads; quad += Config::kNumThreads) {
      const int slot = quad / kQuads, r = quad % kQuads / (kD / 4), channel = 4 * (quad % (kD / 4));
      const Row& row = shared_.share.row[slot];
      Sum4 sum;
      if (has_history)
        sum.add(*reinterpret_cast<const float4*>(&shared_.data[slot].product[r][channel]),
                shared_.history_max_sum[slot][r]);
      join<Config>(shared_, shared_.parts_of[2 * slot + 1], 2 * slot + 1, r, channel, sum);
      if (row.end > end) {
        publish(published, r, channel, sum);
      } else if (row.begin < first) {
        keep(row, r, channel, sum);
      } else {
        write_output<Config>(p_, plan_, row, r, channel, sum);
      }
    }
  }
  // The kept part of the block's first row and the parts of the `count` blocks before it, in the blocks' order.
  __device__ __forceinline__ void finish_kept(Part* parts, int count) {
    const int group = kGroups > 1 ? fresh_thread() / kQuads : 0;
    const auto for_own = [&](const auto& action) {
      const int thread = fresh_thread() - group * kQuads;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (const int quad = thread + i * Config::kNumThreads; group < kGroups && quad < kQuads)
          action(i, quad / (kD / 4), 4 * (quad % (kD / 4)));
    };
    Sum4 own[kOwn];
    for_own([&](int i, int r, int channel) {
      own[i] = gather(parts, count, group, r, channel);
      if (group == 0) return;
      Part& part = shared_.parts[group];
      *reinterpret_cast<float4*>(&part.acc[r][channel]) = own[i].acc;
      if (channel == 0) part.max_sum[r] = make_float2(own[i].max, own[i].sum);
    });
    __syncthreads();
    for (int k = fresh_thread(); k < count * kR; k += Config::kNumThreads)
      store_relaxed(&parts[k / kR].max_sum[k % kR], make_float2(0, 0));
    if (group > 0) return;
    for_own([&](int i, int r, int channel) {
#pragma unroll
      for (int other = 1; other < kGroups; ++other) add_part<Config>(own[i], shared_.parts[other], r, channel);
      add_part<Config>(own[i], shared_.kept, r, channel);
      write_output<Config>(p_, plan_, shared_.kept_row, r, channel, own[i]);
    });
  }

 private:
  static constexpr int kOwn = (kQuads + Config::kNumThreads - 1) / Config::kNumThreads;

  // For finish_kept(): a row's end, whose beginning an earlier block holds.
  __device__ __forceinline__ void keep(const Row& row, int r, int channel, const Sum4& sum) const {
    *reinterpret_cast<float4*>(&shared_.kept.acc[r][channel]) = sum.acc;
    if (channel != 0) return;
    shared_.kept.max_sum[r] = make_float2(sum.max, sum.sum);
    if (r == 0) shared_.kept_row = row;
  }
  static __device__ __forceinline__ void publish(Part& part, int r, int channel, const Sum4& sum) {
    const float4 x = sum.acc;
    store_relaxed(&part.acc[r][channel], make_float4(written(x.x), written(x.y), written(x.z), written(x.w)));
    if (channel == 0) store_relaxed(&part.max_sum[r], make_float2(written(sum.max), written(sum.sum)));
  }

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
  const DecodePlan& plan_;
  Shared& shared_;
};

}  // namespace oscar::cuda
