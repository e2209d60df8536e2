"""A case names a problem. Its tensors are drawn from its own seed."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn.problem import ALiBi, Mask, RelativeBias


@dataclass(frozen=True)
class Case:
    """One problem: sizes by the letters of ``Problem``, and features switched on.

    A string of letters, such as ``"bhmn"``, ``"mn"`` or ``"n"``, names the dims that a tensor
    really has; the others broadcast.

    Attributes:
        name: the seed of the tensors, together with score and dtype.
        causal: ``"top_left"`` or ``"bottom_right"``.
        window: as in :class:`fastattn.Mask`.
        kv_len: ``"batch"`` or ``"rows"``; or ``"sorted"``, of rows in ascending order, as packed
            documents have them. The first sample gets no key.
        kv_begin: likewise.
        keep: letters of ``[B, H, M, N]``: a dense mask that keeps ``keep_rate`` of its elements.
        keep_run: keep keeps one run of keys instead, from a sixth of them to five sixths.
        empty_rows: keep and bias mask every third row completely.
        bias: letters, as for keep; or ``"alibi"``, ``"alibi-b"`` with slopes of samples, or
            ``"relative"``, with ``bias_offset``.
        bias_inf: some elements of the bias are -inf.
        bias_grad: whether bias, attn_mask and sink have gradients.
        bias_dtype: that of the case by default.
        attn_mask: letters, as for keep; some elements of a float one are -inf.
        scale: of the dot product and the cosine.
        bandwidth: of the gaussian score, letters of ``[B, H, D]``.
        sink: every head has a sink, around this number.
        weights: ``"full"`` or ``"mean"``, as ``return_weights``.
        lse: whether the log-sum-exp is a result.
        layout: ``"bhmd"``; ``"bmhd"``: heads transposed; ``"bhdm"``: columns; ``"sliced"``: every
            other element; ``"expanded"``: batch stride 0; ``"unaligned"``: one element past where
            memory begins.
        mask_layout: of keep, bias, attn_mask and the gradient of weights.
        magnitude: of query and key.
        opposite: is added to query and subtracted from key.
        garbage: :func:`check` also runs with this number wherever a mask excludes what stands.
        drawn: whether the case was drawn at random. Plain PyTorch may be right by luck where
            numbers are few. So the budget then includes the condition of the scores, and the error
            of tanh that :func:`fastattn.additive_attention` documents.
    """

    name: str
    score: Literal["dot", "additive", "cosine", "gaussian"] = "dot"
    B: int = 2
    H: int = 2
    Hkv: int = 2
    M: int = 15
    N: int = 17
    D: int = 8
    E: int = 8
    dtype: torch.dtype = torch.float32
    causal: str | None = None
    window: tuple[int, int] | None = None
    kv_len: str | None = None
    kv_begin: str | None = None
    keep: str | None = None
    keep_rate: float = 0.7
    keep_run: bool = False
    empty_rows: bool = False
    bias: str | None = None
    bias_inf: bool = False
    bias_offset: int = 0
    bias_grad: bool = True
    bias_dtype: torch.dtype | None = None
    attn_mask: str | None = None
    attn_mask_dtype: torch.dtype = torch.bool
    scale: float | None = None
    bandwidth: str = "h"
    softcap: float = 0.0
    sink: float | None = None
    dropout_p: float = 0.0
    weights: str | None = None
    lse: bool = False
    layout: str = "bhmd"
    mask_layout: str = "bhmd"
    magnitude: float = 1.0
    opposite: float = 0.0
    garbage: float | None = None
    drawn: bool = False

    def __str__(self) -> str:
        return f"{self.score}-{self.name}-{str(self.dtype).removeprefix('torch.')}"

    def __repr__(self) -> str:
        """Python, but for what is as usual."""
        told = [
            f"{f.name}={_spelled(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Case({', '.join(told)})"

    @property
    def seed(self) -> int:
        """Fixed by the case, so that a failure is reproduced by its name."""
        return zlib.crc32(str(self).encode())


def _spelled(value: object) -> str:
    """Python for a field of a case."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{'-' if value < 0 else ''}math.{'nan' if math.isnan(value) else 'inf'}"
    return repr(value)


@dataclass
class Tensors:
    """The drawn tensors of a case; ``grad_*`` are the upstream gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    bias: Tensor | None
    mask: Mask
    grad_out: Tensor
    grad_weights: Tensor | None
    grad_lse: Tensor | None
    attn_mask: Tensor | None = None
    bandwidth: Tensor | None = None  # of the gaussian score, [(B,) H|1, 1, D|1]
    sink: Tensor | None = None  # [H]


# Those that may have gradients.
INPUTS = ("q", "k", "v", "w", "bias", "attn_mask", "bandwidth", "sink")


def make(case: Case, device: str = "cpu") -> Tensors:
    """Draws the tensors of a case, in its dtype and layout; other numbers on another device."""
    rng = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64, device=device)

    c = case
    q = normal(c.B, c.H, c.M, c.D) * c.magnitude + c.opposite
    k = normal(c.B, c.Hkv, c.N, c.D) * c.magnitude - c.opposite
    v = normal(c.B, c.Hkv, c.N, c.E)
    w = (normal(c.H, c.D) / math.sqrt(max(c.D, 1))).to(c.dtype) if c.score == "additive" else None
    grad_weights = None
    if c.weights is not None:
        shape = (c.B, c.H, c.M, c.N) if c.weights == "full" else (c.B, c.M, c.N)
        grad_weights = normal(*shape).to(c.dtype)
    t = Tensors(
        q.to(c.dtype), k.to(c.dtype), v.to(c.dtype), w, _bias(c, normal, rng), _mask(c, rng),
        grad_out=normal(c.B, c.H, c.M, c.E).to(c.dtype),
        grad_weights=grad_weights,
        grad_lse=normal(c.B, c.H, c.M) if c.lse else None,
        attn_mask=_attn_mask(c, normal, rng),
        bandwidth=_bandwidth(c, rng),
        sink=None if c.sink is None else (normal(c.H) + c.sink).to(c.dtype),
    )  # fmt: skip
    return _laid_out(c, t)


def _bandwidth(case: Case, rng: torch.Generator) -> Tensor | None:
    if case.score != "gaussian":
        return None
    own = case.bandwidth
    shape = (case.H if "h" in own else 1, 1, case.D if "d" in own else 1)
    drawn = 1 + _uniform((case.B, *shape) if "b" in own else shape, rng)
    return (drawn * math.sqrt(max(case.D, 1))).to(case.dtype)


def _uniform(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device)


def _shape(case: Case, letters: str) -> list[int]:
    sizes = {"b": case.B, "h": case.H, "m": case.M, "n": case.N}
    return [size if letter in letters else 1 for letter, size in sizes.items()]


_TRANSPOSED = {"bmhd": (1, 2), "bhdm": (-2, -1)}


def _laid_out(case: Case, t: Tensors) -> Tensors:
    """The same values behind the strides of the case."""

    def each(layout: str, *names: str) -> dict[str, Any]:
        return {n: x if (x := getattr(t, n)) is None else relaid(layout, x) for n in names}

    keep = t.mask.keep
    mask = t.mask if keep is None else replace(t.mask, keep=relaid(case.mask_layout, keep))
    plain, masks = ("q", "k", "v", "grad_out"), ("bias", "attn_mask", "grad_weights")
    masks = masks[1:] if is_relative(case) else masks
    return replace(t, mask=mask, **each(case.layout, *plain), **each(case.mask_layout, *masks))


def relaid(layout: str, x: Tensor) -> Tensor:
    """The same values with the strides that a case names."""
    if layout in _TRANSPOSED:
        dims = _TRANSPOSED[layout]
        return x.transpose(*dims).contiguous().transpose(*dims)
    if layout == "sliced":  # what lies between must never be read
        filler = math.nan if x.is_floating_point() else True
        padded = x.new_full([2 * s + 1 for s in x.shape], filler)
        return padded[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)
    if layout == "unaligned":
        return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def _empty_rows(case: Case, x: Tensor, value: float) -> Tensor:
    if case.empty_rows and x.shape[2] == case.M:
        x[:, :, ::3] = value
    return x


def _bias(case: Case, normal: Callable[..., Tensor], rng: torch.Generator) -> Tensor | None:
    if case.bias is None:
        return None
    bias = normal(*_bias_shape(case))
    if case.bias_inf and bias.dim() != 1 and case.bias != "alibi-b":  # inf * 0 is no slope's
        bias = bias.masked_fill(_uniform(bias.shape, rng) < 0.3, -math.inf)
        bias = bias if bias.dim() < 4 else _empty_rows(case, bias, -math.inf)
    return bias.to(case.bias_dtype or case.dtype)


# Distances with buckets of their own: few, so that most tiles have some that share one.
REACH = 20


def _bias_shape(case: Case) -> list[int]:
    if case.bias == "relative":
        return [2 * REACH + 1, case.H]
    if case.bias in ("alibi", "alibi-b"):
        return [case.B, case.H] if case.bias == "alibi-b" else [case.H]
    return _shape(case, case.bias or "")


def is_relative(case: Case) -> bool:
    """Whether the bias is a line: its tensor is then what the line is made of."""
    return case.bias in ("alibi", "alibi-b", "relative")


def given_bias(case: Case, bias: Tensor | None) -> Any:
    """The argument ``bias``, made of its tensor."""
    if bias is None or not is_relative(case):
        return bias
    if case.bias != "relative":
        return ALiBi(bias, case.bias_offset)
    return RelativeBias(bias, torch.arange(2 * REACH + 1, device=bias.device), case.bias_offset)


def _attn_mask(case: Case, normal: Callable[..., Tensor], rng: torch.Generator) -> Tensor | None:
    if case.attn_mask is None:
        return None
    shape = _shape(case, case.attn_mask)
    keep = _uniform(shape, rng) < case.keep_rate
    if case.attn_mask_dtype == torch.bool:
        return _empty_rows(case, keep, False)
    added = normal(*shape).masked_fill(~keep, -math.inf)
    return _empty_rows(case, added, -math.inf).to(case.attn_mask_dtype)


def _mask(case: Case, rng: torch.Generator) -> Mask:
    keep = None
    kv_len = _limit(case, case.kv_len, case.N, 0, rng)
    if case.keep is not None:
        keep = _uniform(_shape(case, case.keep), rng) < case.keep_rate
        if case.keep_run:
            edge = case.N // 6
            keep = torch.zeros_like(keep)
            keep[..., edge : case.N - edge] = True
        keep = _empty_rows(case, keep, False)
    kv_begin = _limit(case, case.kv_begin, case.N // 2, case.N, rng)
    return Mask(case.causal, case.window, kv_len, keep, kv_begin)  # pyright: ignore[reportArgumentType]


def _limit(
    case: Case, kind: str | None, most: int, first: int, rng: torch.Generator
) -> Tensor | None:
    if kind is None:
        return None
    shape = (case.B,) if kind == "batch" else (case.B, case.M)
    limit = torch.randint(0, most + 1, shape, generator=rng, device=rng.device)
    limit = limit.sort(-1).values if kind == "sorted" else limit
    limit[:1] = first
    return limit
