"""Models that call torch's scaled_dot_product_attention, computed by fastattn.

A ``TorchFunctionMode`` sees every call of a torch function in its thread, whatever name the caller
imported, and passes on all but one. Nothing in torch is replaced. torch takes the mode along to the
threads of its backward pass, and guards compiled code by it.

A mode is off while it handles a call. ``F.multi_head_attention_forward`` calls the function inside,
and so does a backward pass that computes a checkpoint again. So copies of these functions run with
the mode on. The copies do not dispatch to modes.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fastattn.functional import scaled_dot_product_attention
from fastattn.problem import arguments, jagged, validate

# Kept from the import on: a program may put something else in their place later.
_SDPA = F.scaled_dot_product_attention
_UNFLATTEN = Tensor.unflatten


@dataclass(eq=False, init=False)
class SdpaCalls:
    """Where calls of torch's scaled_dot_product_attention went; ``str()`` gives a table.

    Calls inside code that torch.compile made are not counted, though fastattn computes them.

    Attributes:
        fastattn: how many calls fastattn computed.
        torch: how many torch computed, by the reason.
    """

    fastattn: int
    torch: Counter[str]

    def __init__(self) -> None:  # torch.compile cannot trace one that calls a default factory
        self.fastattn = 0
        self.torch = Counter()

    def __str__(self) -> str:
        rows = [f"fastattn  {self.fastattn}"]
        return "\n".join([*rows, *(f"torch     {n}  {why}" for why, n in self.torch.items())])

    def count(self, reason: str | None) -> None:
        """Counts one call: torch's for this reason, or fastattn's if there is none."""
        if torch.compiler.is_compiling():  # numbers that change are guards that fail
            return
        if reason is None:
            self.fastattn += 1
        else:
            self.torch[reason] += 1


class UseForSdpa(TorchFunctionMode):
    """The context that :func:`use_for_sdpa` makes; entering it gives the :class:`SdpaCalls`."""

    def __init__(self, calls: SdpaCalls | None = None) -> None:
        super().__init__()
        self.calls = SdpaCalls() if calls is None else calls

    def __enter__(self) -> SdpaCalls:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().__enter__()
        return self.calls

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Computes the one function, and hands on all others."""
        kwargs = kwargs or {}
        if func in _COPIES and not _any_handles(func, (*args, *kwargs.values())):
            with self:
                return _COPIES[func](*args, **kwargs)
        if func is _UNFLATTEN:  # calls super(), which torch.compile cannot trace here
            return torch.unflatten(*args, **kwargs)
        if func is not _SDPA:
            return func(*args, **kwargs)
        reason = _reason_against(dict(zip(_NAMES, args, strict=False)) | kwargs)
        self.calls.count(reason)
        return (_SDPA if reason else scaled_dot_product_attention)(*args, **kwargs)


def _copy(function: Callable) -> Callable:
    """A copy that does not ask modes first.

    Its globals are without __name__, by which a tracer would look them up in torch's module after
    all.
    """
    own = {name: x for name, x in function.__globals__.items() if name != "__name__"}
    own |= dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)
    copy = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_BACKWARD = Tensor.backward, torch.autograd.backward, torch.autograd.grad
# A program may have put something else in their place before the import, which is left alone.
_COPIES = {
    function: _copy(function)
    for function in (F.multi_head_attention_forward, *_BACKWARD)
    if isinstance(function, types.FunctionType) and function.__closure__ is None
}


def _any_handles(func: Callable, values: Iterable[Any]) -> bool:
    """Whether one of these arguments, or one in a list, has a say in what the function does."""
    flat = (y for x in values for y in (x if isinstance(x, (tuple, list)) else (x,)))
    # Results have the type of a subclass without rules of its own. The calls inside of
    # F.multi_head_attention_forward see to that.
    by_calls = func is F.multi_head_attention_forward
    return any(map(arguments.overrides if by_calls else _is_asked, flat))


def _is_asked(x: Any) -> bool:
    """Whether torch asks the type of ``x`` to handle a call."""
    own = getattr(type(x), "__torch_function__", None)
    return not (type(x) is Tensor or own is None or own is torch._C._disabled_torch_function_impl)


_NAMES = "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"


def _reason_against(call: dict[str, Any]) -> str | None:
    """Why a call with these arguments is torch's; None where it is ours."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.jit.trace cannot follow sizes into our operators"
    if torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return "no forward-mode derivative where it is compiled"
    if (reason := _numbers(call.get("scale"), call.get("dropout_p", 0.0))) is not None:
        return reason
    q, k, v = (call.get(name) for name in _NAMES[:3])
    if jagged.given(q, k, v):
        return jagged.reason_against(q, k, v, call) or _dtype(q)
    for x in call.values():
        if not isinstance(x, Tensor) or arguments.is_causal_bias(x):
            continue
        if x.is_nested:
            return "nested tensor"
        if arguments.overrides(x) or arguments.is_dtensor(x):
            return f"{type(x).__name__} is a tensor subclass"
        if x.layout is not torch.strided:
            return f"layout {x.layout}"
        if x.dtype is not torch.bool and (reason := _dtype(x)) is not None:
            return reason
    if _differ_in_heads(k, v):
        return "key and value of different heads"
    attn_mask = call.get("attn_mask")
    if attn_mask is not None and call.get("is_causal"):
        return "attn_mask and is_causal, which some of torch's kernels refuse"
    return "attn_mask of less than 2 dims" if _is_flat(attn_mask) else None


def _numbers(scale: Any, dropout_p: Any) -> str | None:
    """Why torch takes these, and we do not."""
    if scale is not None and not arguments.is_scale(scale):
        return "scale that is no float, or too large"
    return None if arguments.is_real(dropout_p) else "dropout_p that is no float"


def _differ_in_heads(k: Any, v: Any) -> bool:
    """Whether torch may repeat the heads of each; one head broadcasts here as well."""
    if not all(isinstance(x, Tensor) and x.dim() > 2 for x in (k, v)):
        return False
    return k.shape[-3] != v.shape[-3] and min(k.shape[-3], v.shape[-3]) > 1


def _is_flat(x: Any) -> bool:
    return isinstance(x, Tensor) and not arguments.is_causal_bias(x) and x.dim() < 2


def _dtype(x: Any) -> str | None:
    return None if x.dtype in validate.DTYPES else f"dtype {x.dtype}"


class _Forward:
    """The forward of a module, in the context; copied and pickled along with the module."""

    def __init__(self, forward: Callable, calls: SdpaCalls) -> None:
        self.__wrapped__ = forward  # whose signature inspect.signature then gives
        self.mode = UseForSdpa(calls)

    @property
    def __code__(self) -> types.CodeType:
        """What torch.export asks a forward for; an attribute could not be pickled."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = torch.overrides._get_current_function_mode_stack()
        if any(isinstance(mode, UseForSdpa) for mode in modes):
            return self.__wrapped__(*args, **kwargs)
        with self.mode:
            return self.__wrapped__(*args, **kwargs)


@overload
def use_for_sdpa() -> UseForSdpa: ...
@overload
def use_for_sdpa(model: nn.Module) -> SdpaCalls: ...
def use_for_sdpa(model: nn.Module | None = None) -> UseForSdpa | SdpaCalls:
    """Lets fastattn compute torch's ``scaled_dot_product_attention``, in models as they are.

    ``with use_for_sdpa():`` does so for all that this thread calls inside. ``use_for_sdpa(model)``
    does so for this model from now on, in any thread. Nothing in torch changes, so other code is
    not affected. Both work under torch.compile, in one graph. nn.MultiheadAttention and
    nn.TransformerEncoderLayer take part: PyTorch's fast path at inference is off inside.

    Jagged nested tensors are computed too, with gradients on any device. These calls are left to
    torch, and counted with the reason:

    - tensor subclasses, strided nested tensors, and torch.jit.trace;
    - dtypes other than float16, bfloat16, float32 and float64;
    - a ``scale`` or ``dropout_p`` that is no float, or a ``scale`` beyond 1e30;
    - ``attn_mask`` beside ``is_causal``, or of less than 2 dims;
    - key and value of different heads.

    Args:
        model: any module, changed in place. Its ``forward`` is wrapped, and so is that of every
            module in it that is not a plain one of torch. Where such a module is checkpointed, the
            backward pass computes again by the same code.

    Returns:
        The context manager, which gives a :class:`SdpaCalls`; with a model, the
        :class:`SdpaCalls` of that model.

    Raises:
        TypeError: ``model`` is no nn.Module, or a scripted one.

    Note:
        The context must last until the end of ``backward()`` if gradients are checkpointed. So must
        one around a wrapped model that checkpoints something else than modules.
        Inside the context, every call of a torch function costs one more call in Python. Code with
        a softmax of its own is not reached, and neither are calls from C++. Compiled for inference,
        nn.TransformerEncoderLayer keeps PyTorch's fast path. To switch that off, call
        :func:`fastattn.replace_attention` first: it leaves a wrapped model alone.
        ``torch.nn.attention.sdpa_kernel`` chooses among torch's kernels and has no effect here.
        Do not wrap a model for nn.DataParallel: its replicas would call the wrapped model.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> with fastattn.use_for_sdpa() as calls:
        ...     out = model(torch.randn(2, 10, 64))
        >>> print(calls)
        fastattn  1
    """
    if model is None:
        return UseForSdpa()
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        got = type(model).__name__
        raise TypeError(f"model: expected an nn.Module that is not scripted, got {got}")
    calls = SdpaCalls()
    for module in model.modules():
        if module is model or _may_attend(module):
            forward = module.forward
            forward = forward.__wrapped__ if isinstance(forward, _Forward) else forward
            module.forward = _Forward(forward, calls)
    return calls


def _may_attend(module: nn.Module) -> bool:
    """Whether it computes, with modules of its own or by code that is not torch's.

    Calls of scripted modules come from C++, where no wrapper reaches them.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    kind = type(module)
    computes = kind.forward is not nn.Module.forward
    plain = kind.__module__.startswith("torch.") and next(module.children(), None) is None
    return computes and not plain
