// Memory for results, in the layouts that fake kernels promise (fastattn/backends/operators.py).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "binding/device.h"
#include "binding/operands.h"
#include "binding/views.h"

namespace fastattn::binding {

// Calls the C interface: torch::stable::empty() looks up an operator by name in the dispatcher.
// That takes as long as the rest of a small call.
inline Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& shape,
                            const std::vector<int64_t>& strides, ScalarType dtype) {
  int32_t device = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle out = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides.data(), static_cast<int32_t>(dtype),
                                                  device, index, &out));
  Tensor result(out);
  const int64_t size = static_cast<int64_t>(result.element_size());
  device::expect_writes(result.data_ptr(), result.numel() * size);
  return result;
}

inline Tensor empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return empty_strided(like, shape, strides, dtype);
}

// [B, H, M, E], in memory in the order of q's dims.
inline Tensor empty_out(const Tensor& q, const AttentionParams& p, ScalarType dtype) {
  return empty_strided(q, {p.B, p.H, p.M, p.E}, out_strides(p, q.strides().data()), dtype);
}

// Laid out like the result of torch.empty_like(); contiguous if of another dtype.
inline Tensor like(const Tensor& t, ScalarType dtype) {
  if (dtype != t.scalar_type()) return empty(t, {t.sizes().begin(), t.sizes().end()}, dtype);
  if (!t.is_contiguous() || t.numel() == 0) return torch::stable::empty_like(t);
  const auto sizes = t.sizes(), strides = t.strides();
  return empty_strided(t, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, dtype);
}

// Of results that may be sums over blocks later.
inline ScalarType result_dtype(const Operands& in) {
  return in.wide ? ScalarType::Float : in.q.scalar_type();
}

// `bytes` of memory that live as long as the tensor; none if 0.
inline OptTensor workspace_of(const Tensor& like, int64_t bytes) {
  if (bytes == 0) return std::nullopt;
  return empty(like, {bytes}, ScalarType::Byte);
}

}  // namespace fastattn::binding
