// Lines of biases of head and distance, as fastattn/problem/relative.py makes them: the same bits.
//
// After a large problem, nothing of Python or of torch is in the caches. A line then takes 0.1 ms
// there, and 0.01 ms here.
#pragma once

#include <algorithm>

#include "binding/dlpack.h"
#include "problem/params.h"

namespace fastattn::binding {

// What an ALiBi or a RelativeBias is made of. Parts of other classes are nullptr.
struct LineParts {
  const dlpack::Tensor *slopes, *table, *buckets;
  int64_t offset;

  bool given() const { return slopes != nullptr || table != nullptr; }

  // Whether write() can make lines where p has its own; others are left to the ordinary way.
  bool usual(const AttentionParams& p) const {
    const dlpack::Tensor& numbers = slopes != nullptr ? *slopes : *table;
    return numbers.dtype.is(dlpack::kFloat, 32) && p.bias.dtype == DType::kFloat32 &&
           (buckets == nullptr || buckets->dtype.is(dlpack::kInt, 64)) &&
           (p.bias.stride_c == 1 || length(p) == 1);
  }

  int64_t count(const AttentionParams& p) const { return samples() * p.H * length(p); }

  // False if a bucket is no row of the table. What is written is p.bias of such params.
  bool write(const AttentionParams& p, float* to) const {
    return slopes != nullptr ? write_slopes(p, to) : write_table(p, to);
  }

 private:
  static int64_t length(const AttentionParams& p) { return p.M + p.N - 1; }
  int64_t samples() const { return slopes != nullptr && slopes->ndim == 2 ? slopes->shape[0] : 1; }
  int64_t first(const AttentionParams& p) const { return 1 - p.M - offset; }

  bool write_slopes(const AttentionParams& p, float* to) const {
    const int64_t count = length(p), own = samples() * p.H - 1;
    const auto row = [&](int64_t n) {
      return to + n / p.H * p.bias.stride_b + n % p.H * p.bias.stride_h;
    };
    // The last line has the distances until its own turn.
    float* const distances = row(own);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t d = first(p) + t;
      distances[t] = static_cast<float>(d < 0 ? -d : d);
    }
    for (int64_t n = 0; n <= own; ++n) {
      const int64_t at = slopes->ndim == 2 ? n / p.H * slopes->strides[0] : 0;
      const int64_t step = slopes->strides[slopes->ndim - 1];
      const float slope = -static_cast<const float*>(slopes->data)[at + n % p.H * step];
      float* const line = row(n);
      for (int64_t t = 0; t < count; ++t) line[t] = slope * distances[t];
    }
    return true;
  }

  bool write_table(const AttentionParams& p, float* to) const {
    const auto* const numbers = static_cast<const float*>(table->data);
    const auto* const rows = static_cast<const int64_t*>(buckets->data);
    const int64_t most = buckets->shape[0] / 2, step = buckets->strides[0];
    for (int64_t n = 0; n < buckets->shape[0]; ++n)
      if (rows[n * step] < 0 || rows[n * step] >= table->shape[0]) return false;
    for (int64_t h = 0; h < p.H; ++h) {
      const float* const own = numbers + h * table->strides[1];
      for (int64_t t = 0; t < length(p); ++t) {
        const int64_t d = std::clamp(first(p) + t, -most, most);
        to[h * p.bias.stride_h + t] = own[rows[(d + most) * step] * table->strides[0]];
      }
    }
    return true;
  }
};

}  // namespace fastattn::binding
