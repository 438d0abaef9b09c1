// The codec's arithmetic, compiled once per instruction set on top of an eight-lane vocabulary (F8). Every operation
// and its order is specified in docs/format.md, "Encoder arithmetic"; changing one changes the format.
// Products are rounded before they are added (-ffp-contract=off); a sum over channels runs in eight interleaved
// partial sums (reduce_add), except transform, whose outputs are plain sums in ascending channel order.

constexpr float kStartScale = 1.05f;  // feedback starts from a slightly wide scale
constexpr float kMinScale = 1e-8f;
constexpr float kSingular = 1e-4f;  // determinant of the refit, relative to its diagonal product
constexpr int kNumSweeps = 2;
constexpr int kGroupRows = 4;  // rows that a matrix product takes together

inline float at_least(float value, float limit) { return value > limit ? value : limit; }  // NaN becomes limit

inline F8 nearest_levels(F8 u) {
  const F8 lower = select(greater(u, splat(-kStep)), splat(kLevels[1]), splat(kLevels[0]));
  const F8 upper = select(greater(u, splat(kStep)), splat(kLevels[3]), splat(kLevels[2]));
  return select(greater(u, splat(0.0f)), upper, lower);
}

inline void store_level_codes(std::uint8_t* out, F8 level) {
  const F8 lower = select(greater(level, splat(-kStep)), splat(1.0f), splat(0.0f));
  const F8 upper = select(greater(level, splat(kStep)), splat(3.0f), splat(2.0f));
  store_codes(out, select(greater(level, splat(0.0f)), upper, lower));
}

inline float sum(const float* a, int num) {
  F8 partial = splat(0.0f);
  for (int j = 0; j < num; j += kLanes) partial = add(partial, load(a + j));
  return reduce_add(partial);
}

inline float dot(const float* a, const float* b, int num) {
  F8 partial = splat(0.0f);
  for (int j = 0; j < num; j += kLanes) partial = add(partial, mul(load(a + j), load(b + j)));
  return reduce_add(partial);
}

// ---- transform: y_j = sum_i x_i A_ij, i ascending ----

// kRows rows by 8 kVectors outputs, held in registers while the rows of A stream by.
template <int kRows, int kVectors>
inline void transform_tile(const float* matrix, int head_dim, const float* x, float* y) {
  F8 total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) total[r][v] = splat(0.0f);
  }
  for (int i = 0; i < head_dim; ++i) {
    const float* matrix_row = matrix + i * head_dim;
    for (int r = 0; r < kRows; ++r) {
      const F8 channel = splat(x[r * head_dim + i]);
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] = add(total[r][v], mul(channel, load(matrix_row + kLanes * v)));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(y + r * head_dim + kLanes * v, total[r][v]);
  }
}

// Outputs in strips: a strip of A (at most 16 KiB) stays in the first-level cache while the rows pass. Four rows share
// each load; the last ones, alone, take wider strips to keep as many sums in flight.
void transform(const float* matrix, int head_dim, const float* x, int num_rows, float* y) {
  const int num_shared = num_rows / kGroupRows * kGroupRows;
  for (int j = 0; j < head_dim && num_shared > 0; j += 2 * kLanes) {
    for (int row = 0; row < num_shared; row += kGroupRows) {
      transform_tile<kGroupRows, 2>(matrix + j, head_dim, x + row * head_dim, y + row * head_dim + j);
    }
  }
  for (int row = num_shared; row < num_rows; ++row) {
    const float* from = x + row * head_dim;
    float* to = y + row * head_dim;
    int j = 0;
    for (; j + 8 * kLanes <= head_dim; j += 8 * kLanes) transform_tile<1, 8>(matrix + j, head_dim, from, to + j);
    for (; j < head_dim; j += 2 * kLanes) transform_tile<1, 2>(matrix + j, head_dim, from, to + j);
  }
}

// x_j = y . row j of A^{-T}; four outputs at a time hide the latency of the additions.
void inverse_transform(const float* inverse_transposed, int head_dim, const float* y, int num_rows, float* x) {
  for (int row = 0; row < num_rows; ++row, y += head_dim, x += head_dim) {
    for (int j = 0; j < head_dim; j += 4) {
      F8 partial[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
      for (int i = 0; i < head_dim; i += kLanes) {
        const F8 channels = load(y + i);
        for (int r = 0; r < 4; ++r) {
          partial[r] = add(partial[r], mul(channels, load(inverse_transposed + (j + r) * head_dim + i)));
        }
      }
      for (int r = 0; r < 4; ++r) x[j + r] = reduce_add(partial[r]);
    }
  }
}

// ---- mean and deviation, stored parameters ----

struct Fit {
  float mean;
  float scale;
};

// mean = sum / D; deviation = sqrt(sum (y - mean)^2 / D). `centered` receives y - mean.
inline Fit mean_and_deviation(const float* y, int num, float* centered) {
  const float count = static_cast<float>(num);
  const float mean = sum(y, num) / count;
  for (int j = 0; j < num; j += kLanes) store(centered + j, sub(load(y + j), splat(mean)));
  return {mean, __builtin_sqrtf(dot(centered, centered, num) / count)};
}

// Replaces the fit by what its two stored bytes decode to.
inline Log8Parameters store_fit(float center, float spread, Fit* fit) {
  float offset = 20.0f * (fit->mean - center) / spread;
  offset = at_least(offset, -128.0f);
  offset = offset < 127.0f ? offset : 127.0f;
  const float kToWhole = 12582912.0f;  // 1.5 * 2^23: the sum's last bit is worth 1, ties to even
  offset = (offset + kToWhole) - kToWhole;
  int index = 0;  // number of limits below the scale
  for (int width = 128; width > 0; width /= 2) {
    if (fit->scale > kScaleTable.limits[index + width - 1]) index += width;
  }
  fit->mean = center + offset * (spread / 20.0f);
  fit->scale = kScaleTable.values[index];
  return {static_cast<std::int8_t>(index - 128), static_cast<std::int8_t>(static_cast<int>(offset))};
}

// u = (y - mean) / scale
inline void normalize(const float* y, int num, Fit fit, float* u) {
  for (int j = 0; j < num; j += kLanes) {
    store(u + j, div(sub(load(y + j), splat(fit.mean)), splat(fit.scale)));
  }
}

// ---- least squares ----

Log8Parameters encode_least_squares(int head_dim, float center, float spread, const float* y, std::uint8_t* codes) {
  float centered[kMaxHeadDim], u[kMaxHeadDim], level[kMaxHeadDim];
  const float count = static_cast<float>(head_dim);
  Fit fit = mean_and_deviation(y, head_dim, centered);
  fit.scale = at_least(fit.scale, kMinScale);
  const float mean = fit.mean;
  for (int round = 0; round < 2; ++round) {
    normalize(y, head_dim, fit, u);
    for (int j = 0; j < head_dim; j += kLanes) store(level + j, nearest_levels(load(u + j)));
    const float level_mean = sum(level, head_dim) / count;
    for (int j = 0; j < head_dim; j += kLanes) store(level + j, sub(load(level + j), splat(level_mean)));
    const float square = dot(level, level, head_dim);
    if (!(square > kSingular)) continue;  // one code for the whole row: any scale fits
    fit.scale = at_least(dot(centered, level, head_dim) / square, kMinScale);
    fit.mean = mean - fit.scale * level_mean;
  }
  const Log8Parameters stored = store_fit(center, spread, &fit);
  normalize(y, head_dim, fit, u);
  for (int j = 0; j < head_dim; j += kLanes) store_level_codes(codes + j, nearest_levels(load(u + j)));
  return stored;
}

// ---- feedback ----

void prepare_feedback(FeedbackTable* table) {
  const int num = table->head_dim;
  float ones[kMaxHeadDim] = {};
  for (int j = 0; j < num; ++j) ones[j] = 1.0f;
  transform(table->metric, num, ones, 1, table->row_sum);
  for (int j = 0; j < num; ++j) table->inverse_diagonal[j] = 1.0f / table->metric[j * num + j];
  table->total = sum(table->row_sum, num);
}

// Rounds channel by channel: level_i is the nearest one to u_i - T_0i e_0 - T_1i e_1 ... (in this order), with
// e_i = level_i - u_i. Eight channels are done at a time; their errors then move all later channels.
inline void round_with_feedback(const FeedbackTable& table, const float* u, float* level) {
  const int num = table.head_dim;
  float shifted[kMaxHeadDim];
  for (int j = 0; j < num; j += kLanes) store(shifted + j, load(u + j));
  for (int first = 0; first < num; first += kLanes) {
    const float* feedback = table.feedback + first * num;
    float block[kLanes], error[kLanes];
    for (int k = 0; k < kLanes; ++k) block[k] = shifted[first + k];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      level[first + i] = nearest_level(block[i]);
      error[i] = level[first + i] - u[first + i];
#pragma GCC unroll 8
      for (int k = i + 1; k < kLanes; ++k) block[k] -= feedback[i * num + first + k] * error[i];
    }
    for (int j = first + kLanes; j < num; j += kLanes) {
      F8 later = load(shifted + j);
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; ++i) later = sub(later, mul(load(feedback + i * num + j), splat(error[i])));
      store(shifted + j, later);
    }
  }
}

// Least squares in M of (alpha, beta): u ~ alpha 1 + beta level; then mean += scale alpha, scale *= beta.
// weighted = level M.
inline void refit(const FeedbackTable& table, const float* u, const float* level, const float* weighted, Fit* fit) {
  const int num = table.head_dim;
  const float ones_level = dot(level, table.row_sum, num);
  const float level_level = dot(level, weighted, num);
  const float ones_u = dot(u, table.row_sum, num);
  const float level_u = dot(u, weighted, num);
  const float diagonal = table.total * level_level;
  const float determinant = diagonal - ones_level * ones_level;
  if (!(determinant > kSingular * diagonal)) return;  // (nearly) constant levels: keep the start
  const float alpha = (level_level * ones_u - ones_level * level_u) / determinant;
  const float beta = (table.total * level_u - ones_level * ones_u) / determinant;
  fit->mean = fit->mean + fit->scale * alpha;
  fit->scale = at_least(fit->scale * beta, kMinScale);
}

// One pass of coordinate descent: level_i <- nearest(level_i - g_i / M_ii), i ascending; a change of level_i by d adds
// d M_i to g at once. Most channels keep their level, so eight are tried together and the first that changes is
// applied; the lanes after it are then tried again.
inline void sweep(const FeedbackTable& table, float* gradient, float* level) {
  const int num = table.head_dim;
  for (int first = 0; first < num; first += kLanes) {
    const F8 inverse_diagonal = load(table.inverse_diagonal + first);
    unsigned open = 0xff;  // lanes not yet decided
    while (true) {
      const F8 old_level = load(level + first);
      const F8 new_level = nearest_levels(sub(old_level, mul(load(gradient + first), inverse_diagonal)));
      const unsigned changed = bits(differs(new_level, old_level)) & open;
      if (changed == 0) break;
      const int lane = __builtin_ctz(changed);
      float updated[kLanes];
      store(updated, new_level);
      const F8 change = splat(updated[lane] - level[first + lane]);
      level[first + lane] = updated[lane];
      const float* metric = table.metric + (first + lane) * num;
      for (int j = 0; j < num; j += kLanes) store(gradient + j, add(load(gradient + j), mul(load(metric + j), change)));
      open = 0xfeu << lane;
    }
  }
}

// A few rows at a time, so that they share the loads of M in its two products.
void encode_feedback_group(const FeedbackTable& table, const float* y, int num_rows, std::uint8_t* codes,
                           Log8Parameters* parameters) {
  const int num = table.head_dim;
  float u[kGroupRows * kMaxHeadDim], level[kGroupRows * kMaxHeadDim] = {}, product[kGroupRows * kMaxHeadDim];
  Fit fit[kGroupRows];
  for (int row = 0; row < num_rows; ++row) {
    float* row_u = u + row * num;
    fit[row] = mean_and_deviation(y + row * num, num, row_u);
    fit[row].scale = at_least(kStartScale * fit[row].scale, kMinScale);
    normalize(y + row * num, num, fit[row], row_u);
    round_with_feedback(table, row_u, level + row * num);
  }
  transform(table.metric, num, level, num_rows, product);
  for (int row = 0; row < num_rows; ++row) {
    float* row_u = u + row * num;
    const float* row_level = level + row * num;
    refit(table, row_u, row_level, product + row * num, fit + row);
    parameters[row] = store_fit(table.center, table.spread, fit + row);
    normalize(y + row * num, num, fit[row], row_u);
    for (int j = 0; j < num; j += kLanes) store(row_u + j, sub(load(row_level + j), load(row_u + j)));
  }
  transform(table.metric, num, u, num_rows, product);  // gradient of half the error in M: (level - (y - m) / s) M
  for (int row = 0; row < num_rows; ++row) {
    float* row_level = level + row * num;
    for (int i = 0; i < kNumSweeps; ++i) sweep(table, product + row * num, row_level);
    for (int j = 0; j < num; j += kLanes) store_level_codes(codes + row * num + j, load(row_level + j));
  }
}

void encode_feedback(const FeedbackTable* table, const float* y, int num_rows, std::uint8_t* codes,
                     Log8Parameters* parameters) {
  for (int row = 0; row < num_rows; row += kGroupRows) {
    const int num = num_rows - row < kGroupRows ? num_rows - row : kGroupRows;
    encode_feedback_group(*table, y + row * table->head_dim, num, codes + row * table->head_dim, parameters + row);
  }
}

// ---- min and max ----

FloatPairParameters encode_min_max(int head_dim, float clip, const float* y, std::uint8_t* codes) {
  float clipped[kMaxHeadDim];
  F8 low = splat(__builtin_inff()), high = splat(-__builtin_inff());
  for (int j = 0; j < head_dim; j += kLanes) {
    const F8 value = min(max(load(y + j), splat(-clip)), splat(clip));
    store(clipped + j, value);
    low = min(low, value);
    high = max(high, value);
  }
  const float smallest = reduce_min(low);
  const float scale = at_least(reduce_max(high) - smallest, 1e-8f) / 3.0f;
  const float zero = 0.0f - smallest / scale;  // not a negation: +0 whatever the sign of a zero minimum
  for (int j = 0; j < head_dim; j += kLanes) {
    const F8 code = add(add(div(load(clipped + j), splat(scale)), splat(zero)), splat(0.5f));
    store_codes(codes + j, min(max(code, splat(0.0f)), splat(3.0f)));
  }
  return {scale, zero};
}

// ---- 16-bit rows ----

void to_bf16(const float* in, std::int64_t num, std::uint16_t* out) {
  for (std::int64_t i = 0; i < num; ++i) {
    std::uint32_t word;
    __builtin_memcpy(&word, in + i, sizeof word);
    const std::uint32_t rounded = word + 0x7fffu + ((word >> 16) & 1u);  // ties to even
    const std::uint32_t quiet = word | 0x400000u;
    out[i] = static_cast<std::uint16_t>(((word & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
  }
}

void to_f16(const float* in, std::int64_t num, std::uint16_t* out) {
  for (std::int64_t i = 0; i < num; i += kLanes) store_f16(out + i, load(in + i));
}

constexpr CodecKernels kKernels = {
    .prepare_feedback = prepare_feedback,
    .encode_feedback = encode_feedback,
    .encode_least_squares = encode_least_squares,
    .encode_min_max = encode_min_max,
    .transform = transform,
    .inverse_transform = inverse_transform,
    .to_bf16 = to_bf16,
    .to_f16 = to_f16,
};
