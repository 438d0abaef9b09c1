// Attention of one layer over a long cache, one thread: oscar's INT2 pages against ggml's flash attention on F16, Q8_0
// and Q4_0 caches of the same shape, in one process. Decode: one query token, sink 64 and recent 256 exact. Prefill:
// 256 query tokens over the same history. Items are keys: items_per_second / 1e9 = keys a nanosecond.
//   attention_bench --benchmark_filter=decode/qwen2.5-0.5b/16384 --benchmark_repetitions=30
//     --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <oscar/attention.hpp>
#include <random>
#include <string>
#include <vector>

#ifdef OSCAR_BENCH_GGML
#include <ggml-cpu.h>
#include <ggml.h>
#endif

namespace {

using namespace oscar;

struct ModelShape {
  const char* name;
  int num_qo_heads, num_kv_heads, head_dim;
};
constexpr ModelShape kModels[] = {
    {"qwen2.5-0.5b", 14, 2, 64}, {"smollm2", 9, 3, 64}, {"qwen2.5-1.5b", 12, 2, 128}, {"qwen3-8b", 32, 8, 128}};

std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

std::vector<float> normals(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Random pages and rows of one layer. Logits spread by about one, as flat as attention gets: no page is negligible.
class Layer {
 public:
  Layer(const ModelShape& model, int num_queries, int num_tokens, bool exact)
      : shape_{num_queries, num_tokens, model.num_qo_heads, model.num_kv_heads, model.head_dim} {
    const auto dim = static_cast<std::size_t>(model.head_dim), tokens = static_cast<std::size_t>(num_tokens);
    const auto kv_heads = static_cast<std::size_t>(model.num_kv_heads);
    rotation_.rope = {.order = RopeOrder::kHalves, .rotary_dim = model.head_dim, .inv_freq = {}};
    for (int p = 0; p < model.head_dim / 2; ++p) {
      rotation_.rope.inv_freq.push_back(std::pow(1e6, -2.0 * p / model.head_dim));
    }
    rotation_.heads.resize(kv_heads);
    for (HeadRotation& head : rotation_.heads) {
      for (SideRotation* side : {&head.key, &head.value}) {
        side->inverse_transposed.assign(dim * dim, 0);
        for (std::size_t c = 0; c < dim; ++c) side->inverse_transposed[c * dim + c] = 1;
      }
      head.page_mean.assign(dim, 1.0);
    }
    const std::size_t half = dim * 16 + 128, num_pages = (tokens + 63) / 64;
    pages_.resize(num_pages * kv_heads * 2 * half);
    std::mt19937 random(1);
    for (std::uint8_t& byte : pages_) byte = static_cast<std::uint8_t>(random());
    for (std::size_t at = dim * 16; at < pages_.size(); at += half) {
      std::memset(&pages_[at], 0, 64);                                              // scale 1
      for (std::size_t t = 64; t < 128; ++t) pages_[at + t] = pages_[at + t] & 15;  // offset up to 15 sd / 20
    }
    layer_.spec = {.num_kv_heads = model.num_kv_heads, .head_dim = model.head_dim};
    layer_.rotation = &rotation_;
    layer_.key = {.base = pages_.data(),
                  .page_stride_bytes = static_cast<std::int64_t>(kv_heads * 2 * half),
                  .head_stride_bytes = static_cast<std::int64_t>(2 * half)};
    layer_.value = layer_.key;
    layer_.value.base += half;

    for (const float value : normals(tokens * kv_heads * dim, 2)) rows_.push_back(to_bf16(value));
    const std::int64_t stride = std::int64_t{model.num_kv_heads} * model.head_dim;
    const auto span = [&](int first, int count) {
      const std::uint16_t* row = rows_.data() + first * stride;
      return ExactSpan{first, count, row, row, stride, model.head_dim, false};
    };
    if (exact) {
      spans_ = {span(0, num_tokens)};
    } else {
      const int sink = std::min(64, num_tokens), window = std::min(256 + num_queries, num_tokens - sink);
      spans_ = {span(0, sink), span(num_tokens - window, window)};
    }
    q_ = normals(static_cast<std::size_t>(num_queries * model.num_qo_heads) * dim, 3);
    out_.resize(q_.size());
    for (int t = 0; t < num_tokens; ++t) positions_.push_back(t);
    params_.q = q_.data();
    params_.q_token_stride = params_.out_token_stride = std::int64_t{model.num_qo_heads} * model.head_dim;
    params_.q_head_stride = params_.out_head_stride = model.head_dim;
    params_.q_positions = positions_.data() + (num_tokens - num_queries);
    params_.key_positions = positions_.data();
    params_.scale = 1 / std::sqrt(static_cast<float>(model.head_dim));
    params_.exact_all = exact;
    params_.spans = spans_.data();
    params_.num_spans = static_cast<int>(spans_.size());
    params_.out = out_.data();
  }

  void run(Isa isa) {
    const AttentionPlan plan = plan_attention(shape_, 1, isa);
    workspace_.resize(plan.workspace_bytes / sizeof(Line));
    attend(plan, layer_, params_, workspace_.data(), serial_executor());
    benchmark::DoNotOptimize(out_.data());
  }

  std::size_t page_bytes() const { return pages_.size(); }

 private:
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  AttentionShape shape_;
  LayerRotation rotation_;
  PagedLayer layer_;
  AttentionParams params_;
  std::vector<std::uint8_t> pages_;
  std::vector<std::uint16_t> rows_;
  std::vector<ExactSpan> spans_;
  std::vector<std::int32_t> positions_;
  std::vector<float> q_, out_;
  std::vector<Line> workspace_;
};

void run_oscar(benchmark::State& state, const ModelShape& model, int num_queries, int num_tokens, bool exact, Isa isa) {
  Layer layer(model, num_queries, num_tokens, exact);
  layer.run(isa);
  for (auto _ : state) layer.run(isa);
  state.SetItemsProcessed(state.iterations() * num_tokens);
  if (!exact) state.counters["MB"] = static_cast<double>(layer.page_bytes()) / 1e6;
}

#ifdef OSCAR_BENCH_GGML
void run_ggml(benchmark::State& state, const ModelShape& model, int num_queries, int num_tokens, ggml_type type) {
  const ggml_init_params init = {
      .mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead(), .mem_buffer = nullptr, .no_alloc = true};
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init(init), ggml_free);
  std::vector<std::vector<char>> storage;
  const auto tensor = [&](ggml_type element, std::int64_t a, std::int64_t b, std::int64_t c) {
    ggml_tensor* result = ggml_new_tensor_3d(context.get(), element, a, b, c);
    storage.emplace_back(ggml_nbytes(result));
    result->data = storage.back().data();
    return result;
  };
  // As llama.cpp lays a cache out: rows [num_kv_heads, head_dim] of a token together, viewed [head_dim, tokens, heads].
  const auto cache = [&](unsigned seed) {
    ggml_tensor* rows = tensor(type, model.head_dim, model.num_kv_heads, num_tokens);
    const std::vector<float> values = normals(static_cast<std::size_t>(ggml_nelements(rows)), seed);
    ggml_quantize_chunk(type, values.data(), rows->data, 0, ggml_nrows(rows), model.head_dim, nullptr);
    ggml_tensor* view = ggml_permute(context.get(), rows, 0, 2, 1, 3);
    view->data = rows->data;
    return view;
  };
  ggml_tensor* q = tensor(GGML_TYPE_F32, model.head_dim, num_queries, model.num_qo_heads);
  const std::vector<float> values = normals(static_cast<std::size_t>(ggml_nelements(q)), 3);
  std::memcpy(q->data, values.data(), ggml_nbytes(q));
  ggml_tensor *k = cache(4), *v = cache(5);
  ggml_tensor* mask = tensor(GGML_TYPE_F16, num_tokens, num_queries, 1);
  for (int i = 0; i < num_queries; ++i) {
    for (int t = 0; t < num_tokens; ++t) {
      const bool visible = t <= num_tokens - num_queries + i;
      static_cast<ggml_fp16_t*>(mask->data)[i * num_tokens + t] = ggml_fp32_to_fp16(visible ? 0.0f : -INFINITY);
    }
  }
  ggml_tensor* out =
      ggml_flash_attn_ext(context.get(), q, k, v, mask, 1 / std::sqrt(static_cast<float>(model.head_dim)), 0, 0);
  std::vector<char> result(ggml_nbytes(out));
  out->data = result.data();
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, out);
  ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
  std::vector<std::uint8_t> work(plan.work_size);
  plan.work_data = work.data();
  ggml_graph_compute(graph, &plan);
  for (auto _ : state) ggml_graph_compute(graph, &plan);
  state.SetItemsProcessed(state.iterations() * num_tokens);
}
#endif

void register_all(Isa isa) {
  const auto add = [](const std::string& name, auto body) {
    benchmark::RegisterBenchmark(name.c_str(), body)->Unit(benchmark::kMicrosecond);
  };
  for (const ModelShape& model : kModels) {
    for (const int num_queries : {1, 256}) {
      for (const int num_tokens : {2048, 8192, 16384, 32768}) {
        if (num_queries > 1 && num_tokens > 8192) continue;
        const std::string name =
            std::string(num_queries == 1 ? "decode/" : "prefill/") + model.name + "/" + std::to_string(num_tokens);
        add(name + "/oscar-int2-" + std::string(isa_name(isa)),
            [=](benchmark::State& state) { run_oscar(state, model, num_queries, num_tokens, false, isa); });
        if (num_queries > 1) {
          add(name + "/oscar-exact-" + std::string(isa_name(isa)),
              [=](benchmark::State& state) { run_oscar(state, model, num_queries, num_tokens, true, isa); });
        }
#ifdef OSCAR_BENCH_GGML
        add(name + "/ggml-f16",
            [=](benchmark::State& state) { run_ggml(state, model, num_queries, num_tokens, GGML_TYPE_F16); });
        add(name + "/ggml-q8_0",
            [=](benchmark::State& state) { run_ggml(state, model, num_queries, num_tokens, GGML_TYPE_Q8_0); });
        add(name + "/ggml-q4_0",
            [=](benchmark::State& state) { run_ggml(state, model, num_queries, num_tokens, GGML_TYPE_Q4_0); });
#endif
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const oscar::Result<oscar::Isa> isa = oscar::select_isa();
  if (!isa) {
    std::cerr << isa.error().message << '\n';
    return 2;
  }
  register_all(*isa);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
