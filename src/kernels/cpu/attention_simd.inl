// The float half of the attention kernels, over the vector type of the file that includes this: Vec of kLanes floats
// with load, store, broadcast, add, multiply, multiply_add, ... Included inside an unnamed namespace, so that each
// instruction set has its own copy, and uses no library function for the same reason.

// ---- exponential ----

// exp(x), x <= 0, as 2^n 2^f: relative error below 3e-7 + 2e-8 |x| (the 7.5e-8 of the polynomial, its roundings, and
// log2 e in float). Below 2^-126, and for -inf, exactly 0. A NaN stays one.
inline Vec exp_nonpositive(Vec x) {
  constexpr float kLog2E = 1.44269504f, kLeast = -126.0f;
  const Vec exponent = multiply(x, broadcast(kLog2E));
  const Vec whole = round_to_integer(exponent);
  // One rounding: x log2(e) - whole.
  const Vec f = multiply_subtract(x, broadcast(kLog2E), whole);
  // Minimax polynomial of 2^f on [-1/2, 1/2] for the relative error.
  Vec power = broadcast(1.3276472e-3f);
  power = multiply_add(power, f, broadcast(9.6755413e-3f));
  power = multiply_add(power, f, broadcast(5.5507133e-2f));
  power = multiply_add(power, f, broadcast(2.4022120e-1f));
  power = multiply_add(power, f, broadcast(6.9314697e-1f));
  power = multiply_add(power, f, broadcast(1.0000001f));
  return zero_where_less(exponent, broadcast(kLeast), scale_by_power_of_two(power, whole));
}

inline float exp_nonpositive(float x) { return first_lane(exp_nonpositive(broadcast(x))); }

// cap tanh(x / cap), off by 2e-7 cap at most.
inline Vec soft_capped(Vec x, float cap) {
  const Vec ratio = multiply(x, broadcast(1 / cap));
  const Vec decay = exp_nonpositive(multiply(absolute(ratio), broadcast(-2.0f)));
  const Vec one = broadcast(1.0f);
  const Vec magnitude = divide(subtract(one, decay), add(one, decay));
  return copy_sign(multiply(magnitude, broadcast(cap)), x);
}

// ---- softmax of a page ----

constexpr int kVectors = kPage / kLanes;

float softmax_page(std::uint64_t visible, float soft_cap, float* logits, Running* running) {
  constexpr float kHidden = -__builtin_inff();
  Vec values[kVectors];
  for (int i = 0; i < kVectors; ++i) values[i] = load(logits + i * kLanes);
  if (soft_cap > 0) {
    for (Vec& value : values) value = soft_capped(value, soft_cap);
  }
  if (visible != ~std::uint64_t{0}) {
    for (int i = 0; i < kVectors; ++i) values[i] = keep_lanes(visible >> (i * kLanes), values[i], broadcast(kHidden));
  }
  Vec largest = values[0];
  for (int i = 1; i < kVectors; ++i) largest = maximum(largest, values[i]);
  const float page_max = max_lane(largest), old_max = running->max;
  const float new_max = page_max > old_max ? page_max : old_max;
  if (new_max == kHidden) {
    for (int i = 0; i < kVectors; ++i) store(logits + i * kLanes, broadcast(0.0f));
    return 1;
  }
  Vec sum = broadcast(0.0f);
  for (int i = 0; i < kVectors; ++i) {
    const Vec weight = exp_nonpositive(subtract(values[i], broadcast(new_max)));
    store(logits + i * kLanes, weight);
    sum = add(sum, weight);
  }
  const float rescale = new_max == old_max ? 1.0f : exp_nonpositive(old_max - new_max);
  running->max = new_max;
  running->sum = running->sum * rescale + sum_lanes(sum);
  return rescale;
}

// ---- query rows ----

// int8 values of a row, channel c at codes[c], and its terms. head_dim is a multiple of 16.
inline void quantize_query(const float* row, int head_dim, float softmax_scale, std::int8_t* codes, KeyTerms* terms) {
  Vec largest_lanes = broadcast(0.0f), sum_lanes_ = broadcast(0.0f);
  for (int c = 0; c < head_dim; c += kLanes) {
    const Vec values = load(row + c);
    largest_lanes = maximum(largest_lanes, absolute(values));
    sum_lanes_ = add(sum_lanes_, values);
  }
  const float largest = max_lane(largest_lanes);
  // A zero row, or one of infinities, has nothing to round.
  const float inverse = largest > 0 && largest <= 3.402823466e38f ? 127.0f / largest : 0.0f;
  std::int32_t integer_sum = 0;
  for (int c = 0; c < head_dim; ++c) {
    const float scaled = row[c] * inverse;
    codes[c] = scaled >= -127.5f && scaled <= 127.5f ? static_cast<std::int8_t>(round_to_int(scaled)) : std::int8_t{0};
    integer_sum += codes[c];
  }
  terms->code_factor = softmax_scale * (largest / 127.0f) * 0.5f;
  terms->middle_factor = softmax_scale * sum_lanes(sum_lanes_);
  terms->three_sums = 3 * integer_sum;
}

// The operand of key_logits: for vector v and plane j, kUnits units of 16 bytes, unit u = word kUnits v + u of a token,
// each holding the four int8 of that word and plane once for each of four tokens. Absent words are zero.
void arrange_query(const float* row, int head_dim, float softmax_scale, std::int8_t* operand, KeyTerms* terms) {
  alignas(64) std::int8_t codes[kMaxDim];
  quantize_query(row, head_dim, softmax_scale, codes, terms);
  for (int i = 0; i < operand_bytes(head_dim); ++i) operand[i] = 0;
  for (int unit = 0; unit < head_dim / 16; ++unit) {
    const int block = unit / 4, t = unit % 4;
    const int width = head_dim - 64 * block < 64 ? head_dim - 64 * block : 64;
    for (int j = 0; j < 4; ++j) {
      const std::int8_t* source = codes + 64 * block + width / 4 * j + 4 * t;
      std::int8_t* target = operand + ((unit / kUnits * 4 + j) * kUnits + unit % kUnits) * 16;
      for (int i = 0; i < 16; ++i) target[i] = source[i % 4];
    }
  }
}

// ---- exact rows: blocks of float products ----

constexpr int kBlockVectors = 2;  // 6 rows x 2 vectors of accumulators

// c[r][v] += sum_k a[r][k] b[k * stride + v * kLanes].
template <int kRows, int kColumns>
inline void multiply_block(const float* const* a, int depth, const float* b, int stride, Vec (&c)[kRows][kColumns]) {
  for (int k = 0; k < depth; ++k) {
    Vec column[kColumns];
    for (int v = 0; v < kColumns; ++v) column[v] = load(b + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = broadcast(a[r][k]);
      for (int v = 0; v < kColumns; ++v) c[r][v] = multiply_add(factor, column[v], c[r][v]);
    }
    b += stride;
  }
}

template <int kRows>
void exact_logits_rows(const float* const* queries, const float* tile, int head_dim, int num_keys, float scale,
                       float* logits) {
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = queries[r];
  // The tile always has 64 columns, so a last half block may be computed in full.
  for (int key = 0; key < num_keys; key += kBlockVectors * kLanes) {
    Vec sums[kRows][kBlockVectors];
    for (auto& row : sums) {
      for (Vec& sum : row) sum = broadcast(0.0f);
    }
    multiply_block(rows, head_dim, tile + key, kPage, sums);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kBlockVectors; ++v) {
        store(logits + r * kPage + key + v * kLanes, multiply(sums[r][v], broadcast(scale)));
      }
    }
  }
}

template <int kRows, int kColumns>
inline void exact_values_block(const float* const* weights, const float* rescale, const float* tile, int head_dim,
                               int num_keys, int channel, float* const* accumulators) {
  Vec sums[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumns; ++v) {
      sums[r][v] = multiply(load(accumulators[r] + channel + v * kLanes), broadcast(rescale[r]));
    }
  }
  multiply_block(weights, num_keys, tile + channel, head_dim, sums);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumns; ++v) store(accumulators[r] + channel + v * kLanes, sums[r][v]);
  }
}

template <int kRows>
void exact_values_rows(const float* weights, const float* rescale, const float* tile, int head_dim, int num_keys,
                       float* const* accumulators) {
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = weights + r * kPage;
  int channel = 0;
  for (; channel + kBlockVectors * kLanes <= head_dim; channel += kBlockVectors * kLanes) {
    exact_values_block<kRows, kBlockVectors>(rows, rescale, tile, head_dim, num_keys, channel, accumulators);
  }
  if (channel < head_dim) {  // 16 channels more, on 16 lanes
    exact_values_block<kRows, 1>(rows, rescale, tile, head_dim, num_keys, channel, accumulators);
  }
}

void exact_logits(const float* const* queries, int num_rows, const float* tile, int head_dim, int num_keys, float scale,
                  float* logits) {
  switch (num_rows) {
    case 1: return exact_logits_rows<1>(queries, tile, head_dim, num_keys, scale, logits);
    case 2: return exact_logits_rows<2>(queries, tile, head_dim, num_keys, scale, logits);
    case 3: return exact_logits_rows<3>(queries, tile, head_dim, num_keys, scale, logits);
    case 4: return exact_logits_rows<4>(queries, tile, head_dim, num_keys, scale, logits);
    case 5: return exact_logits_rows<5>(queries, tile, head_dim, num_keys, scale, logits);
    default: return exact_logits_rows<6>(queries, tile, head_dim, num_keys, scale, logits);
  }
}

void exact_values(const float* weights, const float* rescale, int num_rows, const float* tile, int head_dim,
                  int num_keys, float* const* accumulators) {
  switch (num_rows) {
    case 1: return exact_values_rows<1>(weights, rescale, tile, head_dim, num_keys, accumulators);
    case 2: return exact_values_rows<2>(weights, rescale, tile, head_dim, num_keys, accumulators);
    case 3: return exact_values_rows<3>(weights, rescale, tile, head_dim, num_keys, accumulators);
    case 4: return exact_values_rows<4>(weights, rescale, tile, head_dim, num_keys, accumulators);
    case 5: return exact_values_rows<5>(weights, rescale, tile, head_dim, num_keys, accumulators);
    default: return exact_values_rows<6>(weights, rescale, tile, head_dim, num_keys, accumulators);
  }
}

float dot(const float* a, const float* b, int n) {
  Vec even = broadcast(0.0f), odd = even;  // two, to halve the wait for the sum before
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even = multiply_add(load(a + i), load(b + i), even);
    odd = multiply_add(load(a + i + kLanes), load(b + i + kLanes), odd);
  }
  if (i < n) even = multiply_add(load(a + i), load(b + i), even);
  return sum_lanes(add(even, odd));
}

// ---- 16-bit rows to float tiles (AVX2 instructions in every table that includes this) ----

alignas(64) constexpr std::uint16_t kZeroRow[kMaxDim] = {};

inline __m256 widen(__m128i bits, bool f16) {
  return f16 ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m128i load_8(const std::uint16_t* row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row)); }

// Transposes 8 tokens x 8 channels as 16-bit numbers, half the shuffles of doing so in float.
template <bool kF16>
inline void transpose_8x8(const std::uint16_t* const* rows, int channel, float* tile) {
  __m128i in[8], pairs[8], quads[8];
  for (int t = 0; t < 8; ++t) in[t] = load_8(rows[t] + channel);
  for (int t = 0; t < 4; ++t) {  // pairs[2t], [2t + 1]: tokens 2t and 2t + 1 interleaved, channels 0..3 and 4..7
    pairs[2 * t] = _mm_unpacklo_epi16(in[2 * t], in[2 * t + 1]);
    pairs[2 * t + 1] = _mm_unpackhi_epi16(in[2 * t], in[2 * t + 1]);
  }
  for (int half = 0; half < 2; ++half) {  // quads[4 half + 2 side + i]: tokens 4 half.., channels 4 side + 2 i, + 1
    for (int side = 0; side < 2; ++side) {
      quads[4 * half + 2 * side] = _mm_unpacklo_epi32(pairs[4 * half + side], pairs[4 * half + 2 + side]);
      quads[4 * half + 2 * side + 1] = _mm_unpackhi_epi32(pairs[4 * half + side], pairs[4 * half + 2 + side]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const __m128i even = _mm_unpacklo_epi64(quads[i], quads[4 + i]), odd = _mm_unpackhi_epi64(quads[i], quads[4 + i]);
    _mm256_storeu_ps(tile + (channel + 2 * i) * kPage, widen(even, kF16));
    _mm256_storeu_ps(tile + (channel + 2 * i + 1) * kPage, widen(odd, kF16));
  }
}

template <bool kF16>
inline void load_keys_as(const std::uint16_t* const* rows, int head_dim, float* tile) {
  for (int token = 0; token < kPage; token += 8) {
    const std::uint16_t* present[8];
    for (int t = 0; t < 8; ++t) present[t] = rows[token + t] != nullptr ? rows[token + t] : kZeroRow;
    for (int channel = 0; channel < head_dim; channel += 8) transpose_8x8<kF16>(present, channel, tile + token);
  }
}

void load_keys(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile) {
  if (f16) {
    load_keys_as<true>(rows, head_dim, tile);
  } else {
    load_keys_as<false>(rows, head_dim, tile);
  }
}

void load_values(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile) {
  for (int token = 0; token < kPage; ++token) {
    const std::uint16_t* row = rows[token] != nullptr ? rows[token] : kZeroRow;
    for (int c = 0; c < head_dim; c += 8) _mm256_storeu_ps(tile + token * head_dim + c, widen(load_8(row + c), f16));
  }
}
