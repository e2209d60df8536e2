// The operators. This folder is the only C++ that knows tensors: it checks arguments (problem.h),
// allocates results (memory.h), and fills in the params structs. This file is compiled twice, into
// a library each: for the CPU (on_cpu.h) and for CUDA (on_cuda.h).
//
// Uses PyTorch's stable ABI (torch/csrc/stable), so one binary serves torch 2.11 and every later
// version. The build makes schemas.inc and operands.inc from fastattn/problem/schemas.py. Fake
// kernels are in fastattn/backends/operators.py; their layouts of results must be the same as here.
//
// The Python side has validated everything already, with better messages. These checks are for
// direct calls of an operator: shapes that do not fit must raise, never read out of bounds.
#ifndef FASTATTN_FOR_CUDA
#include <Python.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "binding/memory.h"
#include "binding/operands.h"
#include "binding/problem.h"
#include "binding/views.h"
#ifndef FASTATTN_FOR_CUDA
#include "binding/definitions.h"
#include "binding/direct.h"
#include "binding/isas.h"
#include "binding/limits.h"
#include "binding/linear.h"
#include "binding/path.h"
#endif

namespace fastattn::binding {
namespace {

struct Results {
  Tensor out, weights, stats;
  OptTensor lse;
};

Results run_forward(const Operands& in, bool wants_lse, const OptTensor& sink = {}) {
  ForwardParams p{};
  fill_problem(in, &p);
  p.sink = sink_view(sink, p);

  const Tensor& q = in.q;
  Tensor out = empty_out(q, p, result_dtype(in));
  OptTensor lse;
  if (wants_lse) lse = empty(q, {p.B, p.H, p.M}, ScalarType::Float);
  Tensor stats = empty(q, {p.B, p.H, p.M, 2}, ScalarType::Float);
  Tensor returned = empty(q, weights_shape(p), q.scalar_type());
  p.out = view_of(out, "out", {p.B, p.H, p.M, p.E});
  p.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
  p.stats = static_cast<float*>(stats.data_ptr());
  if (p.weights_mode != WeightsMode::kNone) p.weights = weights_view(p, returned, "weights");
  if (p.H == 0) torch::stable::zero_(returned);  // the mean over no heads: CUDA's write none

  device::Current current(q);  // before the sizes, which may depend on it
  const OptTensor workspace = workspace_of(q, device::forward_workspace_bytes(p));
  p.workspace = workspace ? workspace->data_ptr() : nullptr;
  current.forward(p);
  return {out, returned, stats, lse};
}

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  Arguments arguments(stack, count);
  const Operands in = take_operands(arguments);
  const auto sink = arguments.take<OptTensor>();
  arguments.end();
  const auto [out, weights, stats, lse] = run_forward(in, true, sink);
  put(stack, out, *lse, weights, stats);
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  Arguments arguments(stack, count);
  const Operands in = take_operands(arguments);
  const Saved saved = take_saved(arguments);
  arguments.end();
  BackwardParams p{};
  fill_problem(in, &p);
  const Tensor& q = in.q;

  p.out = view_of(saved.out, "out", {p.B, p.H, p.M, p.E});
  STD_TORCH_CHECK(saved.grad_out.scalar_type() == q.scalar_type(),
                  "fastattn: expected grad_out of the dtype of q");
  p.grad_out = view_of(saved.grad_out, "grad_out", {p.B, p.H, p.M, p.E});
  const auto is_floats = [](const Tensor& t, const std::vector<int64_t>& shape) {
    return t.scalar_type() == ScalarType::Float && t.sizes().equals(shape);
  };
  STD_TORCH_CHECK(is_floats(saved.stats, {p.B, p.H, p.M, 2}),
                  "fastattn: stats: expected float32 [B, H, M, 2]");
  STD_TORCH_CHECK(!saved.grad_lse || is_floats(*saved.grad_lse, {p.B, p.H, p.M}),
                  "fastattn: grad_lse: expected float32 [B, H, M]");
  const Tensor stats_rows = torch::stable::contiguous(saved.stats);
  p.stats = static_cast<const float*>(data_of(stats_rows, "stats"));
  OptTensor grad_lse_rows;
  if (saved.grad_lse) {
    grad_lse_rows = torch::stable::contiguous(*saved.grad_lse);
    p.grad_lse = static_cast<const float*>(data_of(*grad_lse_rows, "grad_lse"));
  }
  if (saved.grad_weights && p.weights_mode != WeightsMode::kNone) {
    STD_TORCH_CHECK(saved.grad_weights->scalar_type() == q.scalar_type(),
                    "fastattn: expected grad_weights of the dtype of q");
    p.grad_weights = weights_view(p, *saved.grad_weights, "grad_weights");
  }

  const ScalarType dtype = result_dtype(in);
  Tensor grad_q = like(q, dtype);
  Tensor grad_k = like(in.k, dtype);
  Tensor grad_v = like(in.v, dtype);
  p.grad_q = view_of(grad_q, "grad_q", {p.B, p.H, p.M, p.D});
  p.grad_k = view_of(grad_k, "grad_k", {p.B, p.Hkv, p.N, p.D});
  p.grad_v = view_of(grad_v, "grad_v", {p.B, p.Hkv, p.N, p.E});
  Tensor grad_w =
      in.w ? empty(q, {p.B, p.H, p.D}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  p.grad_w = in.w ? static_cast<float*>(grad_w.data_ptr()) : nullptr;
  Tensor grad_bias = empty(q, {0}, q.scalar_type());
  if (saved.bias_needs_grad) {
    STD_TORCH_CHECK(in.bias.has_value(), "fastattn: bias_needs_grad without a bias");
    p.bias_B = in.bias->size(0), p.bias_H = in.bias->size(1), p.bias_M = in.bias->size(2),
    p.bias_N = in.bias->size(3);
    grad_bias = empty(q, {p.bias_B, p.bias_H, p.bias_M, p.bias_N}, in.bias->scalar_type());
    const int64_t rows = p.bias_is_line ? 1 : p.M, cols = p.bias_is_line ? p.bias_N : p.N;
    p.grad_bias = view_of(grad_bias, "grad_bias", {p.B, p.H, rows, cols}, /*may_broadcast=*/true);
  }

  p.sink = sink_view(saved.sink, p);
  Tensor grad_sink = empty(q, {0}, ScalarType::Float);
  if (saved.sink) {
    grad_sink = empty(q, {p.B, p.H}, ScalarType::Float);
    p.grad_sink = sink_view(grad_sink, p);
  }

  device::Current current(q);
  const OptTensor workspace = workspace_of(q, device::backward_workspace_bytes(p));
  p.workspace = workspace ? workspace->data_ptr() : nullptr;
  current.backward(p);
  put(stack, grad_q, grad_k, grad_v, grad_w, grad_bias, grad_sink);
}

#ifndef FASTATTN_FOR_CUDA
// x [first, second, E] as [first * second, E]: tokens.
Tensor tokens_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 3, "fastattn: x, key, value: expected 3 dims, got ", x.dim());
  const Tensor rows = projection::as_contiguous(x);
  return projection::view(rows, {x.size(0) * x.size(1), x.size(2)}, {x.size(2), 1});
}

// y [first * second, F] as [first, second, F], like x.
Tensor as_batch(const Tensor& y, const Tensor& x) {
  const int64_t F = y.size(1);
  return projection::view(y, {x.size(0), x.size(1), F}, {x.size(1) * F, F, 1});
}

// Earlier keys and values [B, H, room, D], of which there are `length`. If the call adds others,
// these are written behind.
struct Past {
  OptTensor keys, values;
  int64_t length;
  bool adds;
};

// Writes `added` [B, H, M, D], if any, into `room` from position `past` on. Returns all up to
// there. Their B, H, D and dtype are those of q.
Tensor written(const Tensor& room, const Tensor& q, const OptTensor& added, int64_t past) {
  const auto sizes = q.sizes();
  const int64_t B = sizes[0], H = sizes[1], D = sizes[3], M = added ? added->size(2) : 0;
  STD_TORCH_CHECK(room.dim() == 4 && room.size(0) == B && room.size(1) == H && room.size(3) == D &&
                      past >= 0 && past <= room.size(2) - M &&
                      room.scalar_type() == q.scalar_type() && room.device() == q.device(),
                  "fastattn: keys, values: expected room for past + M of the dtype of x, "
                  "[B, num_heads, room, head size]");
  data_of(room, "keys, values");
  const auto part = [&](int64_t begin, int64_t count) {
    if (count == room.size(2)) return room;
    return projection::view(room, {B, H, count, D},
                            {room.stride(0), room.stride(1), room.stride(2), room.stride(3)},
                            begin * room.stride(2));
  };
  if (added) {
    Tensor rows = part(past, M);
    torch::stable::copy_(rows, *added);
  }
  return part(0, past + M);
}

// The projection to queries, keys and values, whose weight and bias have a part for each.
struct Projection {
  const Tensor& weight;
  const OptTensor& bias;

  // Tokens [T, E] by the parts [begin, end).
  Tensor operator()(const Tensor& tokens, int64_t begin, int64_t end) const {
    const OptTensor own_bias = bias ? OptTensor(rows(*bias, begin, end)) : std::nullopt;
    return projection::linear(tokens, rows(weight, begin, end), own_bias);
  }

 private:
  Tensor rows(const Tensor& t, int64_t begin, int64_t end) const {
    const int64_t all = weight.size(0), part = all / 3;
    STD_TORCH_CHECK(t.dim() > 0 && t.size(0) == all,
                    "fastattn: in_bias: expected a number for each row of in_weight");
    if (end - begin == 3) return t;
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes[0] = (end - begin) * part;
    return projection::view(t, sizes, t.strides().vec(), begin * part * t.stride(0));
  }
};

// What queries, keys and values are made of.
using Inputs = std::array<const Tensor*, 3>;

// Queries, keys and values [B, H, M or N, D], or the queries alone. A run of one input is one
// product, and its heads are strided views of it.
std::vector<Tensor> project_heads(const Inputs& inputs, size_t count, const Projection& project,
                                  int64_t H, bool batch_first) {
  const int64_t rows = project.weight.size(0), D = rows / 3 / H;
  std::vector<Tensor> heads;
  while (heads.size() < count) {
    const size_t begin = heads.size();
    const Tensor& x = *inputs[begin];
    size_t end = begin + 1;
    while (end < count && inputs[end] == &x) ++end;
    const Tensor packed = project(tokens_of(x), begin, end);
    const int64_t F = packed.size(1), first = x.size(0), second = x.size(1);
    for (size_t n = begin; n < end; ++n)
      heads.push_back(batch_first ? projection::view(packed, {first, H, second, D},
                                                     {second * F, D, F, 1}, (n - begin) * H * D)
                                  : projection::view(packed, {second, H, first, D},
                                                     {F, D, second * F, 1}, (n - begin) * H * D));
  }
  return heads;
}

// The input of the output projection, [first * second, H D], and the weights. Attention reads heads
// where they are, and writes its output in their order: only new keys behind earlier ones are
// copied. The projection is freed on return.
std::tuple<Tensor, Tensor> attend_tokens(const Inputs& inputs, const Projection& project, int64_t H,
                                         double scale, int64_t weights, bool batch_first,
                                         const OptTensor& mask, const Past& past, bool is_causal) {
  STD_TORCH_CHECK(past.keys.has_value() == past.values.has_value() && (past.adds || past.keys),
                  "fastattn: keys, values: expected both, or none and those of x");
  STD_TORCH_CHECK(past.keys || past.length == 0, "fastattn: past: expected 0 without keys");
  const int64_t rows = project.weight.size(0);
  STD_TORCH_CHECK(H > 0 && rows % 3 == 0 && rows / 3 % H == 0,
                  "fastattn: in_weight: expected a multiple of 3 * num_heads rows");
  const std::vector<Tensor> heads =
      project_heads(inputs, past.adds ? 3 : 1, project, H, batch_first);
  const Tensor& q = heads[0];
  const auto all = [&](size_t n, const OptTensor& room) {
    const OptTensor added = past.adds ? OptTensor(heads[n]) : std::nullopt;
    return room ? written(*room, q, added, past.length) : *added;
  };
  Operands in{q, all(1, past.keys), all(2, past.values)};
  if (past.keys ? past.adds && q.size(2) > 1 : is_causal) in = causal(in, past.length);
  if (mask) (mask->scalar_type() == ScalarType::Bool ? in.keep : in.bias) = mask;
  in.scale = scale;
  in.weights = weights;
  const Results found = run_forward(in, false);
  const int64_t T = q.size(0) * q.size(2), F = H * q.size(3);
  return {projection::view(found.out, {T, F}, {F, 1}), found.weights};
}

// Of x [T, E], with any strides.
Tensor linear(Tensor x, Tensor weight, OptTensor bias) {
  STD_TORCH_CHECK(x.dim() == 2, "fastattn: x: expected 2 dims, got ", x.dim());
  return projection::linear(x, weight, bias);
}

std::tuple<Tensor, Tensor> multi_head_attention(Tensor x, Tensor in_weight, OptTensor in_bias,
                                                Tensor out_weight, OptTensor out_bias,
                                                int64_t num_heads, double scale, int64_t weights,
                                                bool batch_first, OptTensor mask, OptTensor keys,
                                                OptTensor values, int64_t past, bool adds,
                                                OptTensor key, OptTensor value, bool is_causal) {
  STD_TORCH_CHECK(!(keys && (key || value)), "fastattn: key, value: expected none beside keys");
  const Tensor& of_keys = key ? *key : x;
  const Inputs inputs{&x, &of_keys, value ? &*value : &of_keys};
  const auto [merged, returned] =
      attend_tokens(inputs, {in_weight, in_bias}, num_heads, scale, weights, batch_first, mask,
                    {keys, values, past, adds}, is_causal);
  return {as_batch(projection::linear(merged, out_weight, out_bias), x), returned};
}
#endif

}  // namespace
}  // namespace fastattn::binding

namespace binding = fastattn::binding;

#define FASTATTN_IMPLEMENT(key, m) STABLE_TORCH_LIBRARY_IMPL(fastattn, key, m)
FASTATTN_IMPLEMENT(FASTATTN_DISPATCH_KEY, m) {
  m.impl(FASTATTN_OPERATOR(forward), &binding::forward);
  m.impl(FASTATTN_OPERATOR(backward), &binding::backward);
#ifndef FASTATTN_FOR_CUDA
  m.impl("multi_head_attention", TORCH_BOX(&binding::multi_head_attention));
  m.impl("linear", TORCH_BOX(&binding::linear));
  m.impl("cpu_loop", TORCH_BOX(&binding::cpu_loop));
#endif
}

#ifdef FASTATTN_FOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(fastattn, CompositeExplicitAutograd, m) {
  m.impl("cuda_choose_wgmma", TORCH_BOX(&fastattn::cuda::choose_wgmma));
}
#else
static const binding::Definitions definitions;

STABLE_TORCH_LIBRARY_IMPL(fastattn, CompositeExplicitAutograd, m) {
  m.impl("linear_from", TORCH_BOX(&fastattn::projection::linear_from));
  m.impl("cpu_isa", TORCH_BOX(&binding::cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&binding::cpu_isas));
  m.impl("select_cpu_isa", &binding::select_by_name<fastattn::cpu::select_isa>);
  m.impl("select_cpu_path", &binding::select_by_name<fastattn::cpu::select_path>);
  m.impl("cpu_path", TORCH_BOX(&binding::cpu_path));
}

// An importable module, with the functions of direct.h. Loading it registers the kernels.
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "_C",
                                 nullptr,
                                 -1,
                                 binding::functions,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_def); }
#endif
