"""A case by blocks: cut at odd places, run block by block, merged over the keys."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from fastattn import blocks, sinks
from fastattn.backends import registry
from fastattn.blocks import Cut, Part
from fastattn.problem import Problem
from fastattn.testing.cases import Case, Tensors
from fastattn.testing.runners import explicit


def run_by_blocks(case: Case, t: Tensors, backend: str) -> dict[str, Tensor]:
    """Results and gradients of a case, from blocks of all four dims on a backend."""

    def compute(p: Problem, *tensors: Any) -> tuple[tuple, tuple]:
        *inputs, sink = tensors
        # A mean over heads cannot be rescaled, block of keys by block: it is taken at the end.
        mean, grad_weights = p.weights == "mean", t.grad_weights
        if mean and grad_weights is not None:
            grad_weights = (grad_weights / max(p.H, 1))[:, None].expand(p.B, p.H, p.M, p.N)
        p = dataclasses.replace(p, weights="full" if mean else p.weights, wide=True)
        run = Blocks(backend, p, tuple(inputs), cuts_of(p, case.seed))
        found, unit = run.forward(), run.shift_unit
        if sink is not None:
            found = Part(*sinks.fold(sink, unit, *found))
        grad_lse = None if t.grad_lse is None else t.grad_lse.to(p.acc_dtype)
        grads = run.backward(found, t.grad_out, grad_lse, grad_weights)
        grad_sink = None
        if sink is not None:
            upstream = t.grad_out, grad_lse, grad_weights
            saved = found.out, found.weights, found.stats
            grad_sink = sinks.gradient(sink, unit, *saved, *upstream).to(sink.dtype)
        weights = found.weights.sum(1) / max(p.H, 1) if mean else found.weights
        return (found.out.to(p.dtype), found.lse, weights), (*grads, grad_sink)

    return explicit(case, t, None, compute)


def cuts_of(p: Problem, seed: int) -> list[list[Cut]]:
    """Blocks that are all of a problem: for each part of the rows, a list of blocks of keys.

    Rows and keys are always cut; by the seed samples too, or heads, or neither.
    """
    group = max(1, p.H // p.Hkv) if p.Hkv > 1 else 1  # heads of one key head may part
    samples = _pieces(p.B, p.B // 2 if seed % 3 == 1 else 0)
    heads = _pieces(p.H, p.H // group // 2 * group if seed % 3 == 2 else 0)
    first = p.N // 3
    if p.dropout is not None:
        first = first // 4 * 4
    keys = _pieces(p.N, first, first + p.N // 4 // 4 * 4)
    rows = itertools.product(samples, heads, _pieces(p.M, p.M // 3))
    return [[Cut(*at, j) for j in keys] for at in rows]


def _pieces(size: int, *cuts: int) -> list[tuple[int, int]]:
    """The pieces of a dim between places where it is cut; a cut at its end makes none."""
    inner = sorted({cut for cut in cuts if 0 < cut < size})
    return list(itertools.pairwise([0, *inner, size]))


class Blocks:
    """The blocks of a problem on a backend: a list of blocks of keys for each part of the rows."""

    def __init__(self, backend: str, p: Problem, tensors: tuple, cuts: list[list[Cut]]) -> None:
        self.backend = registry.get(backend)
        self.p, self.tensors, self.cuts = p, tensors, cuts
        self.shift_unit = self.backend.shift_unit(p, tensors[4] is not None)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.p.acc_dtype, device=self.p.device)

    def forward(self) -> Part:
        """Of all rows, with their weights if the problem has these in full."""
        p = self.p
        rows = p.B, p.H, p.M
        found = Part(
            self._zeros(*rows, p.E), self._zeros(*rows), self._zeros(*p.weights_shape()),
            self._zeros(*rows, 2),
        )  # fmt: skip
        for cuts in self.cuts:
            parts = [
                Part(*self.backend.forward(b, *x))
                for _, b, x in blocks.each(p, cuts, *self.tensors)
            ]
            merged, shares = blocks.merge(self.shift_unit, parts)
            for name in ("out", "lse", "stats"):
                blocks.rows_of(getattr(found, name), cuts[0]).copy_(getattr(merged, name))
            for cut, part, share in zip(cuts, parts, shares, strict=True):
                if p.weights == "full":
                    blocks.pairs_of(found.weights, cut).copy_(part.weights * share[..., None])
        return found._replace(weights=found.weights.to(p.dtype))

    def backward(
        self, found: Part, grad_out: Tensor, grad_lse: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, w and bias: sums over the blocks."""
        p, (q, k, v, w, bias) = self.p, self.tensors
        sums: list[Any] = [self._zeros(*x.shape) for x in (q, k, v)]
        sums.append(None if w is None else self._zeros(p.B, p.H, p.D))
        sums.append(None if bias is None else self._zeros(*bias.shape))
        rows = found.out.to(p.dtype), found.stats, grad_out
        for cut, b, x in blocks.each(p, itertools.chain(*self.cuts), *self.tensors):
            own_lse = None if grad_lse is None else blocks.rows_of(grad_lse, cut)
            own_weights = None
            if grad_weights is not None:
                own_weights = blocks.pairs_of(grad_weights, cut)
                pair = (blocks.rows_of(y, cut) for y in (found.weights, grad_weights))
                own_lse = blocks.grad_lse_of(cut, own_lse, *pair)
            own = (blocks.rows_of(y, cut) for y in rows)
            grads = self.backend.backward(b, *x, *own, own_lse, own_weights, bias is not None)
            for total, grad in zip(blocks.tensors_of(p, cut, *sums), grads[:5], strict=True):
                if grad is not None:
                    total += grad
        like = (q, k, v, None, bias)
        return tuple(
            x if x is None or y is None else x.to(y.dtype) for x, y in zip(sums, like, strict=True)
        )
