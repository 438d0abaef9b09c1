// Each vector table against the plain one, kernel by kernel: integers exactly, floats within the rounding of another
// order.

#include "kernels/cpu/attention_kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <oscar/codec.hpp>
#include <random>
#include <vector>

#include "support/isas.hpp"

namespace oscar::test {
namespace {

using cpu::AttentionKernels;
using cpu::kMaxDim;
using cpu::kMaxExactRows;
using cpu::kMaxPackedRows;
using cpu::kPage;

// Sums of up to 256 products of size 1 in another order, and fused.
constexpr float kSumTolerance = 1e-4f;
// attention_simd.inl: 3e-7 + 2e-8 |x|, |x| < 88; and expf's own half unit.
constexpr double exp_tolerance(double x) { return 4e-7 + 2e-8 * std::fabs(x); }

struct Table {
  Isa isa;
  const AttentionKernels* kernels;
};
std::vector<Table> vector_tables() {
  std::vector<Table> tables;
#if defined(__x86_64__)
  for (const Isa isa : isas_to_test()) {
    if (isa == Isa::kAvx2) tables.push_back({isa, &cpu::avx2_attention_kernels()});
    if (isa == Isa::kAvx512) tables.push_back({isa, &cpu::avx512_attention_kernels()});
  }
#endif
  return tables;
}
const AttentionKernels& plain() { return cpu::scalar_attention_kernels(); }

constexpr int kDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 192, 240, 256};

template <typename T, std::size_t kSize>
struct alignas(64) Aligned {
  T values[kSize] = {};
  T* data() { return values; }
  T& operator[](std::size_t i) { return values[i]; }
};
using PageFloats = Aligned<float, kPage>;

std::vector<std::uint8_t> random_bytes(std::size_t count, std::mt19937& random) {
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// Several int8 rows against one page, by one table.
struct KeyProblem {
  KeyProblem(int dim, int num_rows, bool extreme, std::mt19937& random)
      : head_dim(dim), rows(num_rows), packed(random_bytes(static_cast<std::size_t>(16 * dim), random)) {
    if (extreme) std::fill(packed.begin(), packed.end(), std::uint8_t{0xFF});
    std::normal_distribution<float> normal;
    for (int r = 0; r < num_rows; ++r) {
      for (int c = 0; c < dim; ++c)
        queries[r][static_cast<std::size_t>(c)] = extreme ? (r % 2 == 0 ? 1.0f : -1.0f) : normal(random);
    }
    for (std::size_t t = 0; t < kPage; ++t) {
      step[t] = std::exp(normal(random));
      middle[t] = normal(random);
      for (auto& row : offsets) row[t] = normal(random);
    }
  }

  std::vector<float> logits(const AttentionKernels& kernels, bool integers_only, bool by_token) {
    Aligned<std::int8_t, 4 * kMaxDim> operands[kMaxPackedRows];
    cpu::KeyRow key_rows[kMaxPackedRows];
    PageFloats ones;
    std::fill_n(ones.data(), kPage, 1.0f);
    for (int r = 0; r < rows; ++r) {
      key_rows[r].operand = operands[r].data();
      kernels.arrange_query(queries[r].data(), head_dim, 0.125f, operands[r].data(), &key_rows[r].terms);
      if (integers_only) {
        key_rows[r].terms.code_factor = 1;
        key_rows[r].terms.middle_factor = 0;
      } else {
        key_rows[r].offset = 0.25f * static_cast<float>(r);
        if (by_token) key_rows[r].offsets = offsets[r].data();
      }
    }
    Aligned<float, kMaxPackedRows * kPage> result;
    kernels.key_logits(packed.data(), head_dim, key_rows, rows, integers_only ? ones.data() : step.data(),
                       middle.data(), result.data());
    return {result.data(), result.data() + rows * kPage};
  }

  int head_dim, rows;
  std::vector<std::uint8_t> packed;
  Aligned<float, kMaxDim> queries[kMaxPackedRows];
  PageFloats step, middle, offsets[kMaxPackedRows];
};

TEST(AttentionKernels, KeyDotProductsAreExactIntegers) {
  std::mt19937 random(1);
  for (const Table& table : vector_tables()) {
    for (const int dim : kDims) {
      for (const int rows : {1, 3, 7, 8}) {
        for (const bool extreme : {false, true}) {
          KeyProblem problem(dim, rows, extreme, random);
          EXPECT_EQ(problem.logits(*table.kernels, true, false), problem.logits(plain(), true, false))
              << isa_name(table.isa) << ", head_dim " << dim << ", rows " << rows << (extreme ? ", largest sums" : "");
        }
      }
    }
  }
}

TEST(AttentionKernels, KeyLogitsTakeParametersAndOffsets) {
  std::mt19937 random(2);
  for (const Table& table : vector_tables()) {
    for (const int dim : kDims) {
      for (const bool by_token : {false, true}) {
        KeyProblem problem(dim, 5, false, random);
        const std::vector<float> expected = problem.logits(plain(), false, by_token);
        const std::vector<float> actual = problem.logits(*table.kernels, false, by_token);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(actual[i], expected[i], kSumTolerance)
              << isa_name(table.isa) << ", head_dim " << dim << ", at " << i;
        }
      }
    }
  }
}

struct ValueResult {
  std::vector<float> accumulators;
  std::vector<float> sums;
};
ValueResult add_values(const AttentionKernels& kernels, int dim, int rows, const std::vector<std::uint8_t>& packed,
                       PageFloats* weights, PageFloats& step, PageFloats& middle, float weight_before) {
  Aligned<float, kMaxDim> accumulators[kMaxPackedRows];
  cpu::ValueSums sums[kMaxPackedRows];
  cpu::ValueRow value_rows[kMaxPackedRows];
  ValueResult result;
  for (int r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < kMaxDim; ++c) accumulators[r][c] = static_cast<float>(c);
    sums[r] = {.middle = 3, .weight = weight_before};
    value_rows[r] = {
        .weights = weights[r].data(), .rescale = 0.5f, .accumulator = accumulators[r].data(), .sums = &sums[r]};
  }
  kernels.add_values(packed.data(), dim, value_rows, rows, step.data(), middle.data());
  for (int r = 0; r < rows; ++r) {
    result.accumulators.insert(result.accumulators.end(), accumulators[r].data(), accumulators[r].data() + kMaxDim);
    result.sums.push_back(sums[r].middle);
    result.sums.push_back(sums[r].weight);
  }
  return result;
}

// Weights that are whole units, so that every sum is an integer below 2^24.
TEST(AttentionKernels, ValueSumsAreExactIntegersOfOneDigitAndTwo) {
  std::mt19937 random(3);
  for (const Table& table : vector_tables()) {
    for (const int dim : kDims) {
      for (const float largest : {255.0f, 65535.0f}) {
        for (const bool extreme : {false, true}) {
          std::vector<std::uint8_t> packed = random_bytes(static_cast<std::size_t>(16 * dim), random);
          if (extreme) std::fill(packed.begin(), packed.end(), std::uint8_t{0xFF});
          PageFloats weights[kMaxPackedRows], step, middle;
          std::fill_n(step.data(), kPage, 1.0f);
          for (PageFloats& row : weights) {
            for (std::size_t t = 0; t < kPage; ++t) {
              row[t] = extreme ? largest : std::floor(largest * std::ldexp(static_cast<float>(random() >> 8), -24));
            }
            row[random() % kPage] = largest;
          }
          const float before = largest == 255 ? 1e6f : 0;
          const ValueResult expected = add_values(plain(), dim, 7, packed, weights, step, middle, before);
          const ValueResult actual = add_values(*table.kernels, dim, 7, packed, weights, step, middle, before);
          EXPECT_EQ(actual.accumulators, expected.accumulators)
              << isa_name(table.isa) << ", head_dim " << dim << ", largest " << largest;
          EXPECT_EQ(actual.sums, expected.sums) << isa_name(table.isa);
        }
      }
    }
  }
}

// Within the promised rounding of sum weight (middle + step (code - 1.5)).
TEST(AttentionKernels, ValuesAreWithinTheRoundingOfTheirDigits) {
  std::mt19937 random(4);
  std::exponential_distribution<float> exponential;
  std::vector<Table> tables = vector_tables();
  tables.insert(tables.begin(), {Isa::kScalar, &plain()});
  constexpr int kDim = 64;
  for (const Table& table : tables) {
    for (const bool single : {false, true}) {
      const std::vector<std::uint8_t> packed(16 * kDim, 0xE4);  // every byte holds 0, 1, 2, 3
      PageFloats weights[1], step, middle;
      double exact_middle = 0, largest = 0;
      for (std::size_t t = 0; t < kPage; ++t) {
        weights[0][t] = exponential(random);
        step[t] = exponential(random);
        middle[t] = exponential(random) - 1;
        exact_middle += static_cast<double>(weights[0][t]) * middle[t];
        largest = std::max(largest, static_cast<double>(weights[0][t] * step[t]));
      }
      const float before = single ? 1e6f : 0;
      const ValueResult result = add_values(*table.kernels, kDim, 1, packed, weights, step, middle, before);
      // Plane j of every word holds code j; token 32 (j / 2) + 8t + 2 (j % 2) + {0, 1, 4, 5} lies in plane j.
      double expected = exact_middle;
      for (int t = 0; t < kPage; ++t) {
        const int j = 2 * (t / 32) + t / 2 % 2;
        expected += static_cast<double>(weights[0][static_cast<std::size_t>(t)]) * step[static_cast<std::size_t>(t)] *
                    (j - 1.5);
      }
      const double unit = largest / (single ? 255 : 65535);
      const double bound = kPage * 1.5 * unit / 2 + 1e-3 * (single ? 0.1 : 0.01);  // every token off by half a unit
      for (std::size_t c = 0; c < kDim; ++c) {
        const double actual = result.accumulators[c] - 0.5 * static_cast<double>(c) + result.sums[0] - 0.5 * 3;
        ASSERT_NEAR(actual, expected, bound) << isa_name(table.isa) << (single ? ", one digit" : ", two digits");
      }
    }
  }
}

TEST(AttentionKernels, SoftmaxMatchesForEveryMaskAndCap) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 6);
  for (const Table& table : vector_tables()) {
    for (int i = 0; i < 400; ++i) {
      std::uint64_t visible = std::uint64_t{random()} << 32 | random();
      if (i % 4 == 0) visible = std::uint64_t{1} << (i / 4 % 64);
      if (i % 4 == 1) visible = ~std::uint64_t{0};
      const float cap = i % 3 == 0 ? 8.0f : 0.0f;
      PageFloats expected, actual;
      for (std::size_t t = 0; t < kPage; ++t) {
        expected[t] = (visible >> t & 1) != 0 ? normal(random) : std::numeric_limits<float>::quiet_NaN();
        actual[t] = expected[t];
      }
      cpu::Running before{.max = i % 5 == 0 ? -std::numeric_limits<float>::infinity() : normal(random), .sum = 2};
      cpu::Running expected_running = before, running = before;
      const float expected_rescale = plain().softmax_page(visible, cap, expected.data(), &expected_running);
      const float rescale = table.kernels->softmax_page(visible, cap, actual.data(), &running);
      const float slack = cap > 0 ? 1e-5f : 4e-6f;  // a capped logit is itself off by 2e-7 cap
      ASSERT_NEAR(rescale, expected_rescale, slack) << isa_name(table.isa);
      ASSERT_NEAR(running.max, expected_running.max, 2e-6f * (1 + std::fabs(expected_running.max)));
      ASSERT_NEAR(running.sum, expected_running.sum, slack * expected_running.sum);
      for (std::size_t t = 0; t < kPage; ++t) {
        ASSERT_NEAR(actual[t], expected[t], slack) << isa_name(table.isa) << " token " << t;
        if ((visible >> t & 1) == 0) {
          ASSERT_EQ(actual[t], 0);
        }
      }
    }
  }
}

TEST(AttentionKernels, ExponentialKeepsItsStatedError) {
  for (const Table& table : vector_tables()) {
    for (float x = 0; x > -87; x -= 0.37f) {
      PageFloats weights;
      for (int t = 0; t < kPage; ++t) weights[static_cast<std::size_t>(t)] = x - static_cast<float>(t) * 0.0057f;
      PageFloats logits = weights;
      cpu::Running running{.max = 0, .sum = 0};
      table.kernels->softmax_page(~std::uint64_t{0}, 0, weights.data(), &running);
      for (std::size_t t = 0; t < kPage; ++t) {
        const double exact = std::exp(static_cast<double>(logits[t]));
        ASSERT_NEAR(weights[t], exact, exp_tolerance(logits[t]) * exact)
            << isa_name(table.isa) << " exp(" << logits[t] << ")";
      }
    }
  }
}

TEST(AttentionKernels, ParametersDecodeAsTheCodecDoesAndHiddenTokensToZero) {
  SideRotation side;
  side.offset_center = 0.3f;
  side.offset_spread = 1.7f;
  std::vector<float> steps(256);
  for (int code = -128; code < 128; ++code) {
    const RowParameters parameters{.scale_code = static_cast<std::int8_t>(code)};
    steps[static_cast<std::size_t>(code + 128)] = affine(side, ParameterFormat::kLog8, parameters).step;
  }
  std::vector<Table> tables = vector_tables();
  tables.insert(tables.begin(), {Isa::kScalar, &plain()});
  for (const Table& table : tables) {
    for (int start = 0; start < 256; start += kPage) {
      std::vector<std::uint8_t> stored(2 * kPage);
      for (int t = 0; t < kPage; ++t) {
        stored[static_cast<std::size_t>(t)] = static_cast<std::uint8_t>(start + t);
        stored[static_cast<std::size_t>(kPage + t)] = static_cast<std::uint8_t>(255 - start - t);
      }
      const std::uint64_t tokens = 0xF0F0123456789ABC;
      PageFloats step, middle;
      const cpu::ParameterSource source{.stored = stored.data(),
                                        .log8 = true,
                                        .log_steps = steps.data(),
                                        .offset_center = side.offset_center,
                                        .offset_unit = side.offset_spread / 20.0f};
      table.kernels->decode_parameters(source, tokens, step.data(), middle.data());
      for (std::size_t t = 0; t < kPage; ++t) {
        const RowParameters parameters{.scale_code = static_cast<std::int8_t>(stored[t]),
                                       .offset_code = static_cast<std::int8_t>(stored[kPage + t])};
        const AffineRow expected = affine(side, ParameterFormat::kLog8, parameters);
        const bool shown = (tokens >> t & 1) != 0;
        ASSERT_EQ(step[t], shown ? expected.step : 0) << isa_name(table.isa) << " token " << t;
        ASSERT_NEAR(middle[t], shown ? expected.base + 1.5f * expected.step : 0, 1e-6f * (10 + 2 * expected.step));
      }
    }
    std::vector<std::uint8_t> pairs(8 * kPage + 1, 0xFF);  // NaN, and at an odd address
    for (int t = 0; t < kPage; t += 2) {
      const float scale = 0.5f, zero = static_cast<float>(t);
      std::memcpy(pairs.data() + 1 + 4 * t, &scale, sizeof scale);
      std::memcpy(pairs.data() + 1 + 4 * (kPage + t), &zero, sizeof zero);
    }
    PageFloats step, middle;
    table.kernels->decode_parameters({.stored = pairs.data() + 1, .log8 = false, .log_steps = steps.data()},
                                     0x5555555555555555, step.data(), middle.data());
    for (std::size_t t = 0; t < kPage; ++t) {
      ASSERT_EQ(step[t], t % 2 == 0 ? 0.5f : 0.0f) << isa_name(table.isa);
      ASSERT_EQ(middle[t], t % 2 == 0 ? 0.5f * (1.5f - static_cast<float>(t)) : 0.0f) << isa_name(table.isa);
    }
  }
}

TEST(AttentionKernels, EverySixteenBitNumberLoadsAsItself) {
  for (const Table& table : vector_tables()) {
    for (const bool f16 : {false, true}) {
      for (std::uint32_t start = 0; start < 65536; start += kPage * 64) {
        std::vector<std::uint16_t> values(kPage * 64);
        const std::uint16_t* rows[kPage];
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(start + i);
        for (std::size_t t = 0; t < kPage; ++t) rows[t] = t % 9 == 4 ? nullptr : values.data() + t * 64;
        Aligned<float, kPage * 64> expected, actual;
        const auto expect_same = [&](const char* what) {
          for (std::size_t i = 0; i < kPage * 64; ++i) {
            if (std::isnan(expected[i])) {
              ASSERT_TRUE(std::isnan(actual[i])) << what;
            } else {
              ASSERT_EQ(actual[i], expected[i]) << what << " of " << isa_name(table.isa) << " at " << i;
            }
          }
        };
        plain().load_keys(rows, f16, 64, expected.data());
        table.kernels->load_keys(rows, f16, 64, actual.data());
        expect_same("load_keys");
        plain().load_values(rows, f16, 64, expected.data());
        table.kernels->load_values(rows, f16, 64, actual.data());
        expect_same("load_values");
      }
    }
  }
}

TEST(AttentionKernels, ExactBlocksMatchForEveryNumberOfRowsAndKeys) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (const Table& table : vector_tables()) {
    for (const int dim : kDims) {
      for (int rows = 1; rows <= kMaxExactRows; ++rows) {
        for (const int num_keys : {16, 32, 48, 64}) {
          static Aligned<float, kPage * kMaxDim> tile;
          Aligned<float, kMaxDim> queries[kMaxExactRows], sums[2][kMaxExactRows];
          Aligned<float, kMaxExactRows * kPage> logits[2];
          const float* query_rows[kMaxExactRows];
          float* sum_rows[2][kMaxExactRows];
          float rescale[kMaxExactRows];
          for (int i = 0; i < kPage * dim; ++i) tile[static_cast<std::size_t>(i)] = normal(random);
          for (int r = 0; r < rows; ++r) {
            for (std::size_t c = 0; c < kMaxDim; ++c) {
              queries[r][c] = normal(random);
              sums[0][r][c] = sums[1][r][c] = normal(random);
            }
            query_rows[r] = queries[r].data();
            rescale[r] = 0.1f * static_cast<float>(r);
            for (int side = 0; side < 2; ++side) sum_rows[side][r] = sums[side][r].data();
          }
          plain().exact_logits(query_rows, rows, tile.data(), dim, num_keys, 0.3f, logits[0].data());
          table.kernels->exact_logits(query_rows, rows, tile.data(), dim, num_keys, 0.3f, logits[1].data());
          for (int r = 0; r < rows; ++r) {
            for (int t = 0; t < num_keys; ++t) {
              const auto at = static_cast<std::size_t>(r * kPage + t);
              ASSERT_NEAR(logits[1][at], logits[0][at], kSumTolerance) << isa_name(table.isa) << " head_dim " << dim;
            }
          }
          plain().exact_values(logits[0].data(), rescale, rows, tile.data(), dim, num_keys, sum_rows[0]);
          table.kernels->exact_values(logits[0].data(), rescale, rows, tile.data(), dim, num_keys, sum_rows[1]);
          for (int r = 0; r < rows; ++r) {
            for (std::size_t c = 0; c < kMaxDim; ++c) {
              ASSERT_NEAR(sums[1][r][c], sums[0][r][c], kSumTolerance) << isa_name(table.isa) << " head_dim " << dim;
            }
          }
        }
      }
      Aligned<float, kMaxDim> a, b;
      for (std::size_t c = 0; c < kMaxDim; ++c) {
        a[c] = normal(random);
        b[c] = normal(random);
      }
      ASSERT_NEAR(table.kernels->dot(a.data(), b.data(), dim), plain().dot(a.data(), b.data(), dim), kSumTolerance);
    }
  }
}

}  // namespace
}  // namespace oscar::test
