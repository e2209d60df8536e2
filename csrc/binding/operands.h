// The arguments of the operators: those that they share, and how a boxed call passes them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastattn::binding {

using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

// The arguments of one call, taken one by one in the order of the schema. The caller of a boxed
// kernel hands over ownership, so nothing may throw before end().
class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count) : next_(stack), left_(count) {}

  template <typename T>
  T take() {
    STD_TORCH_CHECK(left_-- > 0, "fastattn: the schema has fewer arguments than the kernel");
    T value = torch::stable::detail::to<T>(*next_++);
    look_at(value);
    return value;
  }

  // A kernel with another device's pointer would fault, or read garbage.
  void end() const {
    STD_TORCH_CHECK(left_ == 0, "fastattn: the schema has more arguments than the kernel");
    STD_TORCH_CHECK(one_device_, "fastattn: expected all tensors on the device of q");
  }

 private:
  void look_at(const Tensor& t) {
    if (!first_) first_ = t;
    one_device_ = one_device_ && t.device() == first_->device();
  }
  void look_at(const OptTensor& t) {
    if (t) look_at(*t);
  }
  template <typename T>
  void look_at(const T&) {}

  StableIValue* next_;
  uint64_t left_;
  OptTensor first_;
  bool one_device_ = true;
};

// Puts the results of a call in the place of its arguments.
template <typename... Results>
void put(StableIValue* stack, const Results&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

// The arguments of both forward and backward: Call in fastattn/problem/schemas.py, with the same
// defaults.
struct Operands {
  Tensor q, k, v;
  OptTensor w = {}, bias = {}, kv_len = {}, keep = {}, kv_begin = {}, seed = {};
  std::optional<int64_t> band_lo = {}, band_hi = {};
  double scale = 1, softcap = 0, dropout_p = 0;
  int64_t origin_b = 0, origin_h = 0, origin_i = 0, origin_j = 0;
  int64_t weights = 0, score = 0;
  bool wide = false;
};

inline Operands take_operands(Arguments& from) {
  Operands in{from.take<Tensor>(), from.take<Tensor>(), from.take<Tensor>()};
  in.w = from.take<OptTensor>();
  in.bias = from.take<OptTensor>();
  in.kv_len = from.take<OptTensor>();
  in.keep = from.take<OptTensor>();
  in.kv_begin = from.take<OptTensor>();
  in.seed = from.take<OptTensor>();
  in.band_lo = from.take<std::optional<int64_t>>();
  in.band_hi = from.take<std::optional<int64_t>>();
  in.scale = from.take<double>();
  in.softcap = from.take<double>();
  in.dropout_p = from.take<double>();
  in.origin_b = from.take<int64_t>();
  in.origin_h = from.take<int64_t>();
  in.origin_i = from.take<int64_t>();
  in.origin_j = from.take<int64_t>();
  in.weights = from.take<int64_t>();
  in.score = from.take<int64_t>();
  in.wide = from.take<bool>();
  return in;
}

// The further arguments of backward: Saved in fastattn/problem/schemas.py.
struct Saved {
  Tensor out, stats, grad_out;
  OptTensor grad_lse = {}, grad_weights = {};
  bool bias_needs_grad = false;
};

inline Saved take_saved(Arguments& from) {
  Saved in{from.take<Tensor>(), from.take<Tensor>(), from.take<Tensor>()};
  in.grad_lse = from.take<OptTensor>();
  in.grad_weights = from.take<OptTensor>();
  in.bias_needs_grad = from.take<bool>();
  return in;
}

}  // namespace fastattn::binding
