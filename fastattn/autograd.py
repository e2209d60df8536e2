"""Autograd around a backend: saves, restores, calls. It does no arithmetic.

Functions have a split ``forward`` and ``setup_context`` and a ``vmap`` rule, which torch's
transforms ask for. ``torch.func.functionalize`` alone refuses them. The backward pass is a second
such function, so that second derivatives exist. These differentiate the reference formulas, which
compute everything again in dense [B, H, M, N] memory, times D for the additive and the gaussian
score. So does forward mode.

A transform must see every tensor. So the tensors of the record, its masks and seed, are arguments
beside it, and ``p`` comes without them.
"""

# torch declares these static methods with *args.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.backends import registry
from fastattn.problem import Problem, arguments, reference
from fastattn.problem.record import MASK_TENSORS, laid_out, returned
from fastattn.problem.schemas import Call, Saved

_Function = type[torch.autograd.Function]


def attend(
    backend: str,
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of a validated problem, differentiable in q, k, v, w, bias and sink."""
    if not needs_autograd(q, k, v, w, bias, sink):
        return registry.get(backend).forward(p, q, k, v, w, bias, sink)[:3]
    own = p.tensors()
    bare = p.with_tensors(*[None] * len(own))
    beside = w, bias, sink, *own
    if torch.compiler.is_compiling():
        _refuse_vmap()
        _refuse_forward_mode()
        tensors = distinct(q, k, v, *beside)
    elif levels("Jvp") > 1:  # torch drops the tangents that a Function's own tangents have
        with arguments.no_autocast(p.device.type):
            out, lse, weights, _ = reference.forward(p, q, k, v, w, bias, sink)
        return laid_out(q, out.to(p.result_dtype)), lse, weights.to(p.dtype)
    else:
        tensors = q, k, v, *map(that_autograd_saves, beside)
    return either(AttentionFunction, ForwardMode).apply(backend, bare, *tensors)[:3]


def needs_autograd(*tensors: Tensor | None, later: bool = True) -> bool:
    """Whether a derivative or a transform may be needed: autograd Functions cost 20 us."""
    if later and torch.compiler.is_compiling():  # traced once; later calls may differ
        return True
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def that_autograd_saves(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy of an inference tensor: a mask of a frozen part of a model, for instance."""
    return x.clone() if x is not None and x.is_inference() else x


def distinct(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same, each one but once: torch.compile traces no Function that gets a tensor twice."""
    made: list[Tensor | None] = []
    for x in tensors:
        seen = any(x is other for other in made)
        made.append(x.view_as(x) if x is not None and seen else x)
    return tuple(made)


def _refuse_forward_mode() -> None:
    """A trace has a Function's forward and not its jvp, and does not always see a tangent."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "torch.compile drops the forward-mode derivative of fastattn's functions: call "
            "torch.func.jvp, jacfwd or hessian outside torch.compile"
        )


def _refuse_vmap() -> None:
    """torch.compile drops a Function's vmap rule: gradients would be an error, or silently wrong.

    Whether one is wanted cannot be seen from inside of vmap.
    """
    if torch.is_grad_enabled() and levels("Vmap"):
        raise NotImplementedError(
            "torch.compile drops the gradient of fastattn's functions under torch.func.vmap: call "
            "vmap outside torch.compile, or under torch.no_grad()"
        )


@arguments.traced_as_constant
def levels(transform: str) -> int:
    """How many transforms of that name are active."""
    stack = torch._C._functorch.get_interpreter_stack() or ()  # pyright: ignore
    return sum(level.key().name == transform for level in stack)


class _Positional(inspect.Signature):
    """A signature for a function without defaults that gets positional arguments only.

    ``Function.apply`` binds its arguments at every call, which took longer than a small problem.
    """

    def bind(self, *args: Any) -> _Bound:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``Function.apply`` reads only ``args`` and ``kwargs`` of the result."""
        return _Bound(args, {})


class _Bound(NamedTuple):
    args: tuple
    kwargs: dict

    def apply_defaults(self) -> None:
        """No argument has a default."""


def _positional(*names: str) -> Callable[[Callable], Callable]:
    """Gives names to ``*args``: dynamo reads the number of arguments from the signature."""

    def decorate(function: Any) -> Callable:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        function.__signature__ = _Positional([inspect.Parameter(name, kind) for name in names])
        return function

    return decorate


# ---- the tensors of a call: those with a gradient, then Problem.tensors() ----

_SINK = Call._fields.index("bias") + 1
_TENSORS = (*Call._fields[:_SINK], "sink", *Call._fields[_SINK : Call._fields.index("seed") + 1])
_MASKS = [_TENSORS.index(name) for name in MASK_TENSORS]
_W, _BIAS, _SEED = map(_TENSORS.index, ("w", "bias", "seed"))
_OF_HEADS = _W, _SINK  # of all samples alike, or of each its own
_INPUTS, _ALL = _SINK + 1, _SEED + 1  # how many have a gradient, and how many exist
# Of the backward Function, after those: what was saved of results, and their gradients.
_SAVED, _UPSTREAM = Saved._fields[:2], Saved._fields[2:-2]


def _parts(tensors: tuple) -> tuple[tuple, tuple, tuple]:
    """(q, k, v, w, bias, sink), the tensors of the record, and what backward gets beside them."""
    return tensors[:_INPUTS], tensors[_INPUTS:_ALL], tensors[_ALL:]


class AttentionFunction(torch.autograd.Function):
    """(q, k, v, w, bias, sink) -> (out, lse, weights, stats)."""

    @staticmethod
    @_positional("backend", "p", *_TENSORS)
    def forward(backend: str, p: Problem, *tensors: Tensor | None) -> tuple:
        inputs, own, _ = _parts(tensors)
        return returned(*registry.get(backend).forward(p.with_tensors(*own), *inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.backend, ctx.p, *tensors = inputs
        out, _, weights, stats = output
        ctx.save_for_backward(*tensors, out, stats)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        absent = (weights,) if ctx.p.weights == "none" else ()
        ctx.mark_non_differentiable(stats, *absent)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        grad_weights: Tensor | None,
        _grad_stats: Tensor | None,
    ) -> tuple:
        inputs, own, (out, stats) = _parts(ctx.saved_tensors)
        if ctx.p.weights == "none":  # torch.compile makes zeros for it all the same
            grad_weights = None
        if grad_out is None and grad_lse is None and grad_weights is None:
            return (None,) * (2 + _ALL)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        wanted = ctx.needs_input_grad[2 + _BIAS]
        upstream = grad_out, grad_lse, grad_weights
        grads = gradients(ctx.backend, ctx.p, wanted, inputs, own, (out, stats), upstream)
        return (None, None, *grads, *[None] * len(own))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, backend: str, p: Problem, *tensors: Tensor | None) -> tuple:
        function = either(AttentionFunction, ForwardMode)
        return _vmap(function, info.batch_size, in_dims, (backend, p), tensors)


def gradients(
    backend: str,
    p: Problem,
    bias_needs_grad: bool,
    inputs: tuple[Any, ...],
    own: tuple[Tensor | None, ...],
    saved: tuple[Tensor | None, ...],
    upstream: tuple[Tensor | None, ...],
) -> tuple[Any, ...]:
    """Those of (q, k, v, w, bias, sink), differentiable where that may be needed.

    The gradients of w and of a sink have a row for every sample. Where samples share the tensor,
    autograd adds up the rows, as for all inputs that broadcast. Then it casts the sum.

    ``own`` are the tensors of the record, which ``p`` lacks. ``saved`` are ``_SAVED``, and
    ``upstream`` are ``_UPSTREAM``.
    """
    tensors = (*inputs, *own, *saved, *upstream)
    function = either(AttentionBackwardFunction, BackwardForwardMode)
    compute = function.apply if needs_autograd(*tensors) else function.forward
    return compute(backend, p, bias_needs_grad, *tensors)


class AttentionBackwardFunction(torch.autograd.Function):
    """Inputs and the gradients of (out, lse, weights) -> gradients of the inputs."""

    @staticmethod
    @_positional("backend", "p", "bias_needs_grad", *_TENSORS, *_SAVED, *_UPSTREAM)
    def forward(backend: str, p: Problem, bias_needs_grad: bool, *tensors: Tensor | None) -> tuple:
        (*inputs, sink), own, saved = _parts(tensors)
        p = p.with_tensors(*own)
        return registry.get(backend).backward(p, *inputs, *saved, bias_needs_grad, sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _, ctx.p, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        inputs, own, beside = _parts(ctx.saved_tensors)
        upstream = beside[len(_SAVED) :]
        second = _reference_vjp(ctx.p.with_tensors(*own), [*inputs, *upstream], grads)
        # What was saved has no gradient: it is a function of the inputs, and backward() recomputes
        # it.
        absent = [None] * (len(own) + len(_SAVED))
        return (None, None, None, *second[:_INPUTS], *absent, *second[_INPUTS:])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple,
        backend: str,
        p: Problem,
        bias_needs_grad: bool,
        *tensors: Tensor | None,
    ) -> tuple:
        static = (backend, p, bias_needs_grad)
        function = either(AttentionBackwardFunction, BackwardForwardMode)
        return _vmap(function, info.batch_size, in_dims, static, tensors)


def _reference_vjp(p: Problem, inputs: list[Any], grads: tuple[Any, ...]) -> list[Tensor | None]:
    """Vector-Jacobian product of ``reference.backward`` for each input that is not None."""
    present = [n for n, t in enumerate(inputs) if t is not None]
    wanted = [n for n, g in enumerate(grads) if g is not None]
    if not wanted:
        return [None] * len(inputs)

    def first_order(*tensors: Tensor) -> list[Any]:
        full = list(inputs)
        for n, t in zip(present, tensors, strict=True):
            full[n] = t
        outputs = reference.backward(p, *full)
        return [outputs[n] for n in wanted]

    with arguments.no_autocast(p.device.type):
        _, vjp, *_ = torch.func.vjp(first_order, *[inputs[n] for n in present])
        pulled = vjp([grads[n] for n in wanted])
    second: list[Tensor | None] = [None] * len(inputs)
    for n, g in zip(present, pulled, strict=True):
        second[n] = g
    return second


# ---- forward mode ----


def either(compiled: _Function, eager: _Function) -> _Function:
    """The Function of the two that can run: torch.compile traces none that has a jvp."""
    return compiled if torch.compiler.is_compiling() else eager


class ForwardMode(AttentionFunction):
    """The same, with a Jacobian-vector product."""

    @staticmethod
    def jvp(ctx: Any, _backend: None, _p: None, *tangents: Tensor | None) -> tuple:
        inputs, own, _ = _parts(ctx.saved_tensors)
        p = ctx.p.with_tensors(*own)
        out, lse, weights, _ = _reference_jvp(reference.forward, p, inputs, tangents[:_INPUTS])
        # The layout and dtype of the primal output, as forward mode wants a tangent to have.
        out = laid_out(inputs[0], out.to(p.dtype))
        return out, lse, None if p.weights == "none" else weights.to(p.dtype), None


class BackwardForwardMode(AttentionBackwardFunction):
    """The same, with a Jacobian-vector product: forward over reverse mode."""

    @staticmethod
    def jvp(
        ctx: Any, _backend: None, _p: None, _bias_needs_grad: None, *tangents: Tensor | None
    ) -> tuple:
        inputs, own, beside = _parts(ctx.saved_tensors)
        upstream = beside[len(_SAVED) :]
        moved = *tangents[:_INPUTS], *tangents[_ALL + len(_SAVED) :]
        p = ctx.p.with_tensors(*own)
        grads = _reference_jvp(reference.backward, p, [*inputs, *upstream], moved)
        return tuple(
            g if g is None or n in _OF_HEADS else g.to(x.dtype)
            for n, (g, x) in enumerate(zip(grads, inputs, strict=True))
        )


def _reference_jvp(
    formula: Callable, p: Problem, inputs: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Jacobian-vector product of one of the reference's formulas in the inputs that move.

    The vector-Jacobian product is linear in its vector, so its own transpose is what is wanted.
    torch cannot nest forward mode in dual numbers.
    """
    moving = [n for n, t in enumerate(tangents) if t is not None]
    absent = [False]

    def of_moving(*tensors: Tensor) -> tuple[Tensor, ...]:
        full = list(inputs)
        for n, t in zip(moving, tensors, strict=True):
            full[n] = t
        results = formula(p, *full)
        absent[:] = [r is None for r in results]
        return tuple(r for r in results if r is not None)

    with arguments.no_autocast(p.device.type):
        results, pull, *_ = torch.func.vjp(of_moving, *[inputs[n] for n in moving])
        _, push, *_ = torch.func.vjp(pull, tuple(map(torch.zeros_like, results)))
        [moved] = push(tuple(tangents[n] for n in moving))
    rest = iter(moved)
    return [None if a else next(rest) for a in absent]


# ---- vmap ----


def _vmap(function: _Function, size: int, in_dims: tuple, static: tuple, tensors: tuple) -> tuple:
    """Folds the mapped dim into B for one launch. Mapped weights and seeds have no B: a loop."""
    backend, p, *options = static
    dims = in_dims[len(static) :]
    # A weight of every sample of its own folds as the others do.
    shared = [
        n
        for n, most in zip(_OF_HEADS, (2, 1), strict=True)
        if tensors[n] is not None and tensors[n].dim() - (dims[n] is not None) == most
    ]
    if any(dims[n] is not None for n in shared) or p.dropout is not None:
        return _vmap_by_loop(function, size, dims, static, tensors)

    bias_needs_grad = any(options)  # the backward function's only option
    stays = _MASKS if bias_needs_grad else [*_MASKS, _BIAS]
    folded = []
    for n, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
        alone = n == _SEED or n in shared
        if x is None or alone or (n in stays and dim is None and x.shape[0] == 1):
            folded.append(x)
        else:
            folded.append(_fold(x, dim, size, p.B))
    wide = dataclasses.replace(p, B=size * p.B)
    outputs = list(function.apply(backend, wide, *options, *folded))
    mapped = [o is not None and o.dim() > 1 for o in outputs]  # 1-D: empty, for an absent one
    outputs = [
        o.unflatten(0, (size, p.B)) if m else o for o, m in zip(outputs, mapped, strict=True)
    ]
    if bias_needs_grad and tensors[_BIAS].shape[0 if dims[_BIAS] != 0 else 1] == 1:
        outputs[_BIAS] = outputs[_BIAS].sum(1, keepdim=True)  # a sample's bias broadcasts over B
    return tuple(outputs), tuple(0 if m else None for m in mapped)


def _fold(x: Tensor, dim: int | None, size: int, B: int) -> Tensor:
    """[size, B or 1, ...] -> [size * B, ...]; the mapped dim may be anywhere, or absent."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, B, *x.shape[2:]).flatten(0, 1)


def _vmap_by_loop(
    function: _Function, size: int, dims: tuple, static: tuple, tensors: tuple
) -> tuple:
    samples = []
    for s in range(size):
        picked = [x if d is None else x.select(d, s) for x, d in zip(tensors, dims, strict=True)]
        samples.append(function.apply(*static, *picked))
    columns = list(zip(*samples, strict=True))
    outputs = tuple(None if c[0] is None else torch.stack(c) for c in columns)
    return outputs, tuple(None if o is None else 0 for o in outputs)
