"""Attention at inference: one operator from the inputs to the output, also with a cache.

It serves batches of ``embed_dim`` features. With a cache their only mask is one of keys, and with a
cache that grows they are self-attention.

A matrix product fills the caches with its operands, so Python runs several times slower after it.
Between two products this costs 10% of the module's time with 100 tokens. So everything is decided
here, before the first product, and the rest is one call.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastattn import autograd
from fastattn.backends import operators, registry
from fastattn.modules.linear import PLAIN, is_direct, is_only_linear
from fastattn.modules.multihead import kv_cache, masks, projection
from fastattn.modules.multihead.kv_cache import KVCache
from fastattn.problem import Problem, call_cache, validate
from fastattn.problem.record import WEIGHTS


def attend(
    module: nn.MultiheadAttention,
    x: Tensor,
    key: Any,
    value: Any,
    padding: Any,
    need_weights: bool,
    pairs: Any,
    average: bool,
    is_causal: bool,
    cache: Any = None,
) -> tuple[Tensor, Tensor | None] | None:
    """What ``module`` returns, of the dot product; None if no operator computes it.

    The arguments are those of the module, in its order: ``pairs`` is ``attn_mask``.
    """
    if (module.training and module.dropout) or not (cache is None or type(cache) is KVCache):
        return None
    complete = cache is not None and kv_cache.is_complete(cache)
    own = key is value is x
    if complete:
        serves = own or (_is_unread(key) and _is_unread(value))
    else:
        serves = own or (cache is None and key is not None and value is not None)
    others: Any = () if own or complete else (key, value)
    parameters = _parameters(module) if serves else None
    if parameters is None or not _takes_operator(x, *others, *parameters):
        return None
    if not _fits(module, x, *others):
        return None
    p = _record(module, x, ("mean" if average else "full") if need_weights else None)
    if p is None:
        return None
    operator = operators.multi_head_attention
    batch, length = (0, 1) if module.batch_first else (1, 0)
    B, M = x.shape[batch], x.shape[length]
    mask, causal = None, False
    if padding is not None or pairs is not None:
        past = 0 if cache is None else cache.length
        added = 0 if complete else (others[0] if others else x).shape[length]
        causal = bool(is_causal) and cache is padding is None and not need_weights
        mask = _mask(padding, pairs, x, (B, p.H, M, past + added), causal)
        if mask is NotImplemented:
            return None
    args = (x, *parameters, p.H, p.scale, WEIGHTS[p.weights], module.batch_first, mask)
    if others or causal:
        of_keys, of_values = None if key is x else key, None if value is key else value
        found = operator(*args, None, None, 0, True, of_keys, of_values, causal)
    elif cache is None:
        found = operator(*args)
    else:
        found = cache.written_by(lambda *room: operator(*args, *room), x, (B, p.H, M, p.D))
    return found and (found[0], found[1] if need_weights else None)


def _parameters(module: nn.MultiheadAttention) -> tuple[Tensor | None, ...] | None:
    """Weights and biases of both projections, if these are ordinary parameters and nothing else.

    Without pruned heads: each head has ``embed_dim / num_heads`` rows of each weight.
    """
    own, out_proj = module._parameters, module._modules.get("out_proj")
    if out_proj is None or not is_only_linear(out_proj):  # None: it is parametrized
        return None
    if _has_any_global_hook():  # such a hook wants to see out_proj
        return None
    out = out_proj._parameters
    try:
        found = own["in_proj_weight"], own["in_proj_bias"], out["weight"], out["bias"]
    except KeyError:  # parametrized, or plain tensors
        return None
    if found[0] is None or not PLAIN.issuperset(map(type, found)):
        return None
    if not (_is_of(found[1], found[0]) and _is_of(found[3], found[2])):
        return None
    if found[0].shape[:1] != (3 * module.embed_dim,):
        return None
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return None  # one bias without the other is an error of torch's
    return found


def _is_of(bias: Tensor | None, weight: Any) -> bool:
    """Whether a bias has a number for each row of its weight: it might broadcast."""
    return bias is None or bias.shape == weight.shape[:1]


def _takes_operator(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether ``fastattn::multi_head_attention`` may replace torch's own operators."""
    if operators.EXTENSION_ERROR is not None or not is_direct(x, *parameters):
        return False
    return not autograd.needs_autograd(x, *parameters)


def _is_unread(y: Any) -> bool:
    """Whether a key or value is one that a complete cache may be given."""
    return y is None or (type(y) in PLAIN and not y.is_nested)


def _mask(
    padding: Any, pairs: Any, x: Tensor, sizes: tuple[int, int, int, int], causal: bool
) -> Any:
    """The masks of keys and of pairs as one of four dims, True where it keeps a pair.

    It is None with a promise that ``pairs`` is causal. NotImplemented for masks that the ordinary
    way must look at.
    """
    B, H, M, N = sizes
    mask = None
    if padding is not None:
        if not _fits_mask(padding, x, (B, N)):
            return NotImplemented
        mask = padding.view(B, 1, 1, N)
    if pairs is not None:
        if not (_fits_mask(pairs, x, (M, N)) or _fits_mask(pairs, x, (B * H, M, N))):
            return NotImplemented
        pairs = masks.heads_apart(pairs, B, H)
        if mask is None:
            mask = None if causal else pairs
        elif (mask := masks.joined(pairs, mask)) is None:
            return NotImplemented
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


def _fits_mask(mask: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the operator may take this mask: bool, or numbers of the dtype of ``x``."""
    if not isinstance(mask, Tensor) or autograd.needs_autograd(mask):
        return False
    return is_direct(mask) and mask.dtype in (torch.bool, x.dtype) and mask.shape == shape


def _fits(module: nn.MultiheadAttention, x: Tensor, *others: Tensor) -> bool:
    """Whether nn.MultiheadAttention would accept the shapes, and the dtype of ``x``.

    ``others`` are a key and a value.
    """
    E, batch = module.embed_dim, 0 if module.batch_first else 1
    if E % module.num_heads or x.dtype not in validate.DTYPES:
        return False
    for y in (x, *others):
        if y.is_nested or y.dim() != 3 or y.shape[2] != E or y.shape[batch] != x.shape[batch]:
            return False
    return not others or others[0].shape == others[1].shape


def _record(module: nn.MultiheadAttention, x: Tensor, return_weights: str | None) -> Problem | None:
    """The record of self-attention, whose lengths change no choice; None for other backends."""
    E, H = module.embed_dim, module.num_heads
    call = x.dtype, E, H, return_weights
    found = call_cache.look_up(call)
    if found is None:
        heads = projection.split_heads(x, H, module.batch_first)  # q, k and v have its shape
        p = validate.build("dot", heads, heads, heads, return_weights=return_weights).p
        found = [p if registry.select(p) == "cpu" else None]
        call_cache.keep(call, found)
    return found[0]
