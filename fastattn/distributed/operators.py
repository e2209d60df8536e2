"""Autograd around "gather" and "ring". In compiled code, each of their passes is one operator.

Each rank compiles its own graph. A compiler drops what its rank does not need and moves what it
likes, and then some ranks wait for others in vain. It cannot look into an operator.
"""

# torch declares these static methods with *args.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from fastattn.backends import flops
from fastattn.distributed import gather, ring
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.distributed.plan import Plan, no_second_derivative
from fastattn.problem import Dropout, Mask, Origin, Problem, schemas
from fastattn.problem.record import MASK_TENSORS, Score, Weights, weights_shape

PASSES: dict[str, Any] = {"gather": gather, "ring": ring}


def attend(
    method: str, plan: Plan, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of this rank's rows.

    Raises:
        ValueError: the method cannot do the problem.
    """
    PASSES[method].check(plan)
    tensors = _distinct(q, k, v, w, bias, *plan.p.tensors())
    return Function.apply(_words(method, plan), *tensors)[:3]  # pyright: ignore


def _distinct(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """The same, each one but once: torch.compile traces no Function that gets a tensor twice."""
    for n, x in enumerate(tensors):
        again = torch.compiler.is_compiling() and any(x is other for other in tensors[:n])
        yield x.view_as(x) if x is not None and again else x


class Function(torch.autograd.Function):
    """(q, k, v, w, bias, tensors of the record) of this rank -> (out, lse, weights, stats)."""

    @staticmethod
    def forward(ctx: Any, words: Words, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The tensors of the record are saved too: autograd sees whether they are changed."""
        compiled = torch.compiler.is_compiling()
        found = (torch.ops.fastattn.shared_forward if compiled else _forward)(*words, *tensors)
        out, _, weights, stats = found
        ctx.words = words
        rescales = words.method == "ring" and words.weights == "full"
        ctx.save_for_backward(*tensors, out, weights if rescales else None, stats)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats, *((weights,) if words.weights == "none" else ()))
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, grad_weights: Any, _: Any) -> tuple:
        """Gradients of the first five."""
        words, saved = ctx.words, ctx.saved_tensors
        no_second_derivative(words.method)
        *inputs, out, weights, stats = saved
        w, bias = inputs[3:5]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if words.weights == "none":  # torch.compile makes zeros for it all the same
            grad_weights = None
        biased = bias is not None and ctx.needs_input_grad[5]
        compiled = torch.compiler.is_compiling()
        backward = torch.ops.fastattn.shared_backward if compiled else _backward
        *grads, grad_w, grad_bias = backward(
            *words, *inputs, out, stats, grad_out, grad_lse, grad_weights, biased, weights
        )
        absent = [None] * (len(MASK_TENSORS) + 1)
        grad_w, grad_bias = None if w is None else grad_w, grad_bias if biased else None
        return None, *grads, grad_w, grad_bias, *absent


# ---- a plan in words and numbers, from which operators make it again ----


class Words(NamedTuple):
    """What a plan says, but for its tensors."""

    method: str
    group: str
    backend: str
    score: Score
    weights: Weights
    causal: Any
    window: tuple[int, int] | None
    rows: tuple[str, ...]
    queries: tuple[int, ...]  # the layouts: see _numbers
    keys: tuple[int, ...]
    origin_b: int
    origin_h: int
    heads_per_step: int
    scale: float
    softcap: float
    dropout_p: float


def _words(method: str, plan: Plan) -> Words:
    p = plan.p
    return Words(
        method, plan.group.group.group_name, plan.backend, p.score, p.weights, p.mask.causal,
        p.mask.window, plan.rows, _numbers(plan.layout), _numbers(plan.keys), p.origin.b,
        p.origin.h, plan.heads_per_step, p.scale, p.softcap, p.dropout_p,
    )  # fmt: skip


def _numbers(layout: Layout) -> tuple[int, ...]:
    """For each rank: how many pieces it has, and their bounds."""
    made: list[int] = []
    for own in layout.pieces:
        made.append(len(own))
        for a, b in own:
            made += [a, b]
    return tuple(made)


def _layout(numbers: tuple[int, ...]) -> Layout:
    rest = iter(numbers)
    pieces = tuple(tuple((next(rest), next(rest)) for _ in range(count)) for count in rest)
    return Layout(sum(b - a for own in pieces for a, b in own), pieces)


def _plan(words: Words, points: tuple[Tensor, ...], own: tuple[Tensor | None, ...]) -> Plan:
    q, k, v = points
    queries, keys = _layout(words.queries), _layout(words.keys)
    *masks, seed = own
    window = None if words.window is None else (words.window[0], words.window[1])
    p = Problem(
        words.score, q.shape[0], q.shape[1], k.shape[1], q.shape[2], keys.length, q.shape[3],
        v.shape[3], q.dtype, q.device, words.scale, words.softcap,
        Mask(words.causal, window, **dict(zip(MASK_TENSORS, masks, strict=True))),
        None if seed is None else Dropout(words.dropout_p, seed), words.weights,
        Origin(words.origin_b, words.origin_h, M=queries.length, N=keys.length),
    )  # fmt: skip
    group = Group(_resolve_process_group(words.group))  # pyright: ignore[reportArgumentType]
    rows = tuple(words.rows)
    return Plan(p, words.backend, queries, keys, group, words.heads_per_step, True, rows)


# ---- the operators ----

_STATIC = (
    "str method, str group, str backend, str score, str weights, str? causal, int[]? window, "
    "str[] rows, int[] queries, int[] keys, int origin_b, int origin_h, int heads_per_step, "
    "float scale, float softcap, float dropout_p, Tensor q, Tensor k, Tensor v, Tensor? w, "
    "Tensor? bias, Tensor? kv_len, Tensor? keep, Tensor? kv_begin, Tensor? seed"
)
_SAVED = f"{schemas.operands(schemas.Saved)}, Tensor? saved_weights"


def _split(args: tuple) -> tuple[Words, Any, tuple, tuple]:
    """The words, (q, k, v, w, bias), the tensors of the record, and what backward gets."""
    n = len(Words._fields)
    last = n + 5 + len(MASK_TENSORS) + 1
    return Words(*args[:n]), args[n : n + 5], args[n + 5 : last], args[last:]


def _forward(*args: Any) -> tuple[Tensor, ...]:
    words, tensors, own, _ = _split(args)
    return PASSES[words.method].forward(_plan(words, tensors[:3], own), *tensors)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    words, tensors, own, saved = _split(args)
    plan = _plan(words, tensors[:3], own)
    out, stats, *upstream, biased, weights = saved
    grads = PASSES[words.method].backward(
        plan, tensors, (out, weights, stats), tuple(upstream), biased
    )
    return tuple(tensors[0].new_empty(0) if grad is None else grad for grad in grads)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    words, (q, _, v, *_), _, _ = _split(args)
    B, H, M, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(B, M, H, v.shape[3]).transpose(1, 2)
    shape = weights_shape(words.weights, B, H, M, sum(_layout(words.keys).sizes))
    lse, stats = (q.new_empty(B, H, M, *end, dtype=wide) for end in ((), (2,)))
    return out, lse, q.new_empty(shape), stats


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _, (q, k, v, w, bias), _, saved = _split(args)
    own = q, k, v, w, bias if saved[5] else None
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in own)


_LIBRARY = torch.library.Library("fastattn", "FRAGMENT")
for _name, _schema, _function, _fake in (
    ("shared_forward", f"({_STATIC}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _forward_fake),
    ("shared_backward", f"({_STATIC}, {_SAVED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
     _backward, _backward_fake),
):  # fmt: skip
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastattn::{_name}", _fake, lib=_LIBRARY)


def _of_all_keys(formula: Any) -> Any:
    """Operations of this rank, whose rows meet all keys. ``formula``: of ``backends/flops.py``."""

    def count(*args: Any, **_: Any) -> int:
        words, (q, k, v, *_rest), *_saved = _split(args)
        keys = _layout(tuple(words.keys)).length
        return formula(q, (*k[:-2], keys, k[-1]), (*v[:-2], keys, v[-1]))

    return count


def _register_formulas() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.fastattn.shared_forward)(_of_all_keys(flops.forward))
    register_flop_formula(torch.ops.fastattn.shared_backward)(_of_all_keys(flops.backward))


flops.when_imported("torch.utils.flop_counter", _register_formulas)
