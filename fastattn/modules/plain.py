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

from fastattn import known, ops, registry, validate
from fastattn.modules import interop, projection


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
        linear = ops.linear
    weight, bias, out_weight, out_bias = parameters
    packed = linear(x, weight, bias)
    q, k, v = projection.split_packed(packed, module.num_heads, module.batch_first)
    attended = module._attend(q, k, v, dropout_p=dropout_p, return_weights=return_weights)
    out, weights = attended if need_weights else (attended, None)
    return linear(projection.merge_heads(out, module.batch_first), out_weight, out_bias), weights


def _parameters(module, x: Tensor) -> tuple | None:
    """Weights and biases of both projections, where they and ``x`` are what they usually are."""
    own = module._parameters
    try:
        out: Any = module._modules["out_proj"]._parameters
        found = own["in_proj_weight"], own["in_proj_bias"], out["weight"], out["bias"]
    except KeyError:  # pruned, parametrized, replaced
        return None
    if found[0] is None or not interop.PLAIN.issuperset(map(type, found)):
        return None
    if type(x) is not Tensor or x.is_nested or x.dtype not in interop.DTYPES or x.dim() != 3:
        return None
    E, H = module.embed_dim, module.num_heads
    if x.shape[2] != E or E % H or torch.jit.is_tracing():
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None
    return found


def _operator(module, x: Tensor, return_weights: str | None) -> tuple[Callable | None, Any]:
    """The operator for all of it that the chosen backend has, if any, and the record for it."""
    H, batch_first = module.num_heads, module.batch_first
    call = x.shape, x.dtype, x.device, H, batch_first, return_weights
    seen = known.look_up(call)
    if seen is None:
        heads = projection.split_heads(x, H, batch_first)  # q, k and v have its shape
        p = validate.build("dot", heads, heads, heads, return_weights=return_weights).p
        seen = known.Known(p, registry.select(p), has_head_dim=True)
        known.keep(call, seen)
    return getattr(registry.get(seen.backend), "self_attention", None), seen.p
