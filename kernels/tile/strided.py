"""Tiles of strided arrays: addresses, loads, stores, and products that keep masked NaN out.

Offsets are 64-bit wherever a stride is multiplied: views may span more than 2^31 elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class View(NamedTuple):
    """A strided array over [B, H, rows, cols]; broadcast dims have stride 0, absent has no ptr.

    All strides but that of columns are in steps of UNIT elements.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_r: Any
    stride_c: Any
    UNIT: Any = tl.constexpr(1)


class Dims(NamedTuple):
    """The sizes that kernels take at run time; ``group`` query heads share a key head."""

    H: int
    group: int
    M: int
    N: int


class Spec(NamedTuple):
    """What a kernel is compiled for; every field is a constexpr. Made by ``launch.spec``."""

    D: Any
    E: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any  # D and E as tiles hold them
    BLOCK_E: Any
    STAGES: Any
    PRECISION: Any  # of products of fp32
    APART: Any  # a tile's product has a sum of its own: see add_product
    STREAM: Any  # products over D and E load their operands from memory, a few columns at a time
    FOLD_SCALE: Any  # the softmax multiplies by the scale, and not mask_scores
    BIAS_IN_FULL: Any  # full tiles have a bias too
    MASKS_WITHIN_TILES: Any  # a key may be used by some rows of a tile and masked for others
    REVERSE: Any  # the last row blocks have most keys
    PTX: Any  # the machine is NVIDIA's, so kernels may hold its instructions
    FLAT: Any  # a tile becomes a scalar in one step: with tensor memory, Triton 3.7 fails at two


# Sizes that Triton must not specialise. By default it compiles a kernel again for an int that is 1,
# and for multiples of 16. Ints in a tuple are always specialised.
VARYING = ("M", "N", "n", "B", "chunks", "shares", "n_rows", "n_cols")

EXACT_SLICE = tl.constexpr(16)  # rows that exact_dot is given at a time: little besides the sums

ABSENT = View(None, None, None, None, None)


def view(x: torch.Tensor | None, shape: tuple[int, ...] | None = None) -> View:
    """What a kernel is given of a 4-D tensor, expanded to ``shape``."""
    if x is None:
        return ABSENT
    *outer, column = (x if shape is None else x.expand(shape)).stride()
    unit = unit_of(outer)
    return View(x, *(stride // unit for stride in outer), column, tl.constexpr(unit))


def unit_of(strides: list[int]) -> int:
    """The steps in which kernels are given strides: 8, where not all are multiples of 16.

    Triton knows of a number that it is a multiple of 16, and nothing less. Loads of 16 bytes need 8
    elements in half precision, as rows of 72 have.
    """
    return 8 if all(s % 8 == 0 for s in strides) and any(s % 16 for s in strides) else 1


@triton.jit
def place(n_blocks, H, REVERSE: tl.constexpr):
    """(block, b, h) of this program. Blocks of one head are neighbours: they share keys in L2.

    The grid is one-dimensional, because other dimensions end at 65,535. REVERSE takes the last
    block first, for masks whose last row blocks have most keys: short programs then fill the end.
    """
    pid = tl.program_id(0)
    block = pid % n_blocks
    head = pid // n_blocks
    if REVERSE:
        block = n_blocks - 1 - block
    return block, head // H, head % H


@triton.jit
def head_ptr(x, b, h):
    """Where (b, h) of a View begins."""
    return x.ptr + (b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h) * x.UNIT


@triton.jit
def row_offsets(x, offs_r):
    """Where rows of a View are in a head of it."""
    return offs_r.to(tl.int64) * x.stride_r * x.UNIT


@triton.jit
def pair_ptrs(x, b, h, i, j):
    """Pointers to the numbers (i, j) of a View over pairs, as a bias is; i and j broadcast."""
    rows = head_ptr(x, b, h) + row_offsets(x, i)
    return rows + j.to(tl.int64) * x.stride_c


@triton.jit
def row_numbers(b, h, H, offs_m, M):
    """Where the rows of (b, h) are in a contiguous [B, H, M]."""
    return (b.to(tl.int64) * H + h) * M + offs_m


@triton.jit
def row_ptrs(ptr, b, h, H, offs_m, M):
    """Pointers to the rows of (b, h) in a contiguous [B, H, M]."""
    return ptr + row_numbers(b, h, H, offs_m, M)


@triton.jit
def load_tile(
    ptr, x, offs_r, offs_c, n_rows, n_cols, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr
):
    """Rows ``offs_r`` and columns ``offs_c`` of one head of a View; 0 outside the checked sizes."""
    ptrs = ptr + (row_offsets(x, offs_r)[:, None] + offs_c.to(tl.int64)[None, :] * x.stride_c)
    if CHECK_ROWS and CHECK_COLS:
        inside = (offs_r[:, None] < n_rows) & (offs_c[None, :] < n_cols)
        return tl.load(ptrs, mask=inside, other=0.0)
    elif CHECK_ROWS:
        return tl.load(ptrs, mask=offs_r[:, None] < n_rows, other=0.0)
    elif CHECK_COLS:
        return tl.load(ptrs, mask=offs_c[None, :] < n_cols, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_tile(ptr, x, offs_r, offs_c, n_rows, n_cols, tile):
    """Writes what load_tile would read, in the View's dtype, and nothing outside the sizes."""
    ptrs = ptr + (row_offsets(x, offs_r)[:, None] + offs_c.to(tl.int64)[None, :] * x.stride_c)
    inside = (offs_r[:, None] < n_rows) & (offs_c[None, :] < n_cols)
    tl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def dot_t(x, y, PRECISION: tl.constexpr):
    """x @ y^T, [rows of x, rows of y].

    Exact products of fp32 run on FMA units, and Triton holds their operands in registers over the
    whole inner dim. Products over 128 are cut into two of 64 for that; wider ones stream.
    """
    if x.dtype == tl.float32 and PRECISION == "ieee" and x.shape[1] == 128:
        return _dot_t_halves(x, y)
    else:
        return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def stream_dot_t(
    x, y, q, k, b, h, n_keys, dims, n_cols, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """dot_t of the rows x of q and y of k, which are loaded a few columns at a time.

    If TRANSPOSED, x are rows of k, and y of q.
    """
    STEP: tl.constexpr = 32 if q.ptr.dtype.element_ty == tl.float32 else 64
    q_ptr, k_ptr = head_ptr(q, b, h), head_ptr(k, b, h // dims.group)
    s = tl.zeros((x.shape[0], y.shape[0]), tl.float32)
    for c in tl.range(0, BLOCK, STEP, num_stages=1):
        offs = c + tl.arange(0, STEP)
        if TRANSPOSED:
            tile_x = load_tile(k_ptr, k, x, offs, n_keys, n_cols, True, True)
            tile_y = load_tile(q_ptr, q, y, offs, dims.M, n_cols, True, True)
        else:
            tile_x = load_tile(q_ptr, q, x, offs, dims.M, n_cols, True, True)
            tile_y = load_tile(k_ptr, k, y, offs, n_keys, n_cols, True, True)
        s = tl.dot(tile_x, tl.trans(tile_y), s, input_precision=PRECISION)
    return s


@triton.jit
def _dot_t_halves(x, y):
    x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    y0, y1 = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
    s = tl.dot(x0, tl.trans(y0), input_precision="ieee")
    return tl.dot(x1, tl.trans(y1), s, input_precision="ieee")


@triton.jit
def any_not_finite(x, rows, n_rows, FLAT: tl.constexpr):
    """Whether a tile holds NaN or infinity in a row below n_rows: one scalar."""
    bad = (x != x) | (tl.abs(x) == float("inf"))
    bad = bad & (rows[:, None] < n_rows)
    if FLAT:
        return tl.max(tl.ravel(bad.to(tl.int32)), 0) > 0
    else:
        return tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0


@triton.jit
def exact_dot(a, used, ptr, x, offs_r, n_rows, offs_c, n_cols, acc, SIZE: tl.constexpr):
    """acc + a @ (rows offs_r of a View), where a pair that is not used contributes nothing.

    0 * NaN is NaN, so a plain product would carry garbage past a mask. This product takes a row at
    a time and is slow. Kernels run the plain one first, and this one only if their result holds NaN
    or infinity.
    """
    slots = tl.arange(0, SIZE)
    for n in tl.range(0, SIZE, num_stages=1):
        here = slots == n
        row = tl.sum(tl.where(here, offs_r, 0), 0)
        ptrs = ptr + row_offsets(x, row) + offs_c.to(tl.int64) * x.stride_c
        end = tl.where(row < n_rows, n_cols, 0)  # the interpreter of 3.9 takes no scalar in a mask
        x_row = tl.load(ptrs, mask=offs_c < end, other=0.0).to(tl.float32)
        factor = tl.sum(tl.where(here[None, :], a, 0.0), 1)
        taken = tl.max((used & here[None, :]).to(tl.int32), 1) > 0
        acc = tl.where(taken[:, None], acc + factor[:, None] * x_row[None, :], acc)
    return acc
