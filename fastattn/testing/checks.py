"""The checks of a case: the budget, invariants, and garbage that must not reach a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastattn.problem import reference
from fastattn.testing.blocks import run_by_blocks
from fastattn.testing.budget import _oracle_of_case, poisoned
from fastattn.testing.cases import Case, Tensors, _laid_out, is_relative
from fastattn.testing.runners import _kept, _used_keys, run


def spoil(case: Case, t: Tensors) -> Tensors:
    """The same problem with garbage in every place that a mask excludes: no result may change.

    Upstream gradients of rows without keys and of masked weights become garbage as well. A mask or
    bias of -inf stays -inf; another addend of that pair becomes garbage. ``ALiBi`` and
    ``RelativeBias`` stay as they are, because many pairs share each of their numbers.
    Beside a sink, the log-sum-exp of a row without keys has a gradient.
    """
    p, kept = _kept(case, t)
    structural = p.kept().expand(kept.shape)
    by_key, by_query = _used_keys(p, kept), kept.any(-1)

    def fill(x: Tensor | None, used: Tensor, layout: str) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        most, value = torch.finfo(x.dtype).max, case.garbage
        assert value is not None
        value = max(-most, min(value, most)) if math.isfinite(value) else value
        used = used.any(0, keepdim=True) if layout == "expanded" else used  # one memory for all
        for d, n in enumerate(x.shape):  # a place is used if one of its elements is used
            used = used if n != 1 else used.any(d, keepdim=True)
        return x.masked_fill(~used, value)

    beside = structural
    if t.attn_mask is not None and t.attn_mask.is_floating_point():
        beside = structural & (t.attn_mask != -math.inf)
    rows, keys, weights = (by_query[..., None], by_key[..., None], kept)
    if case.weights == "mean":
        weights = kept.any(1)
    how, masks = case.layout, case.mask_layout
    spoilt = replace(
        t,
        q=fill(t.q, rows, how),
        k=fill(t.k, keys, how),
        v=fill(t.v, keys, how),
        grad_out=fill(t.grad_out, rows, how),
        bias=t.bias if is_relative(case) else fill(t.bias, beside, masks),
        attn_mask=fill(t.attn_mask, structural, masks),
        grad_weights=fill(t.grad_weights, weights, masks),
        grad_lse=t.grad_lse if t.sink is not None else fill(t.grad_lse, by_query, "bhmd"),
    )
    return _laid_out(case, spoilt)


def check(
    case: Case,
    backend: str = "auto",
    relayout: Callable[[Tensors], Tensors] | None = None,
    grad: bool = True,
) -> None:
    """Compares every output and gradient of a case with the reference, within the budget.

    Also checks :func:`assert_invariants`, and that garbage behind masks changes no bit. Ours runs
    in :func:`poisoned` memory, on the drawn tensors or on those of ``relayout``: the same values
    with other strides. Without ``grad``, the forward pass alone runs, as for inference.
    """
    t, oracle = _oracle_of_case(case)
    relayout = relayout or (lambda t: t)
    with poisoned():
        ours = run(case, relayout(t), backend, grad=grad)
    oracle.check(case, ours, grad)
    assert_invariants(case, t, ours)
    if case.garbage is None:
        return
    with poisoned():
        spoilt = run(case, relayout(spoil(case, t)), backend, grad=grad)
    if backend in ("auto", "cpu", "eager"):
        assert_same_bits(spoilt, ours)
    else:  # GPU kernels compute in another way where they find garbage
        oracle.check(case, spoilt, grad)


def check_blocks(case: Case, backend: str) -> None:
    """Compares a case computed block by block with the reference, within the same budget."""
    t, oracle = _oracle_of_case(case)
    with poisoned():
        oracle.check(case, run_by_blocks(case, t, backend))


def assert_same_bits(a: dict, b: dict) -> None:
    """Equal everywhere, with NaN in the same places; the error names the result that differs."""
    assert a.keys() == b.keys()
    for name in a:
        same = (a[name] == b[name]) | (a[name].isnan() & b[name].isnan())
        assert same.all(), f"{name} differs in {(~same).sum()} of {same.numel()} places"


def assert_invariants(case: Case, t: Tensors, ours: dict[str, Tensor]) -> None:
    """Checks what holds for any numbers, in every row and key.

    Without dropout and sinks, a row's weights sum to 1, and gradients of values sum to gradients of
    outputs: forward and backward then use the same weights. Rows without keys, and keys that no row
    keeps, have results of exactly 0.
    """
    p, kept = _kept(case, t)
    empty, unused = ~kept.any(-1), ~_used_keys(p, kept)
    zero = {"out": empty, "grad_q": empty, "grad_k": unused, "grad_v": unused}
    for name in zero.keys() & ours.keys():
        assert not ours[name][zero[name]].any(), f"{case} {name}: not 0 where nothing is kept"
    if case.lse:
        alone = torch.tensor(-math.inf) if t.sink is None else t.sink[:, None]
        assert (ours["lse"] == alone)[empty].all(), f"{case} lse: of rows without keys"
    if case.weights == "full":
        assert not ours["weights"][~kept].any(), f"{case} weights: not 0 where masked"
    if case.dropout_p or t.sink is not None:
        return
    most = 8 * torch.finfo(case.dtype).eps
    if case.weights == "full":
        off = (ours["weights"].double().sum(-1) - (~empty).double()).abs()
        assert (off <= most).all(), f"{case} weights: a row sums to 1 + {off.max():.1e}"
    if "grad_v" not in ours:
        return
    given = reference.sum_groups(p, t.grad_out.double() * ~empty[..., None])
    terms = reference.sum_groups(p, t.grad_out.double().abs() * ~empty[..., None]).sum(2)
    off = (ours["grad_v"].double().sum(2) - given.sum(2)).abs()
    # Rounding moves a result below the normal numbers by half the least number, at most.
    least = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    off = (off - (~unused).sum(-1, keepdim=True) * (least / 2)).clamp(min=0)
    assert (off <= most * terms).all(), (
        f"{case} grad_v: sums over the keys are off by {(off / (most / 8 * terms)).max():.1f} ulp"
    )
