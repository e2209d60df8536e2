// How kernels divide by the bandwidths h_d of a gaussian score: 1 / h_d^2 = c r_d^2. No number of
// ordinary size leaves the range of floats then, and one bandwidth for all dims costs no digit, as
// r is a power of two and c alone is rounded. kernels/loop/gaussian.py does likewise.
#pragma once

#include <cmath>
#include <cstring>

#include "problem/host_device.h"

namespace fastattn {

constexpr double kLeastBandwidth = 0x1p-126;  // smaller ones count as that

struct Bandwidths {
  double least, power;  // power: of two, that makes the least bandwidth one of [1, 2)
  double factor;        // c
};

// From the least |h_d|; infinity where there is none.
FASTATTN_FN Bandwidths bandwidths_of(double least) {
  if (!(least < INFINITY)) least = 1;
  if (least < kLeastBandwidth) least = kLeastBandwidth;
  uint64_t bits = 0;
  std::memcpy(&bits, &least, sizeof(bits));
  bits &= 0x7ff0000000000000;  // of the exponent alone
  double below = 0;
  std::memcpy(&below, &bits, sizeof(below));
  const double power = 1 / below;
  return {least, power, 1 / (least * power * least * power)};
}

// r_d. NaN stays NaN.
FASTATTN_FN float ratio_of(const Bandwidths& all, float bandwidth) {
  const double h = fabs(static_cast<double>(bandwidth));
  return static_cast<float>(all.power * (all.least / (h < all.least ? all.least : h)));
}

}  // namespace fastattn
