#include "kv_buffer.hpp"

#include <ggml-backend-impl.h>

#include <cstring>
#include <new>

namespace oscar::ggml {
namespace {

KvBuffer& buffer_of(ggml_backend_buffer_t buffer) { return *static_cast<KvBuffer*>(buffer->context); }

// Bytes from the start of the root tensor to byte `offset` of a tensor, in llama.cpp's layout. Addresses past the pages
// are never touched; their differences still count.
std::size_t offset_in_root(const ggml_tensor* tensor, std::size_t offset) {
  const auto* root = static_cast<const std::byte*>(root_of(tensor)->data);
  return static_cast<std::size_t>(static_cast<const std::byte*>(tensor->data) - root) + offset;
}

void free_buffer(ggml_backend_buffer_t buffer) { delete static_cast<KvBuffer*>(buffer->context); }

ggml_backend_buffer_i buffer_interface() {
  ggml_backend_buffer_i hooks{};
  hooks.free_buffer = free_buffer;
  hooks.get_base = [](ggml_backend_buffer_t buffer) -> void* { return buffer_of(buffer).memory(); };
  hooks.init_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
    return buffer_of(buffer).init_tensor(tensor);
  };
  hooks.memset_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor* tensor, std::uint8_t value, std::size_t offset,
                           std::size_t size) {
    const std::vector<std::byte> bytes(size, static_cast<std::byte>(value));
    buffer_of(buffer).write(root_of(tensor), offset_in_root(tensor, offset), size, bytes.data());
  };
  hooks.set_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data, std::size_t offset,
                        std::size_t size) {
    buffer_of(buffer).write(root_of(tensor), offset_in_root(tensor, offset), size, static_cast<const std::byte*>(data));
  };
  hooks.get_tensor = [](ggml_backend_buffer_t buffer, const ggml_tensor* tensor, void* data, std::size_t offset,
                        std::size_t size) {
    buffer_of(buffer).read(root_of(tensor), offset_in_root(tensor, offset), size, static_cast<std::byte*>(data));
  };
  hooks.cpy_tensor = [](ggml_backend_buffer_t buffer, const ggml_tensor* source, ggml_tensor* target) {
    return kv_buffer_of(source) != nullptr && buffer_of(buffer).copy(source, target);
  };
  hooks.clear = [](ggml_backend_buffer_t buffer, std::uint8_t value) { buffer_of(buffer).clear(value); };
  return hooks;
}

}  // namespace

std::size_t cache_tensor_bytes(ContextCache&, const ggml_tensor* tensor) { return ggml_nbytes(tensor); }

KvBuffer* kv_buffer_of(const ggml_tensor* tensor) {
  const ggml_backend_buffer_t buffer = root_of(tensor)->buffer;
  return buffer != nullptr && buffer->iface.free_buffer == free_buffer ? &buffer_of(buffer) : nullptr;
}

void KvBuffer::MemoryDeleter::operator()(std::uint8_t* memory) const {
  ::operator delete[](memory, std::align_val_t{kAlignment});
}

KvBuffer::KvBuffer(std::shared_ptr<ContextCache> cache, std::size_t size)
    : cache_(std::move(cache)),
      memory_(static_cast<std::uint8_t*>(::operator new[](size, std::align_val_t{kAlignment}, std::nothrow))),
      size_(size) {
  cache_->attach(this);
}

KvBuffer::~KvBuffer() { cache_->detach(this); }

ggml_backend_buffer_t KvBuffer::create(ggml_backend_dev_t device, std::shared_ptr<ContextCache> cache,
                                       std::size_t size) {
  std::unique_ptr<KvBuffer> buffer(new KvBuffer(std::move(cache), size));
  if (buffer->memory_ == nullptr) return nullptr;
  ggml_backend_buffer_type& type = buffer->type_;
  type.iface.get_name = [](ggml_backend_buffer_type_t) { return "OSCAR"; };
  type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return kAlignment; };
  type.iface.get_alloc_size = [](ggml_backend_buffer_type_t own, const ggml_tensor* tensor) {
    return cache_tensor_bytes(static_cast<KvBuffer*>(own->context)->cache(), tensor);
  };
  type.device = device;
  type.context = buffer.get();
  return ggml_backend_buffer_init(&type, buffer_interface(), buffer.release(), size);
}

ggml_status KvBuffer::init_tensor(ggml_tensor* tensor) {
  if (tensor->view_src == nullptr) delegated_.push_back(tensor);
  return GGML_STATUS_SUCCESS;
}

void KvBuffer::add_usage(CacheUsage& usage) const {
  for (const ggml_tensor* tensor : delegated_) {
    if (parse_cache_name(tensor->name)->side != Side::kKey) continue;
    add_delegated_usage(tensor->ne[0], tensor->ne[1], static_cast<int>(tensor->ne[2]), usage);
  }
}

bool KvBuffer::supports(const ggml_tensor* node) {
  switch (op_of(node)) {
    case Op::kNone:
    case Op::kView: return true;
    case Op::kSetRows:
    case Op::kRope: return kv_buffer_of(node) == this;
    case Op::kFlashAttention: return kv_buffer_of(node->src[1]) == this && kv_buffer_of(node->src[2]) == this;
    case Op::kOther: return kv_buffer_of(node) == this;
  }
  return false;
}

ggml_status KvBuffer::compute(ggml_tensor* node) { return cache_->delegate().add(node); }

void KvBuffer::read(const ggml_tensor* root, std::size_t begin, std::size_t size, std::byte* out) {
  std::memcpy(out, static_cast<const std::byte*>(root->data) + begin, size);
}

void KvBuffer::write(const ggml_tensor* root, std::size_t begin, std::size_t size, const std::byte* data) {
  std::memcpy(static_cast<std::byte*>(root->data) + begin, data, size);
}

bool KvBuffer::copy(const ggml_tensor* source, const ggml_tensor* target) {
  std::memcpy(target->data, source->data, ggml_nbytes(source));
  return true;
}

void KvBuffer::clear(std::uint8_t value) { std::memset(memory_.get(), value, size_); }

}  // namespace oscar::ggml
