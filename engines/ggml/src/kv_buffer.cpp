#include "kv_buffer.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

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
    return kv_buffer_of(source) == &buffer_of(buffer) && buffer_of(buffer).copy(source, target);
  };
  hooks.clear = [](ggml_backend_buffer_t buffer, std::uint8_t value) { buffer_of(buffer).clear(value); };
  return hooks;
}

Status unsupported(const ggml_tensor* node, const std::string& what) {
  return make_error(ErrorCode::kUnsupported, describe(node) + ": " + what);
}

}  // namespace

std::size_t cache_tensor_bytes(ContextCache& cache, const ggml_tensor* tensor) {
  const auto layout = cache.layout_of(tensor);
  return layout ? layout->side_bytes() : ggml_nbytes(tensor);
}

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
      size_(size),
      server_(*cache_) {
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
  if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS;
  const auto layout = cache_->layout_of(tensor);
  if (!layout) {
    delegated_.push_back(tensor);
    return GGML_STATUS_SUCCESS;
  }
  const auto name = parse_cache_name(tensor->name);
  auto& layer = layers_[name->layer];
  if (layer == nullptr) {
    if (layers_.size() == 1) server_.resize(layout->num_cells, layout->num_streams);
    layer = std::make_unique<LayerCache>(name->layer, *layout);
    layer->set_rotation(cache_->config().rotation->layers.at(name->layer), layout->page_format);
  }
  layer->attach(name->side, static_cast<std::uint8_t*>(tensor->data));
  tensor->extra = &slots_.emplace_back(Slot{.layer = layer.get(), .side = name->side});
  return GGML_STATUS_SUCCESS;
}

const KvBuffer::Slot* KvBuffer::slot_of(const ggml_tensor* tensor) {
  return static_cast<const Slot*>(root_of(tensor)->extra);
}

void KvBuffer::add_usage(CacheUsage& usage) const {
  for (const auto& [index, layer] : layers_) oscar::ggml::add_usage(layer->layout(), usage);
  usage.bookkeeping_bytes += server_.positions_bytes();
  for (const ggml_tensor* tensor : delegated_) {
    if (parse_cache_name(tensor->name)->side != Side::kKey) continue;
    add_delegated_usage(tensor->ne[0], tensor->ne[1], static_cast<int>(tensor->ne[2]), usage);
  }
}

bool KvBuffer::note(Status status) {
  if (status) return true;
  cache_->fail(std::move(status).error());
  return false;
}

bool KvBuffer::supports(const ggml_tensor* node) {
  const bool writes = kv_buffer_of(node) == this;
  const Op op = op_of(node);
  if (op == Op::kNone || op == Op::kView) return writes;
  if (op == Op::kFlashAttention) {
    const bool reads = kv_buffer_of(node->src[1]) == this && kv_buffer_of(node->src[2]) == this;
    return reads && note(check(node));
  }
  note(check(node));
  return writes;
}

Status KvBuffer::check(const ggml_tensor* node) {
  const Op op = op_of(node);
  const ggml_tensor* cache = op == Op::kFlashAttention ? node->src[1] : node;
  const Slot* slot = kv_buffer_of(cache) == this ? slot_of(cache) : nullptr;
  if (op == Op::kSetRows && slot != nullptr) {
    const ggml_tensor* rows = node->src[0];
    if (rows->ne[0] != slot->layer->layout().row_width()) {
      return unsupported(node,
                         "values are stored transposed because flash attention is off; create the context with flash "
                         "attention (-fa on)");
    }
    if (rows->type != GGML_TYPE_F32 || rows->ne[2] != 1 || rows->ne[3] != 1) {
      return unsupported(node, "rows of a shape or type that pages cannot take");
    }
    return slot->side == Side::kKey ? slot->layer->learn_rope(rows) : Status();
  }
  if (op == Op::kRope && slot != nullptr && slot->side == Side::kKey) return {};
  if (op == Op::kFlashAttention) {
    const Slot* values = slot_of(node->src[2]);
    if (slot == nullptr && values == nullptr) return {};
    const bool is_plain = slot != nullptr && values != nullptr && slot->layer == values->layer &&
                          slot->side == Side::kKey && values->side == Side::kValue &&
                          node->src[0]->type == GGML_TYPE_F32;
    if (!is_plain) return unsupported(node, "keys and values are not the cache of one layer");
    if (node->src[3] == nullptr || node->src[3]->type != GGML_TYPE_F16 || node->src[3]->ne[2] != 1)
      return unsupported(node, "no F16 mask that all heads share");
    if (node->src[4] != nullptr) return unsupported(node, "attention sinks are not supported");
    if (read_attention(node).max_bias != 0) return unsupported(node, "ALiBi biases are not supported");
    return {};
  }
  // Anything else would see the 16-bit shape of a cache that is not 16 bit.
  const auto is_quantized = [](const ggml_tensor* tensor) {
    return tensor != nullptr && kv_buffer_of(tensor) != nullptr && slot_of(tensor) != nullptr;
  };
  if (is_quantized(node) || std::any_of(std::begin(node->src), std::end(node->src), is_quantized)) {
    return unsupported(
        node,
        "this operation is not served on a 2-bit cache; create the context with flash attention (-fa on), "
        "or keep this model's 16-bit cache");
  }
  return {};
}

ggml_status KvBuffer::compute(ggml_tensor* node) {
  const Op op = op_of(node);
  const Slot* slot = slot_of(op == Op::kFlashAttention ? node->src[1] : node);
  if (slot == nullptr) return cache_->delegate().add(node);
  if (const ggml_status status = cache_->delegate().flush(); status != GGML_STATUS_SUCCESS) return status;
  Status served = cache_->status();
  if (!served) return GGML_STATUS_FAILED;
  switch (op) {
    case Op::kSetRows: served = server_.store_rows(*slot->layer, slot->side, node); break;
    case Op::kFlashAttention: served = server_.attend_to(*slot->layer, node); break;
    case Op::kRope: served = server_.turn_keys(*slot->layer, node); break;
    default: served = unsupported(node, "not served on a 2-bit cache");
  }
  return note(std::move(served)) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void KvBuffer::for_each_range(const LayerCache& layer, std::size_t begin, std::size_t size,
                              const std::function<void(const RowRange&)>& body) const {
  const std::size_t row_bytes = static_cast<std::size_t>(layer.layout().row_width()) * sizeof(ggml_fp16_t);
  const std::int64_t num_cells = layer.layout().num_cells;
  while (size > 0) {
    const auto row = static_cast<std::int64_t>(begin / row_bytes);
    const std::size_t skip = begin % row_bytes;
    const std::int64_t left = num_cells - row % num_cells;  // rows to the end of the stream
    const auto needed = static_cast<std::int64_t>((skip + size + row_bytes - 1) / row_bytes);
    const auto count = static_cast<int>(std::min(left, needed));
    const std::size_t bytes = std::min(size, static_cast<std::size_t>(count) * row_bytes - skip);
    body({.stream = static_cast<int>(row / num_cells),
          .first = row % num_cells,
          .count = count,
          .skip = skip,
          .bytes = bytes});
    begin += bytes;
    size -= bytes;
  }
}

void KvBuffer::read(const ggml_tensor* root, std::size_t begin, std::size_t size, std::byte* out) {
  const Slot* slot = slot_of(root);
  if (slot == nullptr) {
    std::memcpy(out, static_cast<const std::byte*>(root->data) + begin, size);
    return;
  }
  note(server_.finish_batch());
  std::vector<ggml_fp16_t> rows;
  for_each_range(*slot->layer, begin, size, [&](const RowRange& range) {
    rows.resize(static_cast<std::size_t>(range.count) * slot->layer->layout().row_width());
    slot->layer->read_rows(slot->side, range.stream, range.first, range.count,
                           server_.positions(range.stream) + range.first, cache_->isa(), rows.data());
    std::memcpy(out, reinterpret_cast<const std::byte*>(rows.data()) + range.skip, range.bytes);
    out += range.bytes;
  });
}

void KvBuffer::write(const ggml_tensor* root, std::size_t begin, std::size_t size, const std::byte* data) {
  const Slot* slot = slot_of(root);
  if (slot == nullptr) {
    std::memcpy(static_cast<std::byte*>(root->data) + begin, data, size);
    return;
  }
  note(server_.finish_batch());
  std::vector<ggml_fp16_t> rows;
  for_each_range(*slot->layer, begin, size, [&](const RowRange& range) {
    rows.resize(static_cast<std::size_t>(range.count) * slot->layer->layout().row_width());
    std::int32_t* positions = server_.positions(range.stream) + range.first;
    auto* bytes = reinterpret_cast<std::byte*>(rows.data());
    if (range.bytes != rows.size() * sizeof(ggml_fp16_t)) {  // a row is stored whole
      slot->layer->read_rows(slot->side, range.stream, range.first, range.count, positions, cache_->isa(), rows.data());
    }
    std::memcpy(bytes + range.skip, data, range.bytes);
    data += range.bytes;
    note(slot->layer->write_rows(slot->side, range.stream, range.first, range.count, positions, server_.workbench(),
                                 rows.data()));
  });
}

bool KvBuffer::copy(const ggml_tensor* source, const ggml_tensor* target) {
  const Slot *from = slot_of(source), *to = slot_of(target);
  if (from == nullptr && to == nullptr) {
    std::memcpy(target->data, source->data, ggml_nbytes(source));
    return true;
  }
  // Pages are copied a whole stream at a time; anything else goes through 16-bit rows.
  if (from == nullptr || to == nullptr || from->layer != to->layer || from->side != to->side) return false;
  const LayerLayout& layout = from->layer->layout();
  const std::size_t stream_bytes =
      static_cast<std::size_t>(layout.row_width() * layout.num_cells) * sizeof(ggml_fp16_t);
  const std::size_t source_begin = offset_in_root(source, 0), target_begin = offset_in_root(target, 0);
  if (ggml_nbytes(source) != stream_bytes || source_begin % stream_bytes != 0 || target_begin % stream_bytes != 0)
    return false;
  note(server_.finish_batch());
  const auto source_stream = static_cast<int>(source_begin / stream_bytes);
  const auto target_stream = static_cast<int>(target_begin / stream_bytes);
  from->layer->copy_stream(from->side, source_stream, target_stream);
  std::copy_n(server_.positions(source_stream), layout.num_cells, server_.positions(target_stream));
  return true;
}

void KvBuffer::clear(std::uint8_t value) {
  std::memset(memory_.get(), value, size_);
  for (const auto& [index, layer] : layers_) layer->forget_windows();
  server_.forget();
}

Status KvBuffer::check_kept_rows(int num_tokens) {
  OSCAR_TRY(server_.finish_batch());
  for (const auto& [index, layer] : layers_) {
    if (layer->keeps(0, num_tokens)) continue;
    return make_error(ErrorCode::kInvalidArgument, "layer " + std::to_string(index) + ": not all of the first " +
                                                       std::to_string(num_tokens) +
                                                       " tokens have a kept row; decode them first, in one sequence");
  }
  return {};
}

Status KvBuffer::encode_again(const RotationSet& rotation, int num_tokens) {
  for (const auto& [index, layer] : layers_) {
    layer->set_rotation(rotation.layers.at(index), rotation.parameter_format());
    OSCAR_TRY(layer->encode_kept_rows(0, num_tokens, server_.positions(0), server_.workbench()));
  }
  return {};
}

Status KvBuffer::simulate(const Simulation& simulation, int num_tokens) {
  for (const auto& [index, layer] : layers_) OSCAR_TRY(server_.simulate(*layer, simulation, 0, num_tokens));
  return {};
}

}  // namespace oscar::ggml
