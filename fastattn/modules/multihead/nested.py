"""Attention over nested tensors: sequences of different lengths.

nn.TransformerEncoder makes a strided nested tensor from a padded batch at inference, so that its
linear layers skip the padding. Its layers pass it to ``self_attn`` as query, key and value without
a mask. Jagged tensors are what users make, for training too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules.multihead import inputs, projection
from fastattn.problem import Mask, arguments, jagged

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


def attend_sequences(
    module: nn.MultiheadAttention,
    args: tuple,
    mask: Any,
    bias: Any,
    heads_attend: Callable[..., tuple],
) -> tuple[Tensor, None]:
    """Attention over jagged tensors (B, j, E): (out, None); out has the offsets of the query.

    The sequences stand one after the other, so nothing is padded. Each sees itself alone.

    Raises:
        ValueError: lengths that do not fit each other, or what a call over jagged tensors has not.
    """
    query, key, value, *_, is_causal = args
    _check_sequences(module, *args, ours={"mask": mask, "bias": bias})
    q, k, v = inputs.of_each(lambda x: x.values()[None], query, key, value)
    call = inputs.canonical(module, q, k, v, None, None, False, False)
    causal = "top_left" if is_causal else False
    own = jagged.documents(query.offsets(), key.offsets(), q.shape[1], causal)
    heads = projection.to_heads(module, q, k, v, batch_first=True)
    masks = {**call.masks, "mask": own, "bias": bias}
    out, _ = heads_attend(call._replace(masks=masks), *heads, False, False)
    return jagged.from_values(out[0], query), None


def _check_sequences(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    _average: bool,
    is_causal: bool,
    *,
    ours: dict[str, Any],
) -> None:
    if not jagged.given(query, key, value):
        raise ValueError("query, key and value: expected jagged tensors, all of them or none")
    if (reason := jagged.reason_against(query, key, value, ours)) is not None:
        raise ValueError(reason)
    if not module.batch_first or projection.extra_keys(module):
        raise ValueError(
            "jagged tensors: expected a module with batch_first=True, and without add_bias_kv and "
            "add_zero_attn"
        )
    arguments.check_bool("is_causal", is_causal)
    if need_weights:
        raise ValueError("need_weights: jagged tensors have none: write need_weights=False")
    if key_padding_mask is not None:
        raise ValueError("key_padding_mask: expected None, as jagged tensors have no padding")
    if attn_mask is not None and not is_causal:
        raise ValueError(
            "attn_mask: jagged tensors take none: write is_causal=True, or call "
            "fastattn.varlen_attention with a bias="
        )
