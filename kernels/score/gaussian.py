"""The gaussian score, of differences: s_ij = -1/2 sum_d (q_id - k_jd)^2 / h_d^2, h the bandwidths.

    for d, a tile of pairs       a row of q and of k from L1; sums stay in registers
      t = (q_d - k_d) r_d        2 operations
      s += t t                   an FMA

with 1 / h_d^2 = c r_d^2: see csrc/problem/bandwidths.h. q and k are fp32 and transposed, in the
layout of E and F of the additive score (additive.py).

Gradients, x = q - k and g = dS x r:

    dq_id = -c r_d sum_j g_ijd     dk_jd = c r_d sum_i g_ijd
    dh_d = c r_d sum_ij g_ijd x_ijd / h_d

Where dS is 0, x counts as 0: a key behind a mask, or infinitely far away, adds no gradient.
Watson, "Smooth regression analysis", 1964.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .additive import factors, head_start, tile_of_zeros


@triton.jit
def load_bandwidth(terms, b, h, d, dims, spec):
    """(r of a dim, c r)."""
    pairs: tl.constexpr = (spec.D + 1) // 2
    head = b.to(tl.int64) * dims.H + h
    ratio = tl.load(terms.w_ptr + head * (2 * pairs) + d)
    return ratio, ratio * tl.load(terms.power_ptr + head)


@triton.jit
def gaussian_scores(x, y, terms, b, h, dims, spec, TRANSPOSED: tl.constexpr):
    """Scores of a tile in natural units."""
    x_ptr, x_stride, y_ptr, y_stride = factors(terms, b, h, dims, spec, TRANSPOSED)
    s = tile_of_zeros(x.shape[0], y.shape[0])
    for n in tl.range(0, spec.D, num_stages=1):
        d = n + tl.zeros((), tl.int32)
        ratio, _ = load_bandwidth(terms, b, h, d, dims, spec)
        t = (tl.load(x_ptr + x)[:, None] - tl.load(y_ptr + y)[None, :]) * ratio
        s = tl.fma(t, t, s)
        x_ptr += x_stride
        y_ptr += y_stride
    # An fma: a compiler could contract a product and the subtraction of a maximum that follows, in
    # one kernel and not in another.
    factor = tl.load(terms.power_ptr + b.to(tl.int64) * dims.H + h) * -0.5
    return tl.fma(s, factor, 0.0)


@triton.jit
def gaussian_gradients(ds, x, y, terms, b, h, dims, spec, TRANSPOSED: tl.constexpr):
    """Adds what a tile dS contributes to dq and dh, or to dk if TRANSPOSED; dh lacks its 1 / h."""
    x_ptr, x_stride, y_ptr, y_stride = factors(terms, b, h, dims, spec, TRANSPOSED)
    start = head_start(terms, b, h, dims, spec, not TRANSPOSED)
    for n in tl.range(0, spec.D, num_stages=1):
        d = n + tl.zeros((), tl.int32)
        ratio, slope = load_bandwidth(terms, b, h, d, dims, spec)
        t = tl.load(x_ptr + x)[:, None] - tl.load(y_ptr + y)[None, :]
        t = tl.where(ds == 0.0, 0.0, t)
        g = ds * (t * ratio)
        at = start + d.to(tl.int64) * x_stride + x
        if TRANSPOSED:
            ptrs = terms.grad_k_ptr + at
        else:
            ptrs = terms.grad_q_ptr + at
            sums = terms.grad_w_ptr + at
            tl.store(sums, tl.load(sums) + tl.sum(g * t, 1) * slope)
        tl.store(ptrs, tl.load(ptrs) - tl.sum(g, 1) * slope)
        x_ptr += x_stride
        y_ptr += y_stride
