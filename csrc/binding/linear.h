// Linear layers y = x W^T + b with torch's own matrix products.
//
// For float32, this is a product, then a pass that adds the bias. F.linear copies the bias into y
// first and adds the product to it. That takes 8% longer with 128 tokens, 512 features and 1536
// outputs.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "binding/views.h"
#include "problem/host_device.h"

// torch's interface of oneDNN's product for compiled models, and of one that adds another tensor. A
// torch without oneDNN lacks them.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, const char* follows,
    const double** scalars, int64_t n_scalars, const char** algorithm, AtenTensorHandle* y);
__attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise_binary(
    AtenTensorHandle x, AtenTensorHandle other, AtenTensorHandle weight, AtenTensorHandle* bias,
    const char* follows, AtenTensorHandle* y);
}

namespace fastattn::projection {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

// Calls one of torch's operators, with all arguments of its schema.
template <typename Result = Tensor, typename... Args>
Result call(const char* name, const Args&... args) {
  std::array<StableIValue, std::max<size_t>(1, sizeof...(Args))> stack{
      torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Result>(stack[0]);
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// A view of the memory of `t` from its element `offset` on, with other sizes and strides.
inline Tensor view(const Tensor& t, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides, int64_t offset = 0) {
  AtenTensorHandle out = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset, &out));
  return Tensor(out);
}

inline Tensor transposed(const Tensor& t) {
  return view(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
}

// From how many multiply-adds on oneDNN takes less time for float32 than MKL, torch's own choice:
// docs/decisions/0016.
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
inline bool is_zen5() {  // of AMD's processors, those from Zen 5 on have this set
#ifdef __x86_64__
  static const bool found = __builtin_cpu_supports("avx512vp2intersect");
  return found;
#else
  return false;
#endif
}
inline int64_t onednn_from() {
#ifdef __x86_64__
  static const bool faster = aoti_torch_cpu__linear_pointwise != nullptr &&
                             __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
  if (faster) return int64_t{1} << (is_zen5() ? 22 : 23);
#endif
  return kNever;
}

// MKL multiplies few tokens in one thread; oneDNN reads the weights in all. With two threads, that
// is worth as much as this many tokens more. With one, it costs up to 22%: docs/decisions/0016.
// That is Zen 4. On Zen 5 nobody measured two threads.
inline int64_t tokens_of_reading() { return is_zen5() ? 0 : 16; }

// At most so many terms of a sum are added one after the other, as oneDNN itself does for some
// lengths. In one chain of 1536, the error is four times that of MKL. That is nothing in bfloat16,
// and oneDNN adds the products of a single token in another way, more accurate than that of MKL.
constexpr int64_t kOneDnnChain = 1024;
inline int64_t longest_chain(const Tensor& x) {
  return x.scalar_type() == ScalarType::Float && x.size(0) > 1 ? kOneDnnChain : x.size(1);
}

inline bool is_faster_by_onednn(const Tensor& x, const Tensor& weight) {
  constexpr int64_t kFewest = 128;  // rows of each operand, for parts of the other to be copied
  const int64_t T = x.size(0), F = weight.size(0);
  // MKL is faster for a single token and weights that lie column by column. Weights with gaps would
  // be copied. The number of threads is not asked for: results must not depend on it.
  const bool by_columns = weight.stride(0) == 1 && weight.stride(1) == F;
  const bool reads = weight.is_contiguous() || (by_columns && T > 1);
  return (T + (reads ? tokens_of_reading() : 0)) * weight.numel() >= onednn_from() && T > 0 &&
         (x.size(1) <= longest_chain(x) || std::min(T, F) >= kFewest);
}

// Columns [begin, begin + count), without gaps between rows or between columns. With gaps, oneDNN
// takes a thousand times longer.
inline Tensor dense_columns(const Tensor& t, int64_t begin, int64_t count) {
  const int64_t rows = t.size(0);
  const bool by_columns = t.stride(0) == 1 && t.stride(1) == rows;
  if (!by_columns && t.is_contiguous() && count == t.size(1))
    return view(t, {rows, count}, {count, 1});
  const Tensor part = view(t, {rows, count}, {t.stride(0), t.stride(1)}, begin * t.stride(1));
  return by_columns ? part : torch::stable::contiguous(part);
}

inline Tensor linear_by_onednn(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const int64_t depth = x.size(1);
  const int64_t step = fastattn::ceil_div(depth, fastattn::ceil_div(depth, longest_chain(x)));
  const OptTensor own = bias ? OptTensor(as_contiguous(*bias)) : std::nullopt;
  AtenTensorHandle b = own ? own->get() : nullptr;
  const auto multiply = [&](int64_t begin, const OptTensor& other) {
    const int64_t count = std::min(step, depth - begin);
    const Tensor left = dense_columns(x, begin, count);
    const Tensor right = dense_columns(weight, begin, count);
    AtenTensorHandle y = nullptr;
    TORCH_ERROR_CODE_CHECK(other ? aoti_torch_cpu__linear_pointwise_binary(
                                       left.get(), other->get(), right.get(), nullptr, "add", &y)
                                 : aoti_torch_cpu__linear_pointwise(left.get(), right.get(),
                                                                    own ? &b : nullptr, "none",
                                                                    nullptr, 0, nullptr, &y));
    return Tensor(y);
  };
  Tensor y = multiply(0, std::nullopt);
  for (int64_t k = step; k < depth; k += step) y = multiply(k, y);
  return y;
}

// Only Intel processors multiply few tokens faster with the weight on the left:
// docs/decisions/0008.
inline bool weight_first([[maybe_unused]] int64_t tokens, [[maybe_unused]] const Tensor& weight) {
#ifdef __x86_64__
  static const bool intel = __builtin_cpu_is("intel");
  if (!intel) return false;
  constexpr int64_t kFewest = 8, kFewestOfSmall = 16, kMost = 48, kLarge = 1 << 20;
  return tokens >= kFewest && tokens <= kMost &&
         (tokens >= kFewestOfSmall || weight.numel() >= kLarge);
#else
  return false;
#endif
}

// y [T, F] = product [T, F] + bias [F]. y and bias are contiguous, and y may be the product.
inline void add_bias(const Tensor& product, const Tensor& bias, const Tensor& y) {
  constexpr int64_t kGrain = 1 << 15;  // elements a thread, as in torch's own loops
  const float* const from = static_cast<const float*>(product.const_data_ptr());
  const float* const b = static_cast<const float*>(bias.const_data_ptr());
  float* const to = static_cast<float*>(y.mutable_data_ptr());
  const int64_t T = y.size(0), F = y.size(1);
  const int64_t stride_t = product.stride(0), stride_f = product.stride(1);
  torch::stable::parallel_for(0, T, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, F)),
                              [=](int64_t begin, int64_t end) {
                                for (int64_t t = begin; t < end; ++t) {
                                  const float* const row = from + t * stride_t;
                                  float* const out = to + t * F;
                                  if (stride_f == 1) {
                                    for (int64_t f = 0; f < F; ++f) out[f] = row[f] + b[f];
                                  } else {
                                    for (int64_t f = 0; f < F; ++f)
                                      out[f] = row[f * stride_f] + b[f];
                                  }
                                }
                              });
}

inline void check(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const auto fits = [&](const Tensor& t, const std::vector<int64_t>& shape) {
    return t.sizes().equals(shape) && t.scalar_type() == x.scalar_type() &&
           t.device() == x.device();
  };
  STD_TORCH_CHECK(weight.dim() == 2 && fits(weight, {weight.size(0), x.size(1)}),
                  "fastattn: weight: expected [features, ", x.size(1), "] of the dtype of x");
  STD_TORCH_CHECK(!bias || fits(*bias, {weight.size(0)}), "fastattn: bias: expected [",
                  weight.size(0), "] of the dtype of x");
  binding::data_of(x, "x"), binding::data_of(weight, "weight");
  if (bias) binding::data_of(*bias, "bias");
}

// linear() of float32.
inline Tensor linear_of_floats(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  if (is_faster_by_onednn(x, weight)) return linear_by_onednn(x, weight, bias);
  const bool first = weight_first(x.size(0), weight);
  const Tensor product = first ? transposed(call("aten::mm", weight, transposed(x)))
                               : call("aten::mm", x, transposed(weight));
  STD_TORCH_CHECK(
      product.scalar_type() == ScalarType::Float,
      "fastattn: multi_head_attention: expected float32 products; call it outside of autocast");
  if (!bias) return as_contiguous(product);
  const Tensor y = first ? torch::stable::new_empty(product, product.sizes()) : product;
  add_bias(product, as_contiguous(*bias), y);
  return y;
}

// linear() of a half dtype in float32, rounded once. Weights are converted a part at a time, which
// stays in the cache.
inline Tensor linear_in_float(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  constexpr int64_t kPart = 1 << 19;  // weights: 2 MiB
  const int64_t T = x.size(0), E = x.size(1), F = weight.size(0);
  const int64_t step = std::max<int64_t>(1, kPart / std::max<int64_t>(1, E));
  const auto in_float = [](const Tensor& t) { return torch::stable::to(t, ScalarType::Float); };
  const Tensor y = torch::stable::new_empty(x, {T, F}), tokens = in_float(x);
  for (int64_t f = 0; f < F; f += step) {
    const int64_t n = std::min(step, F - f);
    const Tensor rows =
        view(weight, {n, E}, {weight.stride(0), weight.stride(1)}, f * weight.stride(0));
    const OptTensor own =
        bias ? OptTensor(in_float(view(*bias, {n}, {bias->stride(0)}, f * bias->stride(0))))
             : std::nullopt;
    Tensor part = view(y, {T, n}, {F, 1}, f);
    torch::stable::copy_(part, linear_of_floats(tokens, in_float(rows), own));
  }
  return y;
}

// Whether torch's products of a half dtype are slower than linear_in_float(): where oneDNN does not
// take the dtype, torch's own loops multiply. Their rate is down to an eighth of that in float32.
// It is down to a hundredth where weights lie column by column, as those of a gradient do:
// docs/decisions/0018.
inline bool is_faster_in_float([[maybe_unused]] ScalarType dtype) {
#ifdef __x86_64__
  // A torch without oneDNN does not have these operators.
  const auto takes = [](const char* name) {
    std::array<StableIValue, 1> result{};
    return torch_call_dispatcher(name, "", result.data(), TORCH_ABI_VERSION) == 0 &&
           torch::stable::detail::to<bool>(result[0]);
  };
  static const bool bf16 = takes("mkldnn::_is_mkldnn_bf16_supported");
  static const bool fp16 = takes("mkldnn::_is_mkldnn_fp16_supported");
  return !(dtype == ScalarType::BFloat16 ? bf16 : fp16);
#else
  return false;
#endif
}

// From how many multiply-adds on a layer and its gradients take less time by linear() than by
// aten::linear, and how many tokens are added before they are counted. Smaller products of half
// dtypes take less time than the calls do.
inline std::tuple<int64_t, int64_t> linear_from(ScalarType dtype) {
  constexpr int64_t kFewestOfHalf = 1 << 17;  // Zen 3
  if (dtype == ScalarType::Float) return {onednn_from(), tokens_of_reading()};
  const bool half = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  return {half && is_faster_in_float(dtype) ? kFewestOfHalf : kNever, 0};
}

// y [T, F] from x [T, E], weight [F, E] and bias [F]; contiguous.
inline Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  check(x, weight, bias);
  if (x.scalar_type() == ScalarType::Float) return linear_of_floats(x, weight, bias);
  // torch multiplies bfloat16 by oneDNN too, but copies the bias into y first: up to 17% of the
  // time on Zen 5, the only processor where this was measured.
  const bool copies = x.scalar_type() == ScalarType::BFloat16 && bias.has_value();
  if (copies && onednn_from() != kNever && x.size(0) * weight.numel() > 0)
    return linear_by_onednn(x, weight, bias);
  constexpr int64_t kFewest = 4;  // fewer tokens only read the weights, row by row (Zen 3)
  const bool many = x.size(0) >= kFewest || weight.stride(1) != 1;
  return many && is_faster_in_float(x.scalar_type()) ? linear_in_float(x, weight, bias)
                                                     : call("aten::linear", x, weight, bias);
}

}  // namespace fastattn::projection
