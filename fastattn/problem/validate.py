"""Every rule about shapes, dtypes, devices and values: what was expected, and what came.

:func:`build` turns the arguments of a public function into a :class:`Problem` and the canonical 4-D
tensors beside it. It reads no values on a GPU and runs under ``torch.compile`` and ``torch.func``.
It copies nothing of the size of key or value, unless it must flatten several expanded batch dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fastattn.problem import Alignment, Mask, Problem, Score, arguments, parameter, seeds
from fastattn.problem.relative import Relative, spread

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUNCTIONS = {
    "dot": "scaled_dot_product_attention", "additive": "additive_attention",
    "gaussian": "attention",
}  # fmt: skip
RETURN_WEIGHTS = (None, "mean", "full")


class Inputs(NamedTuple):
    """A validated call: the record, the canonical tensors, and the shape the results go back to."""

    p: Problem
    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, E]
    w: Tensor | None  # [H, D], of the gaussian also [B, H, D]
    bias: Tensor | None  # [B|1, H|1, M|1, N|1], or a line
    batch: tuple[int, ...]  # what stood before the head dim
    has_head_dim: bool


def build(
    score: Score,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Any = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    mask: Mask | None = None,
    bias: Tensor | Relative | None = None,
    return_weights: str | None = None,
    seed: int | Tensor | None = None,
    **unknown: NoReturn,
) -> Inputs:
    """Checks everything and builds the record; ``weight`` of the gaussian is its bandwidth.

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes, devices or values that do not fit each other.
    """
    if unknown:
        raise arguments.unknown_keywords(FUNCTIONS[score], unknown)
    _check_tensors(score, query, key, value, weight)
    arguments.check_bool("enable_gqa", enable_gqa)
    arguments.check_choice("return_weights", return_weights, RETURN_WEIGHTS)
    if score == "gaussian":
        weight = parameter.bandwidth_tensor(weight, query)
    has_head_dim = parameter.has_head_dim(score, query, weight)
    batch, q, k, v = to_4d(query, key, value, has_head_dim)
    q, k, v = match_heads(q, k, v, enable_gqa or score == "additive")
    _check_sizes({"query": q, "key": k, "value": v})
    B, H, M, D = q.shape
    N, E = v.shape[-2:]
    if weight is not None and score == "gaussian":
        per_head = Lead(batch, has_head_dim, (H, 1, D))
        w = parameter.match_bandwidth(per_head.to_4d("bandwidth", weight), H, D)
    else:
        w = None if weight is None else parameter.match_weight(weight, H, D)
    lead = Lead(batch, has_head_dim, (H, M, N))
    mask, bias = _masks(lead, query, attn_mask, is_causal, mask, bias)
    p = Problem(
        score=score, B=B, H=H, Hkv=k.shape[1], M=M, N=N, D=D, E=E, dtype=q.dtype, device=q.device,
        scale=arguments.scale(scale, D) if score == "dot" else 1.0,
        softcap=arguments.softcap(softcap), mask=mask,
        dropout=seeds.dropout(dropout_p, seed, q.device),
        weights=return_weights or "none",  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return Inputs(p, q, k, v, w, bias, batch, has_head_dim)


# ---- query, key, value, weight ----


def _check_sizes(named: dict[str, Tensor], most: int = arguments.MOST_POSITIONS) -> None:
    for name, x in named.items():
        for size in x.shape:
            if type(size) is int and size > most:  # of an expanded tensor
                raise ValueError(f"{name}: expected sizes of at most {most}, got {list(x.shape)}")


def _check_tensors(
    score: Score, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None
) -> None:
    check_points(query, key, value)
    named: dict[str, Any] = {"key": key, "value": value}
    if score == "additive":
        _check_tensor("weight", weight, query)
        named["weight"] = weight
    for name, x in named.items():
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
    check_lengths(key, value)


def check_lengths(key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless there are as many keys as values."""
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value: expected the same length, got {_shape(key)} and {_shape(value)}"
        )


def _check_tensor(name: str, x: object, query: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise arguments.no_tensor(name, x)
    _check_strided(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")
    _check_device(name, x, query)


def check_points(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks query, key and value, for whoever changes them before :func:`build` sees them.

    Raises:
        TypeError: one of them is no dense tensor of a floating dtype.
        ValueError: their devices differ, one has fewer than 2 dims, or query and key differ in D.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x, query)
        if x.dim() < 2:
            raise ValueError(
                f"{name}: expected at least 2 dims [..., length, dim], got {_shape(x)}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key: expected the same last dim, got {_shape(query)} and {_shape(key)}"
        )


def to_4d(
    query: Tensor, key: Tensor, value: Tensor, has_head_dim: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """(batch shape, q, k, v): batch dims are broadcast and flattened into one; heads stay."""
    all_4d = has_head_dim and query.dim() == key.dim() == value.dim() == 4
    if all_4d and query.shape[0] == key.shape[0] == value.shape[0]:
        return (query.shape[0],), query, key, value  # the usual call: nothing to do, and quickly
    tensors = (
        [query, key, value] if has_head_dim else [x.unsqueeze(-3) for x in (query, key, value)]
    )
    tensors = [x if x.dim() > 2 else x.unsqueeze(0) for x in tensors]
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        shapes = ", ".join(_shape(x) for x in (query, key, value))
        raise ValueError(
            f"query, key, value: expected batch dims that broadcast, got {shapes}"
        ) from None
    q, k, v = (_flatten_batch(x, batch) for x in tensors)
    return tuple(batch), q, k, v


def _flatten_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    x = x.expand(*batch, *x.shape[-3:])
    if len(batch) == 1:
        return x
    return x.unsqueeze(0) if len(batch) == 0 else x.flatten(0, len(batch) - 1)


def match_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Expands heads that broadcast, except one key head for all queries.

    Raises:
        ValueError: the numbers of heads do not fit.
    """
    H, Hkv, Hv = sizes = q.shape[1], k.shape[1], v.shape[1]
    if Hkv != Hv:
        if Hkv != 1 and Hv != 1:
            raise _heads_error("key and value: expected the same number of heads", sizes)
        Hkv = max(Hkv, Hv) if Hkv != 0 and Hv != 0 else 0
        k, v = (x.expand(-1, Hkv, -1, -1) for x in (k, v))
    if H == 1 and Hkv != 1:
        return q.expand(-1, Hkv, -1, -1), k, v
    if H == Hkv or Hkv == 1:
        return q, k, v
    if not grouped:
        hint = ": enable_gqa=True shares key heads"
        raise _heads_error("expected as many key as query heads", sizes, hint)
    if Hkv == 0 or H % Hkv:
        raise _heads_error("expected the query heads to be a multiple of the key heads", sizes)
    return q, k, v


def _heads_error(expected: str, sizes: tuple[int, int, int], hint: str = "") -> ValueError:
    # Text made on every call would specialise compiled code: a symbol in it becomes a number.
    H, Hkv, Hv = sizes
    return ValueError(f"{expected}, but query has {H} heads, key {Hkv}, value {Hv}{hint}")


# ---- masks and bias ----


class Lead(NamedTuple):
    """What a mask or bias broadcasts to: (*batch, H, M, N), or (*batch, M, N) without heads."""

    batch: tuple[int, ...]
    has_head_dim: bool
    hmn: tuple[int, int, int]

    def to_4d(self, name: str, x: Tensor) -> Tensor:
        """[B|1, H|1, M|1, N|1]; what broadcasts stays so, except among several batch dims."""
        H, M, N = self.hmn
        target = (*self.batch, H, M, N) if self.has_head_dim else (*self.batch, M, N)
        shape = (1,) * (len(target) - x.dim()) + tuple(x.shape)
        fits = len(shape) == len(target) and all(
            s == 1 or s == t for s, t in zip(shape, target, strict=True)
        )
        if not fits:
            hint = arguments.shape_hint(
                name, x.shape, self.batch, H if self.has_head_dim else None, M, N
            )
            raise ValueError(
                f"{name}: expected a shape that broadcasts to {list(target)}, got {_shape(x)}{hint}"
            )
        x = x.reshape(shape)
        if not self.has_head_dim:
            x = x.unsqueeze(-3)
        lead = x.shape[:-3]
        if all(s == 1 for s in lead):
            return x.reshape(1, *x.shape[-3:])
        return _flatten_batch(x, self.batch)


def _masks(
    lead: Lead,
    query: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    mask: Mask | None,
    bias: Tensor | Relative | None,
) -> tuple[Mask, Tensor | None]:
    check_mask(mask)
    mask = mask or Mask()
    causal = _causal(mask.causal, is_causal)
    if arguments.is_causal_bias(attn_mask):
        causal, attn_mask = _causal_bias(lead, attn_mask, causal, mask), None
    keep, added = split_attn_mask(lead, query, attn_mask)
    if mask.keep is not None:
        own = check_dense("mask.keep", mask.keep, query, (torch.bool,))
        own = lead.to_4d("mask.keep", own)
        keep = own if keep is None else keep & own
    if bias is not None:
        own = check_bias(lead, query, bias, added is not None)
        added = own if added is None else sum_of_biases(added, own, query.dtype)
    window = arguments.window("mask.window", mask.window)
    kv_len = check_limit("mask.kv_len", lead, query, mask.kv_len)
    kv_begin = check_limit("mask.kv_begin", lead, query, mask.kv_begin)
    return Mask(causal, window, kv_len, keep, kv_begin), added


def check_bias(lead: Lead, query: Tensor, bias: Any, dense: bool = False) -> Tensor:
    """A bias as a record has it, as a matrix if that must be; raises TypeError or ValueError."""
    dtypes = query.dtype, torch.float32
    if not isinstance(bias, Relative):
        return lead.to_4d("bias", check_dense("bias", bias, query, dtypes))
    check_dense(f"bias.{bias.parameter}", getattr(bias, bias.parameter), query, dtypes)
    line = bias.line(math.prod(lead.batch), *lead.hmn, query.dtype)
    return spread(line, *lead.hmn[1:]) if dense and lead.hmn[1] > 1 else line


def sum_of_biases(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a + b``, but -inf wherever one of them is: it masks, whatever the other one holds.

    In float32 at least, as scores of ``dtype`` are: a sum in a half type may be -inf by overflow.
    """
    total = a.to(torch.promote_types(dtype, torch.float32)) + b
    return total.masked_fill((a == -torch.inf) | (b == -torch.inf), -torch.inf)


def check_mask(mask: object) -> None:
    """Raises TypeError for anything but a Mask and None."""
    if type(mask).__name__ == "BlockMask":
        raise arguments.no_tensor("mask", mask)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask: expected a fastattn.Mask, got {type(mask).__name__} (tensors go to attn_mask)"
        )


def split_attn_mask(
    lead: Lead, query: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """torch's attn_mask as (keep, bias): a bool mask is the first, a float mask the second."""
    if attn_mask is None:
        return None, None
    attn_mask = check_dense("attn_mask", attn_mask, query, (torch.bool, query.dtype, torch.float32))
    x = lead.to_4d("attn_mask", attn_mask)
    return (x, None) if x.dtype == torch.bool else (None, x)


def check_dense(name: str, x: Tensor, query: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """``x`` if it is a dense tensor of one of these dtypes on the device of query, or raises.

    Under autocast, other half types become float32 where that is one of them.
    """
    if not isinstance(x, Tensor):
        raise arguments.no_tensor(name, x)
    _check_strided(name, x)
    if arguments.overrides(x):
        raise TypeError(
            f"{name}: expected a Tensor, got {type(x).__name__}, whose memory may not be what it "
            "means: write a plain tensor of its values, or describe it by mask=fastattn.Mask(...)"
        )
    half = x.dtype in (torch.float16, torch.bfloat16) and torch.float32 in dtypes
    if half and x.dtype not in dtypes and arguments.autocasts(x.device.type):
        x = x.float()  # autocast's dtype may not hold its numbers
    if x.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        hint = arguments.dtype_hint(name, x.dtype, dtypes)
        raise TypeError(f"{name}: expected dtype {names}, got {x.dtype}{hint}")
    _check_device(name, x, query)
    return x


def _check_strided(name: str, x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: expected a dense strided tensor, got {kind}")


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(f"{name}: expected the device of query, {query.device}, got {x.device}")


def _causal(causal: Alignment | None, is_causal: bool) -> Alignment | None:
    if causal is not None and not isinstance(causal, str):
        raise _no_alignment(causal)
    arguments.check_choice("mask.causal", causal, (None, "top_left", "bottom_right"))
    arguments.check_bool("is_causal", is_causal)
    if is_causal and causal == "bottom_right":
        raise ValueError(
            "is_causal=True aligns top_left, but mask.causal is 'bottom_right': give one of them"
        )
    return "top_left" if is_causal else causal


def _no_alignment(x: object) -> TypeError:
    got = f"a {type(x).__name__}"
    hint = ": write causal='top_left', or causal='bottom_right'" if arguments.is_bool(x) else ""
    if isinstance(x, Tensor):
        got, hint = f"{got} {_shape(x)}", ": write Mask(keep=...) for a dense mask"
    return TypeError(f"mask.causal: expected 'top_left', 'bottom_right' or None, got {got}{hint}")


def _causal_bias(lead: Lead, attn_mask: Any, causal: Alignment | None, mask: Mask) -> Alignment:
    """The alignment of torch's own causal mask, which has no values to read."""
    _, M, N = lead.hmn
    size = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if not _same(size, (M, N)):
        raise ValueError(f"attn_mask: expected a CausalBias of [{M}, {N}], got {list(size)}")
    upper = attn_mask.variant.name == "UPPER_LEFT"
    aligned: Alignment = "top_left" if upper else "bottom_right"
    if causal not in (None, aligned):
        raise ValueError(
            f"attn_mask aligns {aligned}, but is_causal or mask.causal {causal}: give one of them"
        )
    if not upper and causal is None and mask.window is not None:  # would be around its diagonal
        raise ValueError(
            "attn_mask and mask.window: write mask=Mask(causal='bottom_right', window=...) instead"
        )
    return aligned


def check_limit(
    name: str, lead: Lead, query: Tensor, limit: Tensor | Sequence[Any] | None
) -> Tensor | None:
    """int32 [B, 1], [B, M] or [1, M], with values that no kernel can trip over."""
    if limit is None:
        return None
    given: Any = limit
    if not isinstance(limit, Tensor):
        given = arguments.integers(name, limit, query.device)
    x = check_dense(name, given, query, arguments.INTEGERS)
    _, M, N = lead.hmn
    batch = math.prod(lead.batch)
    shape = tuple(x.shape)
    if _same(shape, lead.batch) and _same(shape, (1, M)) and M > 1:
        raise ValueError(
            f"{name}: {_shape(x)} may be of {M} samples or of {M} rows: write .flatten() for "
            f"samples, .expand({M}, {M}) for rows, or query[0] without this batch dim"
        )
    if _same(shape, lead.batch) or _same(shape, (batch,)):
        rows = x.reshape(batch, 1)
    elif _same(shape, (*lead.batch, M)) or _same(shape, (batch, M)):
        rows = x.reshape(batch, M)
    elif _same(shape, (1, M)):
        rows = x
    else:
        hint = ""
        if _same(shape, (batch, 1)):
            hint = ": write .flatten()"
        elif len(shape) == 2 and shape[1] != M:
            hint = f": made for {shape[1]} queries, and here are {M}"
        elif lead.has_head_dim and not lead.batch and shape[0] == lead.hmn[0]:
            hint = f": query has {shape[0]} heads and no samples, write query[:, None] for samples"
        raise ValueError(f"{name}: expected [{batch}] or [{batch}, {M}], got {_shape(x)}{hint}")
    return within(name, rows, N)


_FEW_LIMITS = 32  # Python compares so few sooner than torch reduces them


def within(name: str, limits: Tensor, N: int) -> Tensor:
    """Limits as int32 in ``[0, N]``; raises where their values can be read and are others."""
    if arguments.can_read(limits) and (count := limits.numel()):
        if count <= _FEW_LIMITS:
            values = limits.flatten().tolist()
            low, high = min(values), max(values)
        else:
            low, high = map(int, limits.aminmax())
        if not 0 <= low <= high <= N:
            raise ValueError(f"{name}: expected values in [0, {N}], got {low} to {high}")
        return limits.int()
    # Of 64 bits before they are compared: N as an 8-bit number would wrap.
    return limits.long().clamp(0, N).to(torch.int32)


def _same(shape: tuple, expected: tuple) -> bool:
    """Whether two shapes are equal; tuples of symbolic sizes cannot be compared while tracing."""
    return len(shape) == len(expected) and all(s == t for s, t in zip(shape, expected, strict=True))


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
