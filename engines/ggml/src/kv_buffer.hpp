#pragma once
// One KV buffer of llama.cpp: the memory of its cache tensors, and serving the operations on them. Tensors of quantised
// layers are pages and window rows behind llama.cpp's 16-bit shape; all others are what they seem and are served by the
// CPU backend.

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "context_cache.hpp"
#include "nodes.hpp"

namespace oscar::ggml {

// Bytes llama.cpp must allocate for a cache tensor.
std::size_t cache_tensor_bytes(ContextCache& cache, const ggml_tensor* tensor);

// The buffer `tensor` lies in (views included); null when it is not one of ours.
KvBuffer* kv_buffer_of(const ggml_tensor* tensor);

class KvBuffer {
 public:
  // Null when memory is short. `device` is shown by llama.cpp's logs.
  static ggml_backend_buffer_t create(ggml_backend_dev_t device, std::shared_ptr<ContextCache> cache, std::size_t size);
  ~KvBuffer();

  ContextCache& cache() { return *cache_; }
  void add_usage(CacheUsage& usage) const;

  // Whether a node of the graph may be given to us. A node that would have to be ours and cannot be served is accepted
  // too (the scheduler aborts the process otherwise) and fails when it is computed.
  bool supports(const ggml_tensor* node);
  ggml_status compute(ggml_tensor* node);

  // The buffer as ggml's hooks see it; `begin` counts bytes from the start of the root tensor in llama.cpp's 16-bit
  // layout.
  ggml_status init_tensor(ggml_tensor* tensor);
  void read(const ggml_tensor* root, std::size_t begin, std::size_t size, std::byte* out);
  void write(const ggml_tensor* root, std::size_t begin, std::size_t size, const std::byte* data);
  bool copy(const ggml_tensor* source, const ggml_tensor* target);
  void clear(std::uint8_t value);
  std::uint8_t* memory() { return memory_.get(); }

 private:
  struct MemoryDeleter {
    void operator()(std::uint8_t* memory) const;
  };
  KvBuffer(std::shared_ptr<ContextCache> cache, std::size_t size);

  std::shared_ptr<ContextCache> cache_;
  std::unique_ptr<std::uint8_t[], MemoryDeleter> memory_;
  std::size_t size_;
  ggml_backend_buffer_type type_{};  // says "not host memory", so that nobody reads pages as F16
  std::vector<const ggml_tensor*> delegated_;
};

}  // namespace oscar::ggml
