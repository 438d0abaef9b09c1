#pragma once
// Warpgroup products of Hopper (sm_90a) on float16 tiles in shared memory: rows of 64 elements (128 bytes), 16-byte
// pieces exchanged by the 128-byte swizzle, 8 rows = 1024 bytes, tiles aligned to 1024.

#include <cstdint>

#include "../common/ptx.cuh"

namespace oscar::cuda {

// Byte of 16-byte piece `piece` (0..7) of row `row`.
__host__ __device__ constexpr int swizzled(int row, int piece) { return 128 * row + ((piece ^ (row % 8)) << 4); }

__device__ __forceinline__ std::uint64_t tile_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kRowGroupStride = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kRowGroupStride | (std::uint64_t{1} << 16) | ((address & 0x3FFFFu) >> 4);
}

// The same for rows of 32 bytes: two pieces, exchanged in every other four rows; tiles aligned to 256.
__host__ __device__ constexpr int swizzled_32(int row, int piece) { return 32 * row + ((piece ^ (row / 4 % 2)) << 4); }
__device__ __forceinline__ std::uint64_t tile_descriptor_32(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle32 = std::uint64_t{3} << 62, kRowGroupStride = std::uint64_t{256 >> 4} << 32;
  return kSwizzle32 | kRowGroupStride | (std::uint64_t{1} << 16) | ((address & 0x3FFFFu) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Descriptor of the tile `bytes` further on.
__device__ __forceinline__ std::uint64_t advanced(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes >> 4);
}
// Ordinary stores to shared memory become visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The accumulator's registers as the assembler wants them: their numbers in the text, and the operands.
#define OSCAR_NUMBERS_4 "%0, %1, %2, %3"
#define OSCAR_NUMBERS_8 OSCAR_NUMBERS_4 ", %4, %5, %6, %7"
#define OSCAR_NUMBERS_16 OSCAR_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define OSCAR_NUMBERS_32 \
  OSCAR_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OSCAR_NUMBERS_36 OSCAR_NUMBERS_32 ", %32, %33, %34, %35"
#define OSCAR_NUMBERS_64                                                                                        \
  OSCAR_NUMBERS_32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OSCAR_NUMBERS_68 OSCAR_NUMBERS_64 ", %64, %65, %66, %67"
#define OSCAR_NUMBERS_128                                                                                        \
  OSCAR_NUMBERS_64                                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "  \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "    \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"
#define OSCAR_OPERANDS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define OSCAR_OPERANDS_8(i) OSCAR_OPERANDS_4(i), OSCAR_OPERANDS_4((i) + 4)
#define OSCAR_OPERANDS_16(i) OSCAR_OPERANDS_8(i), OSCAR_OPERANDS_8((i) + 8)
#define OSCAR_OPERANDS_32(i) OSCAR_OPERANDS_16(i), OSCAR_OPERANDS_16((i) + 16)
#define OSCAR_OPERANDS_36(i) OSCAR_OPERANDS_32(i), OSCAR_OPERANDS_4((i) + 32)
#define OSCAR_OPERANDS_64(i) OSCAR_OPERANDS_32(i), OSCAR_OPERANDS_32((i) + 32)
#define OSCAR_OPERANDS_68(i) OSCAR_OPERANDS_64(i), OSCAR_OPERANDS_4((i) + 64)
#define OSCAR_OPERANDS_128(i) OSCAR_OPERANDS_64(i), OSCAR_OPERANDS_64((i) + 64)

// For tiles of b of `keys` rows; a thread holds keys / 2 registers of the accumulator.
//   wgmma_shared      d[64 x keys] = a b (+ d when accumulate): a [64 x 16] and b [keys x 16] in shared memory
//   wgmma_registers   d += a b, a in registers
// n0 to n5: the numbers of the operands after the accumulator's.
#define OSCAR_WGMMA_SHARED(keys, registers, n0, n1, n2)                                                 \
  __device__ __forceinline__ void wgmma_shared(float(&d)[registers], std::uint64_t a, std::uint64_t b,  \
                                               int accumulate) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" n2                                                \
                 ", 0;\n"                                                                               \
                 "wgmma.mma_async.sync.aligned.m64n" keys "k16.f32.f16.f16 {" OSCAR_NUMBERS_##registers \
                 "}, %" n0 ", %" n1 ", p, 1, 1, 0, 0;\n}\n"                                             \
                 : OSCAR_OPERANDS_##registers(0)                                                        \
                 : "l"(a), "l"(b), "r"(accumulate));                                                    \
  }
#define OSCAR_WGMMA_REGISTERS(keys, registers, n0, n1, n2, n3, n4, n5)                                                 \
  __device__ __forceinline__ void wgmma_registers(float(&d)[registers], const std::uint32_t(&a)[4], std::uint64_t b) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" n5                                                               \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" keys "k16.f32.f16.f16 {" OSCAR_NUMBERS_##registers                \
                 "}, {%" n0 ", %" n1 ", %" n2 ", %" n3 "}, %" n4 ", p, 1, 1, 0;\n}\n"                                  \
                 : OSCAR_OPERANDS_##registers(0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                        \
  }
OSCAR_WGMMA_SHARED("8", 4, "4", "5", "6")
OSCAR_WGMMA_SHARED("32", 16, "16", "17", "18")
OSCAR_WGMMA_SHARED("64", 32, "32", "33", "34")
OSCAR_WGMMA_SHARED("128", 64, "64", "65", "66")
OSCAR_WGMMA_REGISTERS("8", 4, "4", "5", "6", "7", "8", "9")
OSCAR_WGMMA_REGISTERS("64", 32, "32", "33", "34", "35", "36", "37")
OSCAR_WGMMA_REGISTERS("128", 64, "64", "65", "66", "67", "68", "69")
OSCAR_WGMMA_REGISTERS("72", 36, "36", "37", "38", "39", "40", "41")
OSCAR_WGMMA_REGISTERS("136", 68, "68", "69", "70", "71", "72", "73")
OSCAR_WGMMA_REGISTERS("256", 128, "128", "129", "130", "131", "132", "133")
#undef OSCAR_WGMMA_SHARED
#undef OSCAR_WGMMA_REGISTERS
#undef OSCAR_OPERANDS_128
#undef OSCAR_OPERANDS_68
#undef OSCAR_OPERANDS_64
#undef OSCAR_OPERANDS_36
#undef OSCAR_OPERANDS_32
#undef OSCAR_OPERANDS_16
#undef OSCAR_OPERANDS_8
#undef OSCAR_OPERANDS_4
#undef OSCAR_NUMBERS_128
#undef OSCAR_NUMBERS_68
#undef OSCAR_NUMBERS_64
#undef OSCAR_NUMBERS_36
#undef OSCAR_NUMBERS_32
#undef OSCAR_NUMBERS_16
#undef OSCAR_NUMBERS_8
#undef OSCAR_NUMBERS_4

}  // namespace oscar::cuda
