"""Online softmax in base 2, and its inverse, the weights from known statistics of a row.

    m' = max(m, max_j s_j)    alpha = 2^(c (m - m'))    p_j = 2^(c (s_j - m'))
                              l' = alpha l + sum_j p_j
    weight_j = 2^(c (s_j - shift)) * factor             shift = m, factor = 1 / l

A row that has met no key has m = -inf and l = 0. Such a row subtracts 0 instead of m, so that no
(-inf) - (-inf) arises. Its shift and factor are 0. Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018.

A logit is c s, and c > 0 is the ``scale``. The difference s - m comes first: it is 0 for the
largest key, exact for every key with a weight above 0, and the same forward and backward. A
compiler could contract c s - c m into one multiply-add. That rounds one product and not the other:
the largest weight is then off by an ulp of the logit, and overflows beyond logits of 2^31.

NaN in a row makes its sum, and so its whole result, NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .strided import row_numbers

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST_FACTOR = tl.constexpr(1e-35)  # that has all of its digits


@triton.jit
def unit_of(scale, spec):
    """What the difference of two logits is multiplied by, for an exponent of 2."""
    if spec.FOLD_SCALE:
        return scale
    else:
        return LOG2E


@triton.jit
def softmax_step(s, m_i, l_i, unit):
    """One tile of logits [BLOCK_M, BLOCK_N]: (p, alpha, m_i, l_i)."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((s - m_safe[:, None]) * unit)
    alpha = tl.exp2((m_i - m_safe) * unit)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def softmax_finish(m_i, l_i, sink, natural):
    """(shift, factor, natural log-sum-exp): 0, 0 and -inf where a row met no key.

    ``natural``: the natural logit of a logit of 1. Made of the unit it would be rounded twice, and
    so would every number of a row beside a sink. ``sink``: one more natural logit of every row, or
    None. It is the log-sum-exp of an empty row.
    """
    empty = l_i == 0.0
    l_safe = tl.where(empty, 1.0, l_i)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    if sink is None:
        factor, lse = 1.0 / l_safe, m_i * natural + tl.log(l_safe)
        none = float("-inf")
    else:
        factor, lse = finish_beside(sink, shift, l_safe, natural)
        none = sink
    return shift, tl.where(empty, 0.0, factor), tl.where(empty, none, lse)


@triton.jit
def finish_beside(sink, shift, l_i, natural):
    """(factor, log-sum-exp) of l' = l + e^(sink - shift); a shift of 1 is ``natural``.

    The larger of both powers stays 1, so neither one overflows. Their difference is float64: its
    rounding would be that of every number of the row. Not run on a GPU.
    """
    above = sink.to(tl.float64) - shift.to(tl.float64) * natural
    is_above = above > 0.0
    less = exp_of_double(-tl.abs(above))
    of_keys = tl.where(is_above, less, 1.0)
    total = tl.fma(of_keys, l_i, tl.where(is_above, 1.0, less))
    log = tl.log(total)
    return of_keys / total, tl.where(is_above, sink + log, tl.fma(shift, natural, log))


@triton.jit
def sink_weight(sink, shift, factor, natural):
    """e^(sink - lse) of rows with these statistics, as finish_beside made them. Not run on a GPU.

    Where a factor has lost its digits, the sink has all of the row.
    """
    own = sink.to(tl.float64)
    known = factor * exp_of_double(own - shift.to(tl.float64) * natural)
    alone = tl.where(tl.abs(own) < float("inf"), 1.0, tl.where(own < 0.0, 0.0, own))
    return tl.where(factor < LEAST_FACTOR, alone.to(tl.float32), known)


@triton.jit
def exp_of_double(x):
    """e^x in float32 of float64 x < 88."""
    x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)  # whose result is 0
    whole = tl.floor(x * LOG2E)
    return tl.exp2(whole.to(tl.float32)) * tl.exp((x - whole * LN2).to(tl.float32))


@triton.jit
def store_stats(stats_ptr, b, h, H, offs_m, M, shift, factor):
    """Writes rows of the contiguous [B, H, M, 2] that backward and the weights are made from."""
    ptrs = stats_ptr + 2 * row_numbers(b, h, H, offs_m, M)
    tl.store(ptrs, shift, mask=offs_m < M)
    tl.store(ptrs + 1, factor, mask=offs_m < M)


@triton.jit
def load_stats(stats_ptr, b, h, H, i, M):
    """(shift, factor) of the rows i, in the shape of i; past the last row 0, hence weights 0."""
    ptrs = stats_ptr + 2 * row_numbers(b, h, H, i, M)
    return tl.load(ptrs, mask=i < M, other=0.0), tl.load(ptrs + 1, mask=i < M, other=0.0)


@triton.jit
def fold_factor(factor):
    """log2(l), which an exponent subtracts in place of the factor 1 / l; +inf for a factor of 0."""
    empty = factor == 0.0
    return tl.where(empty, float("inf"), -tl.log2(tl.where(empty, 1.0, factor)))


@triton.jit
def weights_of(s, shift, factor, unit, FOLDED: tl.constexpr):
    """Softmax weights 2^((s - shift) * unit) * factor; shift and factor broadcast to s.

    A weight is at most the factor: a score that is summed in another order may pass a huge maximum
    by a lot. FOLDED: factor is fold_factor's, which saves a product, and the bound is 1.
    """
    x = (s - shift) * unit
    if FOLDED:
        return tl.exp2(tl.minimum(x - factor, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.exp2(tl.minimum(x, 0.0)) * factor
