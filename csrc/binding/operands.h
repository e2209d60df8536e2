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

// Operands and Saved, and take_operands() and take_saved(), which take the arguments of a call. The
// build makes them of the records Call and Saved of fastattn/problem/schemas.py.
#include "operands.inc"

}  // namespace fastattn::binding
