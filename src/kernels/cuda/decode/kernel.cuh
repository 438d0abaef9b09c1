#pragma once
// INT2 decode attention. One persistent wave of blocks; the flat list of (request, KV head, query-row group, page or
// window item) is cut evenly, a block owns a contiguous range and its warps take items in turn. A warp is alone: its
// own ring of two items, filled by bulk copies on its own barriers; blocks meet only where a row ends (a "piece").
//
// Memory moved, each byte once: 32 head_dim + 256 bytes a page of 64 tokens and KV head (2.125 bits an element at 128),
// and 4 head_dim bytes a window token. Bound: device-memory bandwidth. Codes go to the integer tensor cores as they
// are: the word masked by 0x03030303 holds c, by 0x0C0C0C0C it holds 4c; the other operand carries the 1/4.
//
// Fragment lane (g, t) = (lane / 4, lane % 4):
//   scores: rows are tokens 32h + 4g + {0..3}, columns 2r, 2r + 1 the high and low digit of query row r; a lane owns
//   row t of each
//           column tile and 8 tokens of it;
//   values: rows are channels 32v + 4g + {0..3}, K are tokens; a lane owns those channels of row t.

#include "config.hpp"

namespace oscar::cuda {

inline constexpr float kStep2 = 0.9957f;  // distance of neighbouring levels (oscar/codec.hpp)
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kWeightScale = 32512.0f;       // largest 16-bit weight: digits 127 and 0
inline constexpr float kRoundingMagic = 12582912.0f;  // 1.5 2^23: adding it leaves the rounded integer in the low bits

// Where a flat index lies: segment = INT2 pages or window items of one (request, KV head, row group).
struct Segment {
  int request, head, row_group;
  bool window;
  int begin, end;  // flat indices
  int id;          // ((request num_kv_heads + head) row_groups + row_group) 2 + window
  RequestItems items;
};

__device__ inline Segment segment_at(const DecodeParams& p, const DecodePlan& plan, const int* prefix, int index) {
  int low = 0, high = p.num_requests;  // prefix[low] <= index < prefix[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (prefix[middle] <= index)
      low = middle;
    else
      high = middle;
  }
  Segment s;
  s.request = low;
  s.items = request_items(p, p.seq_lens[low]);
  const int total = s.items.total();
  const int offset = index - prefix[low];
  const int group = offset / total, within = offset - group * total;
  s.head = group / plan.row_groups;
  s.row_group = group - s.head * plan.row_groups;
  s.window = within >= s.items.num_pages;
  s.begin = prefix[low] + group * total + (s.window ? s.items.num_pages : 0);
  s.end = s.begin + (s.window ? s.items.num_window_items : s.items.num_pages);
  s.id = ((low * p.num_kv_heads + s.head) * plan.row_groups + s.row_group) * 2 + (s.window ? 1 : 0);
  return s;
}

// Prefix sums of items over requests, by one warp. prefix[num_requests] is the total: 2048 pages x 8 heads x 4096
// requests fit 31 bits.
__device__ inline void scan_requests(const DecodeParams& p, const DecodePlan& plan, int* prefix) {
  const int lane = threadIdx.x % 32;
  const int groups = p.num_kv_heads * plan.row_groups;
  int carry = 0;
  for (int first = 0; first < p.num_requests; first += 32) {
    const int b = first + lane;
    int sum = b < p.num_requests ? request_items(p, p.seq_lens[b]).total() * groups : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (b < p.num_requests) prefix[b + 1] = carry + sum;
    carry += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) prefix[0] = 0;
}

__device__ inline int block_begin(int total, int block, int num_blocks) {
  return static_cast<int>(static_cast<std::int64_t>(total) * block / num_blocks);
}

// State of one warp over the pages of a piece: this lane's channels of row t of each column tile.
template <typename Config>
struct HistoryState {
  float acc[Config::kColumnTiles][Config::kValueTiles][4];
  float max[Config::kColumnTiles];     // log2, running, the same in all lanes of a row
  float sum[Config::kColumnTiles];     // this lane's share
  float offset[Config::kColumnTiles];  // this lane's share of sum p (m_v - 1.5 step_v)
};

template <typename Config>
struct QueryFragments {
  std::uint32_t digits[Config::kColumnTiles][Config::kKeySteps][2];
  float4 row[Config::kColumnTiles];
};

// Parameters of each token, decoded once a page by one lane and read by the four that hold its scores:
// s_token = (s_k, m_k, log2 s_v, 1 / s_v), s_middle = m_v / s_v. Token 32 h + 4 g + i lies at 8 (4 h + i) + g: a load
// of the eight g is one row of banks.
__device__ __forceinline__ void decode_parameters(const std::uint8_t* key_parameters,
                                                  const std::uint8_t* value_parameters, OffsetScale key_offset,
                                                  OffsetScale value_offset, float4* s_token, float* s_middle) {
  const int lane = threadIdx.x % 32;
  const auto pair = [lane](const std::uint8_t* bytes) {
    return *reinterpret_cast<const std::uint16_t*>(bytes + 2 * lane) ^ 0x8080u;
  };
  const std::uint32_t ks = pair(key_parameters), ko = pair(key_parameters + kPageTokens);
  const std::uint32_t vs = pair(value_parameters), vo = pair(value_parameters + kPageTokens);
  const int slot = 8 * (4 * (lane / 16) + 2 * (lane % 2)) + lane % 16 / 2;  // of token 2 lane
  const auto decode = [&](auto index) {
    constexpr int i = decltype(index)::value;
    const float value_log = biased_byte<i>(vs) * 0.0625f - kByteBias * 0.0625f;
    const float value_inverse = exp2_fast(-value_log);
    s_token[slot + 8 * i] =
        make_float4(exp2_fast(biased_byte<i>(ks) * 0.0625f - kByteBias * 0.0625f),
                    key_offset.center + (biased_byte<i>(ko) - kByteBias) * key_offset.step, value_log, value_inverse);
    s_middle[slot + 8 * i] =
        (value_offset.center + (biased_byte<i>(vo) - kByteBias) * value_offset.step) * value_inverse;
  };
  decode(std::integral_constant<int, 0>{});
  decode(std::integral_constant<int, 1>{});
  __syncwarp();
}

// One page of 64 tokens against up to 8 query rows. page_term: the page-mean term of row t of each tile, log2.
template <typename Config>
__device__ __forceinline__ void history_page(const std::uint8_t* page, const DecodeParams& p,
                                             const QueryFragments<Config>& query, OffsetScale key_offset,
                                             OffsetScale value_offset, int first_token,
                                             const int (&low)[Config::kColumnTiles],
                                             const int (&high)[Config::kColumnTiles], bool whole,
                                             float (&page_term)[Config::kColumnTiles], float4* s_token, float* s_middle,
                                             HistoryState<Config>& state) {
  constexpr int kD = Config::kHeadDim;
  constexpr int kTiles = Config::kColumnTiles;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const std::uint8_t* value_half = page + Config::kHalfBytes;
  decode_parameters(page + Config::kCodeBytes, value_half + Config::kCodeBytes, key_offset, value_offset, s_token,
                    s_middle);

  // scores as integers: 4 tiles of 16 tokens
  std::int32_t dots[kTiles][4][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int u = 0; u < kD / 64; ++u) {
      const uint4 words = *reinterpret_cast<const uint4*>(page + 1024 * u + 512 * h + 16 * lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int shift = 4 * half, step = 2 * u + half;
        const std::uint32_t x = words.x >> shift, y = words.y >> shift, z = words.z >> shift, w = words.w >> shift;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const std::uint32_t b0 = query.digits[n][step][0], b1 = query.digits[n][step][1];
          if (step == 0) {
            mma_u8s8_first(dots[n][2 * h], x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b0, b1);
            mma_u8s8_first(dots[n][2 * h + 1], z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b0,
                           b1);
          } else {
            mma_u8s8(dots[n][2 * h], x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b0, b1);
            mma_u8s8(dots[n][2 * h + 1], z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b0, b1);
          }
        }
      }
    }
  }

  std::uint32_t b[kTiles][2][2];  // weights as the B operand of the value MMAs
  float unit[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    // token 32 h + 4 g + i of row t: dots[2 h + i / 2][2 (i % 2)] (high) and the next (low).
    // y = score + log2 of the value's scale, the weight of the value codes; the page term joins at the maximum, it
    // cancels elsewhere.
    float y[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int h = k / 4, i = k % 4;
      const float4 token = s_token[8 * (4 * h + i) + g];
      const float dot =
          static_cast<float>(256 * dots[n][2 * h + i / 2][2 * (i % 2)] + dots[n][2 * h + i / 2][2 * (i % 2) + 1]);
      y[k] = token.x * (dot * query.row[n].x - query.row[n].y) + (token.y * query.row[n].z + token.z);
    }
    if (p.soft_cap > 0) {
      const float cap = p.soft_cap * kLog2E;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float value_log = s_token[8 * k + g].z;
        y[k] = cap * tanh_fast(__fdividef(y[k] - value_log + page_term[n], cap)) + value_log;
      }
      page_term[n] = 0;
    }
    if (!whole) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int token = first_token + 32 * (k / 4) + 4 * g + k % 4;
        if (token < low[n] || token > high[n]) y[k] = -INFINITY;
      }
    }
    float page_max = fmaxf(fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3])), fmaxf(fmaxf(y[4], y[5]), fmaxf(y[6], y[7])));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 4));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 8));
    page_max = fmaxf(page_max, __shfl_xor_sync(~0u, page_max, 16));
    const float reference = page_max == -INFINITY ? 0.0f : page_max;
    page_max += page_term[n];
    if (__any_sync(~0u, page_max > state.max[n])) {  // rare after the first pages
      const float new_max = fmaxf(state.max[n], page_max);
      const float old_factor = state.max[n] == -INFINITY ? 0.0f : exp2_fast(state.max[n] - new_max);
      state.sum[n] *= old_factor;
      state.offset[n] *= old_factor;
#pragma unroll
      for (int v = 0; v < Config::kValueTiles; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.acc[n][v][i] *= old_factor;
      state.max[n] = new_max;
    }
    const float page_factor = page_max == -INFINITY ? 0.0f : exp2_fast(page_max - state.max[n]);

    // Weights in fixed point of the page's maximum: 15 bits for tokens 0, 1 of each four (planes that hold c), 13 for
    // tokens 2, 3 (planes that hold 4 c). p itself is the weight without the value's scale.
    float sum = 0, middle = 0;
    std::uint32_t weights = 0, weights4 = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint32_t fixed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i < 2 ? kWeightScale : kWeightScale * 0.25f;
        const float w = exp2_fast(y[4 * h + i] - reference);
        fixed[i] = __float_as_uint(
            w * scale + (kRoundingMagic + 128.0f));  // the low digit is signed: its half carries into the high one
        (i < 2 ? weights : weights4) += fixed[i];
        sum += w * s_token[8 * (4 * h + i) + g].w;
        middle += w * s_middle[8 * (4 * h + i) + g];
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        // bytes 1 (high digits) and 0 (low digits, biased by 128) of both tokens; column 2r of the transpose is the
        // high digit of row r
        const std::uint32_t digits = __byte_perm(fixed[2 * pair], fixed[2 * pair + 1], 0x4051) ^ 0x80800000u;
        b[n][h][pair] = transpose_8x8(digits);
      }
    }
    constexpr std::uint32_t kFour = 4u * (0x4B400000u + 128u);
    const float total = static_cast<float>(static_cast<std::int32_t>((weights - kFour) + 4 * (weights4 - kFour)));
    state.sum[n] += sum * page_factor;
    state.offset[n] += (middle - total * (1.5f * kStep2 / kWeightScale)) * page_factor;
    unit[n] = page_factor * (kStep2 / kWeightScale);
  }

#pragma unroll
  for (int v = 0; v < Config::kValueTiles; ++v) {
    const uint4 words = *reinterpret_cast<const uint4*>(value_half + 512 * v + 16 * lane);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      std::int32_t first[4], second[4];
      mma_u8s8_first(first, words.x & 0x03030303u, words.y & 0x03030303u, words.x & 0x0C0C0C0Cu, words.y & 0x0C0C0C0Cu,
                     b[n][0][0], b[n][0][1]);
      mma_u8s8_first(second, words.z & 0x03030303u, words.w & 0x03030303u, words.z & 0x0C0C0C0Cu, words.w & 0x0C0C0C0Cu,
                     b[n][0][0], b[n][0][1]);
      const std::uint32_t x = words.x >> 4, y = words.y >> 4, z = words.z >> 4, w = words.w >> 4;
      mma_u8s8(first, x & 0x03030303u, y & 0x03030303u, x & 0x0C0C0C0Cu, y & 0x0C0C0C0Cu, b[n][1][0], b[n][1][1]);
      mma_u8s8(second, z & 0x03030303u, w & 0x03030303u, z & 0x0C0C0C0Cu, w & 0x0C0C0C0Cu, b[n][1][0], b[n][1][1]);
      float(&acc)[4] = state.acc[n][v];
      acc[0] += static_cast<float>(256 * first[0] + first[1]) * unit[n];
      acc[1] += static_cast<float>(256 * first[2] + first[3]) * unit[n];
      acc[2] += static_cast<float>(256 * second[0] + second[1]) * unit[n];
      acc[3] += static_cast<float>(256 * second[2] + second[3]) * unit[n];
    }
  }
}

// State of one warp over the window items of a piece. Scores: rows are query rows (g), columns tokens 2t, 2t + 1;
// values: columns are channels 8 v + 2t, + 1.
template <typename Config>
struct WindowState {
  float acc[Config::kHeadDim / 8][2];
  float max, sum;  // of row g; sum is this lane's share
};

// Eight 16-bit tokens against up to 8 query rows. query: A fragments of the rows (BF16, unscaled).
template <typename Config>
__device__ __forceinline__ void window_item(const std::uint8_t* item, const DecodeParams& p,
                                            const std::uint32_t (&query)[Config::kHeadDim / 16][2], int first_token,
                                            int length, int query_position, WindowState<Config>& state) {
  constexpr int kD = Config::kHeadDim;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const std::uint32_t base = shared_address(item);
  float score[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < kD / 32; ++c) {  // 32 channels a load: matrices of 8 tokens x 8 channels
    std::uint32_t k[4];
    load_matrix_x4(k, base + (lane % 8) * Config::kWindowRowBytes + 64 * c + 16 * (lane / 8));
    mma_bf16_k16(score, query[2 * c][0], 0u, query[2 * c][1], 0u, k[0], k[1]);
    mma_bf16_k16(score, query[2 * c + 1][0], 0u, query[2 * c + 1][1], 0u, k[2], k[3]);
  }
  float x[2], item_max = -INFINITY;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first_token + 2 * t + i;
    float logit = score[i] * p.scale;
    if (p.soft_cap > 0) logit = p.soft_cap * tanh_fast(__fdividef(logit, p.soft_cap));
    const bool exact = token < p.sink || token > query_position - p.recent;
    const bool seen = token <= query_position && token < length &&
                      (p.sliding_window <= 0 || token > query_position - p.sliding_window);
    x[i] = exact && seen ? logit * kLog2E : -INFINITY;
    item_max = fmaxf(item_max, x[i]);
  }
  item_max = fmaxf(item_max, __shfl_xor_sync(~0u, item_max, 1));
  item_max = fmaxf(item_max, __shfl_xor_sync(~0u, item_max, 2));
  const float new_max = fmaxf(state.max, item_max);
  const float reference = new_max == -INFINITY ? 0.0f : new_max;
  const float old_factor = state.max == -INFINITY ? 0.0f : exp2_fast(state.max - reference);
  state.max = new_max;
  const float p0 = exp2_fast(x[0] - reference), p1 = exp2_fast(x[1] - reference);
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(p0, p1);
  state.sum = state.sum * old_factor + __low2float(rounded) + __high2float(rounded);
  const std::uint32_t a = *reinterpret_cast<const std::uint32_t*>(&rounded);
#pragma unroll
  for (int c = 0; c < kD / 32; ++c) {
    std::uint32_t v[4];
    load_matrix_x4_transposed(v,
                              base + (kWindowTokens + lane % 8) * Config::kWindowRowBytes + 64 * c + 16 * (lane / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&acc)[2] = state.acc[4 * c + i];
      acc[0] *= old_factor;
      acc[1] *= old_factor;
      mma_bf16_k8_top(acc[0], acc[1], a, v[i]);
    }
  }
}

}  // namespace oscar::cuda
