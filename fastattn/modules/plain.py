"""Self-attention over a plain batch: nothing to check, nothing to mask, and little time to lose.

After a matrix product nothing is in the caches but its operands, and whatever Python does then
takes several times as long as it does otherwise: a microsecond or two for each function that is
called, ours or torch's. Over a hundred tokens that is a tenth of the module's time. Hence this way
through it, in which everything is asked once, together, and before the first product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules import interop, projection


def attend(
    module, x: Tensor, need_weights: bool, average: bool, is_causal: bool
) -> tuple[Tensor, Tensor | None] | None:
    """``module(x, x, x)`` without masks; None where that is not all there is to it."""
    parameters = _parameters(module, x)
    if parameters is None or is_causal:
        return None
    weight, bias, out_weight, out_bias = parameters
    first, second, E = x.shape
    linear = projection.linear if first * second <= projection.MOST_TOKENS else F.linear
    packed = linear(x, weight, bias)
    q, k, v = projection.split_packed(packed, module.num_heads, module.batch_first)
    if need_weights or module.training:
        attended = module._attend(
            q,
            k,
            v,
            dropout_p=module.dropout if module.training else 0.0,
            return_weights=("mean" if average else "full") if need_weights else None,
        )
        out, weights = attended if need_weights else (attended, None)
    else:
        out, weights = module._attend(q, k, v), None
    out = linear(projection.merge_heads(out, module.batch_first), out_weight, out_bias)
    return out if linear is F.linear else out.contiguous(), weights


def _parameters(module, x: Tensor) -> tuple | None:
    """Weights and biases of both projections, where they and ``x`` are what they usually are."""
    own = module._parameters
    try:
        out: Any = module._modules["out_proj"]._parameters
        weight, bias, out_weight, out_bias = (
            own["in_proj_weight"],
            own["in_proj_bias"],
            out["weight"],
            out["bias"],
        )
    except KeyError:  # pruned, parametrized, replaced
        return None
    if not (type(weight) is type(out_weight) is type(bias) is type(out_bias) is nn.Parameter):
        return None
    if type(x) is not Tensor or x.is_nested or x.dtype not in interop.DTYPES or x.dim() != 3:
        return None
    E, H = module.embed_dim, module.num_heads
    if x.shape[2] != E or E % H or torch.jit.is_tracing():
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None
    return weight, bias, out_weight, out_bias
