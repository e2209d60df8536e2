// Tensors as the views that kernels take: pointer, dtype and strides, with the shape checked.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <vector>

#include "problem/params.h"

namespace fastattn::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "fastattn: ", name, ": expected float32, bfloat16 or float16");
  }
}
inline DType dtype_of(const Tensor& t, const char* name) { return dtype_of(t.scalar_type(), name); }

// Where the elements of a tensor lie. Kernels take nullptr for an argument that is not given, and
// `x.untyped_storage().resize_(0)` frees the memory of a tensor that keeps its shape. Other sizes
// leave a part of it. That is seen here and not by a plan, as little as by torch's own operators:
// DLPack does not say how much memory there is.
inline void* data_of(const Tensor& t, const char* name) {
  int64_t bytes = 0, elements = t.storage_offset() + 1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  const auto sizes = t.sizes(), strides = t.strides();
  for (size_t d = 0; d < sizes.size(); ++d) elements += (sizes[d] - 1) * strides[d];
  const int64_t needed = elements * static_cast<int64_t>(t.element_size());
  STD_TORCH_CHECK(needed <= bytes || t.numel() == 0, "fastattn: ", name,
                  ": expected a tensor with its memory, got one whose storage was freed");
  return t.data_ptr();
}

// True if `t` has the shape. A size of 1 fits any size; its stride becomes 0.
inline bool broadcasts_to(const Tensor& t, const std::vector<int64_t>& shape) {
  if (t.dim() != static_cast<int64_t>(shape.size())) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (t.size(d) != shape[d] && t.size(d) != 1) return false;
  }
  return true;
}

inline int64_t stride_or_0(const Tensor& t, int64_t dim) {
  return t.size(dim) == 1 ? 0 : t.stride(dim);
}

// The strides of an output in the order of q's: fastattn/problem/record.py out_dims() says why.
inline std::vector<int64_t> out_strides(const AttentionParams& p, const int64_t* strides_of_q) {
  const int64_t b = strides_of_q[0], h = strides_of_q[1], m = strides_of_q[2];
  std::array<int, 4> order{0, 1, 2, 3};  // outermost first
  if (p.H == 1 || (0 < h && h < m)) {
    order = {0, 2, 1, 3};
    if (0 < b && b < m) order = {2, 0, 1, 3};
  }
  const int64_t sizes[] = {p.B, p.H, p.M, p.E};
  std::vector<int64_t> strides(4);
  int64_t stride = 1;
  for (int i = 4; i-- > 0;) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

inline View view_of(const Tensor& t, const char* name, const std::vector<int64_t>& shape,
                    bool may_broadcast = false) {
  const bool fits = may_broadcast ? broadcasts_to(t, shape) : t.sizes().equals(shape);
  STD_TORCH_CHECK(fits, "fastattn: ", name, ": its shape does not fit the other arguments");
  return {data_of(t, name),  dtype_of(t, name), stride_or_0(t, 0),
          stride_or_0(t, 1), stride_or_0(t, 2), stride_or_0(t, 3)};
}

// A bias that is a function of (b, h, j - i): one row, with the pair (i, j) at j - i + M - 1. The
// shape tells, as one row of a matrix has N elements, or 1.
inline bool is_line(const Tensor& bias, const AttentionParams& p) {
  return p.M > 1 && bias.dim() == 4 && bias.size(2) == 1 && bias.size(3) == p.M + p.N - 1;
}

// A line as a matrix, whose rows overlap: each begins one element before the one above it.
inline View line_view(const Tensor& bias, const AttentionParams& p) {
  View view = view_of(bias, "bias", {p.B, p.H, 1, p.M + p.N - 1}, /*may_broadcast=*/true);
  const int64_t bytes = static_cast<int64_t>(bias.element_size()) * view.stride_c;
  view.data = static_cast<char*>(view.data) + (p.M - 1) * bytes;
  view.stride_r = -view.stride_c;
  return view;
}

}  // namespace fastattn::binding
