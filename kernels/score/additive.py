"""The additive score, as tiles.

The score s_ij = sum_d w_d tanh(q_id + k_jd) is exact, without a tanh in the loop over pairs:

    tanh(q + k) = 1 - 2 u      u = 1 / (1 + E F)      E = e^2q      F = e^2k

    for two d, a tile of pairs       2 rows of E and F from L1; sums stay in registers
      x_d = 1 + E_d F_d              2 FMAs
      s += (w_1 + w_2) / 2 - (w_1 x_2 + w_2 x_1) / (x_1 x_2)       5 operations, one reciprocal

Two elements share a reciprocal. A multiprocessor has 16 special functions a clock, and one for each
element would bound the loop. Every step adds two terms of w tanh / 2. A sum that lost half of all
weights at its end would cancel. A sum that lost halves at every step would round alike each time,
where weights are alike. additive_forward.py makes E and F once a launch, as [heads, d, tokens], so
that a d is one contiguous load.

Gradients come from the same loop once more, t = u (1 - u) = (1 - tanh^2) / 4 = E F u^2:

    dq_id = 4 w_d E_id sum_j dS_ij u_ijd^2 F_jd     dw_d = sum dS - 2 sum dS u
    dk_jd = 4 w_d F_jd sum_i dS_ij u_ijd^2 E_id

Range. Exponents of E and F are in base 2, shifted by a centre c_d. That is an integer, so
E 2^c F 2^-c is E F to the last bit. Keys of a tile must lie within 2^+-KEY_LIMIT. Queries need no
bound: above 2^(KEY_LIMIT + SATURATION), tanh is 1 for all of those keys. Denominators have the unit
2^-60, half in E and half in F, which keeps products of two in [2^-120, 2^121]. A tile with a key
that is out of range, or not finite, takes the direct loop: an exponential and a reciprocal an
element.

Rounding. Either loop gives a score the same bits in every kernel: its sum goes over dims in order,
and every fma is spelled out. A kernel with larger tiles may take the direct loop for more keys.

Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and translate",
2015.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tile.softmax import LOG2E
from ..tile.strided import head_ptr, row_offsets

KEY_LIMIT = tl.constexpr(45.0)
SATURATION = tl.constexpr(28.0)  # 1 - tanh is 7e-9 there
HALF_UNIT = tl.constexpr(-30)  # the exponent that E has, and F has, of the unit
UNIT = tl.constexpr(2.0**-60)


# ---- the additive score ----


@triton.jit
def keys_in_range(x, y, terms, b, h, dims, TRANSPOSED: tl.constexpr):
    """Whether the loop over pairs of dims is right for the keys of a tile: one scalar."""
    offs_n = x if TRANSPOSED else y
    head = b.to(tl.int64) * (dims.H // dims.group) + h // dims.group
    return tl.max(tl.load(terms.reach_ptr + head * terms.keys + offs_n), 0) <= KEY_LIMIT


@triton.jit
def head_start(terms, b, h, dims, spec, QUERIES: tl.constexpr):
    """Where a head begins in E (F, without QUERIES) and in the sums laid out like it."""
    pairs: tl.constexpr = (spec.D + 1) // 2
    if QUERIES:
        return (b.to(tl.int64) * dims.H + h) * (2 * pairs) * terms.queries
    else:
        head = b.to(tl.int64) * (dims.H // dims.group) + h // dims.group
        return head * (2 * pairs) * terms.keys


@triton.jit
def factors(terms, b, h, dims, spec, TRANSPOSED: tl.constexpr):
    """(E of a head, stride of its dims, F, stride of its dims); F comes first if TRANSPOSED."""
    e_ptr = terms.e_ptr + head_start(terms, b, h, dims, spec, True)
    f_ptr = terms.f_ptr + head_start(terms, b, h, dims, spec, False)
    if TRANSPOSED:
        return f_ptr, terms.keys, e_ptr, terms.queries
    else:
        return e_ptr, terms.queries, f_ptr, terms.keys


@triton.jit
def load_weight(terms, h, d, spec):
    """Weight d of a head, scaled; 0 for the dim that makes their number even."""
    pairs: tl.constexpr = (spec.D + 1) // 2
    return tl.load(terms.w_ptr + h * (2 * pairs) + d)


@triton.jit
def reciprocal(x, spec):
    """1 / x to 1 ulp, in one instruction on NVIDIA's."""
    if spec.PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def tile_of_zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    """fp32 zeros, held in registers as tensor cores hold a product.

    A thread then has few rows and columns, and so few loads of E and F. P is in the registers where
    the product with V reads it.
    """
    a = tl.zeros((ROWS, 16), tl.float16)
    b = tl.zeros((16, COLS), tl.float16)
    return tl.dot(a, b)


@triton.jit
def paired_scores(x, y, terms, b, h, dims, spec, TRANSPOSED: tl.constexpr):
    """-sum_d w tanh / 2, over UNIT."""
    x_ptr, x_stride, y_ptr, y_stride = factors(terms, b, h, dims, spec, TRANSPOSED)
    s = tile_of_zeros(x.shape[0], y.shape[0])
    for d in tl.range(0, spec.D, 2, num_stages=1):
        x1, x2 = tl.load(x_ptr + x), tl.load(x_ptr + x_stride + x)
        y1, y2 = tl.load(y_ptr + y), tl.load(y_ptr + y_stride + y)
        w1, w2 = load_weight(terms, h, d, spec), load_weight(terms, h, d + 1, spec)
        d1 = tl.fma(x1[:, None], y1[None, :], UNIT)
        d2 = tl.fma(x2[:, None], y2[None, :], UNIT)
        heavy = tl.fma(w1, d2, w2 * d1)
        s += tl.fma(heavy, reciprocal(d1 * d2, spec), (w1 + w2) * (-0.5 / UNIT))
        x_ptr += 2 * x_stride
        y_ptr += 2 * y_stride
    return s


@triton.jit
def direct_scores(x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED: tl.constexpr):
    """sum_d w tanh / 2 of any q and k."""
    s = tile_of_zeros(x.shape[0], y.shape[0])
    for n in tl.range(0, spec.D, num_stages=1):
        d = n + tl.zeros((), tl.int32)
        a, c = load_dim(x, y, q, k, b, h, d, n_keys, dims, TRANSPOSED)
        exponential = tl.exp2((a[:, None] + c[None, :]) * (2.0 * LOG2E))
        s = tl.fma(load_weight(terms, h, d, spec), 0.5 - reciprocal(exponential + 1.0, spec), s)
    return s


@triton.jit
def load_dim(x, y, q, k, b, h, d, n_keys, dims, TRANSPOSED: tl.constexpr):
    """Dim d of q and k, for the rows and for the columns of a tile."""
    if TRANSPOSED:
        offs_m, offs_n = y, x
    else:
        offs_m, offs_n = x, y
    q_ptr = head_ptr(q, b, h) + d.to(tl.int64) * q.stride_c
    k_ptr = head_ptr(k, b, h // dims.group) + d.to(tl.int64) * k.stride_c
    q_ptrs = q_ptr + row_offsets(q, offs_m)
    k_ptrs = k_ptr + row_offsets(k, offs_n)
    q_d = tl.load(q_ptrs, mask=offs_m < dims.M, other=0.0).to(tl.float32)
    k_d = tl.load(k_ptrs, mask=offs_n < n_keys, other=0.0).to(tl.float32)
    if TRANSPOSED:
        return k_d, q_d
    else:
        return q_d, k_d


# ---- its gradients ----


@triton.jit
def additive_gradients(ds, x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED: tl.constexpr):
    """Adds what a tile dS contributes to the gradients of its rows: dq and dw, or dk if TRANSPOSED.

    dS is 0 for masked pairs, and u is finite whatever their q and k hold: E of a NaN is 0 in a
    backward pass, and dS holds the NaN. 1 - u is computed as E F u, which stays relatively accurate
    where tanh is near -1.
    """
    total = tl.sum(ds, 1)
    if keys_in_range(x, y, terms, b, h, dims, TRANSPOSED):
        paired_gradients(ds, total, x, y, terms, b, h, dims, spec, TRANSPOSED)
    else:
        direct_gradients(ds, total, x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED)


@triton.jit
def paired_gradients(ds, total, x, y, terms, b, h, dims, spec, TRANSPOSED: tl.constexpr):
    """A row's factor multiplies its sum; terms are then below dS 2^(KEY_LIMIT - HALF_UNIT)."""
    x_ptr, x_stride, y_ptr, y_stride = factors(terms, b, h, dims, spec, TRANSPOSED)
    ds = ds * UNIT
    for n in tl.range(0, spec.D, 2, num_stages=1):
        d = n + tl.zeros((), tl.int32)
        x1, x2 = tl.load(x_ptr + x), tl.load(x_ptr + x_stride + x)
        y1, y2 = tl.load(y_ptr + y)[None, :], tl.load(y_ptr + y_stride + y)[None, :]
        d1, d2 = x1[:, None] * y1 + UNIT, x2[:, None] * y2 + UNIT
        r = reciprocal(d1 * d2, spec)
        u1, u2 = r * d2, r * d1  # over UNIT
        g1, g2 = ds * u1, ds * u2
        sum1, sum2 = x1 * tl.sum(g1 * u1 * y1, 1), x2 * tl.sum(g2 * u2 * y2, 1)
        add_gradients(sum1, g1, total, terms, b, h, d, x, dims, spec, TRANSPOSED)
        add_gradients(sum2, g2, total, terms, b, h, d + 1, x, dims, spec, TRANSPOSED)
        x_ptr += 2 * x_stride
        y_ptr += 2 * y_stride


@triton.jit
def direct_gradients(
    ds, total, x, y, q, k, terms, b, h, n_keys, dims, spec, TRANSPOSED: tl.constexpr
):  # fmt: skip
    for n in tl.range(0, spec.D, num_stages=1):
        d = n + tl.zeros((), tl.int32)
        a, c = load_dim(x, y, q, k, b, h, d, n_keys, dims, TRANSPOSED)
        exponent = (bounded(a)[:, None] + bounded(c)[None, :]) * (2.0 * LOG2E)
        exponential = tl.exp2(tl.minimum(exponent, 100.0))
        u = reciprocal(exponential + 1.0, spec)
        g = ds * u
        sums = tl.sum(g * (exponential * u), 1)
        add_gradients(sums, g, total, terms, b, h, d, x, dims, spec, TRANSPOSED)


@triton.jit
def add_gradients(sums, g, total, terms, b, h, d, offs, dims, spec, TRANSPOSED: tl.constexpr):
    """Adds ``sums`` over dS t to those of dim d, and dw from g = dS u and the ``total`` of dS."""
    w = load_weight(terms, h, d, spec) * tl.load(terms.power_ptr + h)
    start = head_start(terms, b, h, dims, spec, not TRANSPOSED)
    if TRANSPOSED:
        ptrs = terms.grad_k_ptr + start + d.to(tl.int64) * terms.keys + offs
        tl.store(ptrs, tl.load(ptrs) + sums * 4.0 * w)
    else:
        start += d.to(tl.int64) * terms.queries
        ptrs = terms.grad_q_ptr + start + offs
        tl.store(ptrs, tl.load(ptrs) + sums * 4.0 * w)
        ptrs = terms.grad_w_ptr + start + offs
        tl.store(ptrs, tl.load(ptrs) + (total - 2.0 * tl.sum(g, 1)))


@triton.jit
def bounded(x):
    """Finite, so that infinities of q and k do not meet; tanh is as it was, and NaN is 0."""
    x = tl.where(x == x, x, 0.0)
    return tl.where(x > 1e37, 1e37, tl.where(x < -1e37, -1e37, x))
