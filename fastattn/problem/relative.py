"""Biases that depend on the head and on how far key and query are apart, and on nothing else.

A matrix of such numbers has one number a diagonal. So a head has one line of M + N - 1 numbers,
``[B|1, H|1, 1, M + N - 1]``, in which the pair (i, j) is at ``j - i + M - 1``. Backends take a line
in place of a bias ``[B|1, H|1, M|1, N|1]``: :func:`is_line` tells them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.problem import arguments

# ---- lines and matrices ----


def is_line(bias: Tensor | None, M: int, N: int) -> bool:
    """Whether a canonical bias is a line. One row of a matrix has N elements or 1, and not more."""
    return bias is not None and M > 1 and bias.shape[-2] == 1 and bias.shape[-1] == M + N - 1


def spread(line: Tensor, M: int, N: int) -> Tensor:
    """The matrix ``[..., M, N]`` of a line ``[..., 1, M + N - 1]``."""
    # The mirror of diagonal_sums. Tensor.unfold would make compiled code for one N.
    lead = line.shape[:-2]
    flat = line.expand(*lead, M, M + N - 1).reshape(*lead, M * (M + N - 1))
    return F.pad(flat, (0, M)).reshape(*lead, M, M + N)[..., :N].flip(-2)


def diagonal_sums(x: Tensor) -> Tensor:
    """The line ``[..., 1, M + N - 1]`` of the sums of a matrix: the transpose of :func:`spread`."""
    M, N = x.shape[-2:]
    # Rows of M + N elements, read as rows of one less: each row begins one further to the right.
    # By reshape: batched gradients (is_grads_batched) have no rule for flatten and unflatten.
    lead = x.shape[:-2]
    flat = F.pad(x.flip(-2), (0, M)).reshape(*lead, M * (M + N))[..., : M * (M + N - 1)]
    return flat.reshape(*lead, M, M + N - 1).sum(-2, keepdim=True)


# ---- what users write ----


class Relative:
    """A bias of key j and query i that is a function of the head and of ``j - i - offset``."""

    parameter: str  # the name of the tensor that has a gradient
    offset: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is wrong beside any query."""
        offset, x = self.offset, getattr(self, self.parameter)
        if not arguments.is_int(offset):
            raise TypeError(f"bias.offset: expected an int, got {type(offset).__name__}")
        if not -(2**31) <= offset < 2**31:
            raise ValueError(f"bias.offset: expected an int of 32 bits, got {offset}")
        if isinstance(x, Tensor):
            self._check(x)
        elif not arguments.stands_for_tensor(x):
            raise arguments.no_tensor(f"bias.{self.parameter}", x)

    def _check(self, x: Tensor) -> None:
        """Raises TypeError or ValueError unless the parameter fits the rest."""
        raise NotImplementedError

    def at(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers ``[B|1, H, n]`` of distances ``[n]``, of ``dtype`` at least."""
        raise NotImplementedError

    def to_dense(self, M: int, N: int) -> Tensor:
        """The numbers of M queries and N keys, ``[B|1, H, M, N]``: for code that adds a matrix."""
        M, N = arguments.check_int("M", M, 0), arguments.check_int("N", N, 0)
        line = self._line(M, N)
        return spread(line, M, N) if M > 1 else line[:, :, :M]

    def line(self, B: int, H: int, M: int, N: int, dtype: torch.dtype) -> Tensor:
        """``[B, H, 1, M + N - 1]``; ``[B, H, 1, N]`` of a single query.

        Its numbers are float64 where queries of ``dtype`` are, else float32. Samples have lines of
        their own: so have their gradients, which sums over samples follow.
        """
        line = self._line(M, N, torch.promote_types(dtype, torch.float32))
        size, heads = line.shape[:2]
        if heads != H or (size != 1 and size != B):
            shape = list(getattr(self, self.parameter).shape)
            raise ValueError(f"bias.{self.parameter}: expected {H} heads, got {shape}")
        return line.expand(B, H, 1, line.shape[-1])

    def _line(self, M: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.__post_init__()  # what the tensors are may have changed
        offset, x = arguments.as_int(self.offset), getattr(self, self.parameter)
        distances = torch.arange(1 - max(M, 1) - offset, N - offset, device=x.device)
        return self.at(distances, dtype).unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class ALiBi(Relative):
    """Linear biases: ``-slopes[h] * |j - i - offset|`` is added to the score of query i and key j.

    A value for ``bias=``. Memory and traffic are those of M + N - 1 numbers a head.

    Args:
        slopes: ``[H]`` or ``[B, H]``, float32 or the query's dtype, differentiable. Queries
            without a head dim take ``[1]``.
        offset: query i has distance 0 to key ``i + offset``. Queries that are the last M of N
            tokens, as in decoding with cached keys, have ``offset=N - M``. Default 0.

    Raises:
        TypeError: ``slopes`` is no tensor, or ``offset`` no int.
        ValueError: ``slopes`` have other dims, or ``offset`` more than 32 bits.

    Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
    Input Length Extrapolation", 2022.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> bias = fastattn.ALiBi(2.0 ** -torch.arange(1.0, 9.0))
        >>> out = fastattn.scaled_dot_product_attention(q, q, q, is_causal=True, bias=bias)
    """

    slopes: Tensor
    offset: int = 0
    parameter = "slopes"

    def at(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers ``[B|1, H, n]`` of distances ``[n]``, of ``dtype`` at least."""
        slopes = self.slopes.to(torch.promote_types(self.slopes.dtype, dtype))
        slopes = slopes.unsqueeze(0) if slopes.dim() == 1 else slopes
        return slopes.neg().unsqueeze(-1) * distances.abs()

    def _check(self, x: Tensor) -> None:
        if x.dim() not in (1, 2):
            raise ValueError(f"bias.slopes: expected [H] or [B, H], got {list(x.shape)}")


@dataclass(frozen=True, eq=False)
class RelativeBias(Relative):
    """Learned biases: adds ``table[b, h]``, where b is the bucket of ``j - i - offset``.

    A value for ``bias=``. Memory and traffic are those of M + N - 1 numbers a head. The gradient of
    the table has its shape, and its sums have a fixed order.

    Args:
        table: ``[buckets, H]``, float32 or the query's dtype, differentiable; -inf masks. Queries
            without a head dim take ``[buckets, 1]``.
        buckets: integers ``[2 R + 1]``: for each distance from -R to R, its row of the table.
            Larger distances take the row of R or -R. ``torch.arange(2 * R + 1)`` gives each
            distance a row of its own; :meth:`t5_buckets` gives those of T5.
        offset: query i has distance 0 to key ``i + offset``. Queries that are the last M of N
            tokens, as in decoding with cached keys, have ``offset=N - M``. Default 0.

    Raises:
        TypeError: ``table`` or ``buckets`` is no tensor, or ``offset`` no int.
        ValueError: a shape that does not fit, or an ``offset`` of more than 32 bits.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, section 2.1; Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative
    Position Representations", 2018, for distances that are clipped.

    Example:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> table = torch.randn(32, 8, requires_grad=True)
        >>> bias = fastattn.RelativeBias(table, fastattn.RelativeBias.t5_buckets())
        >>> out = fastattn.scaled_dot_product_attention(q, q, q, bias=bias)
    """

    table: Tensor
    buckets: Tensor
    offset: int = 0
    parameter = "table"

    @staticmethod
    def t5_buckets(
        count: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """T5's buckets of distances, int64 ``[2 * max_distance + 1]``.

        Half of the buckets hold one distance each. The other half hold ranges that grow with the
        logarithm of the distance, up to ``max_distance``.

        Args:
            count: how many buckets, at least 4, or 2 if not ``bidirectional``.
            max_distance: from this distance on, all share one bucket. More than the distances that
                have a bucket each.
            bidirectional: True for encoders: keys after the query have the upper half of the
                buckets. False for decoders: these keys share bucket 0, and a causal mask drops
                them.
            device: of the result. Default None: torch's default device.

        Raises:
            TypeError: a number is no int, or ``bidirectional`` is no bool.
            ValueError: ``count`` or ``max_distance`` is too small.
        """
        bidirectional = arguments.check_bool("bidirectional", bidirectional)
        count = arguments.check_int("count", count, 4 if bidirectional else 2)
        size = count // 2 if bidirectional else count
        exact = size // 2
        max_distance = arguments.check_size("max_distance", max_distance, exact + 1)
        ahead = torch.arange(-max_distance, max_distance + 1, device=device)
        far = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        coarse = (exact + (growth * (size - exact)).long()).clamp(max=size - 1)
        own = torch.where(far < exact, far, coarse)
        return own + size * (ahead > 0) if bidirectional else own

    def at(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers ``[B|1, H, n]`` of distances ``[n]``, of ``dtype`` at least."""
        self._check_rows()
        most = self.buckets.shape[0] // 2
        rows = self.buckets[distances.clamp(-most, most) + most]
        table = self.table.to(torch.promote_types(self.table.dtype, dtype))
        # Its gradient has a fixed order of sums, and that of an index has none on the CPU.
        return F.embedding(rows.long(), table).T.contiguous()[None]

    def _check(self, x: Tensor) -> None:
        buckets = self.buckets
        if x.dim() != 2:
            raise ValueError(f"bias.table: expected [buckets, H], got {list(x.shape)}")
        if not isinstance(buckets, Tensor) or buckets.dtype not in arguments.INTEGERS:
            got = buckets.dtype if isinstance(buckets, Tensor) else type(buckets).__name__
            raise TypeError(f"bias.buckets: expected a tensor of integers, got {got}")
        if buckets.dim() != 1 or buckets.shape[0] % 2 == 0:
            raise ValueError(
                f"bias.buckets: expected [2 R + 1], distances -R to R, got {list(buckets.shape)}"
            )
        if buckets.device != x.device:
            raise ValueError(
                f"bias.buckets: expected the device of the table, {x.device}, got {buckets.device}"
            )

    def _check_rows(self) -> None:
        if arguments.can_read(self.buckets):
            rows, (low, high) = self.table.shape[0], map(int, self.buckets.aminmax())
            if not 0 <= low <= high < rows:
                raise ValueError(
                    f"bias.buckets: expected rows of a table of {rows}, got {low} to {high}"
                )
