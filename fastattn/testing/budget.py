"""The error budget: the only tolerance for results that are compared with the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn.problem import record, reference
from fastattn.testing.cases import Case, Tensors, given_bias, is_relative, make
from fastattn.testing.runners import _canonical, _leaves, _unit, _upstream, exact, plain

ULPS = 4  # of the largest exact value, for rounding the result and one more operation


def error(x: Tensor, truth: Tensor) -> float:
    """Largest absolute error; infinite if NaN or inf are not where they are in truth."""
    x, truth = x.detach().double(), truth.detach().double()
    if x.shape != truth.shape:
        raise AssertionError(f"shape {list(x.shape)}, expected {list(truth.shape)}")
    if x.numel() == 0:
        return 0.0
    same = (x == truth) | (x.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (x - truth).abs())
    return torch.nan_to_num(difference, nan=math.inf).max().item()


def largest(truth: Tensor) -> float:
    """Largest finite magnitude."""
    return truth.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() if truth.numel() else 0.0


def budget(plain_error: float, dtype: torch.dtype, scale: float) -> float:
    """The allowed error: twice that of plain PyTorch, plus a few ulp of the largest value."""
    info = torch.finfo(dtype)
    ulp = info.eps * max(scale, info.smallest_normal)
    return 2 * (plain_error if math.isfinite(plain_error) else 0.0) + ULPS * ulp


def error_ratio(ours: Tensor, peer: Tensor, truth: Tensor, scale: float | None = None) -> float:
    """Our error over the budget: at most 1 for a right result."""
    coarser = max(ours.dtype, peer.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    allowed = budget(error(peer, truth), coarser, largest(truth) if scale is None else scale)
    return error(ours, truth) / allowed


def assert_within_budget(
    ours: Tensor, peer: Tensor, truth: Tensor, name: str = "result", scale: float | None = None
) -> None:
    """Raises AssertionError if ours is further from the float64 truth than the budget allows.

    ``scale`` is the magnitude whose ulp counts, by default the largest exact value. For a sum that
    may cancel to 0, it is the root-sum-square of the terms: rounding grows with that.
    """
    ratio = error_ratio(ours, peer, truth, scale)
    if not ratio <= 1:
        mine, theirs = error(ours, truth), error(peer, truth)
        raise AssertionError(
            f"{name}: error {mine:.3e} is {ratio:.2f} of the budget (plain PyTorch: {theirs:.3e})"
        )


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What the results of a case are compared with, by name."""

    truth: dict[str, Tensor]  # float64
    plain: dict[str, Tensor]  # plain PyTorch in the dtype of the case
    scales: dict[str, float]  # the magnitudes whose ulp count

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor, float]:
        return self.truth[name], self.plain[name], self.scales[name]

    def worst(self, case: Case, ours: dict[str, Tensor]) -> tuple[float, str]:
        """The largest ratio of an error to what is allowed, and the name of that result."""
        ratios = []
        for name, x in ours.items():
            truth, peer, scale = self[name]
            ratios.append((error_ratio(x, peer, truth, scale), f"{name} of {case}"))
        return max(ratios)

    def check(self, case: Case, ours: dict[str, Tensor], grad: bool = True) -> None:
        """Raises AssertionError if one of our results is outside the budget.

        ``grad``: whether gradients are among them.
        """
        assert self.truth.keys() == self.plain.keys()
        names = [n for n in self.truth if grad or not n.startswith("grad_")]
        assert ours.keys() == {*names}
        for name in names:
            truth, peer, scale = self[name]
            assert_within_budget(ours[name], peer, truth, f"{case} {name}", scale)


def oracle(case: Case, t: Tensors) -> Oracle:
    """The truth, the peer, and the largest rounding that a right result may have."""
    truth = exact(case, t)
    of_sums, of_scores = _term_norms(case, t), _moved(case, t, truth) if case.drawn else {}
    scales = {
        n: max(
            largest(x), 0.0, *(largest(norms[n]) for norms in (of_sums, of_scores) if n in norms)
        )
        for n, x in truth.items()
    }
    return Oracle(truth, plain(case, t), scales)


@functools.lru_cache(maxsize=4)  # all backends and instruction sets need the same one in turn
def _oracle_of_case(case: Case) -> tuple[Tensors, Oracle]:
    t = make(case)
    return t, oracle(case, t)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New uninitialised tensors hold NaN, which shows elements that a kernel forgets or reads."""
    memory: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _term_norms(case: Case, t: Tensors) -> dict[str, Tensor]:
    """Root-sum-square of the terms of every gradient, in float64: its rounding grows with that.

    A gradient may cancel to 0, with one key in each row or a bias that broadcasts over the keys,
    but its rounding does not. The two parts of dS = P dP - P delta count as separate terms. What
    delta_i multiplies in a sum over j counts as one term. dP_ij may cancel in its own sum over e.
    The two parts then round apart: one sums dO_ie V_je, and the other dO_ie O_ie. Drawn cases meet
    such rows, and dP_ij counts there as at least the root-sum-square of dO_ie V_je.
    """
    leaves: dict[str, Any] = _leaves(case, t, torch.float64)
    leaves = {n: x if x is None else x.detach() for n, x in leaves.items()}
    p, q, k, v, w, bias, sink = _canonical(case, t, leaves)
    grad_out, grad_lse, grad_weights = _upstream(t)
    kept = reference.kept_pairs(p, bias)
    probs, (lse, _), dropped, factors = reference.probabilities(p, q, k, w, bias, kept, None, sink)
    v = reference.per_head(p, v)
    grad_probs = grad_out @ v.mT
    if grad_weights is not None:
        grad_probs = grad_probs + (
            grad_weights if case.weights == "full" else grad_weights[:, None] / case.H
        )
    products = grad_out.square() @ v.square().mT
    if factors is not None:
        grad_probs, products = grad_probs * factors, products * factors.square()
    delta = (probs * grad_probs).sum(-1, keepdim=True)
    delta = delta if grad_lse is None else delta - grad_lse[..., None]

    direct = grad_probs.square()
    direct = probs.square() * (torch.maximum(direct, products) if case.drawn else direct)
    both = direct + (probs * delta).square()
    squares = {"grad_v": reference.sum_groups(p, dropped.square().mT @ grad_out.square())}
    for name in ("bias", "attn_mask"):
        if name == "bias" and is_relative(case):
            squares["grad_bias"] = _along_lines(case, leaves[name], both)
        elif leaves[name] is not None:
            squares[f"grad_{name}"] = both.sum_to_size(leaves[name].shape)
    if sink is not None:
        terms = delta.square().squeeze(-1)
        if case.drawn:  # a sum over j, and one over e
            terms = terms + direct.sum(-1) + (grad_out * (dropped @ v)).square().sum(-1)
        taken = reference.sink_weight(sink, lse).square()
        squares["grad_sink"] = (taken * terms).sum((0, 2))
    if record.is_curved(p):
        steep = reference.curve_slope(p, q, k, w)
        direct, both, probs = direct * steep.square(), both * steep.square(), probs * steep
    k = reference.per_head(p, k)
    if w is None:
        in_rows = direct @ k.square() + (delta * (probs @ k)).square()
        squares["grad_q"] = in_rows * p.scale**2
        in_columns = both.mT @ q.square()
    else:
        gaussian = case.score == "gaussian"
        term, slope = _square(q, k, w) if gaussian else _tanh(case, q, k, w)

        def rows(x: Tensor) -> Tensor:
            own = torch.einsum("bhmn,bhmnd->bhmd", direct, x.square())
            return own + (delta * torch.einsum("bhmn,bhmnd->bhmd", probs, x)).square()

        squares["grad_q"] = rows(slope)
        if gaussian:  # one rounding of a score is in the terms of all dims that share a bandwidth
            h = leaves["bandwidth"]
            term = term if h.shape[-1] == case.D else term.sum(-1, keepdim=True)
            squares["grad_bandwidth"] = rows(term).sum(2, keepdim=True).sum_to_size(h.shape)
        else:
            squares["grad_w"] = rows(term).sum((0, 2))
        if case.drawn and not gaussian:
            # The kernels' tanh is as right beside 0 as beside 1: see additive_attention.
            squares["grad_w"] = rows(torch.ones_like(term)).sum((0, 2))
            squares["lse"] = w.square().sum(-1)
        in_columns = torch.einsum("bhmn,bhmnd->bhnd", both, slope.square())
    scale = p.scale**2 if w is None else 1.0
    squares["grad_k"] = reference.sum_groups(p, in_columns * scale)
    if case.score == "cosine":
        squares |= {f"grad_{n}": _square_unit(leaves[n], squares[f"grad_{n}"]) for n in ("q", "k")}
    return {name: x.sqrt() for name, x in squares.items()}


def _moved(case: Case, t: Tensors, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far one ulp in the scale, and in each key, moves the results of a product, in ulp.

    Of the gaussian, an ulp of float32 in half types too: its points are exact, its sums are not.
    A large logit has a large rounding, which softmax makes that of the result; a peer of few
    numbers may have none by luck. Invariants check that all of a row has the same weights.
    """
    if case.score not in ("dot", "gaussian"):
        return {}
    eps = torch.finfo(case.dtype).eps
    step = eps if case.score == "dot" else min(eps, torch.finfo(torch.float32).eps)
    rng = torch.Generator(t.k.device).manual_seed(case.seed)
    sign = torch.randint(0, 2, t.k.shape, generator=rng, device=t.k.device) * 2 - 1
    q, k = t.q.double() * (1 + step), t.k.double() * (1 + step * sign)
    moved = exact(case, dataclasses.replace(t, q=q, k=k))
    return {name: (moved[name] - x) / eps for name, x in truth.items()}


def _along_lines(case: Case, parameter: Tensor, squares: Tensor) -> Tensor:
    """Squared terms of the gradient of what a line is made of, given those of dS."""
    x = parameter.detach().requires_grad_()
    added = given_bias(case, x).to_dense(case.M, case.N)
    if case.bias != "relative":  # each slope is multiplied by a distance
        one = given_bias(case, torch.ones_like(x)).to_dense(case.M, case.N)
        squares = squares * one.abs()
    [found] = torch.autograd.grad(added, x, squares.sum_to_size(added.shape))
    return found.abs()


def _square_unit(x: Tensor, squares: Tensor) -> Tensor:
    """Squared terms of the gradient of x, given those of x / |x|."""
    unit = _unit(x).square()
    return (squares + unit * (unit * squares).sum(-1, keepdim=True)) / x.square().sum(-1, True)


def _tanh(case: Case, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What w multiplies in the additive score, and its slope in q_d: [B, H, M, N, D]."""
    tanh = torch.tanh(q[:, :, :, None] + k[:, :, None])
    # A slope that 1 - tanh^2 has no digits of, in the dtype, is known as well as the 1 is.
    lost = 1 - tanh.to(case.dtype).square() == 0
    return tanh, w[:, None, None] * torch.where(lost & case.drawn, 1.0, 1 - tanh.square())


def _square(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes of the gaussian score in w_d and in q_d."""
    x = q[:, :, :, None] - k[:, :, None]
    w = w[..., None, None, :]
    return x.square() / w**3, x / w.square()
