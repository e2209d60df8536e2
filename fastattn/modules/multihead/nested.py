"""Self-attention over a nested batch: sequences of different lengths in one strided nested tensor.

nn.TransformerEncoder makes such a tensor from a padded batch at inference, so that its linear
layers skip the padding. Its layers pass it to ``self_attn`` as query, key and value without a mask.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules.multihead import projection
from fastattn.problem import Mask

TAKEN = "of nested tensors, only plain self-attention at inference is computed here"


def takes(module: nn.MultiheadAttention, args: tuple) -> bool:
    """Whether ``attend`` computes this call: self-attention at inference, as encoders call it."""
    query, key, value, key_padding_mask, need_weights, attn_mask, _, is_causal = args
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (query, *module.parameters())
    )
    return (
        query is key
        and key is value
        and query.layout == torch.strided
        and query.dim() == 3
        and key_padding_mask is None
        and attn_mask is None
        and not (need_weights or is_causal or needs_grad or module.training)
        and module.batch_first
        and module._qkv_same_embed_dim
        and projection.extra_keys(module) == 0
    )


def attend(
    module: nn.MultiheadAttention, x: Tensor, heads_attend: Callable[..., Tensor]
) -> tuple[Tensor, None]:
    """Self-attention over the nested batch ``x``: (out, None); out is nested like ``x``.

    The projections run on the nested data, without padding. Attention runs on the padded form;
    ``heads_attend`` skips the padding of the keys by ``kv_len``.
    """
    lengths = x._nested_tensor_size()[:, 0].to(x.device)
    packed = F.linear(x, module.in_proj_weight, module.in_proj_bias).to_padded_tensor(0.0)
    q, k, v = (projection.split_heads(t, module.num_heads, True) for t in packed.chunk(3, dim=-1))
    out = heads_attend(q, k, v, mask=Mask(kv_len=lengths))
    merged = projection.merge_heads(out, batch_first=True)
    present = torch.arange(merged.shape[1], device=x.device) < lengths[:, None]
    nested = torch._nested_tensor_from_mask(  # pyright: ignore[reportPrivateImportUsage]
        merged, present, mask_check=False
    )
    return module.out_proj(nested), None
