"""The functions of the package flash_attn by their names and signatures, on any machine.

Tensors are ``[B, S, H, D]``, causal masks and windows are aligned at the bottom right, and a query
without a key gives 0. These functions take every dtype and head size that fastattn takes. An
argument that they cannot serve raises an error. Only ``deterministic``, ``num_splits`` and
``max_seqlen_*`` have no effect: results are deterministic, and the kernels split keys by their own
rule.

Source: the interface of flash_attn 2; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fastattn import scores
from fastattn.functional import scaled_dot_product_attention
from fastattn.integrations import intervals
from fastattn.problem import ALiBi, Mask, arguments
from fastattn.varlen import varlen_attention

Window = tuple[int, int]
Results = Tensor | tuple[Tensor, Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of queries, keys and values ``[B, S, H, D]``.

    Args:
        q: ``[B, M, H, D]``.
        k: ``[B, N, Hkv, D]``; H is a multiple of Hkv.
        v: ``[B, N, Hkv, E]``.
        dropout_p: probability of dropping a weight.
        softmax_scale: factor on the scores, ``1 / sqrt(D)`` by default.
        causal: keeps ``j <= i + N - M``.
        window_size: (left, right) keeps ``d - left <= j <= d + right``, where ``d = i + N - M``.
            -1 is unbounded.
        softcap: makes ``softcap * tanh(score / softcap)`` of a score, before bias and mask; 0 for
            none.
        alibi_slopes: ``[H]`` or ``[B, H]``; adds ``-slope * |d - j|`` to the scores.
        deterministic: results always are.
        return_attn_probs: whether to return ``(out, lse, weights)``.

    Returns:
        ``out`` ``[B, M, H, E]``, or the tuple. ``lse`` is ``[B, H, M]``, float32 or
        wider, -inf where a query has no key. The weights are ``[B, H, M, N]``, after dropout, or
        None without dropout, as flash_attn has them.
        ``fastattn.scaled_dot_product_attention(return_weights="full")`` returns them at any time.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or values that do not fit.

    Example:
        >>> q = torch.randn(2, 128, 8, 64)
        >>> out = flash_attn_func(q, q, q, causal=True, window_size=(64, 0))  # [2, 128, 8, 64]
    """
    arguments.check_bool("causal", causal)
    arguments.check_bool("return_attn_probs", return_attn_probs)
    _check_dims(4, q=q, k=k, v=v)
    _check_heads(q, k)
    M, N = q.shape[1], k.shape[1]
    weights = "full" if return_attn_probs and dropout_p else None
    out, *others = _attend(
        q, k, v, _band(q.shape[0], M, N, causal, window_size, q.device), softcap=softcap,
        bias=_alibi(alibi_slopes, M, N), dropout_p=dropout_p, scale=softmax_scale,
        return_weights=weights, return_lse=True,
    )  # fmt: skip
    return (out, others[-1], others[0] if weights else None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_func` of ``q`` ``[B, M, H, D]`` and ``kv`` ``[B, N, 2, Hkv, D]``."""
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_func` of ``qkv`` ``[B, S, 3, H, D]``."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Attention of sequences that are packed one after the other.

    Args:
        q: ``[T, H, D]``, where T is at least ``cu_seqlens_q[-1]``. A query past the last sequence
            gives 0.
        k: ``[S, Hkv, D]``; H is a multiple of Hkv.
        v: ``[S, Hkv, E]``.
        cu_seqlens_q: integers ``[n + 1]``: where each sequence of queries begins, and where the
            last one ends.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: has no effect.
        max_seqlen_k: has no effect.
        dropout_p: as in :func:`flash_attn_func`.
        softmax_scale: as there.
        causal: as there, in each sequence.
        window_size: as there, in each sequence.
        softcap: as there.
        alibi_slopes: not computed.
        deterministic: results always are.
        return_attn_probs: whether to return ``(out, lse, weights)``.
        block_table: not computed.

    Returns:
        ``out`` ``[T, H, E]``, or the tuple. ``lse`` is ``[H, T]``, the weights are ``[H, T, S]``,
        0 between sequences, or None without dropout.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or values that do not fit.
        NotImplementedError: an argument that is not computed is given; the message says what to do.

    Example:
        >>> q, cu = torch.randn(7, 8, 64), torch.tensor([0, 3, 7])  # sequences of 3 and 4
        >>> out = flash_attn_varlen_func(q, q, q, cu, cu, causal=True)  # [7, 8, 64]
    """
    if block_table is not None:
        _not_computed(
            "block_table",
            "pass torch.cat([x[:n] for x, n in zip(k[block_table].flatten(1, 2), "
            "cu_seqlens_k.diff())]), v likewise",
        )
    if alibi_slopes is not None:
        _not_computed("alibi_slopes", "call flash_attn_func for one sequence at a time")
    arguments.check_bool("causal", causal)
    arguments.check_bool("return_attn_probs", return_attn_probs)
    _check_dims(3, q=q, k=k, v=v)
    _check_heads(q, k)
    weights = "full" if return_attn_probs and dropout_p else None
    out, *others = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, window=_window(window_size, causal), enable_gqa=True,
        scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, return_weights=weights,
        return_lse=True,
    )  # fmt: skip
    return (out, others[-1], others[0] if weights else None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Results:
    """:func:`flash_attn_varlen_func` of ``q`` ``[T, H, D]`` and ``kv`` ``[S, 2, Hkv, D]``."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *args: Any, **options: Any
) -> Results:
    """:func:`flash_attn_varlen_func` of ``qkv`` ``[T, 3, H, D]``."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache of keys and values, which first takes in new ones.

    Args:
        q: ``[B, M, H, D]``.
        k_cache: ``[C, L, Hkv, D]``, where C is B or more. Without new keys, C may be 1.
        v_cache: ``[C, L, Hkv, E]``.
        k: ``[B, S, Hkv, D]``, written into ``k_cache`` behind each sample's length; or None.
        v: ``[B, S, Hkv, E]``, likewise.
        rotary_cos: not computed.
        rotary_sin: not computed.
        cache_seqlens: how many keys each sample's cache holds before this call, an int or integers
            ``[B]``; L by default.
        cache_batch_idx: integers ``[B]``, the row of the cache of each sample; 0 to B - 1 by
            default.
        cache_leftpad: integers ``[B]``, how many keys at the beginning are padding.
        block_table: not computed.
        softmax_scale: factor on the scores, ``1 / sqrt(D)`` by default.
        causal: keeps ``j <= i + n - M``, where n is the sample's length with the new keys.
        window_size: as in :func:`flash_attn_func`, around ``i + n - M``.
        softcap: as in :func:`flash_attn_func`.
        rotary_interleaved: has no effect, because rotary embeddings are not computed.
        alibi_slopes: not computed.
        num_splits: has no effect.
        return_softmax_lse: whether to return ``(out, lse)``, lse ``[B, H, M]``.

    Returns:
        ``out`` ``[B, M, H, E]``, or the tuple. There are no gradients, as in flash_attn.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or values that do not fit, or a cache that is too short for new keys.
        NotImplementedError: an argument that is not computed is given; the message says what to do.

    Example:
        >>> q = k = v = torch.randn(2, 1, 8, 64)  # one new token a sample
        >>> k_cache, v_cache = torch.zeros(2, 128, 8, 64), torch.zeros(2, 128, 8, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10)
    """
    if rotary_cos is not None or rotary_sin is not None:
        _not_computed("rotary_cos, rotary_sin", "rotate q and k before the call")
    _refuse_pages(block_table, new_keys=k is not None)
    if alibi_slopes is not None:
        _not_computed("alibi_slopes", "call fastattn.scaled_dot_product_attention with a bias=")
    arguments.check_bool("causal", causal)
    _check_dims(4, q=q, k_cache=k_cache, v_cache=v_cache)
    _check_heads(q, k_cache)
    (B, M), L = q.shape[:2], k_cache.shape[1]
    with torch.no_grad():
        lengths = L if cache_seqlens is None else cache_seqlens
        lengths = _integers("cache_seqlens", lengths, B, L, q)
        rows = torch.arange(B, device=q.device)
        if cache_batch_idx is not None:
            rows = _integers("cache_batch_idx", cache_batch_idx, B, k_cache.shape[0] - 1, q)
        if cache_leftpad is not None:
            cache_leftpad = _integers("cache_leftpad", cache_leftpad, B, L, q)
        if (k is None) != (v is None):
            raise ValueError("k and v: expected both or neither")
        options: dict[str, Any] = dict(softcap=softcap, scale=softmax_scale)
        before, writes = lengths, []
        if k is not None and v is not None:
            if cache_batch_idx is None and k_cache.shape[0] < B:
                raise ValueError(
                    f"k_cache: expected [{B}, L, Hkv, D], or cache_batch_idx to choose rows, "
                    f"got {list(k_cache.shape)}"
                )
            _check_new(q, k_cache, v_cache, k, v, lengths, options)
            writes, lengths = [(k_cache, k), (v_cache, v)], lengths + k.shape[1]
        begin, end = _around(lengths - M, M, causal, window_size)
        end = lengths[:, None].expand(B, M) if end is None else end.clamp(max=lengths[:, None])
        if cache_leftpad is not None:
            begin = intervals.largest(begin, cache_leftpad[:, None].expand(B, M))
        mask = Mask(**intervals.fields(begin, end, L))
        for cache, new in writes:  # after all checks: a call that raises writes nothing
            positions = before[:, None] + torch.arange(new.shape[1], device=q.device)
            cache[rows[:, None], positions] = new
        keys, values = k_cache[:B], v_cache[:B]
        if cache_batch_idx is not None:
            keys, values = k_cache[rows], v_cache[rows]
        out, lse = _attend(q, keys, values, mask, **options, return_lse=True)
    return (out, lse) if return_softmax_lse else out


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, lengths: Tensor, options: Any
) -> None:
    """Raises unless new keys and values fit the caches that they are written to, and q fits them.

    What they are written to then fits q too.
    """
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache: expected the same [C, L, Hkv], got {shapes}")
    _check_dims(4, k=k, v=v)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = [q.shape[0], k.shape[1], *cache.shape[2:]]
        if list(new.shape) != expected:
            raise ValueError(
                f"{name}: expected {expected} to fit {name}_cache, got {list(new.shape)}"
            )
        if new.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype} as of {name}_cache, got {new.dtype}")
        if cache.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}_cache: expected a tensor that may be written, got one of inference mode: "
                "call inside torch.inference_mode()"
            )
        if new.device != cache.device:
            raise ValueError(
                f"{name}: expected the device of {name}_cache, {cache.device}, got {new.device}"
            )
    S, L = k.shape[1], k_cache.shape[1]
    if arguments.can_read(lengths) and lengths.numel() and lengths.max() + S > L:
        raise ValueError(f"k_cache: expected room for {lengths.max() + S} keys, got {L}")
    scores.checked(*_by_head(q, k, v), None, enable_gqa=True, **options)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **options: Any) -> list[Tensor]:
    """The output ``[B, M, H, E]``, and what else the options ask for."""
    if k.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"k: expected a batch of {q.shape[0]} like q, got {k.shape[0]}")
    results = scaled_dot_product_attention(
        *_by_head(q, k, v), mask=mask, enable_gqa=True, **options
    )
    return [results[0].transpose(1, 2), *results[1:]]


# ---- masks ----


def _band(
    B: int, M: int, N: int, causal: bool, window_size: Window, device: torch.device
) -> Mask | None:
    """The mask of causal and window, both around ``i + N - M``."""
    left, right = _window(window_size, causal)
    if right == 0:
        return Mask(causal="bottom_right", window=None if left < 0 else (left, -1))
    if left < 0 and right < 0:
        return None
    if M == N:
        return Mask(window=(left, right))
    begin, end = _around(torch.full((B,), N - M, device=device), M, causal, window_size)
    return Mask(**intervals.fields(begin, end, N))


def _around(
    diagonal: Tensor, M: int, causal: bool, window_size: Window
) -> tuple[Tensor | None, Tensor | None]:
    """(begin, end) ``[B, M]`` of the keys around ``i + diagonal``, which is ``[B]``."""
    left, right = _window(window_size, causal)
    center = diagonal[:, None] + torch.arange(M, device=diagonal.device)
    return None if left < 0 else center - left, None if right < 0 else center + right + 1


def _window(window_size: Window, causal: bool) -> Window:
    found = arguments.window("window_size", window_size)
    if found is None:
        raise arguments.no_window("window_size", window_size)
    return found[0], 0 if causal else found[1]


def _alibi(slopes: Tensor | None, M: int, N: int) -> ALiBi | None:
    """Linear biases around ``i + N - M``."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or slopes.dim() not in (1, 2):
        raise ValueError("alibi_slopes: expected a Tensor [H] or [B, H]")
    return ALiBi(slopes, N - M)


# ---- arguments ----


def _integers(name: str, n: int | Tensor, B: int, most: int, q: Tensor) -> Tensor:
    """int64 ``[B]`` on the device of q, between 0 and ``most`` where values can be read."""
    if not isinstance(n, Tensor):
        n = torch.full((B,), arguments.check_int(name, n, 0), device="cpu")
    if n.is_floating_point() or n.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {n.dtype}")
    if n.shape != (B,):
        raise ValueError(f"{name}: expected [{B}], got {list(n.shape)}")
    if arguments.can_read(n) and ((n < 0) | (n > most)).any():
        raise ValueError(f"{name}: expected values in [0, {most}], got {n.tolist()}")
    return n.to(q.device, torch.int64)


def _check_heads(q: Tensor, k: Tensor) -> None:
    """Raises where torch would broadcast a single head of queries."""
    H, Hkv = q.shape[-2], k.shape[-2]
    if Hkv and H % Hkv:
        raise ValueError(f"q: expected a multiple of {Hkv} heads, those of keys, got {H}")


def _check_dims(dims: int, **tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise arguments.no_tensor(name, x)
        if x.dim() != dims:
            layout = "[B, S, H, D]" if dims == 4 else "[T, H, D]"
            raise ValueError(f"{name}: expected {layout}, got {list(x.shape)}")


def _unpack(name: str, packed: Tensor, dims: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of what is packed in the dim before heads."""
    if not isinstance(packed, Tensor):
        raise arguments.no_tensor(name, packed)
    if packed.dim() != dims or packed.shape[-3] != parts:
        layout = "B, S" if dims == 5 else "T"
        raise ValueError(f"{name}: expected [{layout}, {parts}, H, D], got {list(packed.shape)}")
    return packed.unbind(-3)


def _refuse_pages(block_table: Tensor | None, new_keys: bool) -> None:
    if block_table is None:
        return
    instead = "pass k_cache[block_table].flatten(1, 2), v_cache likewise"
    if new_keys:  # what is passed is a copy, which a call would write them into
        instead = (
            "write new keys into their pages first and count them in cache_seqlens, then "
            f"{instead}, without k and v"
        )
    _not_computed("block_table", instead)


def _not_computed(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name}: fastattn does not compute this: {instead}")
