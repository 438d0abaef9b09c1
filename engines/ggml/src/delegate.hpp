#pragma once
// Work on ggml's own CPU backend, in a private instance of it: nodes that a stock context would have given it, and our
// loops.

#include <ggml-backend.h>
#include <ggml.h>

#include <atomic>
#include <memory>
#include <oscar/executor.hpp>
#include <oscar/result.hpp>

namespace oscar::ggml {

// As an Executor it runs its bodies on the threads that ggml computes with. Threads of our own would have to wait for
// ggml's, which keep spinning for a millisecond or more after each of their turns, and there are two turns a layer.
class CpuDelegate final : public Executor {
 public:
  // Error kUnsupported: this build of llama.cpp has no CPU backend.
  static Result<std::unique_ptr<CpuDelegate>> create(int num_threads);

  // Queues a node; nodes run in order at the next flush, in one pass over the backend.
  ggml_status add(ggml_tensor* node);
  ggml_status flush();

  int concurrency() const override { return num_threads_; }
  void parallel_for(int count, const std::function<void(int)>& body) override;

 private:
  struct BackendDeleter {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
  };
  struct ContextDeleter {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  explicit CpuDelegate(int num_threads) : num_threads_(num_threads) {}

  static void run_bodies(ggml_tensor* node, int thread, int num_threads, void* delegate);

  int num_threads_;
  std::unique_ptr<ggml_backend, BackendDeleter> backend_;
  std::unique_ptr<ggml_context, ContextDeleter> context_;
  ggml_cgraph* graph_ = nullptr;  // queued nodes; owned by context_, like the next
  ggml_cgraph* loop_ = nullptr;   // one node, whose computation is run_bodies
  const std::function<void(int)>* body_ = nullptr;
  int count_ = 0;
  std::atomic<int> next_{0};
};

}  // namespace oscar::ggml
