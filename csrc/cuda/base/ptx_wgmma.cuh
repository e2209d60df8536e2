// Products of a warpgroup (four warps, sm_90a): D [64][n] += A [64][16] B [16][n], A from shared
// memory or from registers, B from shared memory, D in registers. PTX ISA 9.0, "wgmma".
// tests/cuda/simulator/async.h has the meaning of each instruction in plain C++.
//
// Products are asynchronous. Between a product and the wait for its group, nothing may touch its
// registers, nor write what it reads. Warp w has rows 16 w to 16 w + 15 of A and D, in fragments as
// those of ptx_mma.cuh:
//
//   D [n / 8][4]   d[i] is C of columns 8 i to 8 i + 7
#pragma once

#include "cuda/base/ptx_async.cuh"
#include "cuda/base/reduce.cuh"

namespace fastattn::cuda {

// Whether this compilation has the instructions: a kernel without them does nothing.
#if defined(FASTATTN_CUDA_ON_CPU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

// Whether a kernel without such products may count on a GPU that has them: on its shared memory.
FASTATTN_DEVICE bool is_for_wgmma() {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::use_sm90();
#endif
  return kHasWgmma;
}

constexpr int kWarpgroup = 128;  // threads

// ---- operands in shared memory ----

// A tile of rows of 128 bytes (64 numbers), as load_box() writes it, aligned to 1024 bytes. Bytes:
struct OperandShape {
  uint32_t panel;    // between panels of 64 numbers; 0 where a product needs one
  uint32_t stretch;  // between groups of eight rows
};

// The 64-bit descriptor of the operand that begins at `at`.
FASTATTN_DEVICE uint64_t describe(const void* at, OperandShape shape) {
#if defined(FASTATTN_CUDA_ON_CPU)
  const uint32_t address = async::shared_address(at);
#else
  const uint32_t address = shared_address(at);
#endif
  constexpr uint32_t kSwizzle128 = 1u << 30;
  const uint32_t low = (address >> 4) + (shape.panel >> 4 << 16);
  return static_cast<uint64_t>(kSwizzle128 | shape.stretch >> 4) << 32 | low;
}

// That of the operand so many chunks of 16 bytes further on. Shared memory ends below 256 KiB:
// nothing is carried into the next field.
FASTATTN_DEVICE constexpr uint32_t chunks_of(size_t bytes) {
  return static_cast<uint32_t>(bytes / 16);
}
FASTATTN_DEVICE uint64_t advance(uint64_t descriptor, uint32_t chunks) {
  return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + chunks);
}
// The same descriptor. What is advanced from it is computed where it is used: computed ahead of a
// loop, the descriptors of a long row of products would take the registers.
FASTATTN_DEVICE uint64_t here(uint64_t descriptor) {
  const int low = opaque_here(static_cast<int>(descriptor));
  return descriptor >> 32 << 32 | static_cast<uint32_t>(low);
}

// ---- order ----

// Before the products of a group: what the threads did to the registers comes first.
FASTATTN_DEVICE void fence_products() {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::fence_products();
#else
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#endif
}

// Ends a group of products.
FASTATTN_DEVICE void commit_products(FASTATTN_SITE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::commit_products(here);
#else
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
#endif
}

// Waits until all groups but the latest kPending are done.
template <int kPending>
FASTATTN_DEVICE void wait_for_products(FASTATTN_SITE) {
#if defined(FASTATTN_CUDA_ON_CPU)
  async::wait_for_products(kPending, here);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving uses of these registers over this place: it knows nothing of the
// products that write and read them. Belongs before each fence and after each wait.
template <int kTiles>
FASTATTN_DEVICE void hold([[maybe_unused]] float (&d)[kTiles][4]) {
#if !defined(FASTATTN_CUDA_ON_CPU)
#pragma unroll
  for (int n = 0; n < 4 * kTiles; ++n) asm volatile("" : "+f"(d[n / 4][n % 4]) : : "memory");
#endif
}
// Of operand A.
template <int kSteps>
FASTATTN_DEVICE void hold([[maybe_unused]] uint32_t (&a)[kSteps][4]) {
#if !defined(FASTATTN_CUDA_ON_CPU)
#pragma unroll
  for (int n = 0; n < 4 * kSteps; ++n) asm volatile("" : "+r"(a[n / 4][n % 4]) : : "memory");
#endif
}

// ptxas would move a wait before what needs no product, which then overlaps none. It moves no wait
// over a store: this one, which no thread makes, needs all of d.
template <int kTiles>
FASTATTN_DEVICE void keep_before_wait([[maybe_unused]] const float (&d)[kTiles][4]) {
#if !defined(FASTATTN_CUDA_ON_CPU)
  uint32_t threads;
  asm("mov.u32 %0, %%ntid.x;" : "=r"(threads));
  if (__any_sync(kAllLanes, threads == 0)) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      asm volatile("st.volatile.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                   :
                   : "r"(threads), "f"(d[n][0]), "f"(d[n][1]), "f"(d[n][2]), "f"(d[n][3])
                   : "memory");
  }
#endif
}

// ---- products ----

#if !defined(FASTATTN_CUDA_ON_CPU)

#define FASTATTN_D8(n)                                                           \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), \
      "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), "+f"(d[n + 1][3])
#define FASTATTN_D32(n) FASTATTN_D8(n), FASTATTN_D8(n + 2), FASTATTN_D8(n + 4), FASTATTN_D8(n + 6)
#define FASTATTN_NAMES32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTATTN_NAMES64                                                     \
  FASTATTN_NAMES32                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTATTN_NAMES40 FASTATTN_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FASTATTN_NAMES128                                                       \
  FASTATTN_NAMES64                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "    \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, " \
  "%93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "     \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "    \
  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FASTATTN_OUTS32 FASTATTN_D32(0)
#define FASTATTN_OUTS40 FASTATTN_D32(0), FASTATTN_D8(8)
#define FASTATTN_OUTS64 FASTATTN_D32(0), FASTATTN_D32(8)
#define FASTATTN_OUTS128 FASTATTN_OUTS64, FASTATTN_D32(16), FASTATTN_D32(24)

// `sums`: how many a thread has; then come the numbers of the other operands. `n`: columns of B.
// K-major A and B, both in shared memory:
#define FASTATTN_WGMMA_SS(sums, n, type, A, B, keep_at)                            \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep_at                  \
               ", 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type      \
               " {" FASTATTN_NAMES##sums "}, %" A ", %" B ", keep, 1, 1, 0, 0;\n}" \
               : FASTATTN_OUTS##sums                                               \
               : "l"(a), "l"(b), "r"(static_cast<int>(keep)))
// A from registers; B is MN-major if kTransposed.
#define FASTATTN_WGMMA_RS(sums, n, type, A, B, keep_at, transposed_at)                            \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep_at                                 \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type                     \
               " {" FASTATTN_NAMES##sums "}, {" A "}, %" B ", keep, 1, 1, %" transposed_at ";\n}" \
               : FASTATTN_OUTS##sums                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), \
                 "n"(kTransposed ? 1 : 0))
#define FASTATTN_WGMMA(kind, sums, n, ...)               \
  if constexpr (kType == DType::kFloat16) {              \
    FASTATTN_WGMMA_##kind(sums, n, "f16", __VA_ARGS__);  \
  } else {                                               \
    FASTATTN_WGMMA_##kind(sums, n, "bf16", __VA_ARGS__); \
  }

#endif

// D += A B, or D = A B unless `keep`: rows of A and columns of B are rows of 16 numbers that
// follow each other in shared memory.
template <DType kType, int kTiles>
FASTATTN_DEVICE void multiply_shared(float (&d)[kTiles][4], uint64_t a, uint64_t b,
                                     bool keep FASTATTN_HERE) {
  static_assert(kTiles == 8 || kTiles == 10 || kTiles == 16);
#if defined(FASTATTN_CUDA_ON_CPU)
  async::multiply({nullptr, a}, b, false, keep, kType == DType::kFloat16, kTiles, &d[0][0], here);
#else
  if constexpr (kTiles == 8) {
    FASTATTN_WGMMA(SS, 32, "64", "32", "33", "34")
  } else if constexpr (kTiles == 10) {
    FASTATTN_WGMMA(SS, 40, "80", "40", "41", "42")
  } else {
    FASTATTN_WGMMA(SS, 64, "128", "64", "65", "66")
  }
#endif
}

// The same where A is a fragment of this warp's rows. kTransposed: rows of B, not columns, are rows
// in shared memory.
template <DType kType, bool kTransposed, int kTiles>
FASTATTN_DEVICE void multiply_registers(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b,
                                        bool keep FASTATTN_HERE) {
  static_assert(kTiles == 8 || kTiles == 16 || kTiles == 32);
#if defined(FASTATTN_CUDA_ON_CPU)
  async::multiply({a, 0}, b, kTransposed, keep, kType == DType::kFloat16, kTiles, &d[0][0], here);
#else
  if constexpr (kTiles == 8) {
    FASTATTN_WGMMA(RS, 32, "64", "%32, %33, %34, %35", "36", "37", "38")
  } else if constexpr (kTiles == 16) {
    FASTATTN_WGMMA(RS, 64, "128", "%64, %65, %66, %67", "68", "69", "70")
  } else {
    FASTATTN_WGMMA(RS, 128, "256", "%128, %129, %130, %131", "132", "133", "134")
  }
#endif
}

// ---- registers ----

// Takes or gives back registers, for the whole warpgroup: the threads of a block have 64 K.
template <int kCount>
FASTATTN_DEVICE void take_registers(FASTATTN_SITE) {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
#if defined(FASTATTN_CUDA_ON_CPU)
  async::take_registers(kCount, here);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kCount));
#endif
}
template <int kCount>
FASTATTN_DEVICE void give_registers(FASTATTN_SITE) {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
#if defined(FASTATTN_CUDA_ON_CPU)
  async::give_registers(kCount, here);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kCount));
#endif
}

}  // namespace fastattn::cuda
