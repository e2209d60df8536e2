"""The record that describes one attention problem, and what each of its parts means.

A public function validates its arguments once (``validate.py``) into a :class:`Problem`. Backend
choice, autograd, launchers and kernels read the record and never the arguments. The differentiable
tensors (query, key, value, weight, bias) travel beside it, so that autograd sees them.

Dims: B batch, H query heads, Hkv key heads, M queries, N keys, D head dim, E value dim.
Indices: b, h, i (query), j (key).
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastattn.problem import arguments

Score = Literal["dot", "additive"]
Weights = Literal["none", "full", "mean"]
# As operators take them: WeightsMode in csrc/problem/params.h. An operator that takes a str leaks
# it at every call, by torch's stable ABI.
WEIGHTS: dict[Weights, int] = {"none": 0, "full": 1, "mean": 2}


def weights_shape(weights: Weights, B: int, H: int, M: int, N: int) -> tuple[int, ...]:
    """Shape of the weights that a backend returns; ``(0,)`` when none are wanted."""
    return {"none": (0,), "full": (B, H, M, N), "mean": (B, M, N)}[weights]


def weights_of(number: int) -> Weights:
    """The name of a number in ``WEIGHTS``."""
    for name, known in WEIGHTS.items():
        if number == known:
            return name
    raise ValueError(f"weights: expected one of {WEIGHTS}, got {number}")


Alignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which (query i, key j) pairs take part. All constraints are ANDed; None means no constraint.

    Args:
        causal: ``"top_left"`` keeps ``j <= i`` (PyTorch's ``is_causal``); ``"bottom_right"`` keeps
            ``j <= i + N - M``: the last query sees every key (FlashAttention's).
        window: ``(left, right)`` keeps ``d - left <= j <= d + right`` around the diagonal ``d``.
            That is ``d = i + N - M`` with ``causal="bottom_right"``, and ``d = i`` otherwise. -1 is
            unbounded.
        kv_len: integer tensor with values in ``[0, N]``. ``[B]`` keeps ``j < kv_len[b]``;
            ``[B, M]`` keeps ``j < kv_len[b, i]``.
        keep: bool tensor broadcastable to ``[B, H, M, N]``; True keeps. For inputs without a head
            dim, it is broadcastable to ``[B, M, N]``.

    A row that keeps no key has output 0, weights 0, log-sum-exp -inf and gradients 0.

    Kept pairs (x) for M=3, N=5::

        causal="top_left"   causal="bottom_right"   window=(1, 1)   kv_len=[2]
          x . . . .            x x x . .              x x . . .      x x . . .
          x x . . .            x x x x .              x x x . .      x x . . .
          x x x . .            x x x x x              . x x x .      x x . . .

    Example:
        >>> q = k = v = torch.randn(2, 4, 16, 8)
        >>> mask = fastattn.Mask(causal="top_left", window=(4, -1), kv_len=torch.tensor([16, 9]))
        >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=mask)
    """

    causal: Alignment | None = None
    window: tuple[int, int] | None = None
    kv_len: Tensor | None = None
    keep: Tensor | None = None

    @staticmethod
    def local(radius: int) -> Mask:
        """Each query sees the keys at most ``radius`` positions away: restricted self-attention.

        Same as ``Mask(window=(radius, radius))``. The kernels skip all other keys: the cost is that
        of M * (2 radius + 1) pairs.

        Raises:
            TypeError: the radius is no int.
            ValueError: the radius is negative.

        Source: Vaswani et al., "Attention Is All You Need", 2017, section 4.

        Example:
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=fastattn.Mask.local(128))
        """
        arguments.check_int("radius", radius, 0)
        return Mask(window=(radius, radius))

    @staticmethod
    def local_blocks(
        block: int,
        length: int,
        *,
        before: int = 0,
        after: int = 0,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Self-attention inside blocks: query i sees the keys of its block and of some neighbours.

        Kept pairs (x) for block=2, length=5::

            before=0       before=1
            x x . . .      x x . . .
            x x . . .      x x . . .
            . . x x .      x x x x .
            . . x x .      x x x x .
            . . . . x      . . x x x

        The mask holds length * length booleans; the kernels read those near the diagonal only. For
        a causal mask, pass ``is_causal=True`` to the function too.

        Args:
            block: positions in a block, at least 1; the last one may be shorter.
            length: M = N, how many positions there are.
            before: how many earlier blocks are seen too.
            after: how many later blocks are seen too.
            device: of the inputs.

        Raises:
            TypeError: a number is no int.
            ValueError: ``block`` is below 1, or another number is negative.

        Example:
            >>> mask = fastattn.Mask.local_blocks(64, 1000, before=1)
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, mask=mask)
        """
        arguments.check_int("block", block, 1)
        for name, count in (("length", length), ("before", before), ("after", after)):
            arguments.check_int(name, count, 0)
        number = torch.arange(length, device=device) // block
        ahead = number - number[:, None]  # of block by block
        # The band that holds these blocks spares the kernels the rest of keep.
        band = (block * (before + 1) - 1, block * (after + 1) - 1)
        return Mask(window=band, keep=(ahead >= -before) & (ahead <= after))

    def to_dense(self, M: int, N: int, B: int = 1, H: int = 1) -> Tensor:
        """The mask written out: bool ``[B, H, M, N]``, True where query i sees key j.

        It lies on the device of ``kv_len`` and ``keep``, or on the CPU if there is neither.

        Args:
            M: how many queries.
            N: how many keys.
            B: how many samples; at least as many as ``kv_len`` has.
            H: how many heads.

        Raises:
            TypeError: a size is no int, or a tensor of the mask has a wrong dtype.
            ValueError: a size is negative, or a tensor of the mask does not fit the sizes.

        Example:
            >>> fastattn.Mask(window=(1, 1)).to_dense(3, 3)[0, 0].int()
            tensor([[1, 1, 0],
                    [1, 1, 1],
                    [0, 1, 1]], dtype=torch.int32)
        """
        from fastattn.problem import validate  # which imports this module

        for name, size in (("M", M), ("N", N), ("B", B), ("H", H)):
            arguments.check_int(name, size, 0)
        device = next((x.device for x in (self.kv_len, self.keep) if x is not None), None)
        query, key = (torch.empty(B, H, n, 0, device=device) for n in (M, N))
        p = validate.build("dot", query, key, key, mask=self).p
        return p.kept().expand(B, H, M, N).contiguous()


MASK_FIELDS = tuple(field.name for field in dataclasses.fields(Mask))
# What autograd, transforms and operators see of a mask, in their order.
MASK_TENSORS = tuple(f.name for f in dataclasses.fields(Mask) if "Tensor" in str(f.type))


def kinds(mask: Mask) -> tuple[str, ...]:
    """The names of the constraints that a mask has."""
    present = [(name, getattr(mask, name)) for name in MASK_FIELDS]
    # An alignment is its own name.
    return tuple(x if isinstance(x, str) else n for n, x in present if x is not None)


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention weights with probability ``p``; survivors times ``1 / (1 - p)``.

    Whether a weight survives is a pure function of ``(seed, b, h, i, j)``, the same on every
    backend. The function is Philox4x32 with 7 rounds, of counter ``(j // 4, i, h, b)`` and key
    ``seed``. The weight survives when output word ``j % 4`` is at least ``p * 2**32``.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """

    p: float
    seed: Tensor | None  # int64, shape []; None only while the record travels without its tensors

    @property
    def threshold(self) -> int:
        """A weight survives when its 32 bits are >= this."""
        return min(int(self.p * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        """What survivors are multiplied by; 0 for p = 1, whose threshold 2**32 no word can hold."""
        return 0.0 if self.p >= 1.0 else 1.0 / (1.0 - self.p)

    def bits(self, p: Problem) -> Tensor:
        """The random bits, int64 in ``[0, 2**32)``, shape ``[B, H, M, N]``."""

        def counter(size: int, dim: int) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[dim] = -1
            return torch.arange(size, dtype=torch.int64, device=p.device).view(shape)

        assert self.seed is not None
        word_blocks = (p.N + 3) // 4
        words = _philox4x32(
            self.seed.to(p.device),
            (counter(word_blocks, 3), counter(p.M, 2), counter(p.H, 1), counter(p.B, 0)),
        )
        stacked = torch.stack([w.expand(p.B, p.H, p.M, word_blocks) for w in words], dim=-1)
        return stacked.flatten(-2)[..., : p.N]

    def factors(self, p: Problem, dtype: torch.dtype) -> Tensor:
        """What each weight is multiplied by: 0 or ``scale``, shape ``[B, H, M, N]``."""
        return (self.bits(p) >= self.threshold).to(dtype) * self.scale


def _philox4x32(seed: Tensor, counters: tuple[Tensor, ...], rounds: int = 7) -> tuple[Tensor, ...]:
    # 32-bit words in int64: a 64-bit product may wrap negative, but its halves are still read off
    # right by shift and mask.
    low32 = 0xFFFFFFFF
    c0, c1, c2, c3 = counters
    key0, key1 = seed & low32, (seed >> 32) & low32
    for _ in range(rounds):
        prod0, prod1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((prod1 >> 32) & low32) ^ c1 ^ key0, prod1 & low32
        c2, c3 = ((prod0 >> 32) & low32) ^ c3 ^ key1, prod0 & low32
        key0, key1 = (key0 + 0x9E3779B9) & low32, (key1 + 0xBB67AE85) & low32
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem: ``out = dropout(softmax(score(q, k) + bias, masked)) @ v``.

    ``score`` is ``"dot"`` (``scale * q . k``) or ``"additive"`` (``sum_d w_d tanh(q_d + k_d)``).
    The scores of :func:`fastattn.attention` are more: its ``"scaled_dot"``, ``"dot"``, ``"cosine"``
    and ``"gaussian"`` all become the ``"dot"`` of the record, and its own ``"dot"`` has scale 1.

    Tensors have the canonical shapes q ``[B, H, M, D]``, k ``[B, Hkv, N, D]``,
    v ``[B, Hkv, N, E]``, w ``[H, D]`` and bias ``[B|1, H|1, M|1, N|1]``. Query head h reads key
    head ``h // (H // Hkv)``.

    ``weights`` says which attention weights are returned beside the output: those after dropout,
    for each head (``"full"``) or averaged over heads (``"mean"``).
    """

    score: Score
    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float = 1.0
    mask: Mask = dataclasses.field(default_factory=Mask)
    dropout: Dropout | None = None
    weights: Weights = "none"
    # What operators take after (q, k, v, w, bias): see schemas.Call. Made once, not at every call.
    operands: tuple = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        masks = [getattr(self.mask, name) for name in MASK_TENSORS]
        p, seed = (0.0, None) if self.dropout is None else (self.dropout.p, self.dropout.seed)
        band = self.band()
        operands = (*masks, seed, *band, self.scale, p, WEIGHTS[self.weights])
        object.__setattr__(self, "operands", operands)

    def __str__(self) -> str:
        """One line: the score, the dims by name, and what else the problem has."""
        dims = " ".join(f"{name}={getattr(self, name)}" for name in "B H Hkv M N D E".split())
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"{self.score} attention: {dims}", f"{dtype} on {self.device.type}"]
        parts += [f"mask {' '.join(kinds(self.mask))}"] if kinds(self.mask) else []
        parts += ["dropout"] if self.dropout else []
        parts += [f"weights {self.weights}"] if self.weights != "none" else []
        return ", ".join(parts)

    def band(self) -> tuple[int | None, int | None]:
        """Causal and window in one: keeps ``i + lo <= j <= i + hi``, None where unbounded."""
        mask = self.mask
        diagonal = self.N - self.M if mask.causal == "bottom_right" else 0
        left, right = mask.window or (-1, -1)
        if mask.causal is not None:
            right = 0
        return (None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)

    def kept(self) -> Tensor:
        """The definition of the mask: bool, broadcastable to ``[B, H, M, N]``, True keeps.

        It is slow on purpose: only the reference and the tests use it. It expects the mask in its
        validated form: ``kv_len`` int32 ``[B, 1]`` or ``[B, M]``, ``keep`` with 4 dims.
        """
        i = torch.arange(self.M, device=self.device)[:, None]
        j = torch.arange(self.N, device=self.device)[None, :]
        kept = torch.ones(1, 1, self.M, self.N, dtype=torch.bool, device=self.device)
        lo, hi = self.band()
        if lo is not None:
            kept = kept & (j >= i + lo)
        if hi is not None:
            kept = kept & (j <= i + hi)
        if self.mask.kv_len is not None:
            kept = kept & (j < self.mask.kv_len[:, None, :, None])
        if self.mask.keep is not None:
            kept = kept & self.mask.keep
        return kept

    @property
    def acc_dtype(self) -> torch.dtype:
        """What sums are accumulated in, and the log-sum-exp's dtype: fp64 for fp64, else fp32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def dropout_p(self) -> float:
        """Dropout probability, 0 without dropout."""
        return 0.0 if self.dropout is None else self.dropout.p

    def weights_shape(self) -> tuple[int, ...]:
        """Shape of the weights that a backend returns; ``(0,)`` when none are wanted."""
        return weights_shape(self.weights, self.B, self.H, self.M, self.N)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors inside the record: ``MASK_TENSORS``, and the seed."""
        return self.operands[: len(MASK_TENSORS) + 1]

    def with_tensors(self, *tensors: Tensor | None) -> Problem:
        """The same problem around other tensors, as functional transforms need it."""
        if all(map(operator.is_, self.tensors(), tensors)):
            return self
        *masks, seed = tensors
        mask = dataclasses.replace(self.mask, **dict(zip(MASK_TENSORS, masks, strict=True)))
        dropout = None if self.dropout is None else Dropout(self.dropout.p, seed)
        return dataclasses.replace(self, mask=mask, dropout=dropout)
