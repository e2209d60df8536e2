"""A call of the CPU kernels that came before: one C function, without PyTorch's dispatcher.

Describing a call, recalling it and dispatching an operator take several times the time of a small
problem. ``csrc/binding/direct.h`` does all three in C, for calls that return the output alone:

    first     the ordinary way, which remembers the record: call_cache.py
    second    the same, and a plan is made of what the kernels were given
    later     the plan

Plans stand in the table of known calls, and keep no tensor. A plan is used only where nothing of
PyTorch's could tell: no gradient, transform, autocast, mode, trace or profiler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.backends import operators
from fastattn.problem import call_cache
from fastattn.problem.call_cache import Call
from fastattn.problem.mask import Mask
from fastattn.problem.relative import ALiBi, RelativeBias

UNKNOWN = NotImplemented  # a call that may have a plan, and has none yet
# Classes whose fields are arguments.
_RECORDS = Mask, ALiBi, RelativeBias


def _set_up() -> Any:
    """The functions of the extension; None without them, or without what they need of torch."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    aoti = getattr(torch._C, "_aoti", None)
    take = getattr(aoti, "alloc_tensors_by_stealing_from_void_ptrs", None)
    if operators.EXTENSION_ERROR is not None or exchange is None or take is None:
        return None
    functions = operators.module()
    kinds = tuple((x, tuple(f.name for f in dataclasses.fields(x))) for x in _RECORDS)
    own = torch.nn.Parameter, Call._fields, kinds, take
    return functions if functions.set_up(exchange, Tensor, *own) else None


_FUNCTIONS = _set_up()


def run(call: Call) -> Any:
    """The output of a call that has a plan; UNKNOWN, or None where it can have none."""
    if (
        torch.compiler.is_compiling()
        or _FUNCTIONS is None
        or not (isinstance(call.query, Tensor) and call.query.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    return _FUNCTIONS.run(call_cache.table(), call)


def remember(call: Call, result: Any) -> None:
    """Makes the plan of an UNKNOWN call, whose result the CPU kernels just computed."""
    if type(result) is Tensor and (made := _FUNCTIONS.plan(call, result)) is not None:
        call_cache.keep(*made)
