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
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattn.problem.mask import MASK_TENSORS, Mask, band_of, kept_by, kinds
from fastattn.problem.schemas import Call

Score = Literal["dot", "additive", "gaussian"]
Weights = Literal["none", "full", "mean"]
Name = TypeVar("Name", Score, Weights)
# Gradients of (q, k, v, w, bias, sink).
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
# As operators take them: WeightsMode in csrc/problem/params.h. An operator that takes a str leaks
# it at every call, by torch's stable ABI.
WEIGHTS: dict[Weights, int] = {"none": 0, "full": 1, "mean": 2}
SCORES: dict[Score, int] = {"dot": 0, "additive": 1, "gaussian": 2}  # ScoreKind there


def weights_shape(weights: Weights, B: int, H: int, M: int, N: int) -> tuple[int, ...]:
    """Shape of the weights that a backend returns; ``(0,)`` when none are wanted."""
    return {"none": (0,), "full": (B, H, M, N), "mean": (B, M, N)}[weights]


def out_dims(q: Tensor) -> tuple[int, int, int, int]:
    """The dims of the output ``[B, H, M, E]`` as memory orders them, outermost first: as in q.

    ``torch.nn.functional.scaled_dot_product_attention`` lays out its output so too. A contiguous q
    gets a contiguous output; the output of heads split from tokens merges into tokens as a view.
    With other orders, and expanded heads, the output is contiguous.
    """
    b, h, m, _ = q.stride()
    if q.shape[1] != 1 and not 0 < h < m:  # the stride of one head means nothing
        return 0, 1, 2, 3
    return (2, 0, 1, 3) if 0 < b < m else (0, 2, 1, 3)


def empty_out(q: Tensor, E: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised output ``[B, H, M, E]``, laid out as ``out_dims`` says."""
    B, H, M, _ = q.shape
    return torch.empty_permuted((B, H, M, E), out_dims(q), dtype=dtype, device=q.device)


def laid_out(q: Tensor, out: Tensor) -> Tensor:
    """A copy of an output, laid out as ``out_dims`` says."""
    dims = out_dims(q)
    # Not written into a new tensor: compiled by torch 2.11, that write is lost.
    copy = out.permute(dims).clone(memory_format=torch.contiguous_format)
    return copy.permute([dims.index(d) for d in range(4)])


def returned(*results: Tensor) -> tuple[Tensor, ...]:
    """The results of a Function's forward, which are tensors of their own in compiled code.

    Compiled by torch 2.11, a Function returns every tensor that its forward makes. In-place work
    and a cast to the same dtype return a tensor that is there already. As two results, it gets its
    gradient at the last place, where nobody reads it.
    """
    if not torch.compiler.is_compiling():
        return results
    return tuple(x.detach() for x in results)


def empty_gradient(x: Tensor, wide: bool) -> Tensor:
    """An uninitialised gradient of x as backends lay it out: contiguous if of another dtype."""
    if wide and x.dtype != torch.float32:
        return x.new_empty(x.shape, dtype=torch.float32)
    return torch.empty_like(x)


def weights_of(number: int) -> Weights:
    """The name of a number in ``WEIGHTS``."""
    return _named("weights", WEIGHTS, number)


def score_of(number: int) -> Score:
    """The name of a number in ``SCORES``."""
    return _named("score", SCORES, number)


def _named(argument: str, numbers: dict[Name, int], number: int) -> Name:
    for name, known in numbers.items():
        if number == known:
            return name
    raise ValueError(f"{argument}: expected one of {numbers}, got {number}")


def natural_scale(p: Problem | Call, plain: float) -> float:
    """The factor from the number in a score's place to the natural logit: ``plain`` for a score.

    Under a softcap c, the ratio ``tanh(score / c)`` stands there, and the factor is c.
    """
    return p.softcap or plain


def is_curved(p: Problem | Call) -> bool:
    """Whether a curve, a function of the score alone, takes its place before bias and mask."""
    return bool(p.softcap)


class Origin(NamedTuple):
    """Where a problem, a block, lies in a larger one, the whole.

    The pair (b, h, i, j) of the block is the pair (b + origin.b, h + origin.h, i + origin.i,
    j + origin.j) of the whole. Bands and dropout's bits are those of the whole. The tensors of the
    block's mask are cut from those of the whole, and count from the block's first key.

    ``M`` and ``N`` are the sizes of the whole; None: those of the block.
    """

    b: int = 0
    h: int = 0
    i: int = 0
    j: int = 0
    M: int | None = None
    N: int | None = None


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention weights with probability ``p``; survivors times ``1 / (1 - p)``.

    Whether a weight survives is a pure function of ``(seed, b, h, i, j)``, the same on every
    backend. The function is Philox4x32 with 7 rounds, of counter ``(j // 4, i, h, b)`` and key
    ``seed``. The weight survives when output word ``j % 4`` is at least ``p * 2**32``. The indices
    of a block are those of the whole.

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

        def counter(first: int, size: int, dim: int) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[dim] = -1
            count = torch.arange(size, dtype=torch.int64, device=p.device)
            return (count + first).view(shape)

        assert self.seed is not None
        word_blocks = (p.N + 3) // 4
        b, h, i, j = p.origin[:4]
        counters = (
            counter(j // 4, word_blocks, 3), counter(i, p.M, 2), counter(h, p.H, 1),
            counter(b, p.B, 0),
        )  # fmt: skip
        words = _philox4x32(self.seed.to(p.device), counters)
        stacked = torch.stack([w.expand(p.B, p.H, p.M, word_blocks) for w in words], dim=-1)
        return stacked.flatten(-2)[..., : p.N]

    def factors(self, p: Problem, dtype: torch.dtype) -> Tensor:
        """What each weight is multiplied by: 0 or ``scale``, shape ``[B, H, M, N]``."""
        return (self.bits(p) >= self.threshold).to(dtype) * self.scale


def _philox4x32(seed: Tensor, counters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # 32-bit words in int64: a 64-bit product may wrap negative, but its halves are still read off
    # right by shift and mask.
    low32 = 0xFFFFFFFF
    c0, c1, c2, c3 = counters
    key0, key1 = seed & low32, (seed >> 32) & low32
    for _ in range(7):
        prod0, prod1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((prod1 >> 32) & low32) ^ c1 ^ key0, prod1 & low32
        c2, c3 = ((prod0 >> 32) & low32) ^ c3 ^ key1, prod0 & low32
        key0, key1 = (key0 + 0x9E3779B9) & low32, (key1 + 0xBB67AE85) & low32
    return c0, c1, c2, c3


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem: ``out = dropout(softmax(score(q, k) + bias, masked)) @ v``.

    ``score`` is ``"dot"`` (``scale * q . k``), ``"additive"`` (``sum_d w_d tanh(q_d + k_d)``) or
    ``"gaussian"`` (``-1/2 sum_d (q_d - k_d)^2 / w_d^2``, w being bandwidths). A ``softcap`` c that
    is not 0 replaces the score by ``c tanh(score / c)``, before bias and mask.
    :func:`fastattn.attention` has more scores. Its ``"scaled_dot"``, ``"dot"`` and ``"cosine"`` all
    become the ``"dot"`` of the record, and its own ``"dot"`` has scale 1.

    Tensors have the canonical shapes q ``[B, H, M, D]``, k ``[B, Hkv, N, D]``,
    v ``[B, Hkv, N, E]``, w ``[H, D]`` and bias ``[B|1, H|1, M|1, N|1]``, or a line (relative.py).
    Query head h reads key head ``h // (H // Hkv)``. The gaussian's w is fp32 at least, and
    ``[B, H, D]`` where samples differ.

    ``weights`` says which attention weights are returned beside the output: those after dropout,
    for each head (``"full"``) or averaged over heads (``"mean"``).

    ``origin`` says where a block lies in a larger problem. With ``wide``, the output and the
    gradients of q, k and v are in ``acc_dtype``, for sums over blocks.
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
    softcap: float = 0.0
    mask: Mask = dataclasses.field(default_factory=Mask)
    dropout: Dropout | None = None
    weights: Weights = "none"
    origin: Origin = Origin()  # noqa: RUF009, a tuple of numbers
    wide: bool = False
    # What operators take after (q, k, v, w, bias): see schemas.Call. Made once, not at every call.
    operands: tuple = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        masks = [getattr(self.mask, name) for name in MASK_TENSORS]
        p, seed = (0.0, None) if self.dropout is None else (self.dropout.p, self.dropout.seed)
        band = self.band()
        if self.dropout is not None and self.origin.j % 4:
            raise ValueError(
                f"origin.j: expected a multiple of 4 with dropout, got {self.origin.j}: four keys "
                "share their random bits"
            )
        numbers = self.scale, self.softcap, p, *self.origin[:4]
        names = WEIGHTS[self.weights], SCORES[self.score]
        operands = (*masks, seed, *band, *numbers, *names, self.wide)
        object.__setattr__(self, "operands", operands)

    @classmethod
    def of(cls, call: Call, band: Mask, origin: Origin, N: int) -> Problem:
        """The problem of N keys whose operands these are; k and v may be a part of the keys.

        ``band``: its causal and window. ``origin`` knows the sizes of the whole.
        """
        (B, H, M, D), Hkv, E = call.q.shape, call.k.shape[1], call.v.shape[3]
        own = {name: getattr(call, name) for name in MASK_TENSORS}
        dropout = None if call.seed is None else Dropout(call.dropout_p, call.seed)
        return cls(
            score_of(call.score), B, H, Hkv, M, N, D, E, call.q.dtype, call.q.device, call.scale,
            call.softcap, dataclasses.replace(band, **own), dropout, weights_of(call.weights),
            origin, call.wide,
        )  # fmt: skip

    def __str__(self) -> str:
        """One line: the score, the dims by name, and what else the problem has."""
        dims = " ".join(f"{name}={getattr(self, name)}" for name in "B H Hkv M N D E".split())
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"{self.score} attention: {dims}", f"{dtype} on {self.device.type}"]
        parts += [f"mask {' '.join(kinds(self.mask))}"] if kinds(self.mask) else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["dropout"] if self.dropout else []
        parts += [f"weights {self.weights}"] if self.weights != "none" else []
        if self.origin != Origin():
            parts += [
                f"a block at b={self.origin.b} h={self.origin.h} i={self.origin.i} "
                f"j={self.origin.j}"
            ]
        parts += ["wide"] if self.wide else []
        return ", ".join(parts)

    def band(self) -> tuple[int | None, int | None]:
        """Causal and window in one: keeps ``i + lo <= j <= i + hi``, None where unbounded."""
        M = self.M if self.origin.M is None else self.origin.M
        N = self.N if self.origin.N is None else self.origin.N
        lo, hi = band_of(self.mask, M, N)
        shift = self.origin.i - self.origin.j
        return lo if lo is None else lo + shift, hi if hi is None else hi + shift

    def kept(self) -> Tensor:
        """The definition of the mask: bool, broadcastable to ``[B, H, M, N]``, True keeps."""
        return kept_by(self.mask, self.band(), self.M, self.N, self.device)

    @property
    def acc_dtype(self) -> torch.dtype:
        """What sums are accumulated in, and the log-sum-exp's dtype: fp64 for fp64, else fp32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output, and of the gradients of q, k and v."""
        return self.acc_dtype if self.wide else self.dtype

    def weights_shape(self) -> tuple[int, ...]:
        """Shape of the weights that a backend returns; ``(0,)`` when none are wanted."""
        return weights_shape(self.weights, self.B, self.H, self.M, self.N)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors inside the record: ``MASK_TENSORS``, and the seed."""
        return self.operands[: len(MASK_TENSORS) + 1]

    def with_tensors(self, *tensors: Tensor | None) -> Problem:
        """The same problem around other tensors, as functional transforms need it."""
        if all(map(operator.is_, self.operands, tensors)):  # which begin with the tensors
            return self
        *masks, seed = tensors
        own = dict(zip(MASK_TENSORS, masks, strict=True))
        dropout = None if self.dropout is None else Dropout(self.dropout.p, seed)
        if torch.compiler.is_compiling():  # which cannot trace what follows
            mask = dataclasses.replace(self.mask, **own)
            return dataclasses.replace(self, mask=mask, dropout=dropout)
        operands = (*tensors, *self.operands[len(tensors) :])
        mask = _changed(self.mask, own)
        return _changed(self, {"mask": mask, "dropout": dropout, "operands": operands})


def _changed(record: Any, fields: dict[str, Any]) -> Any:
    """``dataclasses.replace`` in a tenth of its time; ``fields`` hold what is derived, too."""
    made = object.__new__(type(record))
    made.__dict__.update(record.__dict__)
    made.__dict__.update(fields)
    return made
