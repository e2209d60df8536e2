"""Linear layers by the fastest matrix product that torch has for a CPU.

torch multiplies float32 by MKL, which uses half of what newer processors of AMD can do. oneDNN uses
all of it, and torch ships that too. Half types are multiplied by loops of torch's own where oneDNN
does not take them. Larger products in float32 are 3 to 140 times faster. docs/decisions/0016 and
0018 have the rates.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from fastattn import autograd
from fastattn.backends import operators
from fastattn.problem import arguments

PLAIN = {Tensor, nn.Parameter, type(None)}
_multiply = operators.linear
_NEVER = 2**63 - 1, 0
# ``_multiply`` is faster here than F.linear from so many multiply-adds on, counted with so many
# tokens more: csrc/binding/linear.h. Half types also need _FEWEST tokens, where no gradient is
# wanted and weights lie row by row.
_FROM: dict[torch.dtype, tuple[int, int]] = {}
_FEWEST = 4
if operators.EXTENSION_ERROR is None:
    for _dtype in (torch.float32, torch.bfloat16, torch.float16):
        _FROM[_dtype] = torch.ops.fastattn.linear_from(_dtype)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x ``[..., E]`` times weight ``[F, E]`` transposed, plus bias ``[F]``."""
    if torch.compiler.is_compiling() or not arguments.autocasts("cpu"):
        faster = _is_faster(x, weight, bias)
        return _by_operator(x, weight, bias) if faster else F.linear(x, weight, bias)
    dtype = torch.get_autocast_dtype("cpu")
    if _FROM.get(dtype, _NEVER) < _NEVER:
        with arguments.no_autocast("cpu"):
            if _is_faster(x, weight, bias, dtype):
                return _by_operator(x.to(dtype), weight, bias)
    return F.linear(x, weight, bias)


def _by_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    needed = autograd.needs_autograd(x, weight, bias)
    y = (_Linear.apply if needed else _cast_and_multiply)(x.flatten(0, -2), weight, bias)
    if x.dim() == 2:
        return y
    # Unlike a view, the result of F.linear may be changed in place whatever made it.
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def _cast_and_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return _multiply(x, weight.to(x.dtype), bias)


def call(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``; by ``forward`` if the layer is no more than that."""
    if type(x) is Tensor and is_only_linear(layer) and not _has_any_global_hook():
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        # A plain tensor may stand in the place of the bias.
        if weight is not None and "bias" not in layer.__dict__:
            return forward(x, weight, bias)
    return layer(x)


def is_only_linear(layer: nn.Module) -> bool:
    """Whether calling ``layer`` is exactly ``F.linear`` with its parameters.

    If hooks, pruning or adapters such as LoRA add to it, the layer must be called.
    """
    if type(layer) is not NonDynamicallyQuantizableLinear and type(layer) is not nn.Linear:
        return False  # parametrized layers also have their own class
    return not (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
    )


def _is_faster(
    x: Tensor, weight: Tensor, bias: Tensor | None, autocast: torch.dtype | None = None
) -> bool:
    """Whether ``_multiply`` is faster, and only the time would differ.

    autocast: what tensors of any dtype of ``_FROM`` are cast to.
    """
    if torch.compiler.is_compiling() or type(x) not in PLAIN or x.is_nested:  # sizes are symbols
        return False
    dtype = autocast or x.dtype
    if x.dtype not in _FROM or dtype not in _FROM or x.dim() < 2 or weight.dim() != 2:
        return False
    rows, (least, more) = x.numel() // max(1, x.shape[-1]), _FROM[dtype]
    if (rows + more) * weight.numel() < least or x.shape[-1] != weight.shape[1]:
        return False
    if not is_direct(x, weight, bias, dtypes=_FROM if autocast else None):
        return False
    if torch._C._are_functorch_transforms_active() or autograd.forward_ad._current_level >= 0:
        return False
    if any(map(arguments.is_legacy_batch, (x, weight, bias))):
        return False
    few = dtype is not torch.float32 and rows < _FEWEST and weight.stride(1) == 1
    if few and not autograd.needs_autograd(x, weight, bias):
        return False
    return bias is None or bias.shape == weight.shape[:1]


def is_direct(
    x: Tensor, *others: Tensor | None, dtypes: Container[torch.dtype] | None = None
) -> bool:
    """Whether an operator without autograd, autocast or formula for modes may take these tensors.

    It multiplies by oneDNN, which a user may have turned off. They must be dense tensors on a CPU,
    all of the dtype of ``x``, or each of one of ``dtypes``. Traces could not see inside.
    """
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.enabled:
        return False
    dtypes, strided = dtypes or (x.dtype,), torch.strided
    for t in (x, *others):
        if type(t) not in PLAIN:
            return False
        if t is not None and not (t.is_cpu and t.dtype in dtypes and t.layout is strided):
            return False
    if x.is_nested or torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    return not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


class _Linear(torch.autograd.Function):
    """Of x [T, E], with gradients by the same products, which are differentiable again.

    Weight and bias are cast to the dtype of ``x``, and a cast weight is not kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wants = ctx.needs_input_grad
        ctx.save_for_backward(x if wants[1] else None, weight if wants[0] else None)
        return _cast_and_multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            forward(grad, weight.to(grad.dtype).T) if wants[0] else None,
            forward(grad.T, x.T) if wants[1] else None,
            grad.sum(0) if wants[2] else None,
        )
