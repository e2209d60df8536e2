"""fastattn as an attention implementation of the package transformers."""

from __future__ import annotations

from torch import Tensor, nn

import fastattn

NAME = "fastattn"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """What the attention layers of transformers call, whatever the model.

    Args:
        module: the layer, which knows whether it is causal where ``is_causal`` is None.
        query: ``[B, H, M, D]``.
        key: ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        value: ``[B, Hkv, N, D]``.
        attention_mask: ``[B, 1 or H, M, N]``, bool (True keeps) or float (added), or None.
        dropout: probability of dropping a weight; 0 in evaluation.
        scaling: factor on the scores, ``1 / sqrt(D)`` by default.
        is_causal: keeps ``j <= i`` where there is no mask, and more than one query.
        **options: ``output_attentions`` asks for the weights. Others must be None.

    Returns:
        The output ``[B, M, H, D]``, contiguous, and the weights ``[B, H, M, N]`` or None.

    Raises:
        ValueError: the model wants a change of the scores that this function does not make.
    """
    for name in ("softcap", "position_bias", "s_aux", "sliding_window", "cache"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: not supported here, use another attn_implementation")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    weights = "full" if options.get("output_attentions") else None
    result = fastattn.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=True,
        return_weights=weights,
    )
    out, weights = result if isinstance(result, tuple) else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def register() -> None:
    """Makes ``model.set_attn_implementation("fastattn")`` possible for every model.

    The second line matters: without it, no mask at all would reach the function.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
