#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <oscar/cache.hpp>

#include "support/allocation_count.hpp"
#include "support/isas.hpp"
#include "support/plain_encoder.hpp"
#include "support/rows.hpp"

namespace oscar {
namespace {

constexpr int kHeads = 3, kPages = 4;

// A layer of random rotations over pages that lie in a permuted order with gaps, filled with poison.
struct Layer {
  int head_dim;
  Quantizer quantizer;
  LayerRotation rotation;
  PagedLayer view;
  std::vector<std::int32_t> block_table = {2, 5, 0, 3};
  std::vector<std::uint8_t> memory;

  Layer(int head_dim_, Quantizer quantizer_, std::mt19937& random) : head_dim(head_dim_), quantizer(quantizer_) {
    rotation.rope = {.order = RopeOrder::kHalves, .rotary_dim = head_dim, .inv_freq = {}};
    for (int p = 0; p < head_dim / 2; ++p) rotation.rope.inv_freq.push_back(std::pow(1e5, -2.0 * p / head_dim));
    for (int head = 0; head < kHeads; ++head) {
      HeadRotation side{.key = test::random_side(random, head_dim),
                        .value = test::random_side(random, head_dim),
                        .key_mean = {},
                        .page_mean = {}};
      if (head != 1) {  // one head without a page mean
        for (const float value : test::gaussian(random, static_cast<std::size_t>(head_dim)))
          side.page_mean.push_back(value);
      }
      rotation.heads.push_back(side);
    }
    view.spec = {
        .num_kv_heads = kHeads,
        .head_dim = head_dim,
        .parameter_format = quantizer == Quantizer::kMinMax ? ParameterFormat::kFloatPair : ParameterFormat::kLog8};
    view.rotation = &rotation;
    view.block_table = block_table.data();
    const auto half = static_cast<std::int64_t>(view.spec.half_bytes());
    const std::int64_t head_stride = 2 * half + 24, page_stride = kHeads * head_stride + 100;
    memory.resize(static_cast<std::size_t>(6 * page_stride));
    for (std::uint8_t& byte : memory) byte = static_cast<std::uint8_t>(random());
    view.key = {memory.data(), page_stride, head_stride};
    view.value = {memory.data() + half + 8, page_stride, head_stride};
  }
  Layer(const Layer&) = delete;
};

struct Batch {
  std::vector<std::int32_t> tokens, positions;
  std::vector<float> k, v;

  Batch(const std::vector<std::int32_t>& tokens_, int first_position, int head_dim, std::mt19937& random)
      : tokens(tokens_) {
    for (const std::int32_t token : tokens) positions.push_back(first_position + token);
    k = test::gaussian(random, tokens.size() * static_cast<std::size_t>(kHeads * head_dim), .5f, 2);
    v = test::gaussian(random, k.size());
  }
  StoreRows rows() const {
    return {static_cast<int>(tokens.size()), tokens.data(), positions.data(), k.data(), v.data()};
  }
};

// The same by the plain encoders, one row after the other.
void store_plainly(Layer& layer, const Batch& batch) {
  const auto width = static_cast<std::size_t>(layer.head_dim);
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    for (int head = 0; head < kHeads; ++head) {
      const HeadRotation& rotation = layer.rotation.heads[static_cast<std::size_t>(head)];
      std::vector<float> mean(width);
      block_mean(rotation, layer.rotation.rope, layer.head_dim, batch.positions[i], mean.data());
      for (const bool is_key : {true, false}) {
        const auto from = (is_key ? batch.k : batch.v).begin() +
                          static_cast<std::ptrdiff_t>((i * kHeads + static_cast<std::size_t>(head)) * width);
        test::Row x(from, from + layer.head_dim);
        for (std::size_t j = 0; j < width && is_key; ++j) x[j] = x[j] - mean[j];
        const SideRotation& side = is_key ? rotation.key : rotation.value;
        const test::PlainRow row = test::plain_encode(side, layer.quantizer, test::plain_transform(side.transform, x));
        std::uint8_t* half = layer.view.half(is_key ? layer.view.key : layer.view.value, batch.tokens[i] / 64, head);
        (is_key ? pack_key_row : pack_value_row)(half, layer.head_dim, layer.view.spec.parameter_format,
                                                 batch.tokens[i] % 64, row.codes.data(), row.parameters);
      }
    }
  }
}

std::vector<std::int32_t> shuffled_tokens(std::size_t num, std::mt19937& random) {
  std::vector<std::int32_t> tokens(kPages * kPageTokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i);
  std::shuffle(tokens.begin(), tokens.end(), random);
  tokens.resize(num);
  return tokens;
}

TEST(Store, GivesTheBytesOfThePlainPipelineAndTouchesNothingElse) {
  const auto pool = make_thread_pool(2);
  for (const Isa isa : test::isas_to_test()) {
    for (const Quantizer quantizer : {Quantizer::kMinMax, Quantizer::kLeastSquares, Quantizer::kFeedback}) {
      for (const int head_dim : {64, 80, 128}) {
        for (const std::size_t num_rows : {1u, 16u, 39u}) {
          std::mt19937 random(31), same_random(31);
          Layer layer(head_dim, quantizer, random), expected(head_dim, quantizer, same_random);
          ASSERT_EQ(layer.memory, expected.memory);
          const Batch batch(shuffled_tokens(num_rows, random), 4000, head_dim, random);
          ASSERT_TRUE(store(layer.view, quantizer, batch.rows(), isa, *pool));
          store_plainly(expected, batch);
          ASSERT_EQ(layer.memory, expected.memory)
              << isa_name(isa) << ", head_dim " << head_dim << ", rows " << num_rows;
        }
      }
    }
  }
}

TEST(Store, OneCallOrOneCallATokenGiveTheSameBytes) {
  std::mt19937 random(32), same_random(32);
  Layer together(64, Quantizer::kFeedback, random), apart(64, Quantizer::kFeedback, same_random);
  const Batch batch(shuffled_tokens(50, random), 0, 64, random);
  ASSERT_TRUE(store(together.view, Quantizer::kFeedback, batch.rows(), Isa::kScalar, serial_executor()));
  for (int i = 0; i < 50; ++i) {
    const StoreRows row{1, batch.tokens.data() + i, batch.positions.data() + i, batch.k.data() + i * kHeads * 64,
                        batch.v.data() + i * kHeads * 64};
    ASSERT_TRUE(store(apart.view, Quantizer::kFeedback, row, Isa::kScalar, serial_executor()));
  }
  EXPECT_EQ(together.memory, apart.memory);
}

TEST(Store, KAndVMayComeApart) {
  std::mt19937 random(33), same_random(33);
  Layer together(64, Quantizer::kLeastSquares, random), apart(64, Quantizer::kLeastSquares, same_random);
  const Batch batch(shuffled_tokens(20, random), 0, 64, random);
  ASSERT_TRUE(store(together.view, Quantizer::kLeastSquares, batch.rows(), Isa::kScalar, serial_executor()));
  StoreRows only_keys = batch.rows(), only_values = batch.rows();
  only_keys.v = nullptr;
  only_values.k = nullptr;
  only_values.positions = nullptr;  // values have no page mean
  ASSERT_TRUE(store(apart.view, Quantizer::kLeastSquares, only_values, Isa::kScalar, serial_executor()));
  ASSERT_TRUE(store(apart.view, Quantizer::kLeastSquares, only_keys, Isa::kScalar, serial_executor()));
  EXPECT_EQ(together.memory, apart.memory);
}

TEST(Store, RefusesNanAndInfinityBeforeAnythingIsWritten) {
  std::mt19937 random(34);
  Layer layer(64, Quantizer::kFeedback, random);
  const std::vector<std::uint8_t> before = layer.memory;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const bool is_key : {true, false}) {
      Batch batch({10, 77, 130}, 0, 64, random);
      (is_key ? batch.k : batch.v)[(2 * kHeads + 1) * 64 + 63] = bad;  // third row, head 1
      const Status status = store(layer.view, Quantizer::kFeedback, batch.rows(), Isa::kScalar, serial_executor());
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().code, ErrorCode::kBadInput);
      EXPECT_EQ(status.error().message.rfind(is_key ? "K of token 130, KV head 1" : "V of token 130, KV head 1", 0), 0u)
          << status.error().message;
      EXPECT_EQ(layer.memory, before);
    }
  }
}

TEST(Store, RefusesWhatThePagesCannotHold) {
  std::mt19937 random(35);
  Layer layer(64, Quantizer::kFeedback, random);
  const Batch batch({0}, 0, 64, random);
  const auto error_of = [&](Quantizer quantizer) {
    const Status status = store(layer.view, quantizer, batch.rows(), Isa::kScalar, serial_executor());
    return status ? ErrorCode{} : status.error().code;
  };
  EXPECT_EQ(error_of(Quantizer::kMinMax), ErrorCode::kInvalidArgument);  // float pairs into 8-bit parameters
  layer.rotation.heads[2].key_bits = 3;
  EXPECT_EQ(error_of(Quantizer::kFeedback), ErrorCode::kUnsupported);
  layer.rotation.heads.pop_back();
  EXPECT_EQ(error_of(Quantizer::kFeedback), ErrorCode::kMismatch);
  layer.view.rotation = nullptr;
  EXPECT_EQ(error_of(Quantizer::kFeedback), ErrorCode::kMismatch);
}

TEST(Store, AllocatesNothing) {
  std::mt19937 random(36);
  const auto pool = make_thread_pool(2);
  for (const Quantizer quantizer : {Quantizer::kMinMax, Quantizer::kLeastSquares, Quantizer::kFeedback}) {
    Layer layer(128, quantizer, random);
    const Batch batch(shuffled_tokens(40, random), 64, 128, random);
    ASSERT_TRUE(store(layer.view, quantizer, batch.rows(), Isa::kScalar, *pool));
    const long before = test::num_allocations();
    ASSERT_TRUE(store(layer.view, quantizer, batch.rows(), Isa::kScalar, *pool));
    EXPECT_EQ(test::num_allocations(), before);
  }
}

}  // namespace
}  // namespace oscar
