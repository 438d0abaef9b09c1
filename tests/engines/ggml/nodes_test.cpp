// Reading of graph nodes, against ggml's own arithmetic and plain loops. Needs no model.

#include "nodes.hpp"

#include <ggml-backend.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

namespace oscar::ggml {
namespace {

const ggml_fp16_t kVisible = ggml_fp32_to_fp16(0.0F);
const ggml_fp16_t kHidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());

struct ContextDeleter {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
using ContextPtr = std::unique_ptr<ggml_context, ContextDeleter>;
ContextPtr make_context() {
  return ContextPtr(ggml_init({.mem_size = 32 << 20, .mem_buffer = nullptr, .no_alloc = false}));
}

TEST(CacheNameTest, OnlyCacheTensorsHaveALayer) {
  EXPECT_EQ(parse_cache_name("cache_k_l0")->layer, 0);
  EXPECT_EQ(parse_cache_name("cache_k_l0")->side, Side::kKey);
  EXPECT_EQ(parse_cache_name("cache_v_l31")->layer, 31);
  EXPECT_EQ(parse_cache_name("cache_v_l31")->side, Side::kValue);
  for (const char* other :
       {"cache_k_l", "cache_k_l3 (view)", "cache_k_lx", "cache_r_l0", "Kcur-3", "", "cache_k_l-1"}) {
    EXPECT_FALSE(parse_cache_name(other).has_value()) << other;
  }
}

RC_GTEST_PROP(MaskTest, BitsAreTheVisibleKeys, ()) {
  const auto visible = *rc::gen::container<std::vector<bool>>(rc::gen::arbitrary<bool>());
  std::vector<ggml_fp16_t> row;
  for (const bool v : visible) row.push_back(v ? kVisible : kHidden);
  std::vector<std::uint64_t> words((row.size() + 63) / 64, 0xDEAD);
  RC_ASSERT(visible_bits(row.data(), static_cast<std::int64_t>(row.size()), words.data()));
  for (std::size_t j = 0; j < 64 * words.size(); ++j) {
    RC_ASSERT((words[j / 64] >> (j % 64) & 1) == (j < visible.size() && visible[j] ? 1U : 0U));
  }
}

TEST(MaskTest, AnyOtherValueIsNoticed) {
  for (const std::size_t place : {0, 3, 63, 64, 129}) {
    for (const float value : {-1.0F, 0.5F, 1e-6F, std::numeric_limits<float>::infinity()}) {
      std::vector<ggml_fp16_t> row(130, kVisible);
      row[place] = ggml_fp32_to_fp16(value);
      std::vector<std::uint64_t> words(3);
      EXPECT_FALSE(visible_bits(row.data(), 130, words.data())) << value << " at " << place;
    }
  }
}

ggml_tensor* make_mask(ggml_context* context, int num_keys, int num_tokens,
                       const std::function<bool(int, int)>& visible) {
  ggml_tensor* mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, num_keys, num_tokens);
  auto* data = static_cast<ggml_fp16_t*>(mask->data);
  for (int i = 0; i < num_tokens; ++i) {
    for (int j = 0; j < num_keys; ++j) data[i * num_keys + j] = visible(i, j) ? kVisible : kHidden;
  }
  return mask;
}

TEST(MaskTest, TheWindowIsRead) {
  const ContextPtr context = make_context();
  for (const int window : {1, 7, 64, 100}) {
    const auto sliding = [&](int i, int j) { return j <= i && j > i - window; };
    EXPECT_EQ(read_window(make_mask(context.get(), 256, 130, sliding), 130).value(), window);
  }
  const auto causal = [](int i, int j) { return j <= i; };
  EXPECT_EQ(read_window(make_mask(context.get(), 256, 130, causal), 130).value(), 0);
}

TEST(MaskTest, OtherShapesAreRefused) {
  const ContextPtr context = make_context();
  const auto chunked = [](int i, int j) { return j <= i && j / 50 == i / 50; };
  const auto bidirectional = [](int, int j) { return j < 130; };
  for (const std::function<bool(int, int)>& shape : {std::function<bool(int, int)>(chunked), {bidirectional}}) {
    EXPECT_EQ(read_window(make_mask(context.get(), 256, 130, shape), 130).error().code, ErrorCode::kUnsupported);
  }
  EXPECT_EQ(read_window(nullptr, 130).error().code, ErrorCode::kUnsupported);
}

struct RopeCase {
  const char* name;
  int mode;
  int num_dims;
  float base, scale, ext_factor;
  bool factors;
};

class RopeTest : public ::testing::TestWithParam<RopeCase> {};

// ggml's own ROPE turns the vector of ones; read_rope's frequencies must predict every angle.
TEST_P(RopeTest, FrequenciesAreThoseOfGgml) {
  const RopeCase& rope = GetParam();
  constexpr int kHeadDim = 128, kPosition = 1000;
  // Angles of 1,000 radians in float32 are right to 1000 * 2^-24 = 6e-5, in a product of a few factors.
  constexpr double kTolerance = 5e-4;
  const ContextPtr context = make_context();
  ggml_tensor* rows = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, kHeadDim, 1, 1);
  std::fill_n(static_cast<float*>(rows->data), kHeadDim, 1.0F);
  ggml_tensor* positions = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 1);
  *static_cast<std::int32_t*>(positions->data) = kPosition;
  ggml_tensor* factors = nullptr;
  if (rope.factors) {
    factors = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, rope.num_dims / 2);
    for (int p = 0; p < rope.num_dims / 2; ++p)
      static_cast<float*>(factors->data)[p] = 1.0F + 0.1F * static_cast<float>(p);
  }
  ggml_tensor* turned = ggml_rope_ext(context.get(), rows, positions, factors, rope.num_dims, rope.mode, 4096,
                                      rope.base, rope.scale, rope.ext_factor, 1.0F, 32.0F, 1.0F);
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, turned);
  ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  ASSERT_EQ(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
  ggml_backend_free(backend);

  const auto spec = read_rope(turned, kHeadDim);
  ASSERT_TRUE(spec.has_value()) << spec.error().message;
  EXPECT_EQ(spec->rotary_dim, rope.num_dims);
  ASSERT_EQ(spec->inv_freq.size(), static_cast<std::size_t>(rope.num_dims / 2));
  const std::vector<int> permutation = halves_permutation(*spec, kHeadDim);
  const auto* out = static_cast<const float*>(turned->data);
  const double magnitude = rope.ext_factor != 0 ? 1 + 0.1 * std::log(1 / rope.scale) : 1;
  for (int p = 0; p < rope.num_dims / 2; ++p) {
    const double angle = kPosition * spec->inv_freq[p];
    EXPECT_NEAR(out[permutation[p]], magnitude * (std::cos(angle) - std::sin(angle)), kTolerance) << "pair " << p;
    EXPECT_NEAR(out[permutation[p + rope.num_dims / 2]], magnitude * (std::sin(angle) + std::cos(angle)), kTolerance);
  }
  for (int d = rope.num_dims; d < kHeadDim; ++d) EXPECT_EQ(out[d], 1.0F);
}

INSTANTIATE_TEST_SUITE_P(Modes, RopeTest,
                         ::testing::Values(RopeCase{"Pairs", GGML_ROPE_TYPE_NORMAL, 128, 10000, 1, 0, false},
                                           RopeCase{"Halves", GGML_ROPE_TYPE_NEOX, 128, 1e6F, 1, 0, false},
                                           RopeCase{"Partial", GGML_ROPE_TYPE_NEOX, 64, 10000, 1, 0, false},
                                           RopeCase{"Linear", GGML_ROPE_TYPE_NEOX, 128, 10000, 0.25F, 0, false},
                                           RopeCase{"Factors", GGML_ROPE_TYPE_NORMAL, 128, 500000, 1, 0, true},
                                           RopeCase{"Yarn", GGML_ROPE_TYPE_NEOX, 128, 1e6F, 0.25F, 1, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(RopeNodeTest, OtherRopesAreRefused) {
  const ContextPtr context = make_context();
  ggml_tensor* rows = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 64, 1, 1);
  ggml_tensor* positions = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 1);
  ggml_tensor* turned = ggml_rope(context.get(), rows, positions, 64, GGML_ROPE_TYPE_NEOX);
  EXPECT_TRUE(read_rope(turned, 64).has_value());
  EXPECT_EQ(read_rope(turned, 128).error().code, ErrorCode::kUnsupported);  // a part of a head
  turned->op_params[2] = GGML_ROPE_TYPE_MROPE;
  EXPECT_EQ(read_rope(turned, 64).error().code, ErrorCode::kUnsupported);
}

TEST(RopeNodeTest, TheNodeIsFoundBehindViewsAndScalings) {
  const ContextPtr context = make_context();
  ggml_tensor* weight = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 64, 64);
  ggml_tensor* input = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 64, 1);
  ggml_tensor* positions = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 1);
  ggml_tensor* projection = ggml_reshape_3d(context.get(), ggml_mul_mat(context.get(), weight, input), 64, 1, 1);
  ggml_tensor* turned = ggml_rope(context.get(), projection, positions, 64, GGML_ROPE_TYPE_NEOX);
  EXPECT_EQ(find_rope(turned).value(), turned);
  EXPECT_EQ(find_rope(ggml_reshape_2d(context.get(), ggml_scale(context.get(), turned, 0.5F), 64, 1)).value(), turned);
  EXPECT_EQ(find_rope(projection).value(), nullptr);
  EXPECT_EQ(find_rope(ggml_mul(context.get(), turned, turned)).error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace oscar::ggml
