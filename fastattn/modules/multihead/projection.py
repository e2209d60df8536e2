"""Projections around multi-head attention: inputs to heads, heads to output.

Heads are a strided view [B, H, N, D] of the projection, in both layouts, (N, B, E) and (B, N, E).
The kernels read strides, so nothing is transposed in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastattn.modules import linear


def to_heads(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected q [B, H, M, D], and k and v [B, H, N, D] with the appended keys of the module."""
    H = module.num_heads
    if module._qkv_same_embed_dim and query is key is value:
        packed = linear.forward(query, module.in_proj_weight, module.in_proj_bias)
        q, k, v = split_packed(packed, H, batch_first)
    else:
        q, k, v = (
            split_heads(x, H, batch_first) for x in _in_projection(module, query, key, value)
        )
    return (q, *_append_keys(k, v, module))


def split_packed(x: Tensor, num_heads: int, batch_first: bool) -> Sequence[Tensor]:
    """From q, k and v side by side, (B, N, 3 E) or (N, B, 3 E), to views [B, H, N, D] of each."""
    first, second, features = x.shape
    x = x.view(first, second, 3, num_heads, features // (3 * num_heads))
    # In this order, backward is one stack without another copy.
    return [_heads_first(y, batch_first) for y in x.unbind(2)]


def queries_to_heads(module: nn.MultiheadAttention, query: Tensor, batch_first: bool) -> Tensor:
    """Projected q [B, H, M, D] alone, for keys and values that are projected already."""
    bias = module.in_proj_bias
    if module._qkv_same_embed_dim:
        weight = module.in_proj_weight
        weight = weight[: weight.shape[0] // 3]
    else:
        weight = module.q_proj_weight
    q = linear.forward(query, weight, None if bias is None else bias[: weight.shape[0]])
    return split_heads(q, module.num_heads, batch_first)


def _in_projection(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> list[Tensor]:
    """Projected q, k and v, each with the leading dims of its input and E features.

    The parameters are read at every call. They may be anything that attribute access gives: pruned
    plain tensors, parametrized properties, tensors from functional_call.
    """
    bias = module.in_proj_bias
    if not module._qkv_same_embed_dim:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        _check_features((query, key, value), weights)
        triples = zip((query, key, value), weights, biases, strict=True)
        return [linear.forward(x, w, b) for x, w, b in triples]
    return _packed_projection([query, key, value], module.in_proj_weight, bias)


def _check_features(inputs: tuple, weights: tuple) -> None:
    """Raises torch's error of an input with other features than its weight takes."""
    for name, x, w in zip(("query", "key", "value"), inputs, weights, strict=True):
        if w.shape[1] != x.shape[-1]:
            wanted = (w.shape[0], x.shape[-1])
            raise AssertionError(f"expecting {name} weights shape of {wanted}, but got {w.shape}")


def _packed_projection(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """One matrix product per run of identical inputs: two when k is v.

    The pieces come from ``chunk`` and ``split`` because their backward is a single ``cat``;
    indexing would write and add one full-size gradient for each piece.
    """
    runs: list[tuple[Tensor, int]] = []
    for x in inputs:
        if runs and runs[-1][0] is x:
            runs[-1] = (x, runs[-1][1] + 1)
        else:
            runs.append((x, 1))
    rows = [n * (weight.shape[0] // 3) for _, n in runs]
    weights = weight.split(rows)
    biases = [None] * len(runs) if bias is None else bias.split(rows)
    projected = []
    for (x, n), w, b in zip(runs, weights, biases, strict=True):
        projected += linear.forward(x, w, b).chunk(n, dim=-1)
    return projected


def split_heads(x: Tensor, num_heads: int, batch_first: bool) -> Tensor:
    """From (B, N, E) or (N, B, E) to a view [B, H, N, D]."""
    x = x.view(*x.shape[:2], num_heads, x.shape[2] // num_heads)
    return _heads_first(x, batch_first)


def _heads_first(x: Tensor, batch_first: bool) -> Tensor:
    """From (B, N, H, D) or (N, B, H, D) to a view [B, H, N, D]."""
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


def merge_heads(x: Tensor, batch_first: bool) -> Tensor:
    """From [B, H, M, D] to (B, M, E) or (M, B, E): a view where memory has this order, or a copy.

    Sequence first, it is contiguous: callers ``view`` it, as torch's allows.
    """
    x = x.transpose(1, 2).flatten(2)
    return x if batch_first else x.transpose(0, 1).contiguous()


def _append_keys(k: Tensor, v: Tensor, module: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, N, D], then the learned ones (add_bias_kv), then zeros."""
    if module.bias_k is None and module.bias_v is None and not module.add_zero_attn:
        return k, v
    if module.bias_v is None and module.bias_k is not None:
        raise AssertionError("bias_k is set but bias_v is None")
    if module.bias_k is None and module.bias_v is not None:
        raise AssertionError("bias_v is set but bias_k is None")
    return (
        _append_rows(k, module.bias_k, module.add_zero_attn),
        _append_rows(v, module.bias_v, module.add_zero_attn),
    )


def _append_rows(x: Tensor, learned: Tensor | None, zero: bool) -> Tensor:
    B, H, _, D = x.shape
    rows = [x]
    if learned is not None:
        # Under autocast x is bf16 and the parameter float32. Without the cast, cat would promote
        # every key to float32.
        rows.append(learned.to(x.dtype).reshape(1, H, 1, D).expand(B, H, 1, D))
    if zero:
        rows.append(x.new_zeros(B, H, 1, D))
    return torch.cat(rows, dim=2)


def extra_keys(module: nn.MultiheadAttention) -> int:
    """How many keys ``to_heads`` appends."""
    return int(module.bias_k is not None) + int(module.add_zero_attn)
