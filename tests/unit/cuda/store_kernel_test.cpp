// The store kernel's own source, run on the CPU thread by thread: its pages must be the CPU library's, byte for byte.

#include "support/cuda_emulation.hpp"
// the kernel comes after what it is emulated with
#include <gtest/gtest.h>
#include <oscar/executor.hpp>

#include "kernels/cuda/store/kernel.cuh"
#include "kernels/cuda/store/plan.hpp"
#include "support/store_case.hpp"

namespace oscar::cuda {
namespace {

constexpr std::uint16_t kUnwritten = 0x7777;

}  // namespace

alignas(16) std::uint8_t dynamic[227 * 1024];  // shared memory of the block that runs

namespace {

std::vector<std::uint16_t> bf16_bits(const std::vector<float>& rows) {
  std::vector<std::uint16_t> bits;
  for (const float value : rows) bits.push_back(static_cast<std::uint16_t>(__float_as_uint(value) >> 16));
  return bits;
}

// Matrices of one side, heads one after another.
struct SideTables {
  std::vector<float> transform, feedback, metric, row_sum, inverse_diagonal;
  std::vector<StoreConstants> constants;

  SideTables(const LayerRotation& layer, bool is_key, int head_dim) {
    const auto append = [](std::vector<float>& to, const std::vector<float>& values) {
      to.insert(to.end(), values.begin(), values.end());
    };
    for (const HeadRotation& head : layer.heads) {
      const SideRotation& side = is_key ? head.key : head.value;
      const MetricTables tables = metric_tables(side.metric.data(), head_dim);
      append(transform, side.transform);
      append(feedback, side.feedback);
      append(metric, side.metric);
      append(row_sum, tables.row_sum);
      append(inverse_diagonal, tables.inverse_diagonal);
      constants.push_back({side.offset_center, side.offset_spread, side.clip_ratio, tables.total});
    }
  }
  StoreSide side(const std::uint16_t* rows, std::uint8_t* pages, std::uint16_t* window, const float* means) const {
    return {rows,
            pages,
            window,
            transform.data(),
            feedback.data(),
            metric.data(),
            row_sum.data(),
            inverse_diagonal.data(),
            constants.data(),
            means};
  }
};

template <int kHeadDim, Quantizer kQuantizer>
void launch(const StoreParams& params, const StoreShape& shape) {
  using Config = StoreConfig<kHeadDim, kQuantizer>;
  static_assert(sizeof(typename Config::Shared) <= sizeof dynamic);
  const StorePlan plan = *plan_store(shape, 132);
  test::CudaEmulation emulation;
  for (int tile = 0; tile < plan.num_tiles; ++tile)
    for (int head = 0; head < 2 * shape.num_kv_heads; ++head) {
      std::fill(std::begin(dynamic), std::end(dynamic), std::uint8_t{0xff});  // NaN wherever nothing was written
      const dim3 block{static_cast<unsigned>(tile), static_cast<unsigned>(head), 0};
      emulation.run_block(block, Config::kNumThreads, [&] {
        if (plan.tile_tokens == 64)
          store_kernel<Config, 8>(params);
        else
          store_kernel<Config, 2>(params);
      });
    }
}

template <int kHeadDim, Quantizer kQuantizer>
void expect_pages_of_the_cpu(bool prefill) {
  const LayerRotation layer = test::random_layer(kHeadDim);
  const std::vector<test::StoreToken> tokens = test::tokens_of(prefill);
  const int num_tokens = static_cast<int>(tokens.size());
  const int width = test::kStoreHeads * kHeadDim;
  const std::vector<float> k = test::random_rows(tokens.size(), kHeadDim, prefill);
  const std::vector<float> v = test::random_rows(tokens.size(), kHeadDim, prefill);
  std::vector<std::int32_t> slots, positions, window_slots;
  std::vector<float> means;  // of a block a token
  for (int i = 0; i < num_tokens; ++i) {
    const test::StoreToken& token = tokens[static_cast<std::size_t>(i)];
    slots.push_back(token.page < 0 ? -1 : 64 * token.page + token.slot);
    positions.push_back(64 * i + token.position % 64);
    window_slots.push_back(i % 3 == 0 ? num_tokens - 1 - i : -1);
    for (const HeadRotation& head : layer.heads) {
      std::vector<float> mean(kHeadDim);
      block_mean(head, layer.rope, kHeadDim, token.position, mean.data());
      means.insert(means.end(), mean.begin(), mean.end());
    }
  }

  PagedLayer cpu;
  cpu.spec.num_kv_heads = test::kStoreHeads;
  cpu.spec.head_dim = kHeadDim;
  cpu.spec.parameter_format = kQuantizer == Quantizer::kMinMax ? ParameterFormat::kFloatPair : ParameterFormat::kLog8;
  cpu.rotation = &layer;
  const auto half = static_cast<std::int64_t>(cpu.spec.half_bytes());
  std::vector<uint4> memory(static_cast<std::size_t>(test::kStorePages * test::kStoreHeads * 2 * half / 16));
  auto* pages = reinterpret_cast<std::uint8_t*>(memory.data());
  std::vector<std::uint8_t> expected(memory.size() * sizeof(uint4));
  for (std::uint8_t& byte : expected) byte = static_cast<std::uint8_t>(test::generator());
  std::copy(expected.begin(), expected.end(), pages);
  cpu.key = {expected.data(), 2 * test::kStoreHeads * half, 2 * half};
  cpu.value = {expected.data() + half, 2 * test::kStoreHeads * half, 2 * half};
  for (int i = 0; i < num_tokens; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (slots[at] < 0) continue;
    const StoreRows one{1, &slots[at], &tokens[at].position, k.data() + at * width, v.data() + at * width};
    ASSERT_TRUE(oscar::store(cpu, kQuantizer, one, Isa::kScalar, serial_executor()));
  }

  const std::vector<std::uint16_t> k_bits = bf16_bits(k), v_bits = bf16_bits(v);
  std::vector<std::uint16_t> window_k(k_bits.size(), kUnwritten), window_v(v_bits.size(), kUnwritten);
  const SideTables key(layer, true, kHeadDim), value(layer, false, kHeadDim);
  const StoreShape shape{num_tokens, 1, test::kStoreHeads, kHeadDim, kQuantizer, /*exact=*/true};
  StoreParams params{};
  params.num_tokens = num_tokens;
  params.num_layers = 1;
  params.num_kv_heads = test::kStoreHeads;
  params.num_blocks = num_tokens;
  params.slot_mapping = slots.data();
  params.positions = positions.data();
  params.window_slots = window_slots.data();
  params.key_token_stride = params.value_token_stride = params.window_token_stride = width;
  params.key_head_stride = params.value_head_stride = params.window_head_stride = kHeadDim;
  params.page_stride_bytes = 2 * test::kStoreHeads * half;
  params.head_stride_bytes = 2 * half;
  params.layer.key = key.side(k_bits.data(), pages, window_k.data(), means.data());
  params.layer.value = value.side(v_bits.data(), pages + half, window_v.data(), nullptr);
  ASSERT_TRUE(check_store(params, shape));
  launch<kHeadDim, kQuantizer>(params, shape);

  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    ASSERT_EQ(pages[i], expected[i]) << "page " << at / (2 * test::kStoreHeads * half) << ", head "
                                     << at / (2 * half) % test::kStoreHeads << ", "
                                     << "kv"[at / half % 2] << " half, byte " << at % half;
  }
  std::vector<std::uint16_t> expected_k(k_bits.size(), kUnwritten), expected_v(v_bits.size(), kUnwritten);
  for (int i = 0; i < num_tokens; i += 3) {
    std::copy_n(k_bits.begin() + i * width, width, expected_k.begin() + (num_tokens - 1 - i) * width);
    std::copy_n(v_bits.begin() + i * width, width, expected_v.begin() + (num_tokens - 1 - i) * width);
  }
  EXPECT_EQ(window_k, expected_k);
  EXPECT_EQ(window_v, expected_v);
}

TEST(StoreKernel, MinMaxPagesAreTheCpus) {
  expect_pages_of_the_cpu<64, Quantizer::kMinMax>(false);
  expect_pages_of_the_cpu<64, Quantizer::kMinMax>(true);
  expect_pages_of_the_cpu<128, Quantizer::kMinMax>(true);
  expect_pages_of_the_cpu<256, Quantizer::kMinMax>(false);
}

TEST(StoreKernel, LeastSquaresPagesAreTheCpus) {
  expect_pages_of_the_cpu<64, Quantizer::kLeastSquares>(true);
  expect_pages_of_the_cpu<128, Quantizer::kLeastSquares>(false);
  expect_pages_of_the_cpu<128, Quantizer::kLeastSquares>(true);
  expect_pages_of_the_cpu<256, Quantizer::kLeastSquares>(false);
}

TEST(StoreKernel, FeedbackPagesAreTheCpus) {
  expect_pages_of_the_cpu<64, Quantizer::kFeedback>(true);
  expect_pages_of_the_cpu<128, Quantizer::kFeedback>(false);
  expect_pages_of_the_cpu<128, Quantizer::kFeedback>(true);
  expect_pages_of_the_cpu<256, Quantizer::kFeedback>(false);
}

TEST(CudaEmulation, ADivergentShuffleIsAnErrorAndNotAHang) {
  test::CudaEmulation emulation;
  EXPECT_THROW(emulation.run_block({}, 32,
                                   [] {
                                     if (threadIdx.x < 8) __shfl_xor_sync(~0u, 1, 4);
                                   }),
               std::runtime_error);
}

}  // namespace
}  // namespace oscar::cuda
