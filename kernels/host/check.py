"""What kernels trust of their operands. Users may call operators directly, past all other checks.

A call that is launched from a plan has the sizes, dtypes and devices of one that was checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.problem import relative, schemas, validate
from fastattn.problem.record import score_of, weights_of, weights_shape

from .config import HEAD_SIZES

DTYPES = tuple(dtype for dtype in validate.DTYPES if dtype != torch.float64)


def operands(call: schemas.Call) -> None:
    """Raises ValueError or TypeError where kernels would read out of bounds, or misread."""
    q, k, v, w, bias, kv_len, keep, kv_begin, seed = call[:9]
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError("q, k, v: expected 4 dims")
    (B, H, M, D), (_, Hkv, N, _), E = q.shape, k.shape, v.shape[3]
    if q.dtype not in DTYPES:
        raise TypeError(f"q: expected one of {DTYPES}, got {q.dtype}")
    if max(D, E) > HEAD_SIZES[-1]:
        raise ValueError(f"q, v: expected at most {HEAD_SIZES[-1]} features, got {D} and {E}")
    if Hkv != H and (Hkv == 0 or H % Hkv):
        raise ValueError(f"q: expected a multiple of {Hkv} heads, those of k, got {H}")
    score = score_of(call.score)
    if (w is None) != (score == "dot"):
        raise ValueError("w: expected one for every score but the dot product")
    own = (B,) if w is not None and w.dim() == 3 and score == "gaussian" else ()
    _expect("k", k, (B, Hkv, N, D), q.dtype)
    _expect("v", v, (B, Hkv, N, E), q.dtype)
    _expect("w", w, (*own, H, D))
    if bias is None or not relative.is_line(bias, M, N):
        _expect("bias", bias, (B, H, M, N), broadcasts=True)
    else:
        _expect("bias", bias, (B, H, 1, M + N - 1), broadcasts=True)
    _expect("keep", keep, (B, H, M, N), torch.bool, broadcasts=True)
    _expect("kv_len", kv_len, (B, M), torch.int32, broadcasts=True)
    _expect("kv_begin", kv_begin, (B, M), torch.int32, broadcasts=True)
    _expect("seed", seed, (), torch.int64)
    _on_one_device(q, *call[1:9])


def sink(call: schemas.Call, given: Tensor | None) -> None:
    """The same of a sink."""
    if given is None:
        return
    B, H = call.q.shape[:2]
    _expect("sink", given, (B, H) if given.dim() == 2 else (H,))
    _on_one_device(call.q, given)


def saved(call: schemas.Call, given: schemas.Saved) -> None:
    """The same of what backward gets besides."""
    (B, H, M, _), N, E = call.q.shape, call.k.shape[2], call.v.shape[3]
    _expect("out", given.out, (B, H, M, E))
    _expect("stats", given.stats, (B, H, M, 2))
    _expect("grad_out", given.grad_out, (B, H, M, E))
    _expect("grad_lse", given.grad_lse, (B, H, M))
    mode = weights_of(call.weights)
    if mode != "none":
        _expect("grad_weights", given.grad_weights, weights_shape(mode, B, H, M, N))
    _on_one_device(call.q, *given[:5])
    sink(call, given.sink)


def _expect(
    name: str,
    x: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    broadcasts: bool = False,
) -> None:
    if x is None:
        return
    sizes = tuple(x.shape)
    fits = len(sizes) == len(shape) and all(
        size == n or (broadcasts and size == 1) for size, n in zip(sizes, shape, strict=True)
    )
    if not fits:
        to = " or what broadcasts to it" if broadcasts else ""
        raise ValueError(f"{name}: expected {list(shape)}{to}, got {list(sizes)}")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")


def _on_one_device(q: Tensor, *others: Any) -> None:
    for x in others:
        if x is not None and x.device != q.device:
            raise ValueError(f"expected all tensors on the device of q, {q.device}, got {x.device}")
