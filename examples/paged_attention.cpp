// Decode attention over a paged 2-bit cache: 1000 tokens are stored, one query reads them.
#include <cstdio>
#include <cstdlib>
#include <oscar/attention.hpp>
#include <oscar/cache.hpp>
#include <random>
#include <string>
#include <vector>

constexpr int kHeadDim = 64, kQoHeads = 8, kKvHeads = 2, kTokens = 1000;
constexpr int kPages = (kTokens + oscar::kPageTokens - 1) / oscar::kPageTokens;

int fail(const oscar::Error& error) {
  std::fprintf(stderr, "%s\n", error.message.c_str());
  return EXIT_FAILURE;
}

std::vector<float> random_rows(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(size);
  for (float& value : rows) value = normal(random);
  return rows;
}

int main() {
  oscar::ModelGeometry geometry;
  geometry.architecture = "example";
  geometry.layers.resize(1);
  geometry.layers[0].num_qo_heads = kQoHeads;
  geometry.layers[0].num_kv_heads = kKvHeads;
  geometry.layers[0].head_dim = kHeadDim;
  const auto set = oscar::fit_rotation(geometry, oscar::Method::kHadamard);
  if (!set) return fail(set.error());

  // The pages are ours: a key half and a value half for each KV head, side by side.
  oscar::PagedLayer layer;
  layer.spec = {.num_kv_heads = kKvHeads, .head_dim = kHeadDim, .parameter_format = (*set)->parameter_format()};
  layer.rotation = &(*set)->layers.at(0);
  const std::size_t half = layer.spec.half_bytes();
  std::vector<std::uint8_t> pages(kPages * kKvHeads * 2 * half);
  layer.key = {pages.data(), static_cast<std::int64_t>(kKvHeads * 2 * half), static_cast<std::int64_t>(2 * half)};
  layer.value = {pages.data() + half, layer.key.page_stride_bytes, layer.key.head_stride_bytes};

  const std::vector<float> k = random_rows(std::size_t{kTokens} * kKvHeads * kHeadDim, 1);
  const std::vector<float> v = random_rows(k.size(), 2);
  std::vector<std::int32_t> tokens(kTokens);
  for (int i = 0; i < kTokens; ++i) tokens[static_cast<std::size_t>(i)] = i;
  const auto pool = oscar::make_thread_pool(2);
  const oscar::Isa isa = oscar::supported_isas().back();
  const oscar::StoreRows rows{kTokens, tokens.data(), tokens.data(), k.data(), v.data()};
  if (const auto stored = oscar::store(layer, (*set)->quantizer(), rows, isa, *pool); !stored)
    return fail(stored.error());

  // One query token after all of them. Without 16-bit windows (no spans) every key comes from its page.
  const std::vector<float> q = random_rows(std::size_t{kQoHeads} * kHeadDim, 3);
  const std::int32_t position = kTokens;
  std::vector<float> out(q.size()), lse(kQoHeads);
  oscar::AttentionParams params;
  params.q = q.data();
  params.q_token_stride = kQoHeads * kHeadDim;
  params.q_head_stride = kHeadDim;
  params.q_positions = &position;
  params.key_positions = tokens.data();
  params.scale = .125F;  // 1 / sqrt(head_dim)
  params.out = out.data();
  params.out_token_stride = params.q_token_stride;
  params.out_head_stride = params.q_head_stride;
  params.lse = lse.data();
  const auto plan = oscar::plan_attention({1, kTokens, kQoHeads, kKvHeads, kHeadDim}, pool->concurrency(), isa);
  std::vector<std::uint8_t> workspace(plan.workspace_bytes + 64);
  void* aligned = workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64) % 64;
  oscar::attend(plan, layer, params, aligned, *pool);

  std::printf("%d tokens in %zu bytes (16 bits: %zu); log-sum-exp of head 0: %.3f, first output: %+.4f\n", kTokens,
              pages.size(), 2 * 2 * k.size(), lse[0], out[0]);
  return EXIT_SUCCESS;
}
