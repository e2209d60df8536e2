// A plan: the params of an earlier call, and where the memory of another such call goes.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "binding/description.h"
#include "binding/lines.h"
#include "binding/on_cpu.h"
#include "binding/problem.h"
#include "binding/views.h"

namespace fastattn::binding {

// ---- making ----

// A tensor to make.
struct Result {
  Layout layout;
  ScalarType dtype;
};

template <typename Params>
struct Plan {
  Params p;  // its pointers are those of the earlier call
  // The argument that each_input() and each_limit() point to, by number; -1: nullptr.
  std::vector<int> inputs, limits;
  int sink = -1;          // likewise
  bool has_line = false;  // which each_input() then lacks
  bool any_length = false;
  std::vector<Result> results;
};
template <typename Params>
constexpr const char* kName = nullptr;
template <>
constexpr const char* kName<ForwardParams> = "fastattn.Plan.forward";
template <>
constexpr const char* kName<BackwardParams> = "fastattn.Plan.backward";

// What backward gets behind the arguments of the forward pass: f(pointer).
template <typename F>
void each_saved(ForwardParams*, F) {}
template <typename F>
void each_saved(BackwardParams* p, F f) {
  f(&p->out.data), f(&p->stats), f(&p->grad_out.data);
  if (p->grad_weights.data != nullptr) f(&p->grad_weights.data);
}

// How many arguments a forward pass has.
template <typename Params>
size_t count_arguments(const Plan<Params>& plan) {
  size_t count = plan.p.dropout.enabled + (plan.sink >= 0);
  for (const std::vector<int>* numbers : {&plan.inputs, &plan.limits})
    for (const int n : *numbers) count += n >= 0;
  return count;
}

// What the arguments of a backward pass are to a plan for any length.
inline void set_roles(const Plan<ForwardParams>& plan, std::vector<Argument>* arguments) {
  for (const int n : plan.limits)
    if (n >= 0) (*arguments)[n].role = Role::kOther;
  if (plan.sink >= 0) (*arguments)[plan.sink].part = kSink;
  const Role weights = plan.p.weights_mode == WeightsMode::kMean ? Role::kMean : Role::kPairs;
  size_t n = count_arguments(plan);
  for (const Role role : {Role::kPoints, Role::kStats, Role::kPoints, weights})
    if (n < arguments->size()) (*arguments)[n++].role = role;
}

inline LineParts line_of(const Description& given) {
  return {given.find(kSlopes), given.find(kTable), given.find(kBuckets), given.offset()};
}

// Limits that read_limits() can read; others are no part of a plan.
inline bool is_readable(const dlpack::Tensor& t) {
  if (!t.dtype.is(dlpack::kInt, 32) && !t.dtype.is(dlpack::kInt, 64)) return false;
  int64_t stride = 1;
  for (int32_t d = t.ndim; d-- > 0; stride *= t.shape[d])
    if (t.shape[d] != 1 && t.strides[d] != stride) return false;
  return true;
}

// Finds the arguments of a forward pass. False if a pointer is to something else, as to a copy, or
// if an argument is not in use, or if it cannot be told from another.
inline bool find_arguments(const Description& given, Plan<ForwardParams>* plan) {
  const std::vector<Argument>& all = given.arguments();
  std::vector<int> uses(all.size(), 0);
  bool found = all.size() >= kFirst;
  const auto find = [&](std::vector<int>* to, bool present, auto is_it) {
    to->push_back(-1);
    if (!present) return;
    int matches = 0;
    for (size_t n = 0; n < all.size(); ++n)
      if (is_it(n)) ++matches, ++uses[n], to->back() = static_cast<int>(n);
    found = found && matches == 1;
  };
  const LineParts line = line_of(given);
  plan->has_line = line.given() && line.usual(plan->p);
  if (plan->has_line)
    for (size_t n = 0; n < all.size(); ++n) uses[n] = all[n].part < kWhole;
  each_input(&plan->p, [&](auto* pointer) {
    const size_t own = plan->inputs.size();
    const void* const line_at = plan->has_line ? &plan->p.bias.data : nullptr;
    find(&plan->inputs, *pointer != nullptr && pointer != line_at, [&](size_t n) {
      const bool fits = own < kFirst ? n == own : n >= kFirst && all[n].part == kWhole;
      return fits && all[n].tensor.data == *pointer;
    });
  });
  each_limit(&plan->p.mask, [&](const char*, KeyLimit* limit) {
    const int own = static_cast<int>(plan->limits.size());
    find(&plan->limits, limit->data != nullptr,
         [&](size_t n) { return all[n].part == own && is_readable(all[n].tensor); });
  });
  const bool drops = plan->p.dropout.enabled;
  const void* const sinks = plan->p.sink.data;
  const DType dtype = plan->p.sink.dtype;  // autocast takes others than ordinary calls do
  if (sinks != nullptr) found = found && (dtype == DType::kFloat32 || dtype == plan->p.q.dtype);
  for (size_t n = 0; n < all.size(); ++n) {
    if (all[n].part == kSeed) uses[n] = drops;
    if (all[n].part == kSink) {
      uses[n] = all[n].tensor.data == sinks;
      plan->sink = static_cast<int>(n);
    }
  }
  for (const int count : uses) found = found && count == 1;
  const auto has = [&](int part) { return given.find(part) != nullptr; };
  return found && drops == has(kSeed) && (sinks != nullptr) == has(kSink);
}

// Whether a backward pass had the arguments that the forward pass has by its plan.
inline bool has_arguments(const Description& given, Plan<BackwardParams>* plan) {
  const std::vector<Argument>& all = given.arguments();
  size_t saved = count_arguments(*plan), count = saved;
  each_saved(&plan->p, [&](auto*) { ++count; });
  if (all.size() != count) return false;
  bool same = plan->p.dropout.enabled == (given.find(kSeed) != nullptr);
  const int* input = plan->inputs.data();
  each_input(&plan->p, [&](auto* pointer) {
    const int n = *input++;
    same = same && *pointer == (n < 0 ? nullptr : all[n].tensor.data);
  });
  const int* number = plan->limits.data();
  each_limit(&plan->p.mask, [&](const char*, KeyLimit* limit) {
    const int n = *number++;
    const bool present = n >= 0 && is_readable(all[n].tensor);
    same = same && present == (limit->data != nullptr);
  });
  each_saved(&plan->p, [&](auto* pointer) { same = same && *pointer == all[saved++].tensor.data; });
  const void* const sinks = plan->sink < 0 ? nullptr : all[plan->sink].tensor.data;
  return same && plan->p.sink.data == sinks;
}

inline Layout layout_of(const dlpack::Tensor& t) {
  Layout made;
  for (int32_t d = 0; d < t.ndim; ++d) made.add(t.shape[d], t.strides[d]);
  return made;
}

// What a tensor was, if it lies where the params say and plans can make another.
inline std::optional<Result> result_of(PyObject* x, const void* data) {
  dlpack::Tensor t;
  if (python.exchange->describe(x, &t) != 0 || t.data != data || data == nullptr) return {};
  const ScalarType dtype = t.dtype.is(dlpack::kFloat, 32)    ? ScalarType::Float
                           : t.dtype.is(dlpack::kFloat, 16)  ? ScalarType::Half
                           : t.dtype.is(dlpack::kBFloat, 16) ? ScalarType::BFloat16
                                                             : ScalarType::Undefined;
  if (dtype == ScalarType::Undefined || t.ndim > kMostDims) return {};
  return Result{layout_of(t), dtype};
}

// ---- computing ----

// A tensor of PyTorch's, which is deleted unless somebody takes it.
struct Deleter {
  void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, Deleter>;

template <typename T>
void add_result(const Result& like, std::vector<Handle>* to, T** data) {
  AtenTensorHandle made = nullptr;
  const Layout& layout = like.layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(layout.dims, layout.sizes, layout.strides,
                                                  static_cast<int32_t>(like.dtype),
                                                  aoti_torch_device_type_cpu(), 0, &made));
  to->emplace_back(made);
  void* memory = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(made, &memory));
  const bool half = like.dtype == ScalarType::Half || like.dtype == ScalarType::BFloat16;
  device::expect_writes(memory, layout.count() * (half ? 2 : 4));
  *data = static_cast<T*>(memory);
}

// Memory that nobody else sees, aligned as a workspace; none if there is none left.
using Scratch = std::unique_ptr<char, decltype(&std::free)>;
inline Scratch scratch(int64_t bytes) {
  constexpr int64_t kAlign = 64;
  void* const memory = std::aligned_alloc(kAlign, (bytes / kAlign + 1) * kAlign);
  return {static_cast<char*>(memory), &std::free};
}

inline int64_t count_of(const dlpack::Tensor& t) {
  int64_t count = 1;
  for (int32_t d = 0; d < t.ndim; ++d) count *= t.shape[d];
  return count;
}

// Of what set_arguments() makes of arguments.
template <typename Params>
int64_t made_bytes(const Plan<Params>& plan, const Description& given) {
  int64_t count = plan.has_line ? line_of(given).count(plan.p) : 0;
  for (const int n : plan.limits)
    if (n >= 0) count += count_of(given.arguments()[n].tensor);
  return count * 4;
}

// False if a value is outside of [0, most].
template <typename T>
bool read_limits(const dlpack::Tensor& t, int64_t most, int32_t* to) {
  const T* const from = static_cast<const T*>(t.data);
  for (int64_t n = 0, count = count_of(t); n < count; ++n) {
    const T limit = from[n];  // once: another thread may write
    if (limit < 0 || limit > most) return false;
    to[n] = static_cast<int32_t>(limit);
  }
  return true;
}

// Sets the pointers to arguments and the seed, and makes limits and a line in `memory`. False if a
// number is wrong.
template <typename Params>
bool set_arguments(const Plan<Params>& plan, const Description& given, void* memory, Params* p) {
  const std::vector<Argument>& all = given.arguments();
  const int* input = plan.inputs.data();
  each_input(p, [&](auto* pointer) {
    using Pointer = std::remove_reference_t<decltype(*pointer)>;
    if (const int n = *input++; n >= 0) *pointer = static_cast<Pointer>(all[n].tensor.data);
  });
  size_t saved = count_arguments(plan);
  each_saved(p, [&](auto* pointer) {
    using Pointer = std::remove_reference_t<decltype(*pointer)>;
    *pointer = static_cast<Pointer>(all[saved++].tensor.data);
  });
  if (p->dropout.enabled)
    device::set_seed(static_cast<const int64_t*>(given.find(kSeed)->data), &p->dropout);
  if (plan.sink >= 0) p->sink.data = all[plan.sink].tensor.data;
  const int* number = plan.limits.data();
  auto* next = static_cast<int32_t*>(memory);
  bool right = true;
  each_limit(&p->mask, [&](const char*, KeyLimit* limit) {
    const int n = *number++;
    if (n < 0 || !right) return;
    const dlpack::Tensor& t = all[n].tensor;
    right = t.dtype.bits == 32 ? read_limits<int32_t>(t, p->N, next)
                               : read_limits<int64_t>(t, p->N, next);
    limit->data = next;
    next += count_of(t);
  });
  if (!plan.has_line || !right) return right;
  float* const line = reinterpret_cast<float*>(next);
  p->bias.data = line + p->M - 1;  // line_view()
  return line_of(given).write(*p, line);
}

// The arguments that are 64-bit limits, by number, and where set_arguments() has made 32-bit ones
// of them. Backward gets copies of these, as in the ordinary way: the caller may change limits
// meanwhile.
template <typename F>
void each_copied(const Plan<ForwardParams>& plan, const Description& given, F f) {
  int64_t first = 0;
  for (const int n : plan.limits) {
    if (n < 0) continue;
    const dlpack::Tensor& t = given.arguments()[n].tensor;
    if (t.dtype.bits == 64) f(n, first);
    first += count_of(t);
  }
}

// As view_of(): `own` are the four of a view.
template <typename... Own>
void set_strides(const FourDims& x, Own*... own) {
  int d = 0;
  ((*own = x.sizes[d] == 1 ? 0 : x.strides[d], ++d), ...);
}
inline void set_strides(const FourDims& x, View* view) {
  set_strides(x, &view->stride_b, &view->stride_h, &view->stride_r, &view->stride_c);
}

// A result of these dims.
inline void set_result(const Description& given, const FourDims& x, bool heads, View* view,
                       Result* result) {
  set_strides(x, view);
  result->layout = given.lead().restored(x, heads);
}

// Gives the params of a plan for any length those of a call. False if these do not fit each other.
template <typename Params>
bool set_inputs(const Plan<Params>& plan, const Description& given, Params* p) {
  const auto dims = [&](int n) -> const FourDims& { return given.arguments()[n].dims; };
  p->M = dims(0).sizes[2], p->N = dims(1).sizes[2];
  View* const views[] = {&p->q, &p->k, &p->v};
  for (int n = 0; n < 3; ++n) set_strides(dims(n), views[n]);
  bool fits = dims(2).sizes[2] == p->N && std::max(p->M, p->N) < kTooLarge;
  const int* number = plan.inputs.data() + kBeforePairs;
  each_pair_strides(p, [&](auto*... own) {
    const int n = *number++;
    if (n < 0) return;
    set_strides(dims(n), own...);
    const int64_t M = dims(n).sizes[2], N = dims(n).sizes[3];
    fits = fits && (M == 1 || M == p->M) && (N == 1 || N == p->N);
  });
  return fits && number == plan.inputs.data() + plan.inputs.size();  // no other array of pairs
}

// The same, and gives the results their sizes.
inline bool set_lengths(const Plan<ForwardParams>& plan, const Description& given, ForwardParams* p,
                        std::vector<Result>* results) {
  if (!set_inputs(plan, given, p)) return false;
  const bool heads = given.lead().has_heads;
  FourDims out{{p->B, p->H, p->M, p->E}, {}};
  const std::vector<int64_t> strides = out_strides(*p, given.arguments()[0].dims.strides);
  std::copy(strides.begin(), strides.end(), out.strides);
  set_result(given, out, heads, &p->out, &results->front());
  if (p->weights_mode == WeightsMode::kNone) return true;
  const bool full = p->weights_mode == WeightsMode::kFull;
  FourDims weights{{p->B, full ? p->H : 1, p->M, p->N}, {}};
  std::copy_n(contiguous(4, weights.sizes).strides, 4, weights.strides);
  set_result(given, weights, heads && full, &p->weights, &results->back());
  return true;
}

inline bool set_lengths(const Plan<BackwardParams>& plan, const Description& given,
                        BackwardParams* p, std::vector<Result>* results) {
  if (!set_inputs(plan, given, p)) return false;
  const std::vector<Argument>& all = given.arguments();
  const Argument* const saved = all.data() + count_arguments(plan);  // as each_saved()
  const auto fits = [&](const FourDims& x, int64_t columns) {
    return x.sizes[2] == p->M && x.sizes[3] == columns;
  };
  if (saved[1].tensor.shape[2] != p->M) return false;
  View* const views[] = {&p->out, nullptr, &p->grad_out, &p->grad_weights};
  for (size_t n = 0; saved + n < all.data() + all.size(); ++n) {
    if (views[n] == nullptr) continue;
    if (!fits(saved[n].dims, n < 3 ? p->E : p->N)) return false;
    set_strides(saved[n].dims, views[n]);
  }
  View* const grads[] = {&p->grad_q, &p->grad_k, &p->grad_v};
  for (int n = 0; n < 3; ++n)
    set_result(given, like(all[n].dims), given.lead().has_heads, grads[n], &(*results)[n]);
  if (p->grad_bias.data == nullptr) return true;
  const Argument& bias = all[plan.inputs[kBeforePairs]];
  const int64_t* const sizes = bias.dims.sizes;
  p->bias_B = sizes[0], p->bias_H = sizes[1], p->bias_M = sizes[2], p->bias_N = sizes[3];
  FourDims own = bias.dims;
  std::copy_n(contiguous(4, sizes).strides, 4, own.strides);
  set_strides(own, &p->grad_bias);
  (*results)[kFirst].layout = contiguous(bias.tensor.ndim, bias.tensor.shape);
  return true;
}

// The output, weights if the plan has them, and if backward wants them the stats and copies of
// limits; nothing if a limit has a wrong value.
inline std::vector<Handle> compute(const Plan<ForwardParams>& plan, const Description& given) {
  ForwardParams p = plan.p;
  std::vector<Result> own;
  if (given.any_length() && !set_lengths(plan, given, &p, &(own = plan.results))) return {};
  const std::vector<Result>& like = given.any_length() ? own : plan.results;
  const int64_t rows = p.B * p.H * p.M, workspace = device::forward_workspace_bytes(p);
  const int64_t made = made_bytes(plan, given);
  const Scratch memory = scratch(workspace + made + 2 * rows * sizeof(float));
  std::vector<Handle> results;
  if (memory == nullptr || !set_arguments(plan, given, memory.get() + workspace, &p)) return {};
  p.workspace = memory.get();
  p.lse = nullptr;  // no such call returns them
  p.stats = reinterpret_cast<float*>(memory.get() + workspace + made);
  add_result(like[0], &results, &p.out.data);
  if (like.size() > 1) add_result(like[1], &results, &p.weights.data);
  if (given.needs_grad()) {
    const int64_t sizes[] = {p.B, p.H, p.M, 2};
    add_result({contiguous(4, sizes), ScalarType::Float}, &results, &p.stats);
    const auto* const limits = reinterpret_cast<const int32_t*>(memory.get() + workspace);
    each_copied(plan, given, [&](int n, int64_t first) {
      const dlpack::Tensor& t = given.arguments()[n].tensor;
      int32_t* copy = nullptr;
      add_result({layout_of(t), ScalarType::Int}, &results, &copy);
      std::copy_n(limits + first, count_of(t), copy);
    });
  }
  device::Current::compute(p);
  return results;
}

// The gradients that there are, in the order of each_gradient(), and that of a sink.
inline std::vector<Handle> compute(const Plan<BackwardParams>& plan, const Description& given) {
  BackwardParams p = plan.p;
  std::vector<Result> own;
  if (given.any_length() && !set_lengths(plan, given, &p, &(own = plan.results))) return {};
  const std::vector<Result>& like = given.any_length() ? own : plan.results;
  const int64_t workspace = device::backward_workspace_bytes(p);
  const Scratch memory = scratch(workspace + made_bytes(plan, given));
  std::vector<Handle> results;
  if (memory == nullptr || !set_arguments(plan, given, memory.get() + workspace, &p)) return {};
  p.workspace = memory.get();
  each_gradient(&p, [&](auto* pointer) {
    if (*pointer != nullptr) add_result(like[results.size()], &results, pointer);
  });
  if (plan.sink >= 0) add_result(like.back(), &results, &p.grad_sink.data);
  device::Current::compute(p);
  return results;
}

}  // namespace fastattn::binding
