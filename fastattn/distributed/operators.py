"""Autograd around "gather" and "ring". In compiled code, each of their passes is one operator.

Each rank compiles its own graph. A compiler drops what its rank does not need and moves what it
likes, and then some ranks wait for others in vain. It cannot look into an operator.
"""

# torch declares these static methods with *args.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from fastattn import autograd, sinks
from fastattn.backends import flops, registry
from fastattn.distributed import gather, ring
from fastattn.distributed.comm import Group
from fastattn.distributed.heads import refuse_transforms
from fastattn.distributed.layout import Layout
from fastattn.distributed.plan import Plan
from fastattn.problem import Mask, Origin, Problem, schemas
from fastattn.problem.record import empty_out, returned, weights_of, weights_shape
from fastattn.problem.schemas import Call, Saved

PASSES: dict[str, Any] = {"gather": gather, "ring": ring}


def attend(
    method: str,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of this rank's rows.

    Raises:
        ValueError: the method cannot do the problem.
    """
    PASSES[method].check(plan)
    own = plan.p.tensors()
    if torch.compiler.is_compiling():
        tensors = autograd.distinct(sink, q, k, v, w, bias, *own)
    else:
        tensors = tuple(map(autograd.that_autograd_saves, (sink, q, k, v, w, bias, *own)))
    unit = registry.get(plan.backend).shift_unit(plan.p, bias is not None)
    others = plan.p.operands[len(own) :]
    return Function.apply(_words(method, plan), unit, others, *tensors)[:3]  # pyright: ignore


class Function(torch.autograd.Function):
    """(sink, q, k, v, w, bias, those of the record) of this rank -> (out, lse, weights, stats)."""

    @staticmethod
    def forward(
        ctx: Any, words: Words, unit: float, others: tuple, sink: Any, *tensors: Any
    ) -> tuple[Tensor, ...]:
        """The tensors of the record are saved too: autograd sees whether they are changed.

        ``unit``: the backend's ``shift_unit``. ``others``: the operands of the record that are no
        tensors.
        """
        compiled = torch.compiler.is_compiling()
        call = Call(*tensors, *others)
        found = (torch.ops.fastattn.shared_forward if compiled else _forward)(*words, *call)
        if sink is not None:
            found = sinks.fold(sink, unit, *found)
        out, _, weights, stats = found = returned(*found)
        ctx.words, ctx.unit, ctx.others = words, unit, others
        ctx.weights = weights_of(call.weights)
        rescales = words.method == "ring" or sink is not None
        weights_too = weights if rescales and ctx.weights == "full" else None
        ctx.save_for_backward(sink, *tensors, out, weights_too, stats)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats, *((weights,) if ctx.weights == "none" else ()))
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, grad_weights: Any, _: Any) -> tuple:
        """Gradients of the first six tensors."""
        if torch.is_grad_enabled():  # create_graph=True, of which a part would be missing
            raise NotImplementedError(
                f"method '{ctx.words.method}' has no second derivatives: write method='heads', "
                "which has"
            )
        refuse_transforms(grad_out, grad_lse, grad_weights)
        sink, *tensors, out, weights, stats = ctx.saved_tensors
        call = Call(*tensors, *ctx.others)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if ctx.weights == "none":  # torch.compile makes zeros for it all the same
            grad_weights = None
        grad_sink = None
        if sink is not None:
            upstream = grad_out, grad_lse, grad_weights
            grad_sink = sinks.gradient(sink, ctx.unit, out, weights, stats, *upstream)
            grad_sink = grad_sink.sum(0).to(sink.dtype)
        biased = call.bias is not None and ctx.needs_input_grad[8]
        compiled = torch.compiler.is_compiling()
        backward = torch.ops.fastattn.shared_backward if compiled else _backward
        saved = Saved(out, stats, grad_out, grad_lse, grad_weights, biased)
        *grads, grad_w, grad_bias = backward(*ctx.words, *call, *saved, weights)
        grad_w, grad_bias = None if call.w is None else grad_w, grad_bias if biased else None
        own = [None] * (len(tensors) - 5)
        return None, None, None, grad_sink, *grads, grad_w, grad_bias, *own


# ---- a plan in words and numbers, from which operators make it again ----


class Words(NamedTuple):
    """What a plan has beside the operands of its record, where causal and window are a band."""

    method: str
    group: str
    backend: str
    causal: Any
    window: tuple[int, int] | None
    rows: tuple[str, ...]
    queries: tuple[int, ...]  # the layouts: see _numbers
    keys: tuple[int, ...]
    heads_per_step: int


def _words(method: str, plan: Plan) -> Words:
    mask = plan.p.mask
    return Words(
        method, plan.group.group.group_name, plan.backend, mask.causal, mask.window, plan.rows,
        _numbers(plan.layout), _numbers(plan.keys), plan.heads_per_step,
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


def _plan(words: Words, call: Call) -> Plan:
    queries, keys = _layout(words.queries), _layout(words.keys)
    window = None if words.window is None else (words.window[0], words.window[1])
    origin = Origin(call.origin_b, call.origin_h, M=queries.length, N=keys.length)
    p = Problem.of(call, Mask(words.causal, window), origin, keys.length)
    group = Group(_resolve_process_group(words.group))  # pyright: ignore[reportArgumentType]
    rows = tuple(words.rows)
    return Plan(p, words.backend, queries, keys, group, words.heads_per_step, True, rows)


# ---- the operators ----

_STATIC = (
    "str method, str group, str backend, str? causal, int[]? window, str[] rows, int[] queries, "
    f"int[] keys, int heads_per_step, {schemas.operands(Call)}"
)
_SAVED = f"{schemas.operands(Saved)}, Tensor? saved_weights"


def _split(args: tuple) -> tuple[Words, Call, tuple]:
    """The words, the operands, and what backward gets."""
    n = len(Words._fields)
    last = n + len(Call._fields)
    return Words(*args[:n]), Call(*args[n:last]), args[last:]


def _forward(*args: Any) -> tuple[Tensor, ...]:
    words, call, _ = _split(args)
    return PASSES[words.method].forward(_plan(words, call), *call[:5])


def _backward(*args: Any) -> tuple[Tensor, ...]:
    words, call, (*given, weights) = _split(args)
    saved = Saved(*given)
    upstream = saved.grad_out, saved.grad_lse, saved.grad_weights
    grads = PASSES[words.method].backward(
        _plan(words, call), call[:5], (saved.out, weights, saved.stats), upstream,
        saved.bias_needs_grad,
    )  # fmt: skip
    return tuple(call.q.new_empty(0) if grad is None else grad for grad in grads)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    words, call, _ = _split(args)
    q = call.q
    B, H, M, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = empty_out(q, call.v.shape[3], q.dtype)
    keys = sum(_layout(words.keys).sizes)
    lse, stats = (q.new_empty(B, H, M, *end, dtype=wide) for end in ((), (2,)))
    shape = weights_shape(weights_of(call.weights), B, H, M, keys)
    return out, lse, q.new_empty(shape), stats


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _, call, (*given, _) = _split(args)
    own = *call[:4], call.bias if Saved(*given).bias_needs_grad else None
    return tuple(call.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in own)


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

    def count(*args: Any, **_out: Any) -> int:
        words, (q, k, v, *_rest), _ = _split(args)
        keys = _layout(tuple(words.keys)).length
        return formula(q, (*k[:-2], keys, k[-1]), (*v[:-2], keys, v[-1]))

    return count


def _register_formulas() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.fastattn.shared_forward)(_of_all_keys(flops.forward))
    register_flop_formula(torch.ops.fastattn.shared_backward)(_of_all_keys(flops.backward))


def _keep_unused() -> None:
    """A rank without rows uses no result, but others wait for what the operator sends."""
    from torch.fx.node import has_side_effect

    has_side_effect(torch.ops.fastattn.shared_forward.default)
    has_side_effect(torch.ops.fastattn.shared_backward.default)


flops.when_imported("torch.utils.flop_counter", _register_formulas)
flops.when_imported("torch.fx.node", _keep_unused)
