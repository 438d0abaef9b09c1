#include "delegate.hpp"

namespace oscar::ggml {
namespace {

constexpr int kMaxNodes = 16;  // a layer queues three: two stores and the attention

}  // namespace

Result<std::unique_ptr<CpuDelegate>> CpuDelegate::create(int num_threads) {
  std::unique_ptr<CpuDelegate> delegate(new CpuDelegate);
  delegate->backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  if (delegate->backend_ == nullptr) {
    return make_error(ErrorCode::kUnsupported, "this llama.cpp has no CPU backend; install one built with GGML_CPU=ON");
  }
  // By name through the registry: the CPU backend may be a plug-in that nothing links.
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(delegate->backend_.get()));
  const auto set_num_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
  if (set_num_threads != nullptr) set_num_threads(delegate->backend_.get(), num_threads);

  delegate->context_.reset(ggml_init({.mem_size = ggml_graph_overhead_custom(kMaxNodes, false) + ggml_tensor_overhead(),
                                      .mem_buffer = nullptr,
                                      .no_alloc = true}));
  if (delegate->context_ == nullptr) return make_error(ErrorCode::kInternal, "ggml_init failed: out of memory");
  delegate->graph_ = ggml_new_graph_custom(delegate->context_.get(), kMaxNodes, false);
  return delegate;
}

ggml_status CpuDelegate::add(ggml_tensor* node) {
  ggml_graph_add_node(graph_, node);
  return ggml_graph_n_nodes(graph_) == kMaxNodes ? flush() : GGML_STATUS_SUCCESS;
}

ggml_status CpuDelegate::flush() {
  if (ggml_graph_n_nodes(graph_) == 0) return GGML_STATUS_SUCCESS;
  const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph_);
  ggml_graph_clear(graph_);
  return status;
}

}  // namespace oscar::ggml
