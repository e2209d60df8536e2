"""Softcap: c tanh(s / c) in place of a score s, before bias and mask.

The ratio t = tanh(s / c) takes the place of the score. Its logit is c t, a product with a scale, as
without a softcap. ``Mask.cap`` makes s / c of a score, and ``Call.logit_scale`` holds c.

    tanh |x| = z / (z + 2) = 1 - 2 / (z + 2)    z = e^2|x| - 1 = 2^n (2^f - 1) + (2^n - 1)

The first form serves a small x, to 4 ulp. The second one rounds well near 1, where the slope
1 - tanh^2 cancels. Every fma is spelled out: forward and backward must round a ratio alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .softmax import LOG2E


@triton.jit
def cap_scores(s, mask):
    """The ratios of the scores s, where there is a softcap."""
    if mask.cap is None:
        return s
    else:
        return tanh(s * mask.cap)


@triton.jit
def cap_gradient(ds, t, mask):
    """The gradient of scores from that of logits. 0 stays 0, because masked pairs may be NaN."""
    if mask.cap is None:
        return ds
    else:
        return tl.where(ds == 0.0, 0.0, tl.fma(-ds * t, t, ds))


@triton.jit
def tanh(x):
    size = tl.minimum(tl.abs(x), 10.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(tl.fma(size, 2.0 * LOG2E, 0.5))
    f = tl.fma(size, 2.0 * LOG2E, -n)
    p = tl.fma(f, 1.5353362e-4, 1.3398874e-3)
    p = tl.fma(p, f, 9.6184369e-3)
    p = tl.fma(p, f, 5.5503324e-2)
    p = tl.fma(p, f, 2.4022648e-1)
    p = tl.fma(p, f, 6.9314718e-1)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    z = tl.fma(p * f, power, power - 1.0)
    t = tl.where(z > 2.0, 1.0, 0.0) + tl.where(z > 2.0, -2.0, z) / (z + 2.0)
    return tl.where(x < 0.0, -t, t)
