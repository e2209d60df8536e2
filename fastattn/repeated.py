"""Autograd around a call that came before: one C function each way.

``autograd.py`` defines the gradients. This is the same in half the time of a small problem: a
Function that returns what the caller wants, and has no rule for a transform. It is used where no
transform is: ``fastattn/backends/direct.py`` says when.
"""

# torch declares these static methods with *args.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import autograd
from fastattn.backends import direct
from fastattn.backends.direct import Trained


class Repeated(torch.autograd.Function):
    """What ``direct.run`` gives, and the tensors of the call -> out, or (out, weights)."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Trained, Any, Tensor], *tensors: Tensor) -> Any:
        ctx.trained, results, stats = made
        out = results if type(results) is Tensor else results[0]
        ctx.save_for_backward(*tensors, out, stats)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None = None) -> tuple:
        saved = ctx.saved_tensors
        if grad_out is None and grad_weights is None:
            return (None,) * len(ctx.needs_input_grad)
        if grad_out is None:
            grad_out = torch.zeros_like(saved[-2])
        given = ctx.needs_input_grad, saved, grad_out, grad_weights
        grads = direct.backward(ctx.trained, given)
        if type(grads) is tuple:
            return grads
        ordinary = _gradients(ctx.trained, *given)
        if grads is direct.UNKNOWN:
            direct.remember_backward(ctx.trained, given, ordinary)
        return ordinary


# Function.apply also looks for what dead transforms left in the arguments. Such have no plan, and
# to look takes 5% of a call of one query.
_base: Any = super(torch.autograd.Function, Repeated)
attend: Callable[..., Any] = _base.apply


def _gradients(
    trained: Trained,
    needed: tuple[bool, ...],
    saved: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients by the ordinary way, which is differentiable; None for what is no tensor."""
    *tensors, out, stats = saved
    given = [None if n is None else tensors[n] for n in trained.masks]
    q, k, v, *others = tensors
    seed, sink = (None if n is None else tensors[n] for n in (trained.seed, trained.sink))
    known, bias = trained.known.at(q.shape[-2], k.shape[-2]).around(given, seed)
    inputs = known.tensors(q, k, v, others[0] if trained.has_weight else None)
    p = known.p
    out, grad_out = (x.reshape(p.B, p.H, p.M, p.E) for x in (out, grad_out))
    if grad_weights is not None:
        grad_weights = grad_weights.reshape(p.weights_shape())
    own = p.tensors()
    bare = p.with_tensors(*[None] * len(own))
    place = trained.masks[-1]  # of the bias
    wanted = place is not None and needed[1 + place]
    results = (out, stats), (grad_out, None, grad_weights)
    found = autograd.gradients(known.backend, bare, wanted, (*inputs, bias, sink), own, *results)
    grads: list[Tensor | None] = [None] * (1 + len(tensors))
    weight = 3 if trained.has_weight else None
    places = 0, 1, 2, weight, place if wanted else None, trained.sink
    for n, grad in zip(places, found, strict=True):
        if n is not None:
            of_samples = n in (weight, trained.sink)  # see autograd.gradients
            grads[1 + n] = grad if of_samples else grad.reshape(tensors[n].shape)
    return tuple(grads)
