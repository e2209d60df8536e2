"""A call in nn.MultiheadAttention's interface, checked and brought into one form."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules.multihead import masks, projection
from fastattn.modules.multihead.masks import Sizes
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask, arguments, validate

_CAUSAL_WITHOUT_MASK = (
    "Need attn_mask if specifying the is_causal hint. You may use the Transformer module method "
    "`generate_square_subsequent_mask` to create this mask."
)


class Inputs(NamedTuple):
    """A checked call: batched inputs, their layout, and masks as keywords."""

    query: Tensor
    key: Tensor
    value: Tensor
    batched: bool  # as given; the tensors here always have a batch dim
    batch_first: bool
    masks: dict[str, object]  # keyword arguments of the functional API


def check_tensors(
    query: object,
    key: object,
    value: object,
    key_padding_mask: object,
    attn_mask: object,
    cache: object,
) -> None:
    """Raises TypeError for what is no tensor. A cache may hold the keys and values."""
    held = cache is not None
    for name, x, may_be_none in (
        ("query", query, False),
        ("key", key, held),
        ("value", value, held),
        ("key_padding_mask", key_padding_mask, True),
        ("attn_mask", attn_mask, True),
    ):
        # None first: compiled by torch 2.11, its class cannot be asked for an attribute.
        if not ((x is None and may_be_none) or arguments.stands_for_tensor(x)):
            raise arguments.no_tensor(name, x)


def that_autograd_saves(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of inference tensors in grad mode: those of a frozen part of a model, for instance.

    Autograd saves no inference tensor. With batch_first, torch's module makes copies too.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return query, key, value
    if not (query.is_inference() or key.is_inference() or value.is_inference()):
        return query, key, value
    return of_each(lambda x: x.clone() if x.is_inference() else x, query, key, value)


def canonical(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    is_causal: bool,
) -> Inputs:
    """Check a call in torch's order, with torch's errors, and bring it into one form."""
    if query is key is value and attn_mask is key_padding_mask is None and not is_causal:
        E, H = module.embed_dim, module.num_heads
        if query.dim() == 3 and query.shape[2] == E and E % H == 0:  # nothing left to check
            none: dict[str, object] = {"attn_mask": None, "mask": None, "bias": None}
            return Inputs(query, key, value, True, module.batch_first, none | {"is_causal": False})
    masks.check_kinds(attn_mask, key_padding_mask, query.dtype)
    batched = F._mha_shape_check(  # pyright: ignore[reportAttributeAccessIssue]
        query, key, value, key_padding_mask, attn_mask, module.num_heads
    )
    if is_causal and attn_mask is None:
        raise RuntimeError(_CAUSAL_WITHOUT_MASK)
    if not batched:
        query, key, value = of_each(lambda x: x.unsqueeze(0), query, key, value)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    batch_first = module.batch_first or not batched
    sizes = _check_sizes(module, query, key, value, batch_first)
    # Without weights and padding the promise is enough: the mask is not read. Appended keys then
    # count as later than the queries.
    causal = bool(is_causal) and key_padding_mask is None and not need_weights
    if causal:
        attn_mask = None
    masks.check_float_dtypes(attn_mask, key_padding_mask, query, need_weights)
    keywords = masks.to_keywords(attn_mask, key_padding_mask, sizes, query.dtype)
    keywords["is_causal"] = causal
    return Inputs(query, key, value, batched, batch_first, keywords)


def with_own(
    module: nn.MultiheadAttention, call: Inputs, mask: Any, bias: Any, past: int = 0
) -> Inputs:
    """The call with a Mask and a bias beside torch's, over its keys and ``past`` earlier ones."""
    if mask is bias is None:
        return call
    if projection.extra_keys(module):
        name = "mask" if bias is None else "bias"
        raise ValueError(f"{name}: expected a module without add_bias_kv and add_zero_attn")
    M, B, _ = _seq_first(call.query.shape, call.batch_first)
    N = past + call.key.shape[1 if call.batch_first else 0]
    lead = validate.Lead((B,), True, (module.num_heads, M, N))
    given: dict[str, Any] = dict(call.masks)
    if bias is not None:
        validate.check_bias(lead, call.query, bias)
        given["bias"] = bias
        if (added := call.masks["bias"]) is not None:  # a float mask: there is room elsewhere
            if (keep := given["attn_mask"]) is not None:
                given["mask"] = dataclasses.replace(given["mask"] or Mask(), keep=keep)
            given["attn_mask"] = added
    if mask is not None:
        given["mask"] = _both(lead, call.query, mask, given["mask"])
    return call._replace(masks=given)


def _both(lead: validate.Lead, query: Tensor, mask: Any, made: Mask | None) -> Mask:
    """A given mask, and that made of torch's masks, which has ``keep`` and ``causal`` alone."""
    mask = Masks(mask=mask).over_heads()["mask"]
    keep = mask.keep
    if made is None:
        return mask
    if keep is not None and made.keep is not None:
        keep = validate.check_dense("mask.keep", keep, query, (torch.bool,))
        keep = lead.to_4d("mask.keep", keep) & made.keep
    elif keep is None:
        keep = made.keep
    if made.causal is not None and mask.causal not in (None, made.causal):
        raise ValueError(
            f"mask.causal: a growing KVCache is causal, aligned at {made.causal!r}: write "
            f"{made.causal!r}, or leave it out"
        )
    return dataclasses.replace(mask, keep=keep, causal=made.causal or mask.causal)


def of_each(
    change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``change`` of each input. Identical inputs stay one tensor, which the projections use.

    Compared by ``is``: code that torch compiles around an ``id`` is for that one tensor.
    """
    q = change(query)
    k = q if key is query else change(key)
    return q, k, k if value is key else q if value is query else change(value)


def _check_sizes(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
) -> Sizes:
    """The sizes of a batched call. Inputs that do not fit raise torch's errors in torch's words.

    torch checks after moving the sequence dim to the front, so its messages show shapes (N, B, E).
    """
    qs, ks, vs = (_seq_first(t.shape, batch_first) for t in (query, key, value))
    M, B, embed_dim = qs
    if embed_dim != module.embed_dim:
        raise AssertionError(
            f"was expecting embedding dimension of {module.embed_dim}, but got {embed_dim}"
        )
    if embed_dim % module.num_heads:
        raise AssertionError(f"embed_dim {embed_dim} not divisible by num_heads {module.num_heads}")
    if module._qkv_same_embed_dim and ks != vs:
        raise AssertionError(f"key shape {ks} does not match value shape {vs}")
    if ks[:2] != vs[:2]:
        raise AssertionError(
            f"key's sequence and batch dims {ks[:2]} do not match value's {vs[:2]}"
        )
    if ks[1] != B:
        wanted = [ks[0], B * module.num_heads, module.head_dim]
        size = ks[0] * ks[1] * embed_dim
        raise RuntimeError(f"shape '{wanted}' is invalid for input of size {size}")
    return Sizes(B, module.num_heads, M, ks[0], projection.extra_keys(module))


def _seq_first(shape: torch.Size, batch_first: bool) -> torch.Size:
    return torch.Size((shape[1], shape[0], shape[2])) if batch_first else shape


def keys_like(module: nn.MultiheadAttention, query: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Placeholders for N keys and values, for checks that only read shapes."""
    dim = 1 if module.batch_first and query.dim() == 3 else 0
    shape = list(query.shape)
    shape[dim : dim + 1] = [N]
    blank = query.new_empty(1)
    return tuple(blank.expand(*shape[:-1], n) for n in (module.kdim, module.vdim))  # pyright: ignore
