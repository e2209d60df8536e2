"""Lets fastattn's modules replace nn.MultiheadAttention everywhere in torch.

Four places in torch do more than call ``forward``. The fast path of encoder layers at inference
reads the parameters. TorchScript compiles the source. torch.ao looks classes up by exact type.
torch.fx recognises leaf modules by the name of their package. This file handles all four.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastattn.modules.linear import PLAIN
from fastattn.problem import validate

# Read at import: a program may later replace the name in torch.nn by our class.
TORCH_ATTENTION = nn.MultiheadAttention


def foreign(module: nn.MultiheadAttention, query: Tensor, *tensors: Tensor | None) -> str | None:
    """Why a call must go to torch's own forward; None if our operators support it.

    Such a call has one of these:

    - an argument or parameter of its own that overrides torch functions or wraps other tensors
      (DTensor, quantised weights, torch.fx proxies). ``out_proj`` is called, whatever it holds;
    - a dtype outside float16, bfloat16, float32 and float64;
    - torch.jit.trace, which cannot follow sizes into an autograd function. Its traces should also
      run where fastattn is not installed.
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.jit.trace cannot follow our operators"
    everything = (
        query,
        *tensors,
        # As registered: reading the attributes would run parametrizations once more.
        *module._parameters.values(),
    )
    if not PLAIN.issuperset(map(type, everything)) and not all(map(_is_plain, everything)):
        return (
            "the type of an input or of a parameter overrides torch functions, or wraps other "
            "tensors, as DTensor"
        )
    return None if query.dtype in validate.DTYPES else f"the query is {query.dtype}"


def _is_plain(x: Tensor | None) -> bool:
    """Whether ``x`` is an ordinary tensor, or represents one while tracing.

    torch.overrides.has_torch_function would be wrong: under a mode it is true of every tensor.
    torch.set_default_device and torch.export are modes.
    """
    if x is None or type(x) in PLAIN:
        return True
    overrides = type(x).__torch_function__ is not torch._C._disabled_torch_function_impl
    return not overrides and not is_traceable_wrapper_subclass(x)


def fx_leaf(module: nn.Module, args: tuple) -> Any:
    """During torch.fx symbolic tracing, a call_module node for ``module``; at other times None.

    fx treats the modules of the torch.nn package as leaves. It traces into all others, where the
    first shape check fails. So a replacement of nn.MultiheadAttention must be a leaf for any
    tracer.
    """
    proxy = next((a for a in args if isinstance(a, torch.fx.Proxy)), None)
    if proxy is None:
        return None
    tracer: Any = proxy.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def keep_forward(module: nn.Module, args: tuple) -> None:
    """A forward pre-hook that does nothing: its existence is enough.

    nn.TransformerEncoderLayer in eval mode without gradients never calls its ``self_attn``, unless
    a module inside the layer has a hook. One fused C++ operator reads the parameters instead.
    """


def off_fast_path(module: nn.Module) -> None:
    """Make encoder layers call ``module`` at inference too. Calling this again changes nothing."""
    if keep_forward not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(keep_forward)


def as_plain(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """An nn.MultiheadAttention that shares this module's parameters, hooks and settings."""
    plain = TORCH_ATTENTION.__new__(TORCH_ATTENTION)
    plain.__dict__.update(module.__dict__)
    plain._forward_pre_hooks = copy.copy(module._forward_pre_hooks)
    for key, hook in module._forward_pre_hooks.items():
        if hook is keep_forward:
            del plain._forward_pre_hooks[key]
    return plain


def register_with_torch_ao(cls: type[nn.MultiheadAttention]) -> None:
    """Let torch.ao's eager-mode quantization treat ``cls`` as it treats nn.MultiheadAttention.

    torch.ao's table maps exact types to observed types. The observed class accepts only an exact
    nn.MultiheadAttention, so an adapter gives it one. A torch without torch.ao is no error, because
    torch has announced its removal.
    """
    try:
        from torch.ao.nn.quantizable import MultiheadAttention as Observed
        from torch.ao.quantization.quantize import get_default_custom_config_dict
    except ImportError:
        return

    class Adapter(Observed):
        @classmethod
        def from_float(cls, other: nn.MultiheadAttention) -> nn.Module:
            return Observed.from_float(as_plain(other))

    table = get_default_custom_config_dict()["float_to_observed_custom_module_class"]
    table.setdefault(cls, Adapter)
