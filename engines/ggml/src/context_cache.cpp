#include "context_cache.hpp"

#include <algorithm>
#include <string>

#include "kv_buffer.hpp"
#include "nodes.hpp"

namespace oscar::ggml {
namespace {

Status check_config(const CacheConfig& config) {
  if (config.num_threads < 1) {
    return make_error(ErrorCode::kInvalidArgument,
                      "num_threads is " + std::to_string(config.num_threads) + "; it must be at least 1");
  }
  if (config.mode == CacheMode::kDelegate) return {};
  if (config.rotation == nullptr) {
    return make_error(ErrorCode::kInvalidArgument, "an INT2 cache needs a rotation; fit or load one");
  }
  if (config.simulation != nullptr && !config.keep_exact_rows) {
    return make_error(ErrorCode::kInvalidArgument, "a simulated cache needs keep_exact_rows");
  }
  for (const auto& [index, layer] : config.rotation->layers) {
    if (!is_quantized(*config.rotation, index)) continue;
    const int head_dim = config.rotation->geometry.layers[index].head_dim;
    KvSpec spec;
    spec.num_kv_heads = static_cast<int>(layer.heads.size());
    spec.head_dim = head_dim;
    spec.sink = config.sink;
    spec.recent = config.recent;
    OSCAR_TRY(check_spec(spec));
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<ContextCache>> ContextCache::create(const CacheConfig& config) {
  OSCAR_TRY(check_config(config));
  std::shared_ptr<ContextCache> cache(new ContextCache(config));
  OSCAR_ASSIGN(cache->isa_, select_isa());
  OSCAR_ASSIGN(cache->delegate_, CpuDelegate::create(config.num_threads));
  return cache;
}

CacheUsage ContextCache::usage() const {
  CacheUsage usage;
  for (const KvBuffer* buffer : buffers_) buffer->add_usage(usage);
  return usage;
}

Status ContextCache::status() const {
  const std::lock_guard lock(error_mutex_);
  if (error_) return tl::unexpected(*error_);
  return {};
}

void ContextCache::fail(Error error) {
  const std::lock_guard lock(error_mutex_);
  if (!error_) error_ = std::move(error);
}

std::optional<LayerLayout> ContextCache::layout_of(const ggml_tensor* tensor) {
  const auto name = parse_cache_name(tensor->name);
  if (config_.mode != CacheMode::kInt2 || !name || !is_quantized(*config_.rotation, name->layer)) return std::nullopt;
  const LayerRotation& rotation = config_.rotation->layers.at(name->layer);
  const int num_kv_heads = static_cast<int>(rotation.heads.size());
  const int head_dim = config_.rotation->geometry.layers[name->layer].head_dim;
  const std::string who = "layer " + std::to_string(name->layer);
  if (tensor->ne[0] != static_cast<std::int64_t>(num_kv_heads) * head_dim) {
    fail({ErrorCode::kMismatch, who + ": the cache has " + std::to_string(tensor->ne[0]) +
                                    " channels but the rotation " + std::to_string(num_kv_heads) + " heads of " +
                                    std::to_string(head_dim) + "; it was made for another model"});
    return std::nullopt;
  }
  if (tensor->type != GGML_TYPE_F16) {
    fail({ErrorCode::kUnsupported, who + ": the cache has type " + ggml_type_name(tensor->type) +
                                       "; leave it F16 (-ctk f16 -ctv f16), it is packed to 2 bits anyway"});
    return std::nullopt;
  }
  return plan_layer(config_, config_.rotation->parameter_format(), num_kv_heads, head_dim, tensor->ne[1],
                    static_cast<int>(tensor->ne[2]));
}

Status ContextCache::encode_again(std::shared_ptr<const RotationSet> rotation, int num_tokens) {
  if (config_.mode != CacheMode::kInt2 || !config_.keep_exact_rows) {
    return make_error(ErrorCode::kInvalidArgument, "encode_again needs an INT2 cache configured with keep_exact_rows");
  }
  for (const auto& [index, layer] : config_.rotation->layers) {
    if (!is_quantized(*config_.rotation, index)) continue;
    const auto found = rotation->layers.find(index);
    if (found == rotation->layers.end() || found->second.heads.size() != layer.heads.size() ||
        rotation->geometry.layers.at(index).head_dim != config_.rotation->geometry.layers.at(index).head_dim) {
      return make_error(ErrorCode::kMismatch,
                        "layer " + std::to_string(index) +
                            ": the new rotation does not fit this cache; it was made for another model");
    }
  }
  for (KvBuffer* buffer : buffers_) OSCAR_TRY(buffer->check_kept_rows(num_tokens));  // then nothing can be half done
  config_.simulation = nullptr;
  config_.rotation = std::move(rotation);  // first: its quantizer encodes, and layers point into it
  for (KvBuffer* buffer : buffers_) OSCAR_TRY(buffer->encode_again(*config_.rotation, num_tokens));
  return {};
}

Status ContextCache::simulate(std::shared_ptr<const Simulation> simulation, int num_tokens) {
  if (config_.mode != CacheMode::kInt2 || !config_.keep_exact_rows) {
    return make_error(ErrorCode::kInvalidArgument, "simulate needs an INT2 cache configured with keep_exact_rows");
  }
  for (KvBuffer* buffer : buffers_) OSCAR_TRY(buffer->check_kept_rows(num_tokens));  // then nothing can be half done
  config_.simulation = std::move(simulation);
  for (KvBuffer* buffer : buffers_) OSCAR_TRY(buffer->simulate(*config_.simulation, num_tokens));
  return {};
}

Status ContextCache::set_window(int sink, int recent) {
  if (sink < 0 || recent < 0) {
    return make_error(ErrorCode::kInvalidArgument,
                      "window " + std::to_string(sink) + " + " + std::to_string(recent) + ": neither may be negative");
  }
  if (!config_.keep_exact_rows && (sink > config_.sink || recent > config_.recent)) {
    return make_error(ErrorCode::kInvalidArgument,
                      "window " + std::to_string(sink) + " + " + std::to_string(recent) +
                          " is larger than the configured " + std::to_string(config_.sink) + " + " +
                          std::to_string(config_.recent) + "; configure the cache with the larger one");
  }
  sink_ = sink;
  recent_ = recent;
  return {};
}

}  // namespace oscar::ggml
