"""Checks of single arguments, and hints: what to write instead of a common mistake."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = TypeVar("Function", bound=Callable)


def traced_as_constant(function: Function) -> Function:
    """torch.compile takes the result for a constant. For what cannot be traced and does not change.

    Like torch.compiler.assume_constant_result, without its import of half a second.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


# ---- numbers and bools, numpy's too: a bool is not a number ----

_WHOLE = int, torch.SymInt, numbers.Integral
MOST_POSITIONS = 2**31 - 1
_REAL = int, float, torch.SymInt, torch.SymFloat, numbers.Real


def is_int(x: object) -> bool:
    """Whether ``x`` is a whole number (numpy's too), or a tracer's symbol for one."""
    return isinstance(x, _WHOLE) and not isinstance(x, bool)


def as_int(x: Any) -> int:
    """What ``is_int`` takes, as an int of Python's own; a tracer's symbol stays one."""
    return x if isinstance(x, (int, torch.SymInt)) else int(x)  # pyright: ignore[reportReturnType]


def is_real(x: object) -> bool:
    """Whether ``x`` is a number (numpy's too), or a tracer's symbol for one."""
    return isinstance(x, _REAL) and not isinstance(x, bool)


def check_int(name: str, x: Any, least: int) -> int:
    """``as_int`` of ``x``; raises TypeError unless it is an int, ValueError below ``least``."""
    if not is_int(x):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if x < least:
        raise ValueError(f"{name}: expected {least} or more, got {x}")
    return as_int(x)


def check_size(name: str, x: Any, least: int = 0) -> int:
    """``check_int`` of how many positions there are: kernels number them by 32 bits."""
    if isinstance(x, Tensor) and torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return x  # pyright: ignore[reportReturnType]  # the size of a tensor is one
    x = check_int(name, x, least)
    if x > MOST_POSITIONS:
        raise ValueError(f"{name}: expected at most {MOST_POSITIONS}, got {x}")
    return x


def check_real(name: str, x: object) -> None:
    """Raises TypeError unless ``x`` is a number (numpy's too)."""
    if not is_real(x):
        raise TypeError(f"{name}: expected a float, got {type(x).__name__}")


def is_scale(x: object) -> bool:
    """Whether ``x`` is a number in the range of ``scale``. It may be torch's SymFloat."""
    return is_real(x) and -1e30 <= x <= 1e30  # pyright: ignore[reportOperatorIssue]


def softcap(c: float | None) -> float:
    """The cap as a record has it, 0 for none; raises TypeError, or ValueError out of range."""
    if c is None:
        return 0.0
    check_real("softcap", c)
    # Beyond, the ratio of a score to it is no normal number of float32.
    if c != 0 and not 1e-15 <= c <= 1e15:
        raise ValueError(f"softcap: expected 1e-15 to 1e15, or 0 or None for none, got {c}")
    return float(c)


def scale(factor: float | None, D: int) -> float:
    """The factor of dot products, ``1 / sqrt(D)`` for None; raises TypeError or ValueError."""
    if factor is None:
        return 1.0 / math.sqrt(D) if D else 1.0
    if not is_real(factor):
        hint = ": multiply query by it" if isinstance(factor, Tensor) else ""
        raise TypeError(f"scale: expected a float or None, got {type(factor).__name__}{hint}")
    if not is_scale(factor):  # beyond, float32 may not hold a score
        raise ValueError(f"scale: expected -1e30 to 1e30, got {factor}")
    return float(factor)


def is_bool(x: object) -> bool:
    """Whether ``x`` is True or False. Compares names of numpy's: an import would load it."""
    kind = type(x)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def check_bool(name: str, x: Any) -> bool:
    """``x`` as a bool of Python's own; raises TypeError unless it is True or False."""
    if not is_bool(x):
        raise TypeError(f"{name}: expected a bool, got {type(x).__name__}")
    return bool(x)


# ---- names ----


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``: strings, and maybe None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


# ---- integers ----

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_FAR = 2**60  # as kUnbounded in csrc/binding/problem.h


def integers(name: str, x: object, device: torch.device | str | None) -> Tensor:
    """An int64 tensor from a tensor of integers, which stays on its device, or from a list."""
    if isinstance(x, Sequence) and not isinstance(x, str):
        try:
            x = torch.tensor(x, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{name}: expected integers, a tensor or a list: {error}") from error
        x = x if x.numel() else x.long()  # torch takes an empty list for floats
    if not isinstance(x, Tensor):
        raise no_tensor(name, x, "integers, a tensor or a list")
    if x.dtype not in INTEGERS:
        hint = dtype_hint(name, x.dtype, INTEGERS)
        raise TypeError(f"{name}: expected integers, got {x.dtype}{hint}")
    return x.long()


def window(name: str, given: object) -> tuple[int, int] | None:
    """(left, right), -1 where there is no bound; None without a window."""
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not all(is_int(n) for n in given):
        raise no_window(name, given)
    if min(given) < -1:
        raise ValueError(f"{name}: expected -1 (unbounded) or more, got {tuple(given)}")
    # Sizes end far below _FAR: beyond it there is no bound, and no sum that passes 64 bits.
    left, right = (-1 if n >= _FAR else as_int(n) for n in given)
    return left, right


def no_window(name: str, given: object) -> TypeError:
    """The error for what is no (left, right), and what to write for one number."""
    hint = ""
    if is_int(given):
        hint = f": write ({given}, {given}), or ({given}, 0) without later keys"
    return TypeError(f"{name}: expected (left, right) ints, got {given!r}{hint}")


# ---- tensors whose memory is not their value ----


def overrides(x: object) -> bool:
    """Whether ``x`` has its own ``__torch_function__``: its memory may then mean nothing.

    Parameters, fake tensors and the tensors of torch's tracers do not count.
    """
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return False
    own = getattr(type(x), "__torch_function__", None)
    if own is None or own is torch._C._disabled_torch_function_impl:
        return False
    return getattr(own, "__func__", own) is not Tensor.__torch_function__.__func__


def is_causal_bias(x: object) -> bool:
    """Whether ``x`` is torch's CausalBias. Compares names: an import would load Triton."""
    return type(x).__name__ == "CausalBias" and isinstance(x, Tensor)


def overriding(*tensors: object) -> tuple | None:
    """All of ``tensors`` if one of them replaces torch's functions, as a tracer's do; else None.

    A mode alone does not count, as it sees the calls inside.
    """
    if not has_torch_function_variadic(*tensors):
        return None
    others = tuple(x for x in tensors if not is_causal_bias(x))
    return others if any(map(overrides, others)) else None


def can_read(x: Tensor) -> bool:
    """Whether values can be read without a device sync or a graph break."""
    return x.device.type == "cpu" and type(x) is Tensor and has_memory(x)


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has memory of its own: nothing traces or batches it, and it is not fake."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False  # a trace would keep what was read
    # A fake tensor has no values, nor has a tensor that is traced under a mode.
    if type(x) not in (Tensor, torch.nn.Parameter) or is_in_torch_dispatch_mode():
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return not (functorch.is_functorch_wrapped_tensor(x) or is_legacy_batch(x))


def known(fact: Any) -> bool:
    """Whether a comparison of sizes holds. Of symbols, compiled code gets no guard for it."""
    if not torch.compiler.is_compiling():
        return bool(fact)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(fact)


def is_legacy_batch(x: Tensor | None) -> bool:
    """Whether ``x`` is a tensor of ``is_grads_batched``, which is older than ``torch.func``."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return x is not None and functorch.is_legacy_batchedtensor(x)


# ---- autocast ----


@traced_as_constant
def has_autocast(device: str) -> bool:
    """Whether torch has autocast for a kind of device. Compiled, torch 2.11 cannot trace it."""
    return torch.amp.is_autocast_available(device)


def autocasts(device: str) -> bool:
    """Whether torch's autocast is on for a kind of device."""
    if not torch._C._is_any_autocast_enabled():  # which a call without autocast asks alone
        return False
    return has_autocast(device) and torch.is_autocast_enabled(device)


def autocast(score: str, *tensors: Any) -> list[Any]:
    """The tensors as torch's autocast makes them: floats but float64 get the autocast dtype.

    The gaussian's get float32, as ``torch.cdist`` has it. What is close would else be one point.
    """
    first = tensors[0]
    if not isinstance(first, Tensor) or not autocasts(first.device.type):
        return list(tensors)
    dtype = torch.float32 if score == "gaussian" else torch.get_autocast_dtype(first.device.type)
    return [
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    ]


def no_autocast(device: str) -> contextlib.AbstractContextManager:
    """For formulas whose inputs have their final dtype: half types accumulate in float32."""
    if not has_autocast(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


# ---- what to write instead ----

NESTED = (
    "no backend takes these: pad them, x.to_padded_tensor(0.0), and give their lengths,",
    "mask=fastattn.Mask(kv_len=lengths); nothing is computed for keys past a length",
    "fastattn.MultiheadAttention(batch_first=True) does so for self-attention at inference",
)

# Other libraries' names for our arguments.
_OURS = {
    "alibi_slopes": "bias=fastattn.ALiBi(slopes)",
    "attention_mask": "attn_mask=",
    "attn_bias": "bias=",
    "average_attn_weights": "return_weights='mean'",
    "block_mask": "mask=fastattn.Mask(...), or Mask(keep=...) of a dense one",
    "causal": "is_causal=True, or mask=fastattn.Mask(causal='bottom_right') for FlashAttention's",
    "cu_seqlens_k": "mask=fastattn.Mask.documents(cu_seqlens_q, cu_seqlens_k)",
    "cu_seqlens_q": "mask=fastattn.Mask.documents(cu_seqlens_q, cu_seqlens_k)",
    "dropout": "dropout_p=",
    "keep": "mask=fastattn.Mask(keep=keep)",
    "key_padding_mask": "mask=fastattn.Mask(kv_len=lengths), or attn_mask=, where True keeps",
    "kv_begin": "mask=fastattn.Mask(kv_begin=firsts)",
    "kv_len": "mask=fastattn.Mask(kv_len=lengths)",
    "need_weights": "return_weights='mean', or 'full'",
    "p": "dropout_p=",
    "position_bias": "bias=",
    "return_attn_probs": "return_weights='full', or return_lse=True",
    "return_aux": "return_lse=True",
    "score_mod": "softcap=, bias= or mask=, whichever says the same",
    "sliding_window": "mask=fastattn.Mask(window=(left, right))",
    "sm_scale": "scale=",
    "softmax_scale": "scale=",
    "temperature": "scale=1 / temperature",
    "window": "mask=fastattn.Mask(window=(left, right))",
    "window_size": "mask=fastattn.Mask(window=(left, right))",
}
# What functions of other arguments have instead, by other libraries' names or by ours.
_OF = {
    "additive_attention": {
        "enable_gqa": "nothing, since heads broadcast",
        "scale": "weight * scale for weight",
    },
    "varlen_attention": {
        "attn_mask": "bias=, or scaled_dot_product_attention with mask=Mask.documents(...)",
        "causal": "is_causal=True",
        "cu_seq_k": "cu_seqlens_k=",
        "keep": "scaled_dot_product_attention with mask=Mask.documents(...)",
        "kv_begin": "cu_seqlens_k=",
        "kv_len": "cu_seqlens_k=",
        "mask": "scaled_dot_product_attention with mask=Mask.documents(...)",
        "max_k": "max_seqlen_k=",
        "max_q": "max_seqlen_q=",
        "score_mod": "softcap= or bias=",
        "sliding_window": "window=(left, right)",
        "window_size": "window=(left, right)",
    },
}


def unknown_keywords(function: str, unknown: Iterable[str]) -> TypeError:
    """The error for keyword arguments that ``function`` does not have. It names ours."""
    name = next(iter(unknown))
    ours, own = _OURS.get(name, name), _OF.get(function, {})
    ours = own.get(name) or own.get(ours.rstrip("="), ours)
    hint = "" if ours == name else f": write {ours}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def stands_for_tensor(x: object) -> bool:
    """Whether ``x`` is a tensor, or takes the place of one, as a proxy of torch.fx does."""
    return isinstance(x, Tensor) or hasattr(type(x), "__torch_function__")


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, whose class takes a second to import."""
    return isinstance(x, Tensor) and hasattr(x, "placements")


def no_tensor(name: str, x: object, wanted: str = "a Tensor") -> TypeError:
    """The error for an argument that is not a tensor."""
    hint = ""
    if type(x).__name__ == "ndarray":
        hint = ": write torch.from_numpy(x)"
    if type(x).__name__ == "BlockMask":  # of torch.nn.attention.flex_attention
        hint = ": write mask=fastattn.Mask(...), or Mask(keep=create_mask(mask_mod, B, H, M, N))"
    if type(x).__name__ == "Mask":
        hint = ": write mask= for it"
    if type(x).__name__ == "Proxy":  # of torch.fx
        hint = ": torch.fx cannot trace this; make the module a leaf of the tracer (is_leaf_module)"
    if name == "bias":
        wanted = "a Tensor, an ALiBi or a RelativeBias"
    return TypeError(f"{name}: expected {wanted}, got {type(x).__name__}{hint}")


def dtype_hint(name: str, got: torch.dtype, expected: Sequence[torch.dtype]) -> str:
    """What to write instead of a mask, bias or lengths of a wrong dtype; empty without a hint."""
    name = name.rpartition(".")[2]
    if torch.bool in expected and not (got.is_floating_point or got.is_complex):
        return f": write {name}.bool(), True keeps"
    if torch.int64 in expected and got != torch.bool:
        return ": write x.long()"
    if torch.bool in expected and torch.float32 not in expected:
        return ": a float mask goes to attn_mask or bias"
    if got == torch.bool:
        return ": a bool mask goes to attn_mask or mask=Mask(keep=...)"
    return ""


def shape_hint(
    name: str, shape: Sequence[int], batch: Sequence[int], heads: int | None, M: int, N: int
) -> str:
    """What to write if a mask lacks dims; ``heads`` is None for inputs without a head dim.

    A bandwidth has features instead of keys.
    """
    shape = tuple(shape)
    if name == "bandwidth":
        return ": for each head write bandwidth[:, None]" if shape == (heads, N) else ""
    if len(batch) != 1:
        return ""
    B, name = batch[0], name.rpartition(".")[2]
    if shape == (B, N):
        dims = "None, None, :" if heads is not None else "None, :"
        return f": for key padding write {name}[:, {dims}], or mask=Mask(kv_len=lengths)"
    if heads is not None and shape == (B, M, N):
        return f": for all heads alike write {name}[:, None]"
    if heads is not None and shape == (B * heads, M, N):
        return f": write {name}.unflatten(0, ({B}, {heads}))"
    return ""
