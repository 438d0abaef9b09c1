// The device "OSCAR". llama.cpp sees a GPU without compute: it puts every layer's cache there, finds that no weight
// operation is supported and keeps the weights on the CPU. Compute buffers are ordinary CPU memory, so nothing is
// copied between the two.

#include <ggml-backend-impl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <oscar/ggml.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "context_cache.hpp"
#include "kv_buffer.hpp"
#include "nodes.hpp"

namespace oscar::ggml {
namespace {

constexpr const char* kName = "OSCAR";
constexpr std::string_view kTestedVersion = "0.25.3";  // of ggml; its backend interface is internal and moves

// The cache that the next context will take.
struct Pending {
  std::mutex mutex;
  std::shared_ptr<ContextCache> cache;
};
Pending& pending() {
  static Pending instance;
  return instance;
}

// What is known of the context that this thread is creating. llama.cpp asks the size of every cache tensor and then
// allocates the sum, without saying which tensors it is for.
struct Building {
  std::shared_ptr<ContextCache> cache;
  std::vector<std::string> tensors;  // names
  std::size_t bytes = 0;

  void forget_tensors() {
    tensors.clear();
    bytes = 0;
  }
};
Building& building() {
  thread_local Building instance;
  return instance;
}

ContextCache* current_cache() {
  Building& current = building();
  if (current.cache == nullptr) {
    const std::lock_guard lock(pending().mutex);
    current.cache = std::move(pending().cache);
  }
  if (current.cache == nullptr) {
    // Nobody called configure: an ordinary 16-bit cache.
    const auto plain = ContextCache::create({.mode = CacheMode::kDelegate});
    if (!plain) return nullptr;
    current.cache = *plain;
  }
  return current.cache.get();
}

std::size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
  if (tensor->view_src != nullptr || op_of(tensor) != Op::kNone || !parse_cache_name(tensor->name)) {
    return ggml_nbytes(tensor);
  }
  ContextCache* cache = current_cache();
  if (cache == nullptr) return ggml_nbytes(tensor);
  Building& current = building();
  if (std::find(current.tensors.begin(), current.tensors.end(), tensor->name) != current.tensors.end()) {
    current.forget_tensors();  // a new list of tensors begins: the earlier one was only measured
  }
  const std::size_t bytes = cache_tensor_bytes(*cache, tensor);
  current.tensors.emplace_back(tensor->name);
  current.bytes += align_up(bytes);
  return bytes;
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, std::size_t size) {
  Building& current = building();
  const bool is_cache = !current.tensors.empty() && current.bytes == size;
  current.forget_tensors();
  if (!is_cache) return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
  if (!current.cache->status()) return nullptr;  // a tensor did not fit; the context is refused, status() says why
  return KvBuffer::create(type->device, current.cache, size);
}

ggml_backend_buffer_type make_buffer_type(ggml_backend_dev_t device) {
  ggml_backend_buffer_type type{};
  type.iface.get_name = [](ggml_backend_buffer_type_t) { return kName; };
  type.iface.alloc_buffer = alloc_buffer;
  type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return kAlignment; };
  type.iface.get_alloc_size = alloc_size;
  type.iface.is_host = [](ggml_backend_buffer_type_t) {
    return true;
  };  // compute buffers; a cache buffer has its own type
  type.device = device;
  return type;
}

ggml_status graph_compute(ggml_backend_t, ggml_cgraph* graph) {
  KvBuffer* last = nullptr;
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    const Op op = op_of(node);
    if (op == Op::kNone || op == Op::kView || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    KvBuffer* buffer = kv_buffer_of(op == Op::kFlashAttention ? node->src[1] : node);
    if (buffer == nullptr) return GGML_STATUS_FAILED;
    const ggml_status status = buffer->compute(node);
    if (status != GGML_STATUS_SUCCESS) return status;
    last = buffer;
  }
  return last != nullptr ? last->cache().delegate().flush() : GGML_STATUS_SUCCESS;
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {0x6f, 0x73, 0x63, 0x61, 0x72, 0x2d, 0x6b, 0x76,
                           0x2d, 0x32, 0x62, 0x69, 0x74, 0x2d, 0x30, 0x31};
  building() = {};  // a new context begins
  ggml_backend_i hooks{};
  hooks.get_name = [](ggml_backend_t) { return kName; };
  hooks.free = [](ggml_backend_t backend) { delete backend; };
  hooks.graph_compute = graph_compute;
  return new ggml_backend{.guid = &guid, .iface = hooks, .device = device, .context = nullptr};
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* node) {
  if (KvBuffer* own = kv_buffer_of(node); own != nullptr) return own->supports(node);
  for (const ggml_tensor* source : node->src) {
    if (source == nullptr) continue;
    if (KvBuffer* own = kv_buffer_of(source); own != nullptr) return own->supports(node);
  }
  return false;
}

bool supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
  return type->device == device || ggml_backend_buft_is_host(type);
}

struct Device {
  ggml_backend_reg registry{};
  ggml_backend_device device{};
  ggml_backend_buffer_type buffer_type{};

  Device() {
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface.get_name = [](ggml_backend_reg_t) { return kName; };
    registry.iface.get_device_count = [](ggml_backend_reg_t) { return std::size_t{1}; };
    registry.iface.get_device = [](ggml_backend_reg_t own, std::size_t) {
      return &static_cast<Device*>(own->context)->device;
    };
    registry.context = this;

    ggml_backend_device_i& hooks = device.iface;
    hooks.get_name = [](ggml_backend_dev_t) { return kName; };
    hooks.get_description = [](ggml_backend_dev_t) { return "KV cache in 2 bits"; };
    hooks.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) { *free = *total = 0; };
    hooks.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    hooks.get_props = [](ggml_backend_dev_t own, ggml_backend_dev_props* props) {
      *props = {};
      props->name = kName;
      props->description = own->iface.get_description(own);
      props->type = GGML_BACKEND_DEVICE_TYPE_GPU;
      props->caps.mmap_support = true;  // else llama.cpp would load the weights without mmap
    };
    hooks.init_backend = init_backend;
    hooks.get_buffer_type = [](ggml_backend_dev_t own) { return &static_cast<Device*>(own->context)->buffer_type; };
    hooks.supports_op = supports_op;
    hooks.supports_buft = supports_buffer_type;
    device.reg = &registry;
    device.context = this;
    buffer_type = make_buffer_type(&device);
  }
};

}  // namespace

ggml_backend_dev_t device() {
  static Device instance;
  return &instance.device;
}

std::string version_warning() {
  if (kTestedVersion == ggml_version()) return "";
  return "ggml " + std::string(ggml_version()) + " (" + ggml_commit() +
         ") is running, but the adapter was tested with " + std::string(kTestedVersion) +
         "; install that version if anything looks wrong";
}

llama_model_params model_params() {
  static ggml_backend_dev_t devices[] = {device(), nullptr};
  llama_model_params params = llama_model_default_params();
  params.devices = devices;
  params.n_gpu_layers = -1;  // all
  return params;
}

Result<std::shared_ptr<Cache>> configure(const CacheConfig& config) {
  OSCAR_ASSIGN(std::shared_ptr<ContextCache> cache, ContextCache::create(config));
  const std::lock_guard lock(pending().mutex);
  pending().cache = cache;
  return cache;
}

}  // namespace oscar::ggml
