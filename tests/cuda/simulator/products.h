// Sums of products as the tensor cores of an H100 make them, c + sum_k x_k y_k.
//
// The products and c are aligned to the largest exponent among them. Each keeps 24 bits and two
// more, and the rest is cut off. Their sum is exact, and is cut off to fp32. This is what
// Khattak and Mikaitis measured, bit for bit ("Accurate Models of NVIDIA Tensor Cores",
// arXiv:2512.07004). Sums that round each product to nearest would have other errors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace cuda_on_cpu {

constexpr int kDepth = 16;  // products of an instruction
constexpr int kBits = 26;   // an A100 adds groups of 8, and keeps 25 bits

// The exponent of the first bit, which a subnormal operand has as a zero.
inline int exponent_of(float x, int least) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return std::max(static_cast<int>(bits >> 23 & 0xff) - 127, least);
}

inline float cut_to_float(double x) {
  const float nearest = static_cast<float>(x);
  return std::fabs(nearest) > std::fabs(x) && std::isfinite(nearest) ? std::nextafter(nearest, 0.f)
                                                                     : nearest;
}

// Of kDepth products.
inline float add_products(bool fp16, float c, const float* x, const float* y) {
  const int least = fp16 ? -14 : -126;
  int top = c == 0.f ? -133 : exponent_of(c, -126);
  double all = c;
  for (int k = 0; k < kDepth; ++k) {
    all += static_cast<double>(x[k]) * y[k];
    if (x[k] != 0.f && y[k] != 0.f)
      top = std::max(top, exponent_of(x[k], least) + exponent_of(y[k], least));
  }
  if (!std::isfinite(all)) return static_cast<float>(all);
  const int bits = kBits - 1 - top;
  const double unit = std::ldexp(1.0, -bits), units = std::ldexp(1.0, bits);
  int64_t sum = static_cast<int64_t>(c * units);
  for (int k = 0; k < kDepth; ++k)
    sum += static_cast<int64_t>(static_cast<double>(x[k]) * y[k] * units);
  return cut_to_float(static_cast<double>(sum) * unit);
}

}  // namespace cuda_on_cpu
