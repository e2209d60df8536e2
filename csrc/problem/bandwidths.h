// How kernels divide by the bandwidths h_d of a gaussian score: 1 / h_d^2 = c r_d^2. With this form
// no number of ordinary size leaves the range of floats. If all dims have one bandwidth, r is a
// power of two, and only c is rounded: no digit is lost. kernels/loop/gaussian.py does the same.
#pragma once

#include <cmath>
#include <cstring>

#include "problem/host_device.h"

namespace fastattn {

constexpr double kLeastBandwidth = 0x1p-126;  // smaller bandwidths count as this

struct Bandwidths {
  double least, power;  // power: the power of two with least * power in [1, 2)
  double factor;        // c
};

// `least` is the least |h_d|, or infinity if there is none. Infinity and NaN count as 1.
FASTATTN_FN Bandwidths bandwidths_of(double least) {
  if (!(least < INFINITY)) least = 1;
  if (least < kLeastBandwidth) least = kLeastBandwidth;
  uint64_t bits = 0;
  std::memcpy(&bits, &least, sizeof(bits));
  bits &= 0x7ff0000000000000;  // keeps the exponent only
  double below = 0;
  std::memcpy(&below, &bits, sizeof(below));
  const double power = 1 / below;
  return {least, power, 1 / (least * power * least * power)};
}

// r_d for a bandwidth h_d. NaN stays NaN.
FASTATTN_FN float ratio_of(const Bandwidths& all, float bandwidth) {
  const double h = fabs(static_cast<double>(bandwidth));
  return static_cast<float>(all.power * (all.least / (h < all.least ? all.least : h)));
}

}  // namespace fastattn
