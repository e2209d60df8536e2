// The instructions of tensor-core kernels (sm_80): 16-bit matrix fragments, products, asynchronous
// copies. Each has its documented meaning in plain C++, as in ptx.cuh.
//
// Fragments of a warp, with g = lane / 4 and t = lane % 4. A register holds two neighbours of 16
// bits, the one with the lower column or row in its lower half:
//
//   A [16][16]  a0 (g, 2t)  a1 (g + 8, 2t)  a2 (g, 2t + 8)  a3 (g + 8, 2t + 8)
//   B [16][8]   b0 (2t, g)  b1 (2t + 8, g)                              two rows of a column
//   C [16][8]   c0 c1 (g, 2t)  c2 c3 (g + 8, 2t)                        fp32
#pragma once

#include "cuda/base/ptx.cuh"
#include "problem/params.h"

#if defined(FASTATTN_CUDA_ON_CPU)
#include <products.h>

#include <vector>
#endif

namespace fastattn::cuda {

// ---- 16-bit pairs ----

// Rounds both to nearest; `low` is in the lower half.
template <DType kType>
FASTATTN_DEVICE uint32_t pack_pair(float low, float high) {
  static_assert(kType != DType::kFloat32);
#if defined(FASTATTN_CUDA_ON_CPU)
  const auto bits = [](float x) {
    return kType == DType::kFloat16 ? float_to_fp16(x) : float_to_bf16(x);
  };
  return static_cast<uint32_t>(bits(high)) << 16 | bits(low);
#else
  uint32_t y;
  if constexpr (kType == DType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
#endif
}

// ---- fragments from shared memory ----

#if !defined(FASTATTN_CUDA_ON_CPU)
FASTATTN_DEVICE uint32_t shared_address(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}
#endif

// Four 8 x 8 matrices of 16 bits. Lane l gives the address of row l % 8 (16 bytes, aligned) of
// matrix l / 8. Of each matrix, it gets two neighbours of row g: columns 2t and 2t + 1.
// kTransposed: two of column g, rows 2t and 2t + 1.
template <bool kTransposed>
FASTATTN_DEVICE void load_matrices(const uint16_t* row, uint32_t (&to)[4]) {
#if defined(FASTATTN_CUDA_ON_CPU)
  uint64_t rows[32];
  const Site here = {__builtin_FILE(), __builtin_LINE()};
  require_aligned(row, 16, here);
  exchange_all(reinterpret_cast<uint64_t>(row), rows, here);
  const int g = lane() / 4, t = lane() % 4;
  for (int n = 0; n < 4; ++n) {
    const auto at = [&](int r, int c) -> uint32_t {
      return reinterpret_cast<const uint16_t*>(rows[n * 8 + r])[c];
    };
    to[n] =
        kTransposed ? at(2 * t + 1, g) << 16 | at(2 * t, g) : at(g, 2 * t + 1) << 16 | at(g, 2 * t);
  }
  exchange_all(0, rows, here);  // no lane writes before all have read
#else
  const uint32_t address = shared_address(row);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// ---- products ----

// C += A B, with A [16][16] and B [16][8] of 16 bits and C in fp32. All lanes must take part, so
// the asm is volatile: otherwise a compiler may move it into a branch that only some lanes take.
template <DType kType>
FASTATTN_DEVICE void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  static_assert(kType != DType::kFloat32);
#if defined(FASTATTN_CUDA_ON_CPU)
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  uint64_t lanes[32];
  const Site here = {__builtin_FILE(), __builtin_LINE()};
  exchange_all(reinterpret_cast<uint64_t>(mine), lanes, here);
  const auto half = [&](int from, int n, int high) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(lanes[from])[n];
    const uint16_t bits = static_cast<uint16_t>(high ? pair >> 16 : pair);
    return kType == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
  };
  const int g = lane() / 4, t = lane() % 4;
  for (int n = 0; n < 4; ++n) {
    const int row = n / 2, column = 2 * t + n % 2;
    float x[16], y[16];
    for (int k = 0; k < 16; ++k) {
      x[k] = half(g * 4 + k % 8 / 2, row + k / 8 * 2, k % 2);
      y[k] = half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
    c[n] = cuda_on_cpu::add_products(kType == DType::kFloat16, c[n], x, y);
  }
  exchange_all(0, lanes, here);
#else
  if constexpr (kType == DType::kFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// ---- asynchronous copies from global to shared memory ----

#if defined(FASTATTN_CUDA_ON_CPU)
// Odd threads copy at the wait, so a kernel that reads too early sees old data. Even threads copy
// at once, so a kernel that still reads the old data sees new.
struct PendingCopy {
  void* to;
  const void* from;
  int bytes;
};
static inline std::vector<PendingCopy>& pending_copies() {
  static std::vector<PendingCopy> pending[1024];
  return pending[threadIdx.x];
}
#endif

// Copies 16 or 4 bytes; both addresses are aligned to as many. Visible to this thread after
// wait_for_copies(), to others after a barrier that follows.
template <int kBytes>
FASTATTN_DEVICE void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 16 || kBytes == 4);
#if defined(FASTATTN_CUDA_ON_CPU)
  const Site here = {__builtin_FILE(), __builtin_LINE()};
  require_aligned(shared, kBytes, here), require_aligned(global, kBytes, here);
  if (threadIdx.x % 2 == 0)
    std::memcpy(shared, global, kBytes);
  else
    pending_copies().push_back({shared, global, kBytes});
#else
  const uint32_t to = shared_address(shared);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(global) : "memory");
#endif
}

FASTATTN_DEVICE void wait_for_copies() {
#if defined(FASTATTN_CUDA_ON_CPU)
  for (const PendingCopy& copy : pending_copies()) std::memcpy(copy.to, copy.from, copy.bytes);
  pending_copies().clear();
#else
  asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

}  // namespace fastattn::cuda
