// The problem of a call: operands become AttentionParams, and are checked on the way.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "binding/device.h"
#include "binding/operands.h"
#include "binding/views.h"

namespace fastattn::binding {

inline void fill_bias(const OptTensor& bias, AttentionParams* p) {
  p->bias = {};
  p->bias_is_line = bias && is_line(*bias, *p);
  if (p->bias_is_line) {
    p->bias = line_view(*bias, *p);
  } else if (bias) {
    p->bias = view_of(*bias, "bias", {p->B, p->H, p->M, p->N}, /*may_broadcast=*/true);
  }
}

// A number, not a name: torch's stable ABI leaks every str that an operator takes.
template <typename Enum>
Enum one_of(int64_t number, Enum last, const char* expected) {
  STD_TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(last), "fastattn: ", expected,
                  ", got ", number);
  return static_cast<Enum>(number);
}
inline ScoreKind score_kind(int64_t number) {
  return one_of(number, ScoreKind::kGaussian,
                "score: expected 0 (dot), 1 (additive) or 2 (gaussian)");
}

inline std::vector<int64_t> weights_shape(const AttentionParams& p) {
  if (p.weights_mode == WeightsMode::kNone) return {0};
  if (p.weights_mode == WeightsMode::kMean) return {p.B, p.M, p.N};
  return {p.B, p.H, p.M, p.N};
}

// The weights as [B, H or 1, M, N].
inline View weights_view(const AttentionParams& p, const Tensor& t, const char* name) {
  if (p.weights_mode == WeightsMode::kFull) return view_of(t, name, {p.B, p.H, p.M, p.N});
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == p.B && t.size(1) == p.M && t.size(2) == p.N,
                  "fastattn: ", name, ": its shape does not fit the other arguments");
  return {data_of(t, name),  dtype_of(t, name), stride_or_0(t, 0), 0,
          stride_or_0(t, 1), stride_or_0(t, 2)};
}

inline KeyLimit limit_of(const OptTensor& t, const char* name, const AttentionParams& p) {
  if (!t) return {};
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && broadcasts_to(*t, {p.B, p.M}),
                  "fastattn: ", name, ": expected int32 [B, 1] or [B, M]");
  return {static_cast<const int32_t*>(data_of(*t, name)), stride_or_0(*t, 0), stride_or_0(*t, 1)};
}

inline void fill_masks(const Operands& in, AttentionParams* p) {
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
    p->mask.keep = static_cast<const uint8_t*>(data_of(t, "keep"));
    p->mask.keep_stride_b = stride_or_0(t, 0);
    p->mask.keep_stride_h = stride_or_0(t, 1);
    p->mask.keep_stride_m = stride_or_0(t, 2);
    p->mask.keep_stride_n = stride_or_0(t, 3);
  }
}

// [H] or [B, H].
inline View sink_view(const OptTensor& t, const AttentionParams& p) {
  if (!t) return {};
  const int64_t h = t->dim() == 2 ? 1 : 0;
  STD_TORCH_CHECK(t->dim() == h + 1 && t->size(h) == p.H && (h == 0 || t->size(0) == p.B),
                  "fastattn: sink: expected [H] or [B, H]");
  return {data_of(*t, "sink"), dtype_of(*t, "sink"), h == 0 ? 0 : t->stride(0), t->stride(h), 0, 0};
}

// Query i sees the keys up to `past` + i.
inline Operands causal(Operands in, int64_t past) {
  in.band_hi = past;
  return in;
}

inline void fill_dropout(const Operands& in, AttentionParams* p) {
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
  device::set_seed(static_cast<const int64_t*>(data_of(*in.seed, "seed")), &p->dropout);
}

// Those of the score: [H, D], for the gaussian also [B, H, D].
inline void fill_weights(const Operands& in, AttentionParams* p) {
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
  void* const data = in.w->numel() > 0 ? data_of(*in.w, "w") : &nothing;
  p->w = {data, dtype_of(*in.w, "w"), h == 0 ? 0 : in.w->stride(0), in.w->stride(h),
          0,    in.w->stride(h + 1)};
}

// Sizes are less. Sizes of workspaces are products of them, and limits of keys have 32 bits.
constexpr int64_t kTooLarge = int64_t{1} << 31;

inline void fill_problem(const Operands& in, AttentionParams* p) {
  STD_TORCH_CHECK(in.q.dim() == 4 && in.k.dim() == 4 && in.v.dim() == 4,
                  "fastattn: q, k, v: expected 4 dims");
  STD_TORCH_CHECK(
      in.k.scalar_type() == in.q.scalar_type() && in.v.scalar_type() == in.q.scalar_type(),
      "fastattn: expected k and v of the dtype of q");
  p->B = in.q.size(0), p->H = in.q.size(1), p->M = in.q.size(2), p->D = in.q.size(3);
  p->Hkv = in.k.size(1), p->N = in.k.size(2), p->E = in.v.size(3);
  STD_TORCH_CHECK(std::max({p->B, p->H, p->M, p->N, p->D, p->E}) < kTooLarge,
                  "fastattn: q, k, v: expected sizes below 2^31");
  STD_TORCH_CHECK(p->Hkv == p->H || (p->Hkv > 0 && p->H % p->Hkv == 0),
                  "fastattn: expected query heads to be a multiple of key heads");
  p->scale = static_cast<float>(in.scale);
  p->softcap = static_cast<float>(in.softcap);
  STD_TORCH_CHECK(p->softcap >= 0, "fastattn: softcap: expected 0 or more, got ", in.softcap);
  // Infinity would make NaN of a score of 0.
  p->cap = p->softcap == 0 ? 0 : std::clamp(p->scale / p->softcap, -0x1p127f, 0x1p127f);
  p->q = view_of(in.q, "q", {p->B, p->H, p->M, p->D});
  p->k = view_of(in.k, "k", {p->B, p->Hkv, p->N, p->D});
  p->v = view_of(in.v, "v", {p->B, p->Hkv, p->N, p->E});
  fill_weights(in, p);
  fill_bias(in.bias, p);
  p->weights_mode =
      one_of(in.weights, WeightsMode::kMean, "weights: expected 0 (none), 1 (full) or 2 (mean)");
  fill_masks(in, p);
  fill_dropout(in, p);
  const char* const reason = device::unsupported(*p);
  STD_TORCH_CHECK(reason == nullptr, "fastattn: ", reason);
}

}  // namespace fastattn::binding
