#include "delegate.hpp"

#include "layout.hpp"

namespace oscar::ggml {
namespace {

constexpr int kMaxNodes = 16;  // a layer queues three: two stores and the attention

}  // namespace

Result<std::unique_ptr<CpuDelegate>> CpuDelegate::create(int num_threads) {
  std::unique_ptr<CpuDelegate> delegate(new CpuDelegate(num_threads));
  delegate->backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  if (delegate->backend_ == nullptr) {
    return make_error(ErrorCode::kUnsupported, "this llama.cpp has no CPU backend; install one built with GGML_CPU=ON");
  }
  // By name through the registry: the CPU backend may be a plug-in that nothing links.
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(delegate->backend_.get()));
  const auto set_num_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
  if (set_num_threads != nullptr) set_num_threads(delegate->backend_.get(), num_threads);

  const std::size_t tensor_bytes = 4 * (ggml_tensor_overhead() + kAlignment);
  delegate->context_.reset(ggml_init({.mem_size = ggml_graph_overhead_custom(kMaxNodes, false) * 2 + tensor_bytes,
                                      .mem_buffer = nullptr,
                                      .no_alloc = false}));
  if (delegate->context_ == nullptr) return make_error(ErrorCode::kInternal, "ggml_init failed: out of memory");
  ggml_context* context = delegate->context_.get();
  delegate->graph_ = ggml_new_graph_custom(context, kMaxNodes, false);
  delegate->loop_ = ggml_new_graph_custom(context, kMaxNodes, false);
  ggml_tensor* loop =
      ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, run_bodies, GGML_N_TASKS_MAX, delegate.get());
  ggml_build_forward_expand(delegate->loop_, loop);
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

void CpuDelegate::run_bodies(ggml_tensor*, int, int, void* delegate) {
  auto& self = *static_cast<CpuDelegate*>(delegate);
  for (int i = self.next_.fetch_add(1); i < self.count_; i = self.next_.fetch_add(1)) (*self.body_)(i);
}

void CpuDelegate::parallel_for(int count, const std::function<void(int)>& body) {
  if (num_threads_ > 1 && count > 1) {
    body_ = &body;
    count_ = count;
    next_ = 0;
    if (ggml_backend_graph_compute(backend_.get(), loop_) == GGML_STATUS_SUCCESS) return;
  }
  for (int i = 0; i < count; ++i) body(i);
}

}  // namespace oscar::ggml
