#include <oscar/executor.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace oscar {
namespace {

class SerialExecutor final : public Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(int count, const std::function<void(int)>& body) override {
    for (int i = 0; i < count; ++i) body(i);
  }
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~ThreadPool() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  int concurrency() const override { return static_cast<int>(workers_.size()) + 1; }

  void parallel_for(int count, const std::function<void(int)>& body) override {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    drain(body, count);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void drain(const std::function<void(int)>& body, int count) {
    for (int i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) body(i);
  }
  void work() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      const std::function<void(int)>* body = body_;
      const int count = count_;
      lock.unlock();
      drain(*body, count);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int> next_{0};
  const std::function<void(int)>* body_ = nullptr;
  std::uint64_t generation_ = 0;
  int count_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

std::unique_ptr<Executor> make_thread_pool(int num_threads) {
  if (num_threads <= 1) return std::make_unique<SerialExecutor>();
  return std::make_unique<ThreadPool>(num_threads);
}

}  // namespace oscar
