#include <algorithm>
#include <cmath>
#include <oscar/covariance.hpp>
#include <oscar/isa.hpp>

#include "covariance/gram.hpp"
#include "covariance/model_json.hpp"
#include "covariance/rope_turn.hpp"

namespace oscar {
namespace {

constexpr std::int64_t kMaxPosition = std::int64_t{1} << 24;  // bounds the block sums: 512 MiB a 256-wide head
constexpr double kLeastWeight = 1e-12;                        // of a block's total weight, as published

tl::unexpected<Error> invalid(const SampleBlock& block, const std::string& reason) {
  return make_error(ErrorCode::kInvalidArgument, "samples of layer " + std::to_string(block.layer) + ": " + reason);
}

Status check_block(const SampleBlock& block) {
  if (block.q == nullptr || block.k == nullptr || block.v == nullptr || block.rope == nullptr) {
    return invalid(block, "q, k, v or rope is null");
  }
  if (block.head_dim < 16 || block.head_dim > 256 || block.head_dim % 16 != 0) {
    return invalid(block, "head_dim is " + std::to_string(block.head_dim) + ", expected a multiple of 16 in 16..256");
  }
  if (block.num_kv_heads < 1 || block.num_qo_heads < 1 || block.num_qo_heads % block.num_kv_heads != 0) {
    return invalid(block, std::to_string(block.num_qo_heads) + " query heads do not share " +
                              std::to_string(block.num_kv_heads) + " KV heads evenly");
  }
  if (block.num_tokens < 1 || block.first_position < 0 || block.first_position > kMaxPosition - block.num_tokens) {
    return invalid(block, std::to_string(block.num_tokens) + " tokens from position " +
                              std::to_string(block.first_position) + " on, expected positions in 0..16777215");
  }
  if (const auto fault = rope_fault(*block.rope, block.head_dim)) return invalid(block, *fault);
  return {};
}

Status check_layer(const LayerStatistics& layer, const SampleBlock& block) {
  if (layer.heads.empty()) return {};
  const int num_heads = static_cast<int>(layer.heads.size());
  const int head_dim = layer.heads.front().head_dim;
  if (num_heads != block.num_kv_heads || head_dim != block.head_dim) {
    return invalid(block, std::to_string(block.num_kv_heads) + " KV heads of width " + std::to_string(block.head_dim) +
                              ", the statistics have " + std::to_string(num_heads) + " of width " +
                              std::to_string(head_dim) + "; collect each model's statistics on their own");
  }
  const RopeSpec& rope = *block.rope;
  if (layer.rope.order != rope.order || layer.rope.rotary_dim != rope.rotary_dim ||
      layer.rope.inv_freq != rope.inv_freq) {
    return invalid(block, "the RoPE differs from that of the statistics; collect each model's statistics on their own");
  }
  return {};
}

Status check_finite(const SampleBlock& block, const char* name, const float* rows, int num_heads) {
  const std::size_t row_size = static_cast<std::size_t>(num_heads) * static_cast<std::size_t>(block.head_dim);
  const std::size_t size = row_size * static_cast<std::size_t>(block.num_tokens);
  const float* bad = std::find_if(rows, rows + size, [](float value) { return !std::isfinite(value); });
  if (bad == rows + size) return {};
  const auto index = static_cast<std::size_t>(bad - rows);
  return make_error(ErrorCode::kBadInput,
                    "layer " + std::to_string(block.layer) + ": " + name + " of position " +
                        std::to_string(block.first_position + static_cast<std::int64_t>(index / row_size)) + ", head " +
                        std::to_string(index % row_size / static_cast<std::size_t>(block.head_dim)) +
                        " has a NaN or an infinity; check the model file");
}

HeadStatistics empty_head(int head_dim) {
  const auto width = static_cast<std::size_t>(head_dim);
  HeadStatistics head;
  head.head_dim = head_dim;
  head.pre_rope_key_sum.resize(width);
  head.value_sum.resize(width);
  head.query_moment.resize(width * width);
  head.key_moment.resize(width * width);
  head.value_moment.resize(width * width);
  head.weighted_value_moment.resize(width * width);
  return head;
}

// One KV head's rows of a block.
struct HeadRows {
  const float* q;  // first query head of the group
  const float* k;
  const float* v;
  std::ptrdiff_t q_stride;  // elements a token
  std::ptrdiff_t kv_stride;
  int group;  // query heads, head_dim apart
  int num_tokens;
  int num_skipped;  // leading tokens at positions below kSkippedSinkTokens
};

// Adds one block's sums of second order to one head after the other; keeps its buffers between them.
class MomentAdder {
 public:
  explicit MomentAdder(Isa isa) : tiles_(gram::tile_functions(isa)) {}

  void add(const HeadRows& rows, HeadStatistics& head) {
    const int width = head.head_dim;
    add_queries(rows, head);
    const auto skip = [&](const float* first) { return first + rows.num_skipped * rows.kv_stride; };
    const int num_kept = rows.num_tokens - rows.num_skipped;
    add_gram(skip(rows.k), rows.kv_stride, num_kept, width, head.key_moment.data());
    add_gram(skip(rows.v), rows.kv_stride, num_kept, width, head.value_moment.data());
    add_weighted_values(rows, head);
    for (auto* moment : {&head.key_moment, &head.value_moment, &head.weighted_value_moment}) {
      gram::mirror_upper(moment->data(), width);
    }
  }

 private:
  // Calls body(first row, number of rows) for all rows, a chunk at a time.
  template <typename Body>
  static void for_chunks(int num_rows, const Body& body) {
    for (int first = 0; first < num_rows; first += gram::kChunkRows) {
      body(first, std::min(gram::kChunkRows, num_rows - first));
    }
  }

  // Upper triangle of moment += rows^T rows.
  void add_gram(const float* rows, std::ptrdiff_t stride, int num_rows, int width, double* moment) {
    for_chunks(num_rows, [&](int first, int count) {
      gram::pack(rows + first * stride, stride, count, width, left_);
      gram::add_products(tiles_.exact, left_, left_, count, true, moment, width);
    });
  }

  // Leaves the block's mean query moment in block_queries_.
  void add_queries(const HeadRows& rows, HeadStatistics& head) {
    const int width = head.head_dim;
    block_queries_.assign(head.query_moment.size(), 0.0);
    for (int g = 0; g < rows.group; ++g) {
      add_gram(rows.q + g * width, rows.q_stride, rows.num_tokens, width, block_queries_.data());
    }
    gram::mirror_upper(block_queries_.data(), width);
    for (std::size_t i = 0; i < block_queries_.size(); ++i) {
      const double mean_over_group = block_queries_[i] / rows.group;
      head.query_moment[i] += mean_over_group;
      block_queries_[i] = mean_over_group / rows.num_tokens;
    }
    head.num_queries += rows.num_tokens;
  }

  // weights_[t] = k_t M k_t^T with M = block_queries_, scaled to mean 1.
  void find_weights(const HeadRows& rows, int width) {
    weights_.assign(static_cast<std::size_t>(rows.num_tokens), 0.0);
    gram::pack_matrix(block_queries_.data(), width, right_);
    double total = 0;
    for_chunks(rows.num_tokens, [&](int first, int count) {
      const float* keys = rows.k + first * rows.kv_stride;
      gram::pack_transposed(keys, rows.kv_stride, count, width, left_);
      products_.assign(static_cast<std::size_t>(gram::kChunkRows) * static_cast<std::size_t>(width), 0.0);
      gram::add_products(tiles_.rounded, left_, right_, width, false, products_.data(), width);
      for (int t = 0; t < count; ++t) {
        double weight = 0;
        for (int c = 0; c < width; ++c) {
          weight += products_[static_cast<std::size_t>(t * width + c)] * keys[t * rows.kv_stride + c];
        }
        weight = std::max(weight, 0.0);  // M is positive semidefinite up to rounding
        weights_[static_cast<std::size_t>(first + t)] = weight;
        total += weight;
      }
    });
    const double scale = rows.num_tokens / std::max(total, kLeastWeight);
    for (double& weight : weights_) weight *= scale;
  }

  void add_weighted_values(const HeadRows& rows, HeadStatistics& head) {
    const int width = head.head_dim;
    find_weights(rows, width);
    for_chunks(rows.num_tokens, [&](int first, int count) {
      const float* values = rows.v + first * rows.kv_stride;
      gram::pack_scaled(values, rows.kv_stride, count, width, weights_.data() + first, left_);
      gram::pack(values, rows.kv_stride, count, width, right_);
      gram::add_products(tiles_.rounded, left_, right_, count, true, head.weighted_value_moment.data(), width);
    });
    head.num_weighted += rows.num_tokens;
  }

  gram::TileFunctions tiles_;
  std::vector<double> left_, right_, products_, block_queries_, weights_;
};

void grow_blocks(LayerStatistics& layer, std::int64_t last_position) {
  const auto num_blocks = static_cast<std::size_t>(last_position / kBlockTokens + 1);
  for (HeadStatistics& head : layer.heads) {
    if (head.block_count.size() >= num_blocks) continue;
    head.block_count.resize(num_blocks);
    head.block_key_sum.resize(num_blocks * static_cast<std::size_t>(head.head_dim));
  }
}

// Sums of first order of keys and values. A key of position 64 B + t is turned back by t, added up over its block, and
// the sum turned back by 64 B: 64 angles a frequency serve every token and head.
void add_means(LayerStatistics& layer, const SampleBlock& block, int num_skipped) {
  const auto width = static_cast<std::size_t>(block.head_dim);
  grow_blocks(layer, block.first_position + block.num_tokens - 1);
  std::vector<RopeTurn> within_block(kBlockTokens, RopeTurn(layer.rope));
  for (int t = 0; t < kBlockTokens; ++t) within_block[static_cast<std::size_t>(t)].set_position(t);
  RopeTurn to_start(layer.rope);
  std::vector<double> turned_sum(width);

  for (int first = num_skipped; first < block.num_tokens;) {
    const std::int64_t position = block.first_position + first;
    const auto index = static_cast<std::size_t>(position / kBlockTokens);
    const auto slot = static_cast<int>(position % kBlockTokens);
    const int count = std::min(kBlockTokens - slot, block.num_tokens - first);
    to_start.set_position(-static_cast<double>(index) * kBlockTokens);
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      HeadStatistics& head = layer.heads[h];
      std::ranges::fill(turned_sum, 0.0);
      for (int t = 0; t < count; ++t) {
        const std::size_t row = (static_cast<std::size_t>(first + t) * layer.heads.size() + h) * width;
        within_block[static_cast<std::size_t>(slot + t)].add_turned_back(block.k + row, turned_sum);
        for (std::size_t c = 0; c < width; ++c) {
          head.block_key_sum[index * width + c] += block.k[row + c];
          head.value_sum[c] += block.v[row + c];
        }
      }
      to_start.turn(turned_sum.data());
      for (std::size_t c = 0; c < width; ++c) head.pre_rope_key_sum[c] += turned_sum[c];
      head.block_count[index] += count;
      head.num_keys += count;
    }
    first += count;
  }
}

}  // namespace

Status accumulate(LayerStatistics& layer, const SampleBlock& block) {
  OSCAR_TRY(check_block(block));
  OSCAR_TRY(check_layer(layer, block));
  OSCAR_TRY(check_finite(block, "q", block.q, block.num_qo_heads));
  OSCAR_TRY(check_finite(block, "k", block.k, block.num_kv_heads));
  OSCAR_TRY(check_finite(block, "v", block.v, block.num_kv_heads));
  OSCAR_ASSIGN(const Isa isa, select_isa());
  if (layer.heads.empty()) {
    layer.rope = *block.rope;
    layer.heads.assign(static_cast<std::size_t>(block.num_kv_heads), empty_head(block.head_dim));
  }
  const auto num_skipped =
      static_cast<int>(std::clamp<std::int64_t>(kSkippedSinkTokens - block.first_position, 0, block.num_tokens));
  add_means(layer, block, num_skipped);
  MomentAdder adder(isa);
  for (int h = 0; h < block.num_kv_heads; ++h) {
    const int group = block.num_qo_heads / block.num_kv_heads;
    const HeadRows rows{
        .q = block.q + static_cast<std::ptrdiff_t>(h) * group * block.head_dim,
        .k = block.k + static_cast<std::ptrdiff_t>(h) * block.head_dim,
        .v = block.v + static_cast<std::ptrdiff_t>(h) * block.head_dim,
        .q_stride = static_cast<std::ptrdiff_t>(block.num_qo_heads) * block.head_dim,
        .kv_stride = static_cast<std::ptrdiff_t>(block.num_kv_heads) * block.head_dim,
        .group = group,
        .num_tokens = block.num_tokens,
        .num_skipped = num_skipped,
    };
    adder.add(rows, layer.heads[static_cast<std::size_t>(h)]);
  }
  return {};
}

}  // namespace oscar
