"""Online softmax in base 2, and its inverse, the weights from a known log-sum-exp.

    m' = max(m, max_j s_j)    alpha = 2^(m - m')    p_j = 2^(s_j - m')    l' = alpha l + sum_j p_j

A row that has met no key has m = -inf, l = 0; it subtracts 0 instead of m, so that no
(-inf) - (-inf) arises. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

Logits come as ``s * scale`` with scale > 0: 2^(s * scale - m) is then one FMA and one exp2. NaN in
a row makes its sum, and so its whole result, NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import row_ptrs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: masks use it, and it must not become -inf


@triton.jit
def softmax_step(s, m_i, l_i, scale):
    """One tile of scores [BLOCK_M, BLOCK_N]: (p, alpha, m_i, l_i)."""
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def softmax_finish(m_i, l_i):
    """(what O is multiplied by, natural log-sum-exp): 0 and -inf where a row met no key."""
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    lse = tl.where(empty, float("-inf"), m_i * LN2 + tl.log(l_safe))
    return tl.where(empty, 0.0, 1.0 / l_safe), lse


@triton.jit
def load_lse_log2(lse_ptr, b, h, H, offs_m, M):
    """Base-2 log-sum-exp of rows; +inf, hence weights 0, if empty."""
    ptrs = row_ptrs(lse_ptr, b, h, H, offs_m, M)
    lse = tl.load(ptrs, mask=offs_m < M, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def load_factor(factor_ptr, b, h, H, offs_m, M):
    """What weights_of multiplies rows by; 1 where there is nothing to load."""
    if factor_ptr is None:
        return 1.0
    else:
        ptrs = row_ptrs(factor_ptr, b, h, H, offs_m, M)
        return tl.load(ptrs, mask=offs_m < M, other=0.0)


@triton.jit
def weights_of(s, shift, factor, scale, BIASED: tl.constexpr):
    """Softmax weights 2^(s * scale - shift) * factor; shift and factor broadcast to s.

    (m, 1 / l) gives them to the last bit. (lse, 1) is cheaper to keep, but where |lse| is 1e4 its
    own rounding is 1e-3, a factor common to the row: (lse, 1 / their sum) puts that right.
    In rows whose every key is biased by the lowest finite number lse resolves nothing at all:
    weights are kept at most 1, hence finite.
    """
    x = s * scale - shift
    if BIASED:
        x = tl.minimum(x, 0.0)
    return tl.exp2(x) * factor
