// The binding, the only C++ that knows tensors. It checks arguments, allocates results, and fills
// in the params structs. It is compiled twice, into a library each: for the CPU (on_cpu.h) and for
// CUDA (on_cuda.h).
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
#include <optional>
#include <tuple>
#include <vector>

#include "binding/operands.h"
#include "binding/views.h"
#ifdef FASTATTN_FOR_CUDA
#include "binding/on_cuda.h"
#else
#include "binding/definitions.h"
#include "binding/direct.h"
#include "binding/isas.h"
#include "binding/limits.h"
#include "binding/linear.h"
#include "binding/on_cpu.h"
#include "binding/path.h"
#endif

namespace {

namespace binding = fastattn::binding;
namespace device = fastattn::device;
using fastattn::AttentionParams;
using fastattn::BackwardParams;
using fastattn::ForwardParams;
using fastattn::KeyLimit;
using fastattn::ScoreKind;
using fastattn::View;
using fastattn::WeightsMode;
using fastattn::binding::broadcasts_to;
using fastattn::binding::dtype_of;
using fastattn::binding::is_line;
using fastattn::binding::line_view;
using fastattn::binding::Operands;
using fastattn::binding::OptTensor;
using fastattn::binding::stride_or_0;
using fastattn::binding::view_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- the problem ----

void fill_bias(const OptTensor& bias, AttentionParams* p) {
  p->bias = {};
  p->bias_is_line = bias && is_line(*bias, *p);
  if (p->bias_is_line) {
    p->bias = line_view(*bias, *p);
  } else if (bias) {
    p->bias = view_of(*bias, "bias", {p->B, p->H, p->M, p->N}, /*may_broadcast=*/true);
  }
}

// A number, not a name: torch's stable ABI leaks every str that an operator takes.
WeightsMode weights_mode(int64_t weights) {
  const auto mode = static_cast<WeightsMode>(weights);
  for (const WeightsMode known : {WeightsMode::kNone, WeightsMode::kFull, WeightsMode::kMean})
    if (static_cast<int64_t>(known) == weights) return mode;
  STD_TORCH_CHECK(false, "fastattn: weights: expected 0 (none), 1 (full) or 2 (mean), got ",
                  weights);
}

ScoreKind score_kind(int64_t score) {
  const auto kind = static_cast<ScoreKind>(score);
  for (const ScoreKind known : {ScoreKind::kDot, ScoreKind::kAdditive, ScoreKind::kGaussian})
    if (kind == known) return kind;
  STD_TORCH_CHECK(false, "fastattn: score: expected 0 (dot), 1 (additive) or 2 (gaussian), got ",
                  score);
}

std::vector<int64_t> weights_shape(const AttentionParams& p) {
  if (p.weights_mode == WeightsMode::kNone) return {0};
  if (p.weights_mode == WeightsMode::kMean) return {p.B, p.M, p.N};
  return {p.B, p.H, p.M, p.N};
}

// The weights as [B, H or 1, M, N].
View weights_view(const AttentionParams& p, const Tensor& t, const char* name) {
  if (p.weights_mode == WeightsMode::kFull) return view_of(t, name, {p.B, p.H, p.M, p.N});
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == p.B && t.size(1) == p.M && t.size(2) == p.N,
                  "fastattn: ", name, ": its shape does not fit the other arguments");
  return {t.data_ptr(),      dtype_of(t, name), stride_or_0(t, 0), 0,
          stride_or_0(t, 1), stride_or_0(t, 2)};
}

KeyLimit limit_of(const OptTensor& t, const char* name, const AttentionParams& p) {
  if (!t) return {};
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && broadcasts_to(*t, {p.B, p.M}),
                  "fastattn: ", name, ": expected int32 [B, 1] or [B, M]");
  return {static_cast<const int32_t*>(t->data_ptr()), stride_or_0(*t, 0), stride_or_0(*t, 1)};
}

void fill_masks(const Operands& in, AttentionParams* p) {
  // Far outside any key, and far enough from the ends of int64 that i + band cannot overflow.
  constexpr int64_t kUnbounded = int64_t{1} << 60;
  p->mask = {};
  p->mask.band_lo = std::clamp(in.band_lo.value_or(-kUnbounded), -kUnbounded, kUnbounded);
  p->mask.band_hi = std::clamp(in.band_hi.value_or(kUnbounded), -kUnbounded, kUnbounded);
  p->mask.kv_len = limit_of(in.kv_len, "kv_len", *p);
  p->mask.kv_begin = limit_of(in.kv_begin, "kv_begin", *p);
  if (in.keep) {
    const Tensor& t = *in.keep;
    STD_TORCH_CHECK(
        t.scalar_type() == ScalarType::Bool && broadcasts_to(t, {p->B, p->H, p->M, p->N}),
        "fastattn: keep: expected bool, broadcastable to [B, H, M, N]");
    p->mask.keep = static_cast<const uint8_t*>(t.data_ptr());
    p->mask.keep_stride_b = stride_or_0(t, 0);
    p->mask.keep_stride_h = stride_or_0(t, 1);
    p->mask.keep_stride_m = stride_or_0(t, 2);
    p->mask.keep_stride_n = stride_or_0(t, 3);
  }
}

void fill_dropout(const Operands& in, AttentionParams* p) {
  p->dropout = {};
  STD_TORCH_CHECK(in.dropout_p >= 0 && in.dropout_p <= 1,
                  "fastattn: dropout_p: expected 0 to 1, got ", in.dropout_p);
  STD_TORCH_CHECK(in.seed || in.dropout_p == 0, "fastattn: dropout_p: expected a seed with ",
                  in.dropout_p, ", got none");
  if (!in.seed) return;
  STD_TORCH_CHECK(in.seed->scalar_type() == ScalarType::Long && in.seed->numel() == 1,
                  "fastattn: seed: expected one int64");
  const double threshold = in.dropout_p * 4294967296.0;
  p->dropout.enabled = true;
  p->dropout.threshold = threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
  p->dropout.scale = in.dropout_p >= 1 ? 0.f : static_cast<float>(1 / (1 - in.dropout_p));
  STD_TORCH_CHECK(in.origin_j % 4 == 0, "fastattn: origin_j: expected a multiple of 4, got ",
                  in.origin_j);
  p->dropout.first = {static_cast<uint32_t>(in.origin_j / 4), static_cast<uint32_t>(in.origin_i),
                      static_cast<uint32_t>(in.origin_h), static_cast<uint32_t>(in.origin_b)};
  device::set_seed(*in.seed, &p->dropout);
}

// Those of the score: [H, D], for the gaussian also [B, H, D].
void fill_weights(const Operands& in, AttentionParams* p) {
  p->score = score_kind(in.score);
  p->w = {};
  STD_TORCH_CHECK(in.w.has_value() == (p->score != ScoreKind::kDot),
                  "fastattn: w: expected one for every score but the dot product");
  if (!in.w) return;
  const int64_t h = p->score == ScoreKind::kGaussian && in.w->dim() == 3 ? 1 : 0;
  STD_TORCH_CHECK(in.w->dim() == h + 2 && in.w->size(h) == p->H && in.w->size(h + 1) == p->D &&
                      (h == 0 || in.w->size(0) == p->B),
                  "fastattn: w: expected [H, D]");
  static float nothing;  // that there is a w says more of the score, even where D is 0
  void* const data = in.w->numel() > 0 ? in.w->data_ptr() : &nothing;
  p->w = {data, dtype_of(*in.w, "w"), h == 0 ? 0 : in.w->stride(0), in.w->stride(h),
          0,    in.w->stride(h + 1)};
}

void fill_problem(const Operands& in, AttentionParams* p) {
  STD_TORCH_CHECK(in.q.dim() == 4 && in.k.dim() == 4 && in.v.dim() == 4,
                  "fastattn: q, k, v: expected 4 dims");
  STD_TORCH_CHECK(
      in.k.scalar_type() == in.q.scalar_type() && in.v.scalar_type() == in.q.scalar_type(),
      "fastattn: expected k and v of the dtype of q");
  p->B = in.q.size(0), p->H = in.q.size(1), p->M = in.q.size(2), p->D = in.q.size(3);
  p->Hkv = in.k.size(1), p->N = in.k.size(2), p->E = in.v.size(3);
  STD_TORCH_CHECK(p->Hkv == p->H || (p->Hkv > 0 && p->H % p->Hkv == 0),
                  "fastattn: expected query heads to be a multiple of key heads");
  p->scale = static_cast<float>(in.scale);
  p->softcap = static_cast<float>(in.softcap);
  STD_TORCH_CHECK(p->softcap >= 0, "fastattn: softcap: expected 0 or more, got ", in.softcap);
  p->q = view_of(in.q, "q", {p->B, p->H, p->M, p->D});
  p->k = view_of(in.k, "k", {p->B, p->Hkv, p->N, p->D});
  p->v = view_of(in.v, "v", {p->B, p->Hkv, p->N, p->E});
  fill_weights(in, p);
  fill_bias(in.bias, p);
  p->weights_mode = weights_mode(in.weights);
  fill_masks(in, p);
  fill_dropout(in, p);
  const char* const reason = device::unsupported(*p);
  STD_TORCH_CHECK(reason == nullptr, "fastattn: ", reason);
}

// ---- memory ----

// Calls the C interface: torch::stable::empty() looks up an operator by name in the dispatcher.
// That takes as long as the rest of a small call.
Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& shape,
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

Tensor empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return empty_strided(like, shape, strides, dtype);
}

// [B, H, M, E], in memory [B, M, H, E], or [M, B, H, E] if the batch is not the first dim.
Tensor empty_out(const Tensor& like, const AttentionParams& p, bool batch_first, ScalarType dtype) {
  const auto size = [](int64_t n) { return std::max<int64_t>(n, 1); };
  const int64_t head = size(p.E), row = size(p.H) * head;
  const int64_t stride_b = batch_first ? size(p.M) * row : row;
  const int64_t stride_m = batch_first ? row : size(p.B) * row;
  return empty_strided(like, {p.B, p.H, p.M, p.E}, {stride_b, head, stride_m, 1}, dtype);
}

// Laid out like the result of torch.empty_like(); contiguous if of another dtype.
Tensor like(const Tensor& t, ScalarType dtype) {
  if (dtype != t.scalar_type()) return empty(t, {t.sizes().begin(), t.sizes().end()}, dtype);
  if (!t.is_contiguous() || t.numel() == 0) return torch::stable::empty_like(t);
  const auto sizes = t.sizes(), strides = t.strides();
  return empty_strided(t, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, dtype);
}

// Of results that may be sums over blocks later.
ScalarType result_dtype(const Operands& in) {
  return in.wide ? ScalarType::Float : in.q.scalar_type();
}

// `bytes` of memory that live as long as the tensor; none if 0.
OptTensor workspace_of(const Tensor& like, int64_t bytes) {
  if (bytes == 0) return std::nullopt;
  return empty(like, {bytes}, ScalarType::Byte);
}

// ---- operators ----

struct Results {
  Tensor out, lse, weights, stats;
};

Results run_forward(const Operands& in, bool batch_first) {
  ForwardParams p{};
  fill_problem(in, &p);

  const Tensor& q = in.q;
  const ScalarType dtype = q.scalar_type();
  Tensor out = empty_out(q, p, batch_first, result_dtype(in));
  Tensor lse = empty(q, {p.B, p.H, p.M}, ScalarType::Float);
  Tensor stats = empty(q, {p.B, p.H, p.M, 2}, ScalarType::Float);
  Tensor returned = empty(q, weights_shape(p), dtype);
  p.out = view_of(out, "out", {p.B, p.H, p.M, p.E});
  p.lse = static_cast<float*>(lse.data_ptr());
  p.stats = static_cast<float*>(stats.data_ptr());
  if (p.weights_mode != WeightsMode::kNone) p.weights = weights_view(p, returned, "weights");
  if (p.H == 0) torch::stable::zero_(returned);  // the mean over no heads, which no kernel writes

  device::Current current(q);  // before the sizes, which may depend on it
  const OptTensor workspace = workspace_of(q, device::forward_workspace_bytes(p));
  p.workspace = workspace ? workspace->data_ptr() : nullptr;
  current.forward(p);
  return {out, lse, returned, stats};
}

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  binding::Arguments arguments(stack, count);
  const Operands in = binding::take_operands(arguments);
  arguments.end();
  const auto [out, lse, weights, stats] = run_forward(in, /*batch_first=*/true);
  binding::put(stack, out, lse, weights, stats);
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  binding::Arguments arguments(stack, count);
  const Operands in = binding::take_operands(arguments);
  const binding::Saved saved = binding::take_saved(arguments);
  arguments.end();
  BackwardParams p{};
  fill_problem(in, &p);
  const Tensor& q = in.q;

  p.out = view_of(saved.out, "out", {p.B, p.H, p.M, p.E});
  STD_TORCH_CHECK(saved.grad_out.scalar_type() == q.scalar_type(),
                  "fastattn: expected grad_out of the dtype of q");
  p.grad_out = view_of(saved.grad_out, "grad_out", {p.B, p.H, p.M, p.E});
  const auto is_rows = [&](const Tensor& t, int64_t dims) {
    return t.scalar_type() == ScalarType::Float && t.dim() == dims && t.size(0) == p.B &&
           t.size(1) == p.H && t.size(2) == p.M;
  };
  STD_TORCH_CHECK(is_rows(saved.stats, 4) && saved.stats.size(3) == 2,
                  "fastattn: stats: expected float32 [B, H, M, 2]");
  STD_TORCH_CHECK(!saved.grad_lse || is_rows(*saved.grad_lse, 3),
                  "fastattn: grad_lse: expected float32 [B, H, M]");
  const Tensor stats_rows = torch::stable::contiguous(saved.stats);
  p.stats = static_cast<const float*>(stats_rows.data_ptr());
  OptTensor grad_lse_rows;
  if (saved.grad_lse) {
    grad_lse_rows = torch::stable::contiguous(*saved.grad_lse);
    p.grad_lse = static_cast<const float*>(grad_lse_rows->data_ptr());
  }
  if (saved.grad_weights && p.weights_mode != WeightsMode::kNone) {
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

  device::Current current(q);
  const OptTensor workspace = workspace_of(q, device::backward_workspace_bytes(p));
  p.workspace = workspace ? workspace->data_ptr() : nullptr;
  current.backward(p);
  binding::put(stack, grad_q, grad_k, grad_v, grad_w, grad_bias);
}

#ifndef FASTATTN_FOR_CUDA
namespace projection = fastattn::projection;

// x [first, second, E] as [first * second, E]: tokens.
Tensor tokens_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 3, "fastattn: x: expected 3 dims, got ", x.dim());
  const Tensor rows = projection::as_contiguous(x);
  return projection::view(rows, {x.size(0) * x.size(1), x.size(2)}, {x.size(2), 1});
}

// y [first * second, F] as [first, second, F], like x.
Tensor as_batch(const Tensor& y, const Tensor& x) {
  const int64_t F = y.size(1);
  return projection::view(y, {x.size(0), x.size(1), F}, {x.size(1) * F, F, 1});
}

// The input of the output projection, [first * second, H D], and the weights. Nothing is copied:
// heads are strided views of the projection, and attention writes its output in token order. The
// projection is freed on return.
std::tuple<Tensor, Tensor> attend_tokens(const Tensor& x, const Tensor& weight,
                                         const OptTensor& bias, int64_t H, double scale,
                                         int64_t weights, bool batch_first) {
  const Tensor packed = projection::linear(tokens_of(x), weight, bias);
  const int64_t T = packed.size(0), F = packed.size(1);
  STD_TORCH_CHECK(H > 0 && F % (3 * H) == 0,
                  "fastattn: in_weight: expected a multiple of 3 * num_heads rows");
  const int64_t B = x.size(batch_first ? 0 : 1), N = x.size(batch_first ? 1 : 0), D = F / (3 * H);
  const int64_t stride_b = batch_first ? N * F : F, stride_n = batch_first ? F : B * F;
  const auto heads = [&](int64_t n) {
    return projection::view(packed, {B, H, N, D}, {stride_b, D, stride_n, 1}, n * H * D);
  };
  Operands in{heads(0), heads(1), heads(2)};
  in.scale = scale;
  in.weights = weights;
  const Results found = run_forward(in, batch_first);
  return {projection::view(found.out, {T, H * D}, {H * D, 1}), found.weights};
}

// Of x [T, E], with any strides.
Tensor linear(Tensor x, Tensor weight, OptTensor bias) {
  STD_TORCH_CHECK(x.dim() == 2, "fastattn: x: expected 2 dims, got ", x.dim());
  return projection::linear(x, weight, bias);
}

std::tuple<Tensor, Tensor> self_attention(Tensor x, Tensor in_weight, OptTensor in_bias,
                                          Tensor out_weight, OptTensor out_bias, int64_t num_heads,
                                          double scale, int64_t weights, bool batch_first) {
  const auto [merged, returned] =
      attend_tokens(x, in_weight, in_bias, num_heads, scale, weights, batch_first);
  return {as_batch(projection::linear(merged, out_weight, out_bias), x), returned};
}
#endif

}  // namespace

#define FASTATTN_IMPLEMENT(key, m) STABLE_TORCH_LIBRARY_IMPL(fastattn, key, m)
FASTATTN_IMPLEMENT(FASTATTN_DISPATCH_KEY, m) {
  m.impl(FASTATTN_OPERATOR(forward), &forward);
  m.impl(FASTATTN_OPERATOR(backward), &backward);
#ifndef FASTATTN_FOR_CUDA
  m.impl("self_attention", TORCH_BOX(&self_attention));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("cpu_loop", TORCH_BOX(&binding::cpu_loop));
#endif
}

#ifdef FASTATTN_FOR_CUDA
STABLE_TORCH_LIBRARY_IMPL(fastattn, CompositeExplicitAutograd, m) {
  m.impl("cuda_choose_wgmma", TORCH_BOX(&fastattn::cuda::choose_wgmma));
}
#else
static const fastattn::binding::Definitions definitions;

STABLE_TORCH_LIBRARY_IMPL(fastattn, CompositeExplicitAutograd, m) {
  m.impl("onednn_from", TORCH_BOX(&projection::onednn_from));
  m.impl("cpu_isa", TORCH_BOX(&fastattn::binding::cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&fastattn::binding::cpu_isas));
  m.impl("select_cpu_isa", &fastattn::binding::select_by_name<fastattn::cpu::select_isa>);
  m.impl("select_cpu_path", &fastattn::binding::select_by_name<fastattn::cpu::select_path>);
  m.impl("cpu_path", TORCH_BOX(&fastattn::binding::cpu_path));
}

// An importable module, with the functions of direct.h. Loading it registers the kernels.
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "_C",
                                 nullptr,
                                 -1,
                                 fastattn::binding::functions,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_def); }
#endif
