"""Self-attention over a plain batch: nothing to check, nothing to mask, and little time to lose.

After a matrix product nothing is in the caches but its operands, and whatever Python does then
takes several times as long as it does otherwise: a microsecond or two for each function that is
called, ours or torch's. Over a hundred tokens that is a tenth of the module's time. Hence this way
through it, in which everything is asked once, together, and before the first product. At inference
the rest is one operator, where a backend has one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.backends import operators, registry
from fastattn.modules.multihead import interop, projection
from fastattn.problem import call_cache, validate


def attend(
    module, x: Tensor, need_weights: bool, average: bool
) -> tuple[Tensor, Tensor | None] | None:
    """``module(x, x, x)`` without masks; None where that is not all there is to it."""
    parameters = _parameters(module, x)
    if parameters is None:
        return None
    return_weights = ("mean" if average else "full") if need_weights else None
    dropout_p = module.dropout if module.training else 0.0
    linear = F.linear
    if projection.takes_operators(x, *parameters):
        if not dropout_p and getattr(module._attend, "score", None) == "dot":
            whole, p = _operator(module, x, return_weights)
            if whole is not None:
                out, weights = whole(p, x, *parameters, module.batch_first)
                return out, weights if need_weights else None
        linear = operators.linear
    if not _fits(module, x):
        return None
    weight, bias, out_weight, out_bias = parameters
    packed = linear(x, weight, bias)
    q, k, v = projection.split_packed(packed, module.num_heads, module.batch_first)
    attended = module._attend(q, k, v, dropout_p=dropout_p, return_weights=return_weights)
    out, weights = attended if need_weights else (attended, None)
    return linear(projection.merge_heads(out, module.batch_first), out_weight, out_bias), weights


def _parameters(module, x: Tensor) -> tuple | None:
    """Weights and biases of both projections, where they and ``x`` are tensors as usual."""
    own = module._parameters
    last = module._modules.get("out_proj")  # None where it is parametrized
    if last is None or not projection.is_only_linear(last):
        return None
    out: Any = last._parameters
    try:
        found = own["in_proj_weight"], own["in_proj_bias"], out["weight"], out["bias"]
    except KeyError:  # parametrized, or plain tensors
        return None
    if found[0] is None or not interop.PLAIN.issuperset(map(type, found)):
        return None
    if type(x) is not Tensor or x.is_nested or torch.jit.is_tracing():
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None
    return found


def _fits(module, x: Tensor) -> bool:
    """Whether nn.MultiheadAttention would not object to the shape of ``x`` or its dtype."""
    E = module.embed_dim
    if x.dim() != 3 or x.shape[2] != E or E % module.num_heads:
        return False
    return x.dtype in interop.DTYPES


def _operator(module, x: Tensor, return_weights: str | None) -> tuple[Callable | None, Any]:
    """The operator for all of it that the chosen backend has, if any, and the record for it."""
    E, H, batch_first = module.embed_dim, module.num_heads, module.batch_first
    call = x.shape, x.dtype, x.device, E, H, batch_first, return_weights
    found = call_cache.look_up(call)
    if found is None:
        if not _fits(module, x):
            return None, None
        heads = projection.split_heads(x, H, batch_first)  # q, k and v have its shape
        p = validate.build("dot", heads, heads, heads, return_weights=return_weights).p
        backend = registry.get(registry.select(p))
        found = getattr(backend, "self_attention", None), p
        call_cache.keep(call, found)
    return found
