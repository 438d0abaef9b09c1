#pragma once
// Runs nodes on a private instance of ggml's own CPU backend: what a stock context would have done with them.

#include <ggml-backend.h>
#include <ggml.h>

#include <memory>
#include <oscar/result.hpp>

namespace oscar::ggml {

class CpuDelegate {
 public:
  // Error kUnsupported: this build of llama.cpp has no CPU backend.
  static Result<std::unique_ptr<CpuDelegate>> create(int num_threads);

  // Queues a node; nodes run in order at the next flush, in one pass over the backend.
  ggml_status add(ggml_tensor* node);
  ggml_status flush();

 private:
  struct BackendDeleter {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
  };
  struct ContextDeleter {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  CpuDelegate() = default;

  std::unique_ptr<ggml_backend, BackendDeleter> backend_;
  std::unique_ptr<ggml_context, ContextDeleter> context_;
  ggml_cgraph* graph_ = nullptr;  // owned by context_
};

}  // namespace oscar::ggml
