#pragma once
// Enough of CUDA to run a kernel's source on the CPU, one fiber a thread: float operations, shuffles, votes, barriers
// and atomics. A warp operation completes when all 32 lanes have come to the same one; a launch in which no thread can
// go on fails, so that divergent shuffles and barriers show as an error instead of a hung device. Include before the
// kernel. Not emulated: memory ordering between barriers, races, rates.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#pragma GCC diagnostic ignored "-Wconversion"

#define __device__
#define __global__
#define __constant__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline dim3 threadIdx, blockIdx;  // of the fiber that runs

namespace oscar::test {

class CudaEmulation {
 public:
  static constexpr int kLanes = 32;

  // Runs one block of `num_threads` (a multiple of 32) at `block`.
  void run_block(dim3 block, int num_threads, const std::function<void()>& kernel) {
    blockIdx = block;
    kernel_ = &kernel;
    num_threads_ = num_threads;
    fibers_.resize(static_cast<std::size_t>(num_threads));
    warps_.assign(static_cast<std::size_t>(num_threads / kLanes), {});
    barrier_ = {};
    current() = this;
    for (Fiber& fiber : fibers_) {
      if (!fiber.stack) fiber.stack = std::make_unique<std::byte[]>(kStackBytes);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      fiber.done = false;
      makecontext(&fiber.context, &CudaEmulation::enter, 0);
    }
    int live = num_threads;
    while (live > 0) {
      const std::uint64_t before = progress_;
      live = 0;
      for (int thread = 0; thread < num_threads; ++thread) {
        Fiber& fiber = fibers_[static_cast<std::size_t>(thread)];
        if (fiber.done) continue;
        running_ = thread;
        threadIdx.x = static_cast<unsigned>(thread);
        swapcontext(&scheduler_, &fiber.context);
        live += fiber.done ? 0 : 1;
      }
      if (progress_ == before)
        throw std::runtime_error("the block hangs: threads wait at different warp operations or barriers");
    }
  }

  static CudaEmulation*& current() {
    static CudaEmulation* emulation = nullptr;
    return emulation;
  }

  // Meets the other lanes (or threads); returns what each brought. `tag` tells operations apart.
  const std::uint64_t* meet_warp(int tag, std::uint64_t value) {
    return meet(warps_[static_cast<std::size_t>(running_ / kLanes)], kLanes, running_ % kLanes, tag, value);
  }
  const std::uint64_t* meet_block(int tag, std::uint64_t value) {
    return meet(barrier_, num_threads_, running_, tag, value);
  }

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;
  static constexpr int kMaxThreads = 1024;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    bool done = false;
  };
  struct Meeting {
    std::uint64_t values[kMaxThreads], result[kMaxThreads];
    int arrived = 0, tag = 0;
    std::uint64_t generation = 0;
  };

  static void enter() {
    CudaEmulation& self = *current();
    (*self.kernel_)();
    self.fibers_[static_cast<std::size_t>(self.running_)].done = true;
    ++self.progress_;
  }

  const std::uint64_t* meet(Meeting& meeting, int count, int index, int tag, std::uint64_t value) {
    if (meeting.arrived > 0 && meeting.tag != tag) wait([&] { return meeting.arrived == 0; });
    meeting.tag = tag;
    meeting.values[index] = value;
    const std::uint64_t generation = meeting.generation;
    if (++meeting.arrived == count) {
      std::copy_n(meeting.values, count, meeting.result);
      meeting.arrived = 0;
      ++meeting.generation;
      ++progress_;
    } else {
      wait([&] { return meeting.generation != generation; });
    }
    return meeting.result;
  }

  template <typename Condition>
  void wait(Condition condition) {
    const int thread = running_;
    while (!condition()) swapcontext(&fibers_[static_cast<std::size_t>(thread)].context, &scheduler_);
  }

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Meeting> warps_;
  Meeting barrier_;
  ucontext_t scheduler_;
  int running_ = 0, num_threads_ = 0;
  std::uint64_t progress_ = 0;
};

enum CudaOperation : int { kShuffle, kShuffleXor, kBallot, kAny, kSyncWarp, kSyncThreads, kSyncThreadsAnd };

template <typename T>
std::uint64_t to_word(T value) {
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <typename T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace oscar::test

// ---- warp and block operations ----
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  using namespace oscar::test;
  return from_word<T>(CudaEmulation::current()->meet_warp(kShuffle, to_word(value))[lane]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
  using namespace oscar::test;
  const int lane = static_cast<int>(threadIdx.x % 32) ^ step;
  return from_word<T>(CudaEmulation::current()->meet_warp(kShuffleXor + 16 * step, to_word(value))[lane]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto* values = oscar::test::CudaEmulation::current()->meet_warp(oscar::test::kBallot, value);
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= static_cast<unsigned>(values[lane]) << lane;
  return result;
}
inline bool __any_sync(unsigned, bool value) {
  const auto* values = oscar::test::CudaEmulation::current()->meet_warp(oscar::test::kAny, value);
  return std::any_of(values, values + 32, [](std::uint64_t word) { return word != 0; });
}
inline void __syncwarp() { oscar::test::CudaEmulation::current()->meet_warp(oscar::test::kSyncWarp, 0); }
inline void __syncthreads() { oscar::test::CudaEmulation::current()->meet_block(oscar::test::kSyncThreads, 0); }
template <int kThreads = 256>
int __syncthreads_and(bool value) {
  const auto* values = oscar::test::CudaEmulation::current()->meet_block(oscar::test::kSyncThreadsAnd, value);
  return std::all_of(values, values + kThreads, [](std::uint64_t word) { return word != 0; });
}

// ---- arithmetic; the test is compiled without contraction ----
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline unsigned __float_as_uint(float value) { return oscar::test::from_word<unsigned>(oscar::test::to_word(value)); }
inline float __uint_as_float(unsigned value) { return oscar::test::from_word<float>(oscar::test::to_word(value)); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = (std::uint64_t{b} << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(both >> (8 * ((selector >> (4 * i)) & 7)) & 0xff) << (8 * i);
  return result;
}
template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline void atomicAnd(unsigned* address, unsigned value) { *address &= value; }
inline void atomicOr(unsigned* address, unsigned value) { *address |= value; }
