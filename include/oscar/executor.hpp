#pragma once
// Parallel-for that the caller can replace (an engine's own pool, TBB, a serial loop).

#include <functional>
#include <memory>

namespace oscar {

class Executor {
 public:
  virtual ~Executor() = default;
  // Number of bodies that may run at once; at least 1.
  virtual int concurrency() const = 0;
  // Runs body(0) ... body(count - 1), in any order, and returns when all are done. Bodies do not throw.
  virtual void parallel_for(int count, const std::function<void(int)>& body) = 0;
};

// Runs everything on the calling thread. Stateless, shared.
Executor& serial_executor();

// `num_threads` in all, the calling one included. One parallel_for at a time.
std::unique_ptr<Executor> make_thread_pool(int num_threads);

}  // namespace oscar
