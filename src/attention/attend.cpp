// Plans and runs attention on the CPU. Two passes: work items (query tile x KV head x range of pages) gather partial
// sums, then, where pages were split, each row's partials are merged by LSE.

#include <algorithm>
#include <atomic>
#include <oscar/attention.hpp>

#include "attention/tile.hpp"

namespace oscar {
namespace {

using attention::Call;
using attention::ScratchLayout;
using attention::state_bytes;
using attention::Tile;

// Rows (query tokens x heads of a group) that share one unpacked page: enough that unpacking and the conversion of
// 16-bit rows vanish, few enough that their state (16 head_dim bytes a row) stays in a 256 KB L2 cache up to head_dim
// 128.
constexpr int kRowsPerTile = 64;
// Pages of a split at least, so that its fixed work (transforming queries, one merge) stays below a tenth.
constexpr int kMinPagesPerSplit = 8;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

const cpu::AttentionKernels& kernels_of([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return cpu::avx2_attention_kernels();
  if (isa == Isa::kAvx512) return cpu::avx512_attention_kernels();
#endif
  return cpu::scalar_attention_kernels();
}

struct Job {
  Call call;
  std::byte* scratch;
  std::byte* partials;  // [num_queries, num_qo_heads, num_splits] states; null when there is one split
  std::atomic<int> next_item{0};

  int num_items() const { return call.plan.num_tiles * call.plan.shape.num_kv_heads * call.plan.num_splits; }

  std::byte* partial(int query, int qo_head) const {
    const AttentionShape& shape = call.plan.shape;
    const std::size_t row = static_cast<std::size_t>(query) * static_cast<std::size_t>(shape.num_qo_heads) +
                            static_cast<std::size_t>(qo_head);
    return partials + row * static_cast<std::size_t>(call.plan.num_splits) * state_bytes(shape.head_dim);
  }

  void run_item(int item, std::byte* own_scratch) const {
    const AttentionPlan& plan = call.plan;
    const AttentionShape& shape = plan.shape;
    const int split = item % plan.num_splits;
    const int kv_head = item / plan.num_splits % shape.num_kv_heads;
    // Last tile first: under a causal mask it has the most keys.
    const int tile_index = plan.num_tiles - 1 - item / plan.num_splits / shape.num_kv_heads;
    const int first_query = tile_index * plan.queries_per_tile;
    const int num_queries = std::min(plan.queries_per_tile, shape.num_queries - first_query);
    const int num_pages = divide_up(shape.num_tokens, kPageTokens);
    const int begin = std::min(split * plan.pages_per_split, num_pages);
    const int end = std::min(begin + plan.pages_per_split, num_pages);
    const int group = shape.num_qo_heads / shape.num_kv_heads;
    const std::size_t stride = state_bytes(shape.head_dim);

    Tile tile(call, own_scratch, kv_head, first_query, num_queries);
    tile.run(begin, end, tile.scratch_states());
    for (int row = 0; row < tile.num_rows(); ++row) {
      const int query = first_query + row / group, head = kv_head * group + row % group;
      std::byte* state = tile.scratch_states() + static_cast<std::size_t>(row) * stride;
      if (partials == nullptr) {
        attention::finish_row(call, query, head, state, 1, stride);
      } else {
        std::copy_n(state, stride, partial(query, head) + static_cast<std::size_t>(split) * stride);
      }
    }
  }

  void work(int worker) {
    std::byte* own =
        scratch + static_cast<std::size_t>(worker) * ScratchLayout(call.plan.shape, call.plan.queries_per_tile).bytes;
    for (int item = next_item.fetch_add(1); item < num_items(); item = next_item.fetch_add(1)) run_item(item, own);
  }

  void merge(int row) const {
    const AttentionShape& shape = call.plan.shape;
    const int query = row / shape.num_qo_heads, head = row % shape.num_qo_heads;
    attention::finish_row(call, query, head, partial(query, head), call.plan.num_splits, state_bytes(shape.head_dim));
  }
};

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, int concurrency, Isa isa) {
  AttentionPlan plan{.shape = shape, .isa = isa};
  if (shape.num_queries <= 0) {
    plan.num_tiles = 0;
    return plan;
  }
  const int group = shape.num_qo_heads / shape.num_kv_heads;
  plan.queries_per_tile = std::clamp(kRowsPerTile / group, 1, shape.num_queries);
  plan.num_tiles = divide_up(shape.num_queries, plan.queries_per_tile);
  plan.queries_per_tile = divide_up(shape.num_queries, plan.num_tiles);

  // Two items a thread even out what the mask makes unequal.
  const int num_pages = std::max(1, divide_up(shape.num_tokens, kPageTokens));
  const int items = plan.num_tiles * shape.num_kv_heads;
  const int wanted = concurrency <= 1 ? 1 : divide_up(2 * concurrency, items);
  plan.pages_per_split = std::max(divide_up(num_pages, wanted), std::min(kMinPagesPerSplit, num_pages));
  plan.num_splits = divide_up(num_pages, plan.pages_per_split);
  plan.num_workers = std::clamp(concurrency, 1, items * plan.num_splits);

  plan.workspace_bytes = static_cast<std::size_t>(plan.num_workers) * ScratchLayout(shape, plan.queries_per_tile).bytes;
  if (plan.num_splits > 1) {
    plan.workspace_bytes += static_cast<std::size_t>(shape.num_queries) * static_cast<std::size_t>(shape.num_qo_heads) *
                            static_cast<std::size_t>(plan.num_splits) * state_bytes(shape.head_dim);
  }
  return plan;
}

void attend(const AttentionPlan& plan, const PagedLayer& layer, const AttentionParams& params, void* workspace,
            Executor& executor) {
  if (plan.num_tiles == 0) return;
  auto* scratch = static_cast<std::byte*>(workspace);
  const std::size_t scratch_bytes =
      static_cast<std::size_t>(plan.num_workers) * ScratchLayout(plan.shape, plan.queries_per_tile).bytes;
  Job job{.call = {.plan = plan, .layer = layer, .params = params, .kernels = kernels_of(plan.isa)},
          .scratch = scratch,
          .partials = plan.num_splits > 1 ? scratch + scratch_bytes : nullptr};
  // One captured reference fits std::function's own storage: no allocation.
  executor.parallel_for(plan.num_workers, [&job](int worker) { job.work(worker); });
  if (job.partials != nullptr)
    executor.parallel_for(plan.shape.num_queries * plan.shape.num_qo_heads, [&job](int row) { job.merge(row); });
}

}  // namespace oscar
