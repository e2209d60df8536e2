"""Masks: what each field of :class:`Mask` means, and the masks that have a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn.problem import arguments, intervals

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
        kv_len: integers in ``[0, N]``, a tensor or a list. ``[B]`` keeps ``j < kv_len[b]``;
            ``[B, M]`` keeps ``j < kv_len[b, i]``, and ``[1, M]`` is for every sample. Beside
            inputs with batch dims ``[1, M]`` it could be of samples or of rows, which is a
            ValueError.
        keep: bool tensor that broadcasts to ``[B, H, M, N]``; True keeps. For inputs without a head
            dim it broadcasts to ``[B, M, N]``, and so does one of 3 dims in a module.
        kv_begin: integers of the same shapes as those of ``kv_len``, which keep ``j >= kv_begin``.
            Both together leave each query an interval of keys. An interval may be empty.

    A row that keeps no key has output 0, weights 0, log-sum-exp -inf and gradients 0. The call that
    gets a mask checks it.

    Kept pairs (x) for M=3, N=5::

        causal="top_left"   causal="bottom_right"   window=(1, 1)   kv_len=[2]   kv_begin=[3]
          x . . . .            x x x . .              x x . . .      x x . . .     . . . x x
          x x . . .            x x x x .              x x x . .      x x . . .     . . . x x
          x x x . .            x x x x x              . x x x .      x x . . .     . . . x x

    Example:
        >>> q = k = v = torch.randn(2, 4, 16, 8)
        >>> mask = fastattn.Mask(causal="top_left", window=(4, -1), kv_len=[16, 9])
        >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=mask)
    """

    causal: Alignment | None = None
    window: tuple[int, int] | None = None
    kv_len: Tensor | Sequence[Any] | None = None
    keep: Tensor | None = None
    kv_begin: Tensor | Sequence[Any] | None = None

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
            >>> q = k = v = torch.randn(2, 4, 1000, 8)
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=fastattn.Mask.local(128))
        """
        radius = arguments.check_int("radius", radius, 0)
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

        The mask holds two integers a position. The kernels skip all other keys. For a causal mask,
        pass ``is_causal=True`` to the function too.

        Args:
            block: positions in a block, at least 1; the last one may be shorter.
            length: M = N, how many positions there are.
            before: how many earlier blocks are seen too.
            after: how many later blocks are seen too.
            device: of the inputs. Default None: torch's default device.

        Raises:
            TypeError: a number is no int.
            ValueError: ``block`` is below 1, or another number is negative.

        Example:
            >>> q = k = v = torch.randn(2, 4, 1000, 8)
            >>> mask = fastattn.Mask.local_blocks(64, 1000, before=1)
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, mask=mask)
        """
        block = arguments.check_size("block", block, 1)
        length, before, after = (
            arguments.check_size(name, count)
            for name, count in (("length", length), ("before", before), ("after", after))
        )
        number = torch.arange(length, device=device)[None] // block
        begin, end = (number - before) * block, (number + after + 1) * block
        return Mask(kv_begin=begin.clamp(min=0), kv_len=end.clamp(max=length))

    @staticmethod
    def documents(
        cu_seqlens: Tensor | Sequence[int] | None = None,
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        causal: bool | Alignment = False,
        window: tuple[int, int] | None = None,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Documents packed one after the other: a query sees the keys of its own document.

        Kept pairs (x) for lengths=[2, 3]::

            causal=False   causal=True    window=(1, 0)
            x x . . .      x . . . .      x . . . .
            x x . . .      x x . . .      x x . . .
            . . x x x      . . x . .      . . x . .
            . . x x x      . . x x .      . . x x .
            . . x x x      . . x x x      . . . x x

        The mask holds two integers a position. The kernels skip the keys of other documents. Build
        the mask once, and use it in every layer. A document may be empty. A query past the last
        document sees no key, and its output is 0.

        Args:
            cu_seqlens: where each document begins, and where the last one ends: integers
                ``[n + 1]`` that begin with 0 and do not decrease. A tensor or a list.
            cu_seqlens_k: the same of the keys, for cross-attention. Default None: as the queries.
            lengths: integers ``[n]``, how long each document is, instead of ``cu_seqlens``.
            causal: True or ``"bottom_right"``: the last query of a document sees all its keys.
                ``"top_left"``: the first query sees the first key only. Both are the same where
                queries and keys have the same documents.
            window: ``(left, right)`` around the diagonal of each document, as in :class:`Mask`. The
                diagonal ends with the document, or begins with it for ``causal="top_left"``.
            length: how many queries there are, at least ``cu_seqlens[-1]``. Default None: as many,
                which waits for the device if ``cu_seqlens`` is on a GPU.
            device: of the inputs, if a list is given. Default None: torch's default device.

        Raises:
            TypeError: an argument of a wrong type or dtype.
            ValueError: both or neither of ``cu_seqlens`` and ``lengths``, or wrong shapes. Wrong
                values too, if they are on the CPU. On a GPU they never make a kernel read out of
                bounds.

        Example:
            >>> q = k = v = torch.randn(1, 4, 5, 8)
            >>> mask = fastattn.Mask.documents(lengths=[2, 3], causal=True)
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=mask)
        """
        offsets = intervals.offsets_of(cu_seqlens, lengths, device)
        offsets_k = offsets
        if cu_seqlens_k is not None:
            offsets_k = intervals.checked_offsets("cu_seqlens_k", cu_seqlens_k, offsets.device)
            intervals.check_end("cu_seqlens_k", offsets_k)
        if length is None:
            length = intervals.end_of(cu_seqlens, lengths)
        begin, end = intervals.documents(offsets, offsets_k, length, causal, window)
        return Mask(kv_begin=begin, kv_len=end)

    @staticmethod
    def segments(
        ids: Tensor | Sequence[Any],
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Self-attention inside segments: a query sees the keys that have its own id.

        Kept pairs (x) for ids=[7, 7, 2, 2, 2]::

            causal=False   causal=True    window=(1, 0)
            x x . . .      x . . . .      x . . . .
            x x . . .      x x . . .      x x . . .
            . . x x x      . . x . .      . . x . .
            . . x x x      . . x x .      . . x x .
            . . x x x      . . x x x      . . . x x

        Args:
            ids: integers ``[B, M]``, or ``[M]`` for every sample. Positions of the same id must be
                neighbours. On the CPU that is checked. On a GPU, an id that comes again begins a
                segment of its own.
            causal: whether a query sees no later key.
            window: ``(left, right)`` around the position, as in :class:`Mask`.
            device: of the inputs, if a list is given. Default None: torch's default device.

        Raises:
            TypeError: an argument of a wrong type or dtype.
            ValueError: a wrong shape, or an id whose positions are not neighbours.

        Example:
            >>> ids = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])
            >>> q = k = v = torch.randn(2, 4, 5, 8)
            >>> out = fastattn.scaled_dot_product_attention(
            ...     q, k, v, mask=fastattn.Mask.segments(ids))
        """
        begin, end = intervals.segments(ids, causal, window, device)
        return Mask(kv_begin=begin, kv_len=end)

    @staticmethod
    def prefix(
        lengths: Tensor | Sequence[int],
        length: int,
        *,
        device: torch.device | str | None = None,
    ) -> Mask:
        """Prefix language models: every query sees the prefix, and beyond it no later key.

        Kept pairs (x) for lengths=[3], length=5::

            x x x . .
            x x x . .
            x x x . .
            x x x x .
            x x x x x

        Args:
            lengths: integers ``[B]``, how long each sample's prefix is; ``[1]`` for every sample.
            length: M = N, how many positions there are.
            device: of the inputs, if a list is given. Default None: torch's default device.

        Raises:
            TypeError: an argument of a wrong type or dtype.
            ValueError: a wrong shape, or, on the CPU, lengths outside ``[0, length]``.

        Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
        Text-to-Text Transformer", 2020, section 3.2.1.

        Example:
            >>> q = k = v = torch.randn(2, 4, 5, 8)
            >>> mask = fastattn.Mask.prefix([3, 1], length=5)
            >>> out = fastattn.scaled_dot_product_attention(q, k, v, mask=mask)
        """
        return Mask(kv_len=intervals.prefix(lengths, length, device))

    def to(self, device: torch.device | str) -> Mask:
        """The mask with its tensors on a device. Lists stay as they are.

        Example:
            >>> mask = fastattn.Mask.documents(lengths=[2, 3]).to("cpu")
        """
        own = {name: getattr(self, name) for name in MASK_TENSORS}
        moved = {name: x.to(device) for name, x in own.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved)

    def to_dense(self, M: int, N: int, B: int = 1, H: int = 1) -> Tensor:
        """The mask written out: bool ``[B, H, M, N]``, True where query i sees key j.

        It lies on the device of the mask's tensors, or on torch's default device if it has none.

        Args:
            M: how many queries.
            N: how many keys.
            B: how many samples: as many as ``kv_len`` and ``kv_begin`` have.
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

        sizes = ("M", M), ("N", N), ("B", B), ("H", H)
        M, N, B, H = (arguments.check_int(name, size, 0) for name, size in sizes)
        own = (getattr(self, name) for name in MASK_TENSORS)
        device = next((x.device for x in own if isinstance(x, Tensor)), None)
        query, key = (torch.empty(B, H, n, 0, device=device) for n in (M, N))
        p = validate.build("dot", query, key, key, mask=self).p
        return p.kept().expand(B, H, M, N).contiguous()


MASK_FIELDS = tuple(field.name for field in dataclasses.fields(Mask))
# What autograd, transforms and operators see of a mask, in their order.
MASK_TENSORS = tuple(f.name for f in dataclasses.fields(Mask) if "Tensor" in str(f.type))
# Those that are a key's position for each row, ``[B|1, M|1]``. The other one has pairs.
LIMITS = tuple(name for name in MASK_TENSORS if name != "keep")


def kinds(mask: Mask) -> tuple[str, ...]:
    """The names of the constraints that a mask has."""
    present = [(name, getattr(mask, name)) for name in MASK_FIELDS]
    # An alignment is its own name.
    return tuple(x if isinstance(x, str) else n for n, x in present if x is not None)


def band_of(mask: Mask, M: int, N: int) -> tuple[int | None, int | None]:
    """Causal and window in one: keeps ``i + lo <= j <= i + hi``, None where unbounded."""
    diagonal = N - M if mask.causal == "bottom_right" else 0
    left, right = mask.window or (-1, -1)
    if mask.causal is not None:
        right = 0
    return (None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)


def kept_by(
    mask: Mask, band: tuple[int | None, int | None], M: int, N: int, device: torch.device
) -> Tensor:
    """The definition of a mask: bool, broadcastable to ``[B, H, M, N]``, True keeps.

    It is slow on purpose: only the reference and the tests use it. It expects the mask in its
    validated form: ``kv_len`` and ``kv_begin`` int32 ``[B|1, M|1]``, ``keep`` with 4 dims. The band
    stands for causal and window: see ``Problem.band``.
    """
    i = torch.arange(M, device=device)[:, None]
    j = torch.arange(N, device=device)[None, :]
    kept = torch.ones(1, 1, M, N, dtype=torch.bool, device=device)
    lo, hi = band
    if lo is not None:
        kept = kept & (j >= i + lo)
    if hi is not None:
        kept = kept & (j <= i + hi)
    if isinstance(mask.kv_len, Tensor):
        kept = kept & (j < mask.kv_len[:, None, :, None])
    if mask.keep is not None:
        kept = kept & mask.keep
    if isinstance(mask.kv_begin, Tensor):
        kept = kept & (j >= mask.kv_begin[:, None, :, None])
    return kept
