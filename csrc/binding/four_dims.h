// Tensors of any number of dims as the four of the kernels, where that copies nothing. The same as
// to_4d() and match_heads() of fastattn/problem/validate.py, which have checked such shapes before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "binding/dlpack.h"

namespace fastattn::binding {

// [B, H, rows, columns].
struct FourDims {
  int64_t sizes[4], strides[4];

  void expand(int d, int64_t size) {
    if (sizes[d] == 1 && size != 1) sizes[d] = size, strides[d] = 0;
  }
};

// What a call's tensors have before their rows: batch dims, which become one, and a dim of heads.
struct Lead {
  bool has_heads = false;
  std::vector<int64_t> batch;

  size_t behind() const { return has_heads ? 3 : 2; }
  int64_t samples() const {
    int64_t count = 1;
    for (const int64_t size : batch) count *= size;
    return count;
  }

  void add(const dlpack::Tensor& t) {
    const size_t dims = static_cast<size_t>(t.ndim), own = dims > behind() ? dims - behind() : 0;
    if (own > batch.size()) batch.insert(batch.begin(), own - batch.size(), 1);
    for (size_t n = 0; n < own; ++n)
      if (int64_t& size = batch[batch.size() - own + n]; size == 1) size = t.shape[n];
  }

  // One sample for all stays one. False if the batch dims are no single one in memory.
  bool as_four(const dlpack::Tensor& t, bool heads, FourDims* to) const {
    *to = {{1, 1, 1, 1}, {0, 0, 0, 0}};
    size_t left = static_cast<size_t>(t.ndim);
    for (const int d : {3, 2, 1}) {
      if (left == 0 || (d == 1 && !heads)) continue;
      --left, to->sizes[d] = t.shape[left], to->strides[d] = t.strides[left];
    }
    if (left > batch.size()) return false;
    if (left == 1 && batch.size() == 1) {  // the usual call
      to->sizes[0] = t.shape[0], to->strides[0] = t.strides[0];
      return true;
    }
    if (std::all_of(t.shape, t.shape + left, [](int64_t size) { return size == 1; })) return true;
    for (size_t n = batch.size(); n-- > 0;) {
      if (batch[n] == 1) continue;
      const size_t absent = batch.size() - left;
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
    for (FourDims* x : {q, k, v}) x->expand(0, samples());
    k->expand(1, v->sizes[1]), v->expand(1, k->sizes[1]), q->expand(1, k->sizes[1]);
  }

  // Four dims as the caller's.
  void restore(const FourDims& x, bool heads, std::vector<int64_t>* sizes,
               std::vector<int64_t>* strides) const {
    *sizes = batch, *strides = batch;
    int64_t stride = x.strides[0];
    for (size_t n = batch.size(); n-- > 0; stride *= batch[n]) (*strides)[n] = stride;
    const int from = heads ? 1 : 2;
    sizes->insert(sizes->end(), x.sizes + from, x.sizes + 4);
    strides->insert(strides->end(), x.strides + from, x.strides + 4);
    if (batch.size() == 1) return;
    for (size_t n = sizes->size() - 1; n-- > 0;)  // as reshape()
      if ((*sizes)[n] == 1) (*strides)[n] = (*strides)[n + 1] * (*sizes)[n + 1];
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
