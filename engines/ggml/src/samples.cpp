// Samples: post-RoPE queries, keys and values of a real run, taken from the nodes of llama.cpp's graph as it is
// computed. Keys and values are the sources of the SET_ROWS into the cache, queries the source of FLASH_ATTN_EXT:
// neither is computed in place, and whatever a model does after RoPE (norms, scales) has happened by then. Tensor names
// mean little; only the layer number of a cache tensor is read from one.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <oscar/ggml.hpp>
#include <string>

#include "nodes.hpp"

namespace oscar::ggml {
namespace {

struct ContextDeleter {
  void operator()(llama_context* context) const { llama_free(context); }
};

// Copies heads [num_tokens, num_heads, head_dim], each head's channels permuted.
void copy_heads(const std::byte* source, std::size_t token_stride_bytes, std::size_t head_stride_bytes,
                const std::vector<int>& permutation, int num_tokens, int num_heads, std::vector<float>& target) {
  const std::size_t head_dim = permutation.size();
  target.resize(static_cast<std::size_t>(num_tokens) * num_heads * head_dim);
  float* out = target.data();
  for (int t = 0; t < num_tokens; ++t) {
    for (int h = 0; h < num_heads; ++h) {
      const auto* head = reinterpret_cast<const float*>(source + t * token_stride_bytes + h * head_stride_bytes);
      for (const int channel : permutation) *out++ = head[channel];
    }
  }
}

class Sampler {
 public:
  Sampler(const SampleOptions& options, ModelGeometry& geometry, const SampleSink& sink, std::size_t num_windows)
      : options_(options), geometry_(geometry), sink_(sink), num_windows_(num_windows) {}

  void begin_window(int num_tokens) {
    num_tokens_ = num_tokens;
    layers_done_ = 0;
    pending_ = {};
    windows_by_mask_.clear();
  }
  void end_window() { ++windows_done_; }

  bool stopped() const { return !status_.has_value(); }
  Status status() const { return status_; }
  const std::map<int, RopeSpec>& layers() const { return ropes_; }

  // llama_context_params::cb_eval.
  static bool on_node(ggml_tensor* node, bool ask, void* sampler) {
    auto& self = *static_cast<Sampler*>(sampler);
    if (self.stopped()) return false;
    const Op op = op_of(node);
    if (op != Op::kSetRows && op != Op::kFlashAttention) return false;
    if (ask) return true;
    self.status_ = op == Op::kSetRows ? self.on_store(node) : self.on_attention(node);
    return !self.stopped();
  }
  static bool should_abort(void* sampler) { return static_cast<Sampler*>(sampler)->stopped(); }

 private:
  // Rows of one layer between its stores and its attention. Copied: llama.cpp reuses their memory once they are stored.
  struct Pending {
    int layer = -1;
    const ggml_tensor* key_rows = nullptr;  // the node, for its history
    bool has_values = false;
  };

  Status on_store(const ggml_tensor* node) {
    const auto name = parse_cache_name(root_of(node)->name);
    if (!name) return {};  // some other table
    const ggml_tensor* rows = node->src[0];
    const std::string who = "layer " + std::to_string(name->layer);
    if (rows->type != GGML_TYPE_F32 || rows->ne[1] != num_tokens_) {
      return make_error(ErrorCode::kUnsupported, who + ": the cache does not take one row a token (" +
                                                     std::to_string(rows->ne[1]) + " rows of " +
                                                     std::to_string(num_tokens_) + " tokens)");
    }
    if (pending_.layer != name->layer) pending_ = {.layer = name->layer};
    const bool is_key = name->side == Side::kKey;
    if (is_key) pending_.key_rows = rows;
    if (!is_key) pending_.has_values = true;
    std::vector<float>& copy = is_key ? key_rows_ : value_rows_;
    copy.resize(static_cast<std::size_t>(rows->ne[0]) * num_tokens_);
    const std::byte* source = host_bytes(rows, scratch_);
    const std::size_t row_bytes = static_cast<std::size_t>(rows->ne[0]) * sizeof(float);
    for (int t = 0; t < num_tokens_; ++t) {
      std::memcpy(copy.data() + t * rows->ne[0], source + t * rows->nb[1], row_bytes);
    }
    return {};
  }

  Status on_attention(const ggml_tensor* node) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const auto name = parse_cache_name(root_of(k)->name);
    if (!name) {
      return make_error(ErrorCode::kUnsupported,
                        describe(node) + " does not read a KV cache; only decoder models are supported");
    }
    const int layer = name->layer;
    const std::string who = "layer " + std::to_string(layer);
    if (root_of(v) == root_of(k)) {
      return make_error(ErrorCode::kUnsupported, who + ": values are a part of the keys (MLA), which is not supported");
    }
    if (node->src[4] != nullptr) {
      return make_error(ErrorCode::kUnsupported, who + ": attention has sink logits, which are not supported");
    }
    if (read_attention(node).max_bias != 0) {
      return make_error(ErrorCode::kUnsupported, who + ": attention has ALiBi biases, which are not supported");
    }
    const auto head_dim = static_cast<int>(k->ne[0]);
    const auto num_kv_heads = static_cast<int>(k->ne[2]);
    if (v->ne[0] != head_dim || v->ne[2] != num_kv_heads || head_dim % 16 != 0) {
      return make_error(ErrorCode::kUnsupported, who + ": head_dim is " + std::to_string(head_dim) + " for keys and " +
                                                     std::to_string(v->ne[0]) +
                                                     " for values; they must be equal and a multiple of 16");
    }
    if (pending_.layer != layer || pending_.key_rows == nullptr || !pending_.has_values) {
      return {};  // a layer that attends to another layer's cache: those keys were sampled with their own layer
    }

    OSCAR_TRY(learn_layer(layer, node));
    if (geometry_.layers[layer].kind == LayerKind::kFull) {
      OSCAR_TRY(hand_over(layer, q, num_kv_heads, head_dim));
    }
    pending_ = {};
    ++layers_done_;
    if (options_.progress) {
      const double layers = static_cast<double>(layers_done_) / static_cast<double>(geometry_.layers.size());
      if (!options_.progress((static_cast<double>(windows_done_) + layers) / static_cast<double>(num_windows_))) {
        return make_error(ErrorCode::kInterrupted, "sampling was stopped");
      }
    }
    return {};
  }

  // Geometry and RoPE of a layer, as its nodes show them.
  Status learn_layer(int layer, const ggml_tensor* node) {
    if (layer >= static_cast<int>(geometry_.layers.size())) geometry_.layers.resize(layer + 1);
    const ggml_tensor* mask = node->src[3];
    if (!windows_by_mask_.contains(mask)) {
      OSCAR_ASSIGN(windows_by_mask_[mask], read_window(mask, num_tokens_));
    }
    const int window = windows_by_mask_[mask];
    geometry_.layers[layer] = {.kind = window > 0 ? LayerKind::kSlidingWindow : LayerKind::kFull,
                               .num_qo_heads = static_cast<int>(node->src[0]->ne[2]),
                               .num_kv_heads = static_cast<int>(node->src[1]->ne[2]),
                               .head_dim = static_cast<int>(node->src[1]->ne[0]),
                               .sliding_window = window};
    if (!ropes_.contains(layer)) {
      OSCAR_ASSIGN(const ggml_tensor* rope, find_rope(pending_.key_rows));
      if (rope != nullptr) {
        OSCAR_ASSIGN(ropes_[layer], read_rope(rope, geometry_.layers[layer].head_dim));
      } else {
        ropes_[layer] = {};
      }
    }
    return {};
  }

  Status hand_over(int layer, const ggml_tensor* q, int num_kv_heads, int head_dim) {
    const RopeSpec& rope = ropes_[layer];
    const std::vector<int> halves = halves_permutation(rope, head_dim);
    const auto num_qo_heads = static_cast<int>(q->ne[2]);
    copy_heads(host_bytes(q, scratch_), q->nb[1], q->nb[2], halves, num_tokens_, num_qo_heads, q_);
    const std::size_t head_bytes = static_cast<std::size_t>(head_dim) * sizeof(float);
    const auto* keys = reinterpret_cast<const std::byte*>(key_rows_.data());
    copy_heads(keys, head_bytes * num_kv_heads, head_bytes, halves, num_tokens_, num_kv_heads, k_);
    return sink_({.layer = layer,
                  .first_position = 0,
                  .num_tokens = num_tokens_,
                  .num_qo_heads = num_qo_heads,
                  .num_kv_heads = num_kv_heads,
                  .head_dim = head_dim,
                  .q = q_.data(),
                  .k = k_.data(),
                  .v = value_rows_.data(),
                  .rope = &rope});
  }

  const SampleOptions& options_;
  ModelGeometry& geometry_;
  const SampleSink& sink_;
  std::size_t num_windows_;
  std::size_t windows_done_ = 0;
  int num_tokens_ = 0;
  int layers_done_ = 0;
  Status status_;
  Pending pending_;
  std::map<int, RopeSpec> ropes_;                      // by layer
  std::map<const ggml_tensor*, int> windows_by_mask_;  // of the current graph
  std::vector<float> key_rows_, value_rows_;  // [num_tokens, num_kv_heads, head_dim], channels as llama.cpp has them
  std::vector<float> q_, k_;                  // in halves order
  std::vector<std::byte> scratch_;
};

Status check_windows(const llama_model* model, const std::vector<std::vector<llama_token>>& windows) {
  if (windows.empty()) return make_error(ErrorCode::kInvalidArgument, "no text to sample");
  const int sliding_window = llama_model_n_swa(model);
  for (std::size_t i = 0; i < windows.size(); ++i) {
    const int length = static_cast<int>(windows[i].size());
    if (length <= std::max(sliding_window, 0)) {
      return make_error(ErrorCode::kInvalidArgument,
                        "text " + std::to_string(i) + " has " + std::to_string(length) +
                            " tokens; this model needs more than " + std::to_string(std::max(sliding_window, 0)) +
                            (sliding_window > 0 ? ", its sliding window, to tell its layers apart" : ""));
    }
  }
  return {};
}

}  // namespace

Status sample_model(llama_model* model, const std::vector<std::vector<llama_token>>& windows,
                    const SampleOptions& options, ModelGeometry& geometry, const SampleSink& sink) {
  OSCAR_TRY(check_windows(model, windows));
  std::size_t longest = 0;
  for (const auto& window : windows) longest = std::max(longest, window.size());
  if (geometry.layers.empty()) geometry.layers.resize(llama_model_n_layer(model));

  Sampler sampler(options, geometry, sink, windows.size());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(longest);
  params.n_seq_max = 1;
  params.n_outputs_max = 1;
  params.n_threads = params.n_threads_batch = options.num_threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = params.type_v = GGML_TYPE_F16;  // a quantised type would switch on llama.cpp's own rotation
  params.offload_kqv = false;
  params.swa_full = true;
  params.no_perf = true;
  params.cb_eval = Sampler::on_node;
  params.cb_eval_user_data = &sampler;
  params.abort_callback = Sampler::should_abort;
  params.abort_callback_data = &sampler;
  const std::unique_ptr<llama_context, ContextDeleter> context(llama_init_from_model(model, params));
  if (context == nullptr) {
    return make_error(ErrorCode::kInternal, "llama.cpp could not create a context of " + std::to_string(longest) +
                                                " tokens; its log says why (memory?)");
  }

  for (const std::vector<llama_token>& window : windows) {
    sampler.begin_window(static_cast<int>(window.size()));
    llama_memory_clear(llama_get_memory(context.get()), true);
    std::vector<llama_token> tokens = window;  // llama_batch_get_one wants them writable
    const int code = llama_decode(context.get(), llama_batch_get_one(tokens.data(), static_cast<int>(tokens.size())));
    OSCAR_TRY(sampler.status());
    if (code != 0) return make_error(ErrorCode::kInternal, "llama_decode failed with code " + std::to_string(code));
    sampler.end_window();
  }
  if (sampler.layers().empty()) {
    return make_error(ErrorCode::kUnsupported,
                      "this model has no KV cache of keys and values; nothing can be calibrated");
  }
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    if (!sampler.layers().contains(static_cast<int>(i))) geometry.layers[i] = {.kind = LayerKind::kNoCache};
  }
  return {};
}

}  // namespace oscar::ggml
