// Samples of a running model against an independent look at the same run: llama.cpp's own cache, and weights multiplied
// by hand.

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <oscar/ggml.hpp>

#include "llama_fixture.hpp"
#include "nodes.hpp"

namespace oscar::testing {
namespace {

constexpr int kTokens = 96;

struct Rows {
  int num_tokens = 0, num_qo_heads = 0, num_kv_heads = 0, head_dim = 0;
  std::vector<float> q{}, k{}, v{};
  RopeSpec rope{};
};
using Samples = std::map<int, Rows>;

SampleSink keep_in(Samples& samples) {
  return [&samples](const SampleBlock& block) -> Status {
    Rows& rows = samples[block.layer];
    rows = {.num_tokens = block.num_tokens,
            .num_qo_heads = block.num_qo_heads,
            .num_kv_heads = block.num_kv_heads,
            .head_dim = block.head_dim,
            .rope = *block.rope};
    const std::size_t q_size = static_cast<std::size_t>(block.num_tokens) * block.num_qo_heads * block.head_dim;
    const std::size_t kv_size = static_cast<std::size_t>(block.num_tokens) * block.num_kv_heads * block.head_dim;
    rows.q.assign(block.q, block.q + q_size);
    rows.k.assign(block.k, block.k + kv_size);
    rows.v.assign(block.v, block.v + kv_size);
    return {};
  };
}

// The cache of a stock context: F16 rows [tokens, width] by tensor name, read while the graph is alive.
struct CacheReader {
  std::map<std::string, std::vector<ggml_fp16_t>> rows;

  static bool on_node(ggml_tensor* node, bool ask, void* reader) {
    if (ggml::op_of(node) != ggml::Op::kSetRows) return false;
    if (ask) return true;
    const ggml_tensor* cache = ggml::root_of(node);
    std::vector<ggml_fp16_t>& copy = static_cast<CacheReader*>(reader)->rows[cache->name];
    copy.resize(cache->ne[0] * kTokens);
    ggml_backend_tensor_get(cache, copy.data(), 0, copy.size() * sizeof(ggml_fp16_t));
    return true;
  }
};

class SamplesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = load_model(GetParam());
    ASSERT_NE(model_, nullptr);
    tokens_ = passage_tokens(model_, kTokens);
  }
  llama_model* model_ = nullptr;
  std::vector<llama_token> tokens_;
};

TEST_P(SamplesTest, KeysAndValuesAreTheRowsOfTheStockCache) {
  ModelGeometry geometry;
  Samples samples;
  const Status status = ggml::sample_model(model_, {tokens_}, {}, geometry, keep_in(samples));
  ASSERT_TRUE(status.has_value()) << status.error().message;
  ASSERT_EQ(samples.size(), static_cast<std::size_t>(llama_model_n_layer(model_)));

  CacheReader reader;
  llama_context_params params = stock_params(256);
  params.cb_eval = CacheReader::on_node;
  params.cb_eval_user_data = &reader;
  const ContextPtr context(llama_init_from_model(model_, params));
  prefill(context.get(), tokens_);

  for (const auto& [layer, rows] : samples) {
    ASSERT_EQ(rows.num_tokens, kTokens);
    const std::vector<int> permutation = halves_permutation(rows.rope, rows.head_dim);
    const auto& keys = reader.rows.at("cache_k_l" + std::to_string(layer));
    const auto& values = reader.rows.at("cache_v_l" + std::to_string(layer));
    ASSERT_EQ(keys.size(), rows.k.size());
    ASSERT_EQ(values.size(), rows.v.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t head_start = i - i % rows.head_dim;
      wrong += ggml_fp32_to_fp16(rows.k[i]) != keys[head_start + permutation[i % rows.head_dim]];
      wrong += ggml_fp32_to_fp16(rows.v[i]) != values[i];
    }
    EXPECT_EQ(wrong, 0U) << "layer " << layer;
  }
}

// The RoPE that the sampler reports is the one that was applied: turning a key back by its position must give what the
// projection alone gives, which for the same token and the same history does not depend on the position.
TEST_P(SamplesTest, TheReportedRopeIsTheOneApplied) {
  // Layer 0 sees no history, so the keys of two equal tokens differ by RoPE alone.
  std::vector<llama_token> repeated(kTokens, tokens_[5]);
  ModelGeometry geometry;
  Samples samples;
  ASSERT_TRUE(ggml::sample_model(model_, {repeated}, {}, geometry, keep_in(samples)).has_value());
  const Rows& rows = samples.at(0);
  ASSERT_EQ(rows.rope.inv_freq.size(), static_cast<std::size_t>(rows.rope.rotary_dim / 2));
  // cos and sin of angles up to 95 radians in llama.cpp's float: 95 * 2^-24 = 6e-6, on keys of size up to 100 (Qwen's
  // bias).
  constexpr double kTolerance = 2e-4;
  double largest_key = 0, largest_error = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < rows.num_kv_heads; ++h) {
      const float* first = &rows.k[static_cast<std::size_t>(h) * rows.head_dim];
      const float* key = &rows.k[(static_cast<std::size_t>(t) * rows.num_kv_heads + h) * rows.head_dim];
      const int half = rows.rope.rotary_dim / 2;
      for (int p = 0; p < half; ++p) {
        const double angle = t * rows.rope.inv_freq[p], c = std::cos(angle), s = std::sin(angle);
        largest_key = std::max<double>(largest_key, std::hypot(key[p], key[p + half]));
        largest_error = std::max(largest_error, std::hypot(first[p] * c - first[p + half] * s - key[p],
                                                           first[p] * s + first[p + half] * c - key[p + half]));
      }
    }
  }
  EXPECT_LT(largest_error, kTolerance * largest_key);
}

TEST_P(SamplesTest, GeometryIsThatOfTheGraph) {
  ModelGeometry geometry;
  Samples samples;
  ASSERT_TRUE(ggml::sample_model(model_, {tokens_}, {}, geometry, keep_in(samples)).has_value());
  ASSERT_EQ(geometry.layers.size(), static_cast<std::size_t>(llama_model_n_layer(model_)));
  for (const LayerGeometry& layer : geometry.layers) {
    EXPECT_EQ(layer.kind, LayerKind::kFull);
    EXPECT_EQ(layer.sliding_window, 0);
    EXPECT_EQ(layer.num_qo_heads, llama_model_n_head(model_));
    EXPECT_EQ(layer.num_kv_heads, llama_model_n_head_kv(model_));
    EXPECT_EQ(layer.head_dim * layer.num_qo_heads, llama_model_n_embd(model_));
  }
}

TEST_P(SamplesTest, EveryWindowStartsAnew) {
  const std::vector<llama_token> other(tokens_.rbegin(), tokens_.rend());
  ModelGeometry geometry;
  Samples alone, after;
  ASSERT_TRUE(ggml::sample_model(model_, {tokens_}, {}, geometry, keep_in(alone)).has_value());
  ASSERT_TRUE(ggml::sample_model(model_, {other, tokens_}, {}, geometry, keep_in(after)).has_value());
  EXPECT_EQ(alone.rbegin()->second.k, after.rbegin()->second.k);
  EXPECT_EQ(alone.rbegin()->second.q, after.rbegin()->second.q);
}

TEST_P(SamplesTest, ProgressMayStopTheRun) {
  ModelGeometry geometry;
  int calls = 0;
  const ggml::SampleOptions options{.progress = [&](double fraction) {
    EXPECT_GT(fraction, 0);
    return ++calls < 3;
  }};
  const Status status =
      ggml::sample_model(model_, {tokens_}, options, geometry, [](const SampleBlock&) { return Status(); });
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kInterrupted);
  EXPECT_EQ(calls, 3);
}

TEST_P(SamplesTest, AnErrorOfTheSinkStopsTheRun) {
  ModelGeometry geometry;
  int calls = 0;
  const Status status = ggml::sample_model(model_, {tokens_}, {}, geometry, [&](const SampleBlock&) -> Status {
    ++calls;
    return make_error(ErrorCode::kBadInput, "the sink's own");
  });
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().message, "the sink's own");
  EXPECT_EQ(calls, 1);
}

TEST_P(SamplesTest, NoTextIsAnError) {
  ModelGeometry geometry;
  const auto sink = [](const SampleBlock&) { return Status(); };
  EXPECT_EQ(ggml::sample_model(model_, {}, {}, geometry, sink).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ggml::sample_model(model_, {{}}, {}, geometry, sink).error().code, ErrorCode::kInvalidArgument);
}

// One quadratic form of every head against the plain sum over the weight's rows.
TEST_P(SamplesTest, OutputGramIsTheFormOfTheOutputWeight) {
  ModelGeometry geometry;
  ModelStatistics statistics;
  ASSERT_TRUE(ggml::sample_model(model_, {tokens_}, {}, geometry, [&](const SampleBlock& block) {
                statistics.layers[block.layer].heads.resize(block.num_kv_heads);
                return Status();
              }).has_value());
  statistics.geometry = geometry;
  const std::string path = model_path(GetParam());
  const Status status = ggml::add_output_gram(path, statistics);
  ASSERT_TRUE(status.has_value()) << status.error().message;

  const int layer = llama_model_n_layer(model_) - 1;
  const LayerGeometry& shape = geometry.layers[layer];
  ggml_context* tensors = nullptr;
  gguf_context* header = gguf_init_from_file(path.c_str(), {.no_alloc = false, .ctx = &tensors});
  ASSERT_NE(header, nullptr);
  const ggml_tensor* weight =
      ggml_get_tensor(tensors, ("blk." + std::to_string(layer) + ".attn_output.weight").c_str());
  ASSERT_NE(weight, nullptr);

  std::vector<double> probe(shape.head_dim);
  for (int d = 0; d < shape.head_dim; ++d) probe[d] = std::sin(1.0 + d);
  std::vector<double> expected(shape.num_kv_heads, 0.0);
  std::vector<float> row(weight->ne[0]);
  for (int64_t i = 0; i < weight->ne[1]; ++i) {
    ggml_get_type_traits(weight->type)
        ->to_float(static_cast<const char*>(weight->data) + i * weight->nb[1], row.data(), weight->ne[0]);
    for (int h = 0; h < shape.num_qo_heads; ++h) {
      double dot = 0;
      for (int d = 0; d < shape.head_dim; ++d) dot += row[h * shape.head_dim + d] * probe[d];
      expected[h / shape.gqa_group()] += dot * dot;
    }
  }
  constexpr double kRelative = 1e-4;  // 256 rows are summed in float: 256 * 2^-24, with cancellation
  for (int h = 0; h < shape.num_kv_heads; ++h) {
    const std::vector<double>& gram = statistics.layers[layer].heads[h].output_gram;
    ASSERT_EQ(gram.size(), static_cast<std::size_t>(shape.head_dim) * shape.head_dim);
    double form = 0;
    for (int i = 0; i < shape.head_dim; ++i) {
      for (int j = 0; j < shape.head_dim; ++j) form += probe[i] * gram[i * shape.head_dim + j] * probe[j];
    }
    EXPECT_NEAR(form, expected[h], kRelative * expected[h]) << "KV head " << h;
  }
  gguf_free(header);
  ggml_free(tensors);
}

TEST_P(SamplesTest, OutputGramRefusesAnotherModelsFile) {
  ModelStatistics statistics;
  statistics.geometry.layers.resize(1000);
  statistics.layers[999].heads.resize(1);
  EXPECT_EQ(ggml::add_output_gram(model_path(GetParam()), statistics).error().code, ErrorCode::kUnsupported);
  statistics.layers.clear();
  statistics.geometry.layers[0] = {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim = 16};
  statistics.layers[0].heads.resize(1);
  EXPECT_EQ(ggml::add_output_gram(model_path(GetParam()), statistics).error().code, ErrorCode::kMismatch);
  EXPECT_EQ(ggml::add_output_gram("/no/such/file", statistics).error().code, ErrorCode::kIo);
}

INSTANTIATE_TEST_SUITE_P(Models, SamplesTest, ::testing::Values("smollm2.gguf", "qwen2.5-coder-0.5b.gguf"),
                         [](const auto& info) { return std::string(info.index == 0 ? "Interleaved" : "Halves"); });

}  // namespace
}  // namespace oscar::testing
