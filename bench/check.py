"""Checks the timed call's result with the project's error budget.

The float64 truth of a whole case would take longer than the benchmark. So the upstream gradient is
zero except at some random queries. All gradients then depend on these queries alone, and the truth
is that of a small problem. Every batch entry, head and key takes part, and a query of nearly every
tile. For a module with many scores, the first batch entries are checked with all queries.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from bench import cases
from bench.peers import OURS, Implementation, Workload, first_entries, module_in
from fastattn import Mask, blocks, testing
from fastattn.problem import record

MAX_ROWS = 64
MAX_ELEMENTS = 2**23  # of a float64 matrix [B, H, rows, N], times D where a score is of pairs
MAX_MODULE_ELEMENTS = 2**25  # of one [B, H, M, N]


class Checker:
    """The truth of a workload, computed once, and error ratios against it."""

    def __init__(self, work: Workload):
        p = work.case.problem
        if work.case.module:
            work = first_entries(work, max(1, MAX_MODULE_ELEMENTS // (p.H * p.M * p.N)))
        self.work = work
        self.rows = _rows(work)
        if work.case.module:
            self.upstream = work.upstream
            self.oracles = {d: self._module_oracle(d) for d in work.case.directions}
        else:
            self.upstream = torch.zeros_like(work.upstream)
            self.upstream[:, :, self.rows] = work.upstream[:, :, self.rows]
            oracle = testing.oracle(*_with_rows(work, self.rows))
            self.oracles = dict.fromkeys(work.case.directions, oracle)

    def _module_oracle(self, direction: str) -> testing.Oracle:
        dtype = self.upstream.dtype
        truth, plain = (
            _seeded(module_in(self.work, d), direction, self.upstream.to(d))
            for d in (torch.float64, dtype)
        )
        return testing.Oracle(truth, plain, {n: testing.largest(x) for n, x in truth.items()})

    def error_ratios(self, name: str = OURS) -> dict[str, dict[str, float]]:
        """Direction -> result -> error over budget; at most 1 is right."""
        implementation = self.work.implementations[name]
        return {
            direction: self._ratios(
                _seeded(implementation, direction, self.upstream), self.oracles[direction]
            )
            for direction in self.work.case.directions
        }

    def _ratios(self, results: dict[str, Tensor], oracle: testing.Oracle) -> dict[str, float]:
        ratios = {}
        for name, x in results.items():
            truth, plain, scale = oracle[name]
            ratio = testing.error_ratio(self._comparable(name, x), plain, truth, scale)
            ratios[name] = ratio if bool(x.isfinite().all()) else math.inf
        return ratios

    def _comparable(self, name: str, x: Tensor) -> Tensor:
        """The rows that the truth has, where the result has queries as dim 2."""
        whole = ("grad_k", "grad_v", "grad_w", "grad_bandwidth", "grad_sink")
        if self.work.case.module or name in whole:
            return x
        return x if x.dim() < 4 or x.shape[2] == 1 else x[:, :, self.rows]


def _seeded(implementation: Implementation, direction: str, upstream: Tensor) -> dict[str, Tensor]:
    """Results of the implementation, with the same dropout bits in every call."""
    torch.manual_seed(0)
    return implementation.results(direction, upstream)


def worst(ratios: dict[str, float]) -> float:
    """The largest ratio; infinite if one is NaN, or there is none."""
    return max((math.inf if math.isnan(r) else r for r in ratios.values()), default=math.inf)


def _rows(work: Workload) -> Tensor:
    """Random queries, sorted: as many as the truth has time for. All where a bias has no rows."""
    p = work.case.problem
    if p.bias is not None and work.t.bias.dim() < 4:
        return torch.arange(p.M, device=work.t.q.device)
    elements = p.B * p.H * p.N * (p.D if p.score != "dot" else 1)
    count = max(1, min(p.M, MAX_ROWS, MAX_ELEMENTS // elements))
    rng = torch.Generator().manual_seed(p.seed)
    return torch.randperm(p.M, generator=rng)[:count].sort().values.to(work.t.q.device)


def _with_rows(work: Workload, rows: Tensor) -> tuple[testing.Case, testing.Tensors]:
    """The problem of these queries alone. A dense mask keeps the same pairs for them."""
    t, bias = work.t, work.t.bias
    mask = _mask_of(work, rows)
    bias = bias if bias is None or bias.dim() < 4 or bias.shape[2] == 1 else bias[:, :, rows]
    part = dataclasses.replace(work.case.problem, M=len(rows), causal=None)
    tensors = dataclasses.replace(
        t, q=t.q[:, :, rows], grad_out=t.grad_out[:, :, rows], bias=bias, mask=mask
    )
    return part, tensors


def _mask_of(work: Workload, rows: Tensor) -> Mask:
    p = cases.problem(work.case, work.t)
    if not record.kinds(p.mask):
        return Mask()
    cuts = (blocks.whole(p)._replace(i=(row, row + 1)) for row in rows.tolist())
    return Mask(keep=torch.cat([blocks.block_of(p, cut).kept() for cut in cuts], 2))
