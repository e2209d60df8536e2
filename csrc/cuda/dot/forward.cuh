// What the forward kernels of scaled dot-product attention share: the state of a row and its online
// softmax, and what is written at the end.
#pragma once

#include "cuda/dot/step.cuh"

namespace fastattn::cuda {

// m, l of rows g and g + 8.
struct SdpaState {
  float m[2], l[2];
};

// What a tile did to the state, before its sums are added.
struct SdpaStep {
  float m_old[2], sum[2];
  bool raised;  // whether one of the maxima is another one
};

// Turns logits into weights. Unless kMasked, every row has met a key.
template <bool kMasked, int kTiles>
FASTATTN_DEVICE void sdpa_softmax_step(float unit, float slack, SdpaState& state,
                                       float (&s)[kTiles][4], SdpaStep& step) {
  step.raised = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int v = 2 * half;
    float top = max_of(s[0][v], s[0][v + 1]);
#pragma unroll
    for (int n = 1; n < kTiles; ++n) top = max_of(top, max_of(s[n][v], s[n][v + 1]));
    top = lanes_max(top, kQuad);
    const bool raised = top > state.m[half] + slack;
    step.raised |= raised;
    step.m_old[half] = state.m[half];
    if (raised) state.m[half] = top;
    const float shift = kMasked ? finite_max(state.m[half]) : state.m[half];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      s[n][v] = rescaling(s[n][v], shift, unit), s[n][v + 1] = rescaling(s[n][v + 1], shift, unit);
      const float sum = s[n][v] + s[n][v + 1];
      step.sum[half] = n == 0 ? sum : step.sum[half] + sum;
    }
  }
}

// Adds the sums of the tile. alpha rescales O.
FASTATTN_DEVICE void sdpa_add_sums(float unit, const SdpaStep& step, SdpaState& state,
                                   float (&alpha)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    alpha[half] = rescaling(step.m_old[half], finite_max(state.m[half]), unit);
    state.l[half] = state.l[half] * alpha[half] + step.sum[half];
  }
}

template <DType kType, int kDim>
FASTATTN_DEVICE void write_rows(const ForwardParams& p, const Place& at, const SdpaState& state,
                                const float (&o)[kDim / 8][4]) {
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = sum_row(2 * half);
    const float l = lanes_sum(state.l[half], kQuad);
    const int64_t number = query_number(p, at, row);
    const bool writer = lane() % kQuad == 0 && row < at.rows;
    factors[half] = write_row(p, at.b, at.h, number, state.m[half], l, writer);
  }
  store_sums<kType, kDim>(p.out, offset_of(p.out, at.b, at.h, at.i0, 0), at.rows, p.E, factors, o);
}

}  // namespace fastattn::cuda
