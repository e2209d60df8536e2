"""A call of the CPU kernels that came before: one C function, without PyTorch's dispatcher.

Describing a call, recalling it and dispatching an operator take several times the time of a small
problem. ``csrc/binding/direct.h`` does all three in C, for calls without a log-sum-exp:

    first     the ordinary way, which remembers the record: call_cache.py
    second    the same, and a plan is made of what the kernels were given
    later     the plan

Calls of the dot product have one plan for all M, N and strides, in training too. The first of them
makes it: a decoder, whose keys grow, never comes back to a length. Masks and biases of two dims or
more, and limits of samples, may be there, and dropout, for which each call draws a seed. A
``Mask(causal=...)`` has a plan for each length. Tensors of any dims become views of four, as
``validate.to_4d`` makes them: ``four_dims.h``.

Plans stand in the table of known calls, and keep no tensor. A plan is used only where nothing of
PyTorch's could tell: no transform, mode, trace, hook of saved tensors or profiler. Under autocast
a call has the tensors that it makes. For a gradient see ``fastattn/repeated.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.backends import operators
from fastattn.problem import call_cache
from fastattn.problem.call_cache import Call, Known
from fastattn.problem.mask import Mask
from fastattn.problem.relative import ALiBi, Relative, RelativeBias

# The innermost hooks of saved tensors, or None.
_saved_hooks: Any = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)
UNKNOWN = NotImplemented  # a call that may have a plan, and has none yet
_RECORDS = Mask, ALiBi, RelativeBias  # classes whose fields are arguments
_MOST_BACKWARD = 16  # plans, for layouts of the output's gradient


class Trained(NamedTuple):
    """What backward asks of a call with a plan.

    ``backward`` are the plans of its backward passes. ``has_weight``: the call's fourth tensor is
    one. ``masks`` are what ``Call.masks()`` lists, as numbers of the call's tensors, and so are
    ``seed`` and ``sink``.
    """

    forward: Any
    backward: dict[bytes, Any]
    known: Known
    has_weight: bool
    masks: tuple[int | None, ...]
    seed: int | None
    sink: int | None


def _set_up() -> Any:
    """The functions of the extension; None without them, or without what they need of torch."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    aoti = getattr(torch._C, "_aoti", None)
    take = getattr(aoti, "alloc_tensors_by_stealing_from_void_ptrs", None)
    if operators.EXTENSION_ERROR is not None or None in (exchange, take, _saved_hooks):
        return None
    functions = operators.module()
    records = tuple((x, tuple(f.name for f in dataclasses.fields(x))) for x in _RECORDS)
    own = torch.nn.Parameter, records, take
    return functions if functions.set_up(exchange, Tensor, *own) else None


_FUNCTIONS = _set_up()


def _somebody_could_tell() -> Any:
    """Whether less than the ordinary way might be seen."""
    return (
        torch.compiler.is_compiling()
        or _FUNCTIONS is None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or _saved_hooks(True) is not None
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def run(call: Call) -> Any:
    """The results of a call that has a plan; UNKNOWN, or None where it can have none.

    Of a call that needs a gradient, a list: ``(Trained, results, stats)`` and its own tensors.
    """
    if _somebody_could_tell() or not (isinstance(call.query, Tensor) and call.query.is_cpu):
        return None
    if call.score == "gaussian":  # whose bandwidth may be a number, or of another type
        return None
    return _FUNCTIONS.run(call_cache.table(), call)


def remember_first(call: Call, result: Any) -> None:
    """Makes the plan of a first call of the CPU kernels, if that is a plan for any M and N."""
    if call.score == "dot" and not _somebody_could_tell():
        remember(call, result, first=True)


def remember(call: Call, result: Any, first: bool = False) -> None:
    """Makes the plan of an UNKNOWN call, whose results the CPU kernels just computed."""
    if (made := _FUNCTIONS.plan(call, result, first)) is None:
        return
    key, plan, tensors = made
    call_cache.keep(key, plan and (plan, _trained(plan, call, tensors)))


def _trained(plan: Any, call: Call, tensors: tuple[Tensor, ...]) -> Trained | None:
    """None beside a bias of head and distance: its gradient is not that of the kernels' line.

    None too if two masks are one tensor: other such calls have two. And None if inputs broadcast:
    their gradients are sums.
    """
    known, given = call_cache.known_of(call), call.masks()
    if known is None or given is None or isinstance(call.bias, Relative):
        return None
    numbers = {id(x): n for n, x in enumerate(tensors) if n >= 3}  # others than q, k and v
    if len(numbers) < len(tensors) - 3:
        return None
    masks = tuple(None if x is None else numbers[id(x)] for x in given)
    others = (numbers.get(id(x)) for x in (call.seed, call.sink))
    return Trained(plan, {}, known, call.weight is not None, masks, *others)


def backward(trained: Trained, given: tuple) -> Any:
    """The gradients that the autograd Function returns; UNKNOWN and None as ``run``.

    ``given`` is which gradients are wanted, what was saved, and the gradients of results. The
    gradients of a weight and of a sink have those of samples.
    """
    if _somebody_could_tell():
        return None
    return _FUNCTIONS.run_backward(trained.forward, trained.backward, given)


def remember_backward(trained: Trained, given: tuple, grads: tuple) -> None:
    """Makes the plan of an UNKNOWN backward pass, which the CPU kernels just computed."""
    if (made := _FUNCTIONS.plan_backward(trained.forward, given, grads)) is not None:
        if len(trained.backward) >= _MOST_BACKWARD:
            trained.backward.clear()
        trained.backward.update([made])
