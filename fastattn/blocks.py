"""Blocks of a larger problem: cut it, run the blocks, merge what they say of disjoint keys.

A block is an ordinary :class:`Problem` with an origin. Blocks of rows, heads and samples are done
when they have run. Over blocks of keys a row has parts, each with its stats (shift, factor):

    P_ij = e^(s_ij - u shift) factor       so       1 / factor = sum_j e^(s_ij - u shift)

    shift = max_r shift_r       1 / factor = sum_r e^(u (shift_r - shift)) / factor_r
    out = sum_r share_r out_r        share_r = e^(u (shift_r - shift)) factor / factor_r

u is the backend's ``shift_unit``.

A backend's backward of one block takes the merged out and stats. Its gradients are then the block's
own part of those of the whole: sums over blocks are exact but for rounding.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Liu, Zaharia and
Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.problem import Mask, Origin, Problem, arguments, relative
from fastattn.problem.mask import LIMITS


class Cut(NamedTuple):
    """Where a block lies: its first index in each dim of the whole, and where it ends."""

    b: tuple[int, int]
    h: tuple[int, int]
    i: tuple[int, int]
    j: tuple[int, int]

    @property
    def first(self) -> tuple[int, ...]:
        """The indices of the block's first pair."""
        return tuple(first for first, _ in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, H, M and N of the block."""
        return tuple(end - first for first, end in self)


class Part(NamedTuple):
    """What forward says of some rows and some of their keys: see ``registry.Backend``."""

    out: Tensor
    lse: Tensor
    weights: Tensor
    stats: Tensor


# ---- cut ----


def whole(p: Problem) -> Cut:
    """The block that is all of a problem."""
    return Cut((0, p.B), (0, p.H), (0, p.M), (0, p.N))


def by_rows(p: Problem, numbers: int) -> list[Cut]:
    """Blocks of rows, each with the keys that its rows may keep. Their matrices are bounded.

    A matrix has at most so many numbers, or one row: over pairs, times D but for the dot product. A
    mean of weights keeps all heads together.
    """
    group, each = max(1, p.H // max(1, p.Hkv)), p.N * (1 if p.score == "dot" else p.D)
    if p.B * p.H * p.M * each <= numbers:
        return [whole(p)]
    together = p.H if p.weights == "mean" else 1
    fits = max(1, numbers // each)  # rows of a head
    rows = max(1, min(p.M, _ROWS, fits // together))
    heads = max(together, min(p.H, fits // rows))
    if heads < group:  # those of a block share a key head, or are whole groups
        heads = max(n for n in range(1, heads + 1) if group % n == 0)
    heads -= heads % group if heads > group else 0
    samples = max(1, fits // (rows * heads)) if heads == p.H else 1
    sizes = (p.B, samples), (p.H, heads), (p.M, rows)
    pieces = itertools.product(*(_pieces(*size) for size in sizes))
    return [Cut(b, h, i, _keys_of(p, b, i)) for b, h, i in pieces]


# Of a block. With more, the last rows of a causal one keep keys that others do not. Found on AMD
# Zen 4 alone: docs/decisions/0036-eager-in-blocks.md.
_ROWS = 128


def _pieces(size: int, each: int) -> list[tuple[int, int]]:
    return [(first, min(size, first + each)) for first in range(0, size, each)]


def _keys_of(p: Problem, b: tuple[int, int], i: tuple[int, int]) -> tuple[int, int]:
    """From the first to the last key that some of these rows may keep. Dropout counts 4 at a time.

    Limits are read only where nothing waits for that.
    """
    lo, hi = p.band()
    first: Any = p.mask.kv_begin
    last: Any = p.mask.kv_len
    begin, end = 0 if lo is None else max(0, i[0] + lo), p.N if hi is None else i[1] + hi
    if first is not None and arguments.can_read(first):
        begin = max(begin, int(_slice_if(first, b, i).min()))
    if last is not None and arguments.can_read(last):
        end = min(end, int(_slice_if(last, b, i).max()))
    end = max(0, min(end, p.N))
    return min(begin, end) // 4 * 4, end


def block_of(p: Problem, cut: Cut) -> Problem:
    """The problem of a block.

    Raises:
        ValueError: heads that share key heads with others outside; with dropout, a first key that
            is no multiple of 4.
    """
    B, H, M, N = cut.sizes
    k0, k1 = key_heads(p, cut)
    at = p.origin
    b, h, i, j = (x + first for x, first in zip(at[:4], cut.first, strict=True))
    origin = Origin(b, h, i, j, p.M if at.M is None else at.M, p.N if at.N is None else at.N)
    mask = _cut_mask(p.mask, cut)
    return dataclasses.replace(p, B=B, H=H, Hkv=k1 - k0, M=M, N=N, mask=mask, origin=origin)


def key_heads(p: Problem, cut: Cut) -> tuple[int, int]:
    """The key heads of a block's query heads: whole groups, or some of one group."""
    first, end = cut.h
    group = max(1, p.H // max(1, p.Hkv))
    k0, k1 = first // group, -(-end // group)
    if k1 - k0 > 1 and (first % group or end % group):
        raise ValueError(
            f"heads {first} to {end}: expected whole groups of {group} that share a key head, or "
            "heads of one group"
        )
    return k0, k1


def tensors_of(p: Problem, cut: Cut, *tensors: Any) -> tuple[Any, ...]:
    """Views of (q, k, v, w, bias), or of their gradients, as a block takes them."""
    q, k, v, w, bias = tensors
    rows, keys = (cut.b, cut.h, cut.i), (cut.b, key_heads(p, cut), cut.j)
    if w is not None:
        w = _slice(w, *((cut.h,) if w.dim() == 2 else (cut.b, cut.h)))
    bias = None if bias is None else bias_of(p, bias, cut)
    return _slice(q, *rows), _slice(k, *keys), _slice(v, *keys), w, bias


def each(
    p: Problem, cuts: Iterable[Cut], *tensors: Any
) -> Iterator[tuple[Cut, Problem, tuple[Any, ...]]]:
    """The blocks, each with its (q, k, v, w, bias)."""
    for cut in cuts:
        yield cut, block_of(p, cut), tensors_of(p, cut, *tensors)


def operand_of(x: Tensor, cut: Cut) -> Tensor:
    """The part of a mask or bias, or of its gradient, whose dims of size 1 broadcast."""
    return _slice_if(x, *cut)


def bias_of(p: Problem, x: Tensor, cut: Cut) -> Tensor:
    """The part of a bias, or of its gradient. That of a line has the diagonals of the block."""
    if not relative.is_line(x, p.M, p.N):
        return operand_of(x, cut)
    (i0, i1), (j0, j1) = cut.i, cut.j
    first = j0 - i1 + p.M  # the distance j0 - (i1 - 1)
    return _slice_if(x, cut.b, cut.h)[..., first : first + (i1 - i0) + (j1 - j0) - 1]


def rows_of(x: Tensor, cut: Cut) -> Tensor:
    """The part of what belongs to rows: ``[B, H, M, ...]``."""
    return _slice(x, cut.b, cut.h, cut.i)


def pairs_of(x: Tensor, cut: Cut) -> Tensor:
    """The part of what belongs to pairs, ``[B, H, M, N]``."""
    return _slice(x, *cut)


def weights_of(p: Problem, x: Tensor, cut: Cut) -> Tensor:
    """The part of returned weights, or of their gradient. A mean is over the heads of a block."""
    return _slice(x, cut.b, cut.i, cut.j) if p.weights == "mean" else pairs_of(x, cut)


def of_heads(x: Tensor, cut: Cut) -> Tensor:
    """The part of what belongs to heads: ``[H, ...]``, or of every sample ``[B, H]``."""
    return _slice(x, cut.h) if x.dim() == 1 else _slice(x, cut.b, cut.h)


def _slice(x: Tensor, *dims: tuple[int, int]) -> Tensor:
    return x[tuple(slice(*bounds) for bounds in dims)]


def _slice_if(x: Tensor, *dims: tuple[int, int]) -> Tensor:
    """The same, but dims of size 1 stay."""
    bounds = zip(x.shape, dims, strict=False)
    return x[tuple(slice(None) if n == 1 else slice(*given) for n, given in bounds)]


def _cut_mask(mask: Mask, cut: Cut) -> Mask:
    def limit(x: Any) -> Any:  # it may lie past the block's keys: all readers clamp it
        return None if x is None else _slice_if(x, cut.b, cut.i) - cut.j[0]

    keep = None if mask.keep is None else operand_of(mask.keep, cut)
    limits = {name: limit(getattr(mask, name)) for name in LIMITS}
    return dataclasses.replace(mask, keep=keep, **limits)


def keeps_nothing(p: Problem) -> bool:
    """Whether sizes and band alone leave no pair: host arithmetic, no tensor is read."""
    lo, hi = p.band()
    above = hi is not None and hi + p.M - 1 < 0
    return p.B * p.H * p.M * p.N == 0 or above or (lo is not None and lo > p.N - 1)


# ---- merge ----


def merge(shift_unit: float, parts: Sequence[Part]) -> tuple[Part, list[Tensor]]:
    """(out, lse and stats over the keys of all parts, without weights; each part's share of a row).

    ``shift_unit``: that of the backend, for the whole problem.

    The weights of a row are those of its parts times the shares ``[B, H, M]``. Outputs should be
    wide: rounded ones would be rounded once a part.
    """
    shift, factor = torch.stack([part.stats for part in parts]).unbind(-1)
    present = factor != 0
    top = torch.where(present, shift, -torch.inf).amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    totals = torch.where(present, torch.exp((shift - top) * shift_unit) / factor, 0.0)
    total = totals.sum(0)
    empty = total == 0
    lse = (top * shift_unit + torch.log(total)).masked_fill(empty, -torch.inf)
    inverse = (1 / total).masked_fill(empty, 0.0)
    shares = list((totals * inverse).unbind(0))
    scaled = [part.out * share[..., None] for part, share in zip(parts, shares, strict=True)]
    out = torch.stack(scaled).sum(0)
    return Part(out, lse, parts[0].weights, torch.stack([top, inverse], -1)), shares


def grad_lse_of(cut: Cut, grad_lse: Tensor | None, weights: Tensor, grad_weights: Tensor) -> Tensor:
    """What the backward of a block of keys takes for the gradient of lse, of all its rows' keys.

    delta_i has the term sum_j W_ij dW_ij over all keys, and a backend adds up those of the block.
    ``weights`` and ``grad_weights`` are of all keys, ``[B, H, M, N]``.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    terms = weights.to(dtype) * grad_weights.to(dtype)
    terms = terms.masked_fill(weights == 0, 0.0)  # garbage where a mask excludes
    others = terms[..., : cut.j[0]].sum(-1) + terms[..., cut.j[1] :].sum(-1)
    return -others if grad_lse is None else grad_lse - others
