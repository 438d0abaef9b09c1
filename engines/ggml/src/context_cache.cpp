#include "context_cache.hpp"

#include "kv_buffer.hpp"

namespace oscar::ggml {

Result<std::shared_ptr<ContextCache>> ContextCache::create(const CacheConfig& config) {
  if (config.num_threads < 1) {
    return make_error(ErrorCode::kInvalidArgument,
                      "num_threads is " + std::to_string(config.num_threads) + "; it must be at least 1");
  }
  std::shared_ptr<ContextCache> cache(new ContextCache(config));
  OSCAR_ASSIGN(cache->isa_, select_isa());
  OSCAR_ASSIGN(cache->delegate_, CpuDelegate::create(config.num_threads));
  cache->executor_ = make_thread_pool(config.num_threads);
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

std::optional<LayerLayout> ContextCache::layout_of(const ggml_tensor*) { return std::nullopt; }
Status ContextCache::encode_again(std::shared_ptr<const RotationSet>, int) { return {}; }
Status ContextCache::set_window(int, int) { return {}; }

}  // namespace oscar::ggml
