#include "server.hpp"

#include <algorithm>
#include <memory>
#include <string>

namespace oscar::ggml {
namespace {

// Appends what is left of `window` after the tokens of `batch` (ascending) are taken out of it.
void append_uncovered(const ExactSpan& window, const std::vector<ExactSpan>& batch, std::vector<ExactSpan>& spans) {
  const auto append = [&](std::int32_t begin, std::int32_t end) {
    if (begin >= end) return;
    const std::int64_t offset = (begin - window.first_token) * window.token_stride;
    ExactSpan rest = window;
    rest.first_token = begin;
    rest.num_tokens = end - begin;
    rest.k += offset;
    rest.v += offset;
    spans.push_back(rest);
  };
  std::int32_t begin = window.first_token;
  const std::int32_t end = begin + window.num_tokens;
  for (const ExactSpan& fresh : batch) {
    if (fresh.first_token >= end) break;
    append(begin, std::min(end, fresh.first_token));
    begin = std::max(begin, fresh.first_token + fresh.num_tokens);
  }
  append(begin, end);
}

bool same_shape(const AttentionShape& a, const AttentionShape& b) {
  return a.num_queries == b.num_queries && a.num_tokens == b.num_tokens && a.num_qo_heads == b.num_qo_heads &&
         a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim;
}

std::int64_t elements(std::size_t stride_bytes) { return static_cast<std::int64_t>(stride_bytes / sizeof(float)); }

}  // namespace

void Server::resize(std::int64_t num_cells, int num_streams) {
  num_cells_ = num_cells;
  positions_.resize(static_cast<std::size_t>(num_cells * num_streams));
  forget();
}

void Server::forget() {
  batch_.drop();
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    positions_[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % num_cells_);
  }
}

Workbench Server::workbench() const {
  return {.quantizer = cache_.quantizer(),
          .isa = cache_.isa(),
          .executor = &cache_.executor(),
          .encode = cache_.config().encode_on_store && cache_.config().simulation == nullptr};
}

Status Server::simulate(LayerCache& layer, const Simulation& simulation, int first, int last) {
  return simulated_[layer.index()].update(layer, simulation, first, last, positions(0), cache_.executor());
}

Status Server::settle_simulated(LayerCache& layer) {
  const int num_rows = batch_.num_rows();
  const std::int32_t first = batch_.cell(0), last = batch_.cell(num_rows - 1) + 1;
  if (batch_.stream(0) != 0 || batch_.stream(num_rows - 1) != 0 || last - first != num_rows) {
    return make_error(ErrorCode::kUnsupported, "a simulated cache serves one sequence, stored without gaps");
  }
  OSCAR_TRY(finish_batch());
  return simulate(layer, *cache_.simulation(), first, last);
}

void Server::attend_simulated(LayerCache& layer, const AttentionParams& params, void* workspace) {
  const AttentionShape& shape = plan_.shape;
  if (split_at_ != evaluation_) {
    split_.split(params, shape.num_queries, shape.num_tokens);
    split_at_ = evaluation_;
  }
  simulated_attention_.attend(plan_, layer.stream(0).pages, params, split_,
                              simulated_[layer.index()].span(layer, shape.num_tokens), workspace, cache_.executor());
}

Status Server::finish_batch() { return batch_.commit(workbench()); }

Status Server::store_rows(LayerCache& layer, Side side, const ggml_tensor* node) {
  if (!batch_.accepts(layer, side)) {
    OSCAR_TRY(finish_batch());
    OSCAR_TRY(batch_.begin(layer, node->src[1]));
    std::uint64_t& last = stored_in_[layer.index()];
    if (last == evaluation_) {
      ++evaluation_;
      positions_known_ = false;
    }
    last = evaluation_;
  }
  if (side == Side::kKey) OSCAR_TRY(learn_positions(node->src[0]));
  for (int i = 0; i < batch_.num_rows(); ++i) batch_.set_position(i, positions(batch_.stream(i))[batch_.cell(i)]);
  batch_.stage(side, node->src[0]);
  return {};
}

// Positions are read with the first layer that has them: llama.cpp may reuse their memory after the last one.
Status Server::learn_positions(const ggml_tensor* key_rows) {
  if (positions_known_) return {};
  const int num_rows = batch_.num_rows();
  batch_positions_.resize(num_rows);
  OSCAR_ASSIGN(const ggml_tensor* rope, find_rope(key_rows));
  if (rope == nullptr) {  // keys without RoPE: the order of writing stands in
    for (int i = 0; i < num_rows; ++i) batch_positions_[i] = batch_.cell(i);
  } else {
    if (rope->src[1]->ne[0] != num_rows) {
      return make_error(ErrorCode::kUnsupported, describe(rope) + " has " + std::to_string(rope->src[1]->ne[0]) +
                                                     " positions for " + std::to_string(num_rows) + " tokens");
    }
    const auto* data = reinterpret_cast<const std::int32_t*>(host_bytes(rope->src[1], bytes_));
    std::copy_n(data, num_rows, batch_positions_.begin());
    positions_known_ = true;
  }
  for (int i = 0; i < num_rows; ++i) positions(batch_.stream(i))[batch_.cell(i)] = batch_positions_[i];
  return {};
}

Result<const std::uint64_t*> Server::visible_words(const ggml_tensor* mask, int stream) {
  const std::int64_t num_queries = mask->ne[1], num_streams = mask->ne[3];
  Visibility& seen = visibility_;
  if (seen.mask != mask || seen.data != mask->data || seen.evaluation != evaluation_) {
    seen = {.mask = mask,
            .data = mask->data,
            .evaluation = evaluation_,
            .words_per_query = (mask->ne[0] + 63) / 64,
            .words = std::move(seen.words)};
    seen.words.resize(static_cast<std::size_t>(seen.words_per_query * num_queries * num_streams));
    const std::byte* data = host_bytes(mask, mask_bytes_);
    for (std::int64_t row = 0; row < num_queries * num_streams; ++row) {
      const std::byte* values = data + row / num_queries * mask->nb[3] + row % num_queries * mask->nb[1];
      if (!visible_bits(reinterpret_cast<const ggml_fp16_t*>(values), mask->ne[0],
                        seen.words.data() + row * seen.words_per_query)) {
        seen.mask = nullptr;
        return make_error(ErrorCode::kUnsupported,
                          "an attention mask holds values other than 0 and -infinity, which pages cannot serve");
      }
    }
  }
  return seen.words.data() + static_cast<std::int64_t>(stream % num_streams) * num_queries * seen.words_per_query;
}

void Server::gather_spans(LayerCache& layer, int stream, std::int64_t num_keys) {
  batch_spans_.clear();
  if (batch_.belongs_to(layer)) batch_.append_spans(stream, cache_.config().exact_batch, batch_spans_);
  layer.stream(stream).windows.spans(static_cast<std::int32_t>(num_keys), window_spans_);
  spans_.clear();
  for (const ExactSpan& window : window_spans_) append_uncovered(window, batch_spans_, spans_);
  const auto middle = static_cast<std::ptrdiff_t>(spans_.size());
  spans_.insert(spans_.end(), batch_spans_.begin(), batch_spans_.end());
  std::inplace_merge(spans_.begin(), spans_.begin() + middle, spans_.end(),
                     [](const ExactSpan& a, const ExactSpan& b) { return a.first_token < b.first_token; });
}

const float* Server::queries_in_halves_order(const LayerCache& layer, const ggml_tensor* q, const std::byte* data) {
  const std::int64_t head_dim = q->ne[0], num_queries = q->ne[1], num_heads = q->ne[2];
  queries_.resize(static_cast<std::size_t>(head_dim * num_queries * num_heads));
  float* out = queries_.data();
  for (std::int64_t t = 0; t < num_queries; ++t) {
    for (std::int64_t h = 0; h < num_heads; ++h) {
      const auto* head = reinterpret_cast<const float*>(data + t * q->nb[1] + h * q->nb[2]);
      for (const int channel : layer.permutation()) *out++ = head[channel];
    }
  }
  return queries_.data();
}

Status Server::attend_to(LayerCache& layer, ggml_tensor* node) {
  const ggml_tensor *q = node->src[0], *k = node->src[1];
  const std::int64_t num_queries = q->ne[1], num_keys = k->ne[1];
  const LayerLayout& layout = layer.layout();
  const bool simulated = cache_.simulation() != nullptr;
  if (batch_.belongs_to(layer)) OSCAR_TRY(simulated ? settle_simulated(layer) : batch_.encode(workbench()));
  if (static_cast<std::int64_t>(batch_positions_.size()) != num_queries * q->ne[3]) {
    return make_error(ErrorCode::kUnsupported, "layer " + std::to_string(layer.index()) + ": attention of " +
                                                   std::to_string(num_queries * q->ne[3]) + " queries after " +
                                                   std::to_string(batch_positions_.size()) + " tokens were stored");
  }

  const AttentionShape shape{.num_queries = static_cast<int>(num_queries),
                             .num_tokens = static_cast<int>(num_keys),
                             .num_qo_heads = static_cast<int>(q->ne[2]),
                             .num_kv_heads = layout.num_kv_heads,
                             .head_dim = layout.head_dim};
  if (!same_shape(plan_.shape, shape)) plan_ = plan_attention(shape, cache_.executor().concurrency(), cache_.isa());
  if (workspace_.size() < plan_.workspace_bytes + kAlignment) workspace_.resize(plan_.workspace_bytes + kAlignment);
  void* workspace = workspace_.data();
  std::size_t space = workspace_.size();
  std::align(kAlignment, plan_.workspace_bytes, workspace, space);

  const AttentionNode node_params = read_attention(node);
  const std::size_t stream_bytes =
      static_cast<std::size_t>(layout.row_width() * layout.num_cells) * sizeof(ggml_fp16_t);
  const int first_stream = static_cast<int>(k->view_offs / stream_bytes);
  const std::byte* query_data = host_bytes(q, bytes_);
  for (int s = 0; s < static_cast<int>(q->ne[3]); ++s) {
    const int stream = first_stream + s;
    OSCAR_ASSIGN(const std::uint64_t* visible, visible_words(node->src[3], s));
    gather_spans(layer, stream, num_keys);
    AttentionParams params;
    const std::byte* own_queries = query_data + s * q->nb[3];
    if (layer.permutation().empty()) {
      params.q = reinterpret_cast<const float*>(own_queries);
      params.q_token_stride = elements(q->nb[1]);
      params.q_head_stride = elements(q->nb[2]);
    } else {
      params.q = queries_in_halves_order(layer, q, own_queries);
      params.q_token_stride = q->ne[0] * q->ne[2];
      params.q_head_stride = q->ne[0];
    }
    params.q_positions = batch_positions_.data() + s * num_queries;
    params.key_positions = positions(stream);
    params.visible = visible;
    params.visible_stride = visibility_.words_per_query;
    params.scale = node_params.scale;
    params.soft_cap = node_params.soft_cap;
    params.sink = cache_.sink();
    params.recent = cache_.recent();
    params.exact_all = cache_.exact_all();
    params.spans = spans_.data();
    params.num_spans = static_cast<int>(spans_.size());
    params.out = reinterpret_cast<float*>(static_cast<std::byte*>(node->data) + s * node->nb[3]);
    params.out_token_stride = elements(node->nb[2]);
    params.out_head_stride = elements(node->nb[1]);
    if (simulated) {
      attend_simulated(layer, params, workspace);
    } else {
      attend(plan_, layer.stream(stream).pages, params, workspace, cache_.executor());
    }
  }
  return batch_.belongs_to(layer) ? finish_batch() : Status();
}

Status Server::turn_keys(LayerCache& layer, const ggml_tensor* node) {
  OSCAR_TRY(finish_batch());
  const auto* shifts = reinterpret_cast<const std::int32_t*>(host_bytes(node->src[1], bytes_));
  std::uint64_t& last = turned_in_[layer.index()];
  if (last == shift_) ++shift_;
  last = shift_;
  if (applied_shift_ != shift_) {  // the first layer of this shift; the others find the new positions
    for (std::size_t i = 0; i < positions_.size(); ++i) positions_[i] += shifts[i];
    applied_shift_ = shift_;
  }
  const Workbench bench = workbench();
  for (int stream = 0; stream < layer.layout().num_streams; ++stream) {
    OSCAR_TRY(layer.turn_keys(stream, shifts + num_cells_ * stream, positions(stream), bench));
  }
  return {};
}

}  // namespace oscar::ggml
