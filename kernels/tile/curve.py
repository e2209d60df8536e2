"""Curves, which take a score's place before bias and mask: c tanh(s / c) under a softcap c.

The ratio t = tanh(s / c) takes the place of the score. Its logit is c t, a product with a scale, as
without a softcap. ``Mask.cap`` makes s / c of a score, and ``Call.logit_scale`` holds c.

    tanh |x| = z / (z + 2) = 1 - 2 / (z + 2)    z = e^2|x| - 1 = 2^n (2^f - 1) + (2^n - 1)

The first form serves a small x, to 4 ulp. The second form rounds well near 1. There 1 - tanh^2 has
no digits, so the slope is computed as (1 - t) (1 + t). Its first factor is 2 / (z + 2) itself.
Every fma is spelled out, because forward and backward must round a ratio in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .softmax import LOG2E


@triton.jit
def curve_scores(s, mask):
    """(ratios, slopes) of the scores s; without a curve the scores, and nothing to use."""
    if mask.cap is None:
        return s, s
    else:
        return tanh_and_slope(s * mask.cap)


@triton.jit
def curve_gradient(ds, slope, mask):
    """The gradient of scores from that of logits. 0 stays 0, because masked pairs may be NaN."""
    if mask.cap is None:
        return ds
    else:
        return tl.where(ds == 0.0, 0.0, ds * slope)


@triton.jit
def tanh_and_slope(x):
    """tanh x and its slope, which is 0 from |x| = 43 on: it is below 2^-122 there."""
    size = tl.minimum(tl.abs(x), 43.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(tl.fma(size, 2.0 * LOG2E, 0.5))
    f = tl.fma(size, 2.0 * LOG2E, -n)
    p = tl.fma(f, 1.5353362e-4, 1.3398874e-3)
    p = tl.fma(p, f, 9.6184369e-3)
    p = tl.fma(p, f, 5.5503324e-2)
    p = tl.fma(p, f, 2.4022648e-1)
    p = tl.fma(p, f, 6.9314718e-1)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    z = tl.fma(p * f, power, power - 1.0)
    near_one = tl.where(z > 2.0, 1.0, 0.0)
    part = tl.where(z > 2.0, -2.0, z) / (z + 2.0)
    t = near_one + part
    slope = tl.where(size < 43.0, ((1.0 - near_one) - part) * (1.0 + t), 0.0)
    return tl.where(x < 0.0, -t, t), slope
