// Tensors of any number of dims as the four of the kernels, where that copies nothing. The same as
// to_4d() and match_heads() of fastattn/problem/validate.py, which have checked such shapes before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <utility>

#include "binding/dlpack.h"

namespace fastattn::binding {

// [B, H, rows, columns].
struct FourDims {
  int64_t sizes[4], strides[4];

  void expand(int d, int64_t size) {
    if (sizes[d] == 1 && size != 1) sizes[d] = size, strides[d] = 0;
  }
};

constexpr int kMostDims = 8;

// Sizes and strides as the caller sees them.
struct Layout {
  int dims = 0;
  int64_t sizes[kMostDims], strides[kMostDims];

  void add(int64_t size, int64_t stride) { sizes[dims] = size, strides[dims++] = stride; }
  int64_t count() const {
    return std::accumulate(sizes, sizes + dims, int64_t{1}, std::multiplies<>());
  }
};

inline Layout contiguous(int dims, const int64_t* sizes) {
  Layout made{dims, {}, {}};
  int64_t stride = 1;
  for (int d = dims; d-- > 0; stride *= sizes[d])
    made.sizes[d] = sizes[d], made.strides[d] = stride;
  return made;
}

// What a call's tensors have before their rows: batch dims, which become one, and a dim of heads.
struct Lead {
  bool has_heads = false;
  int count = 0;  // of batch dims
  int64_t batch[kMostDims], samples = 1;

  // False if there are too many dims, or too few.
  bool set(std::initializer_list<const dlpack::Tensor*> inputs) {
    has_heads = (*inputs.begin())->ndim > 2;
    const int behind = has_heads ? 3 : 2;
    for (const dlpack::Tensor* t : inputs) {
      if (t->ndim < 2 || t->ndim > kMostDims) return false;
      count = std::max(count, t->ndim - behind);
    }
    for (int n = 0; n < count; ++n) {
      batch[n] = 1;
      for (const dlpack::Tensor* t : inputs)
        if (const int d = n - count + t->ndim - behind; d >= 0 && batch[n] == 1)
          batch[n] = t->shape[d];
      samples *= batch[n];
    }
    return true;
  }

  // One sample for all stays one. False if the batch dims cannot become one without a copy.
  bool as_four(const dlpack::Tensor& t, bool heads, FourDims* to) const {
    *to = {{1, 1, 1, 1}, {0, 0, 0, 0}};
    int left = t.ndim;
    for (const int d : {3, 2, 1}) {
      if (left == 0 || (d == 1 && !heads)) continue;
      --left, to->sizes[d] = t.shape[left], to->strides[d] = t.strides[left];
    }
    if (left > count) return false;
    if (left == 1 && count == 1) {  // the usual call
      to->sizes[0] = t.shape[0], to->strides[0] = t.strides[0];
      return true;
    }
    if (std::all_of(t.shape, t.shape + left, [](int64_t size) { return size == 1; })) return true;
    for (int n = count; n-- > 0;) {
      if (batch[n] == 1) continue;
      const int absent = count - left;
      const bool own = n >= absent && t.shape[n - absent] != 1;
      const int64_t stride = own ? t.strides[n - absent] : 0;
      if (to->sizes[0] == 1) {
        to->strides[0] = stride;
      } else if (stride != to->strides[0] * to->sizes[0]) {
        return false;
      }
      to->sizes[0] *= batch[n];
    }
    return true;
  }

  // Makes queries, keys and values fit each other.
  void match(FourDims* q, FourDims* k, FourDims* v) const {
    for (FourDims* x : {q, k, v}) x->expand(0, samples);
    k->expand(1, v->sizes[1]), v->expand(1, k->sizes[1]), q->expand(1, k->sizes[1]);
  }

  // Four dims as the caller's.
  Layout restored(const FourDims& x, bool heads) const {
    Layout made = contiguous(count, batch);
    for (int n = 0; n < count; ++n) made.strides[n] *= x.strides[0];
    for (int d = heads ? 1 : 2; d < 4; ++d) made.add(x.sizes[d], x.strides[d]);
    if (count == 1) return made;
    for (int d = made.dims - 1; d-- > 0;)  // as reshape()
      if (made.sizes[d] == 1) made.strides[d] = made.strides[d + 1] * made.sizes[d + 1];
    return made;
  }
};

// As torch.empty_like(): dense, in the order of the strides. There are elements.
inline FourDims like(const FourDims& x) {
  int order[] = {3, 2, 1, 0};  // innermost first
  const auto is_outside = [&](int a, int b) {
    const int64_t own = x.strides[a], other = x.strides[b];
    if (own == 0 || other == 0) return 0;
    if (own != other) return own > other ? 1 : -1;
    return x.sizes[a] > x.sizes[b] ? 1 : 0;
  };
  for (int n = 1; n < 4; ++n) {
    for (int at = n, m = n; m-- > 0;) {
      const int outside = is_outside(order[m], order[at]);
      if (outside < 0) break;
      if (outside > 0) std::swap(order[m], order[at]), at = m;
    }
  }
  FourDims made = x;
  int64_t stride = 1;
  for (const int d : order) made.strides[d] = stride, stride *= x.sizes[d];
  return made;
}

}  // namespace fastattn::binding
