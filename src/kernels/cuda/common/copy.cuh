#pragma once
// Asynchronous copies from device memory into a warp's ring in shared memory, and the barrier that tells when one is
// there.
//
// From Hopper on a copy is one bulk instruction: a lane announces the bytes and starts it. On sm_80 to sm_89 every lane
// copies 16 bytes at a time and arrives at the barrier, which waits for its copies. The callers are the same.
// -DOSCAR_BULK_COPIES=0 builds the second way for Hopper too, to test it there.

#include "ptx.cuh"

#ifndef OSCAR_BULK_COPIES
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OSCAR_BULK_COPIES 1
#else
#define OSCAR_BULK_COPIES 0
#endif
#endif

namespace oscar::cuda {

// By one thread, before any copy; the block synchronises afterwards.
__device__ __forceinline__ void copy_barrier_init(std::uint32_t barrier) {
  mbarrier_init(barrier, OSCAR_BULK_COPIES ? 1 : 32);
}
__device__ __forceinline__ void copy_barrier_fence() {
#if OSCAR_BULK_COPIES
  fence_mbarrier_init();
#endif
}

// Until the copy of this phase is there.
__device__ __forceinline__ void copy_wait(std::uint32_t barrier, std::uint32_t parity) {
#if OSCAR_BULK_COPIES
  mbarrier_wait(barrier, parity);
#else
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies of a thread's own, of 8 or 16 bytes, without a register in between; they are there after copies_by_thread_wait
// and a barrier. `valid` false writes zeros.
template <int kBytes>
__device__ __forceinline__ void copy_by_thread(void* destination, const void* source, bool valid = true) {
  // 16 bytes pass by L1, which is small beside this much shared memory
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(destination)), "l"(source),
                 "n"(kBytes), "r"(valid ? kBytes : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_by_thread_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// By every thread that wrote into memory that later copies will fill, before the block synchronises and they start.
__device__ __forceinline__ void copy_order_after_writes() {
#if OSCAR_BULK_COPIES
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A copy in up to 32 pieces, one a lane: all lanes call copy_begin with the bytes of all pieces, those that have a
// piece copy_piece, all copy_end. Bytes are multiples of 16, addresses 16-byte aligned. What is copied is read once: it
// leaves L2 first, and what all blocks read again stays (`policy`).
__device__ __forceinline__ void copy_begin(std::uint32_t barrier, std::uint32_t bytes) {
#if OSCAR_BULK_COPIES
  if (threadIdx.x % 32 == 0) mbarrier_expect(barrier, bytes);
  __syncwarp();
#endif
}
__device__ __forceinline__ void copy_16_bytes(std::uint32_t destination, const std::uint8_t* source,
                                              std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_piece(std::uint32_t destination, const void* source, std::uint32_t bytes,
                                           std::uint32_t barrier, std::uint64_t policy) {
#if OSCAR_BULK_COPIES
  bulk_copy_once(destination, source, bytes, barrier, policy);
#else
  const auto* from = static_cast<const std::uint8_t*>(source);
  for (std::uint32_t at = 0; at < bytes; at += 16) copy_16_bytes(destination + at, from + at, policy);
#endif
}
__device__ __forceinline__ void copy_end(std::uint32_t barrier) {
#if !OSCAR_BULK_COPIES
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// A copy of bytes at base + offset in one piece, by all lanes.
__device__ __forceinline__ void copy_by_warp(std::uint32_t destination, const std::uint8_t* base, std::int64_t offset,
                                             std::uint32_t bytes, std::uint32_t barrier, std::uint64_t policy) {
#if OSCAR_BULK_COPIES
  if (threadIdx.x % 32 == 0) {
    mbarrier_expect(barrier, bytes);
    bulk_copy_once(destination, base + offset, bytes, barrier, policy);
  }
#else
  for (std::uint32_t at = 16 * (threadIdx.x % 32); at < bytes; at += 16 * 32)
    copy_16_bytes(destination + at, base + offset + at, policy);
  copy_end(barrier);
#endif
}

}  // namespace oscar::cuda
