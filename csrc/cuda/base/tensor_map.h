// What load_box() (ptx_async.cuh) copies from: a [B, H, rows, columns] array of 16-bit numbers in
// global memory, and the size of a box of it. Made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "problem/params.h"

namespace fastattn::cuda {

constexpr int kPanel = 64;  // columns of a box: 128 bytes, the row that is permuted

constexpr int64_t kMostRows = (int64_t{1} << 31) - 256;

// The sizes of a view.
struct Extents {
  int64_t b, h, rows, columns;
};

inline bool is_box_stride(int64_t extent, int64_t stride) {
  return extent == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 38);
}

// Whether a tensor map can describe the view: it counts strides in steps of 16 bytes. Rows, and the
// ends of tiles behind them, have 32 bits.
inline bool has_tensor_map(const View& view, const Extents& size) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride_c == 1 &&
         is_box_stride(size.b, view.stride_b) && is_box_stride(size.h, view.stride_h) &&
         is_box_stride(size.rows, view.stride_r) && size.rows <= kMostRows;
}

// Of the driver, which the library does not link to; nullptr without one.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
#if defined(FASTATTN_CUDA_ON_CPU)
  return cuTensorMapEncodeTiled;
#else
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                   &found);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
#endif
}

// The map of a view that has_tensor_map(), in boxes of `rows` x kPanel. Returns whether the driver
// made it. Not one function for the whole process: libraries of tests have drivers of their own.
static inline bool make_tensor_map(const View& view, const Extents& size, int rows,
                                   CUtensorMap* map) {
  static const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const int64_t extents[] = {size.columns, size.rows, size.h, size.b};
  const int64_t strides[] = {view.stride_r, view.stride_h, view.stride_b};
  cuuint64_t sizes[4], bytes[3];
  for (int n = 0; n < 4; ++n) sizes[n] = static_cast<cuuint64_t>(extents[n]);
  // The stride of a dim of size 1 is not used, but has to be valid.
  for (int n = 0; n < 3; ++n)
    bytes[n] = extents[n + 1] == 1 ? 16 : static_cast<cuuint64_t>(strides[n]) * 2;
  const cuuint32_t box[] = {kPanel, static_cast<cuuint32_t>(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  const auto type = view.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(map, type, 4, view.data, sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fastattn::cuda
