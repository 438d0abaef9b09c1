#pragma once
// One KV buffer of llama.cpp: the memory of its cache tensors and ggml's hooks on it. Tensors of quantised layers are
// pages and window rows behind llama.cpp's 16-bit shape; all others are what they seem and are served by the CPU
// backend.

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "context_cache.hpp"
#include "layer_cache.hpp"
#include "nodes.hpp"
#include "server.hpp"

namespace oscar::ggml {

// Bytes llama.cpp must allocate for a cache tensor.
std::size_t cache_tensor_bytes(ContextCache& cache, const ggml_tensor* tensor);

class KvBuffer;

// The buffer `tensor` lies in (views included); null when it is not one of ours.
KvBuffer* kv_buffer_of(const ggml_tensor* tensor);

class KvBuffer {
 public:
  // Null when memory is short. `device` is shown by llama.cpp's logs.
  static ggml_backend_buffer_t create(ggml_backend_dev_t device, std::shared_ptr<ContextCache> cache, std::size_t size);
  ~KvBuffer();
  KvBuffer(const KvBuffer&) = delete;
  KvBuffer& operator=(const KvBuffer&) = delete;

  ContextCache& cache() { return *cache_; }
  std::uint8_t* memory() { return memory_.get(); }
  void add_usage(CacheUsage& usage) const;

  // Whether a node of the graph may be given to us. A node that would have to be ours and cannot be served is accepted
  // too (the scheduler aborts the process otherwise) and fails when it is computed.
  bool supports(const ggml_tensor* node);
  ggml_status compute(ggml_tensor* node);

  // `begin` counts bytes from the start of the root tensor in llama.cpp's 16-bit layout.
  ggml_status init_tensor(ggml_tensor* tensor);
  void read(const ggml_tensor* root, std::size_t begin, std::size_t size, std::byte* out);
  void write(const ggml_tensor* root, std::size_t begin, std::size_t size, const std::byte* data);
  bool copy(const ggml_tensor* source, const ggml_tensor* target);
  void clear(std::uint8_t value);

  // Cache::encode_again for the layers of this buffer, in two steps: whether all rows are there, and doing it.
  Status check_kept_rows(int num_tokens);
  Status encode_again(const RotationSet& rotation, int num_tokens);
  // Cache::simulate for the layers of this buffer, after check_kept_rows.
  Status simulate(const Simulation& simulation, int num_tokens);

 private:
  struct MemoryDeleter {
    void operator()(std::uint8_t* memory) const;
  };
  // A cache tensor of a quantised layer; its `extra` points here.
  struct Slot {
    LayerCache* layer = nullptr;
    Side side = Side::kKey;
  };
  // Consecutive rows of one stream that a byte range touches: row `first` on, `skip` bytes of which lie before the
  // range.
  struct RowRange {
    int stream = 0;
    std::int64_t first = 0;
    int count = 0;
    std::size_t skip = 0;   // bytes of the first row before the range
    std::size_t bytes = 0;  // of the range in these rows
  };

  KvBuffer(std::shared_ptr<ContextCache> cache, std::size_t size);

  static const Slot* slot_of(const ggml_tensor* tensor);
  // Why a node on a quantised layer cannot be served; no error when it can.
  Status check(const ggml_tensor* node);
  void for_each_range(const LayerCache& layer, std::size_t begin, std::size_t size,
                      const std::function<void(const RowRange&)>& body) const;
  bool note(Status status);  // keeps an error in the cache's status; true when there was none

  std::shared_ptr<ContextCache> cache_;
  std::unique_ptr<std::uint8_t[], MemoryDeleter> memory_;
  std::size_t size_;
  ggml_backend_buffer_type type_{};  // says "not host memory", so that nobody reads pages as F16
  std::map<int, std::unique_ptr<LayerCache>> layers_;
  std::deque<Slot> slots_;
  std::vector<const ggml_tensor*> delegated_;
  Server server_;
};

}  // namespace oscar::ggml
