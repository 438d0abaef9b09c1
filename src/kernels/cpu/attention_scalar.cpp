// Plain loops: the definition that the vector tables are tested against. Integer parts agree exactly; float sums differ
// in order.

#include "kernels/cpu/attention_kernels.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace oscar::cpu {
namespace {

void arrange_query(const float* row, int head_dim, float softmax_scale, std::int8_t* operand, KeyTerms* terms) {
  float largest = 0, sum = 0;
  for (int c = 0; c < head_dim; ++c) {
    largest = std::fmax(largest, std::fabs(row[c]));
    sum += row[c];
  }
  // A zero row, or one of infinities, has nothing to round.
  const float inverse = largest > 0 && std::isfinite(largest) ? 127.0f / largest : 0.0f;
  std::int32_t integer_sum = 0;
  for (int c = 0; c < head_dim; ++c) {
    const float scaled = row[c] * inverse;
    operand[c] = std::isfinite(scaled) ? static_cast<std::int8_t>(std::lrint(scaled)) : std::int8_t{0};
    integer_sum += operand[c];
  }
  terms->code_factor = softmax_scale * (largest / 127.0f) * 0.5f;
  terms->middle_factor = softmax_scale * sum;
  terms->three_sums = 3 * integer_sum;
}

std::uint32_t load_word(const std::uint8_t* packed, int index) {
  std::uint32_t word;
  std::memcpy(&word, packed + 4 * index, sizeof word);
  return word;
}

// codes [64 tokens, head_dim]
void unpack_keys(const std::uint8_t* packed, int head_dim, std::uint8_t* codes) {
  for (int block = 0; 64 * block < head_dim; ++block) {
    const int width = head_dim - 64 * block < 64 ? head_dim - 64 * block : 64;
    const int num_words = width / 16;
    for (int token = 0; token < kPage; ++token) {
      std::uint8_t* row = codes + token * head_dim + 64 * block;
      for (int t = 0; t < num_words; ++t) {
        const std::uint32_t word = load_word(packed, 256 * block + (token / 4 * num_words + t) * 4 + token % 4);
        for (int j = 0; j < 4; ++j) {
          for (int b = 0; b < 4; ++b) {
            row[4 * num_words * j + 4 * t + b] = static_cast<std::uint8_t>(word >> (8 * b + 2 * j) & 3);
          }
        }
      }
    }
  }
}

// codes [64 tokens, head_dim]
void unpack_values(const std::uint8_t* packed, int head_dim, std::uint8_t* codes) {
  for (int d = 0; d < head_dim; ++d) {
    for (int t = 0; t < 4; ++t) {
      const std::uint32_t word = load_word(packed, (d / 4 * 4 + t) * 4 + d % 4);
      for (int j = 0; j < 4; ++j) {
        for (int b = 0; b < 4; ++b) {
          const int token = 32 * (j / 2) + 8 * t + 2 * (j % 2) + b % 2 + 4 * (b / 2);
          codes[token * head_dim + d] = static_cast<std::uint8_t>(word >> (8 * b + 2 * j) & 3);
        }
      }
    }
  }
}

void decode_parameters(const ParameterSource& source, std::uint64_t tokens, float* step, float* middle) {
  for (int t = 0; t < kPage; ++t) {
    step[t] = 0;
    middle[t] = 0;
    if ((tokens >> t & 1) == 0) continue;
    if (source.log8) {
      const auto scale_code = static_cast<std::int8_t>(source.stored[t]);
      const auto offset_code = static_cast<std::int8_t>(source.stored[kPage + t]);
      step[t] = source.log_steps[scale_code + 128];
      middle[t] = source.offset_center + static_cast<float>(offset_code) * source.offset_unit;
    } else {
      float zero;
      std::memcpy(&step[t], source.stored + 4 * t, sizeof(float));
      std::memcpy(&zero, source.stored + 4 * (kPage + t), sizeof(float));
      middle[t] = (1.5f - zero) * step[t];
    }
  }
}

void key_logits(const std::uint8_t* packed, int head_dim, const KeyRow* rows, int num_rows, const float* step,
                const float* middle, float* logits) {
  std::uint8_t codes[kPage * kMaxDim];
  unpack_keys(packed, head_dim, codes);
  for (int r = 0; r < num_rows; ++r) {
    const KeyRow& row = rows[r];
    for (int t = 0; t < kPage; ++t) {
      std::int32_t dot = 0;
      for (int c = 0; c < head_dim; ++c) dot += row.operand[c] * codes[t * head_dim + c];
      const auto deviation = static_cast<float>(2 * dot - row.terms.three_sums);
      const float offset = row.offsets != nullptr ? row.offsets[t] : row.offset;
      logits[r * kPage + t] =
          row.terms.code_factor * step[t] * deviation + (row.terms.middle_factor * middle[t] + offset);
    }
  }
}

float softmax_page(std::uint64_t visible, float soft_cap, float* logits, Running* running) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  float largest = kHidden;
  for (int t = 0; t < kPage; ++t) {
    if ((visible >> t & 1) == 0) {
      logits[t] = kHidden;
      continue;
    }
    if (soft_cap > 0) logits[t] = soft_cap * std::tanh(logits[t] / soft_cap);
    largest = std::fmax(largest, logits[t]);
  }
  const float new_max = std::fmax(running->max, largest);
  // Every visible logit may be -inf (a query of infinities): exp(-inf - -inf) would be NaN where weight 0 is meant.
  if (new_max == kHidden) {
    for (int t = 0; t < kPage; ++t) logits[t] = 0;
    return 1;
  }
  const float rescale = std::exp(running->max - new_max);
  float sum = 0;
  for (int t = 0; t < kPage; ++t) {
    logits[t] = std::exp(logits[t] - new_max);
    sum += logits[t];
  }
  running->max = new_max;
  running->sum = running->sum * rescale + sum;
  return rescale;
}

void add_row_values(const std::uint8_t* codes, int head_dim, const ValueRow& row, const float* step,
                    const float* middle) {
  float largest = 0, total = 0, middle_total = 0;
  for (int t = 0; t < kPage; ++t) {
    const float w = row.weights[t] * step[t];
    largest = std::fmax(largest, w);
    total += w;
    middle_total += row.weights[t] * middle[t];
  }
  const float weight_before = row.sums->weight * row.rescale;
  const bool single = largest <= kSingleDigitShare * (weight_before + total);
  const float steps = single ? 255.0f : 65535.0f;
  const float inverse = largest > 0 ? steps / largest : 0.0f;
  const float unit = largest / steps;
  std::int32_t fixed[kPage];
  std::int32_t fixed_sum = 0;
  for (int t = 0; t < kPage; ++t) {
    const float scaled = row.weights[t] * step[t] * inverse;
    fixed[t] = scaled <= steps ? static_cast<std::int32_t>(std::lrint(scaled)) : static_cast<std::int32_t>(steps);
    fixed_sum += fixed[t];
  }
  for (int d = 0; d < head_dim; ++d) {
    std::int32_t sum = 0;
    for (int t = 0; t < kPage; ++t) sum += fixed[t] * codes[t * head_dim + d];
    row.accumulator[d] = row.accumulator[d] * row.rescale + unit * static_cast<float>(sum);
  }
  const float fixed_total = unit * static_cast<float>(fixed_sum);
  row.sums->middle = row.sums->middle * row.rescale + (middle_total - 1.5f * fixed_total);
  row.sums->weight = weight_before + fixed_total;
}

void add_values(const std::uint8_t* packed, int head_dim, const ValueRow* rows, int num_rows, const float* step,
                const float* middle) {
  std::uint8_t codes[kPage * kMaxDim];
  unpack_values(packed, head_dim, codes);
  for (int r = 0; r < num_rows; ++r) add_row_values(codes, head_dim, rows[r], step, middle);
}

float bf16_to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

float f16_to_float(std::uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

void load_keys(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile) {
  for (int t = 0; t < kPage; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      tile[c * kPage + t] = rows[t] == nullptr ? 0 : f16 ? f16_to_float(rows[t][c]) : bf16_to_float(rows[t][c]);
    }
  }
}

void load_values(const std::uint16_t* const* rows, bool f16, int head_dim, float* tile) {
  for (int t = 0; t < kPage; ++t) {
    for (int c = 0; c < head_dim; ++c) {
      tile[t * head_dim + c] = rows[t] == nullptr ? 0 : f16 ? f16_to_float(rows[t][c]) : bf16_to_float(rows[t][c]);
    }
  }
}

void exact_logits(const float* const* queries, int num_rows, const float* tile, int head_dim, int num_keys, float scale,
                  float* logits) {
  for (int r = 0; r < num_rows; ++r) {
    float* row = logits + r * kPage;
    for (int t = 0; t < num_keys; ++t) row[t] = 0;
    for (int c = 0; c < head_dim; ++c) {
      for (int t = 0; t < num_keys; ++t) row[t] += queries[r][c] * tile[c * kPage + t];
    }
    for (int t = 0; t < num_keys; ++t) row[t] *= scale;
  }
}

void exact_values(const float* weights, const float* rescale, int num_rows, const float* tile, int head_dim,
                  int num_keys, float* const* accumulators) {
  for (int r = 0; r < num_rows; ++r) {
    for (int d = 0; d < head_dim; ++d) accumulators[r][d] *= rescale[r];
    for (int t = 0; t < num_keys; ++t) {
      const float weight = weights[r * kPage + t];
      for (int d = 0; d < head_dim; ++d) accumulators[r][d] += weight * tile[t * head_dim + d];
    }
  }
}

float dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

const AttentionKernels& scalar_attention_kernels() {
  static constexpr AttentionKernels kKernels = {
      .arrange_query = arrange_query,
      .decode_parameters = decode_parameters,
      .key_logits = key_logits,
      .softmax_page = softmax_page,
      .add_values = add_values,
      .load_keys = load_keys,
      .load_values = load_values,
      .exact_logits = exact_logits,
      .exact_values = exact_values,
      .dot = dot,
  };
  return kKernels;
}

}  // namespace oscar::cpu
