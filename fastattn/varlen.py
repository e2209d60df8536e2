"""Attention of documents that are packed one after the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from fastattn.functional import AnyOptions, Backend, Bias, Results, Returned
from fastattn.problem import Mask, arguments, intervals, jagged, relative
from fastattn.scores import attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

Offsets = Tensor | Sequence[int]


class VarlenOptions(AnyOptions, total=False):
    """Keywords that the overloads of ``varlen_attention`` share."""

    weight: Tensor | None
    is_causal: bool
    window: tuple[int, int] | None
    scale: float | None
    enable_gqa: bool
    dropout_p: float


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *,
    return_weights: Returned, return_lse: Literal[False] = ..., **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *,
    return_weights: Returned, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *,
    return_weights: Returned | None = ..., return_lse: bool = ..., **options: Unpack[VarlenOptions],
) -> Results: ...  # fmt: skip
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    weight: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_weights: Returned | None = None,
    return_lse: bool = False,
    seed: int | Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: NoReturn,
) -> Results:
    r"""Attention of packed documents: each query sees the keys of its own document.

    The order of the arguments is that of flash_attn's varlen functions and of
    :func:`torch.nn.attention.varlen.varlen_attn`. The cost is that of the pairs inside documents.
    Layers that share their documents can share a mask: :meth:`Mask.documents`.

    Args:
        query: ``[T, H, D]``, float16, bfloat16, float32 or float64, any strides. T is at least
            ``cu_seqlens_q[-1]``. A row past the last document gives output 0 and gradient 0.
        key: ``[S, Hkv, D]``, dtype and device of query. Rows past the last document are seen by no
            query, and have gradient 0.
        value: ``[S, Hkv, E]``; E may differ from D.
        cu_seqlens_q: where each document begins, and where the last one ends: integers ``[n + 1]``
            that begin with 0 and do not decrease. A tensor on query's device, or a list. A document
            may be empty.
        cu_seqlens_k: the same of the keys. Default None: as the queries.
        max_seqlen_q: has no effect, as the kernels need no longest length.
        max_seqlen_k: has no effect.
        weight: ``[H, D]``, or ``[D]`` for all heads, makes the score additive:
            ``sum_d weight_d tanh(q_id + k_jd)``. Default None: ``scale * q_i . k_j``.
        is_causal: the last query of a document sees all its keys, and each query before sees one
            key less. So m queries and n keys keep ``j <= i + n - m`` inside their document. That is
            the alignment of flash_attn and of varlen_attn: new queries follow cached keys. In
            :func:`scaled_dot_product_attention`, is_causal is aligned at the upper left, as in
            torch. Both are the same where m = n.
        window: ``(left, right)`` keeps ``d - left <= j <= d + right`` around ``d = i + n - m``
            inside each document. -1 is unbounded: ``(-1, 0)`` is causal.
        scale: factor on the scores; ``1 / sqrt(D)`` by default. The additive score has none.
        enable_gqa: lets H be a multiple of Hkv. The additive score needs no flag.
        dropout_p: probability of dropping an attention weight. Applied whenever it is > 0.
        bias: numbers to add to the scores, broadcastable to ``[H, T, S]``, in query's dtype or
            float32. Differentiable. Those between documents are not used. Or an :class:`ALiBi` or
            a :class:`RelativeBias`, if keys have the documents of the queries.
        softcap: see :func:`scaled_dot_product_attention`.
        sink: ``[H]``, see :func:`scaled_dot_product_attention`.
        return_weights: also return the weights that multiply value, after dropout: ``"full"``
            (``[H, T, S]``, 0 between documents) or their ``"mean"`` over heads (``[T, S]``).
        return_lse: also return the log-sum-exp of the scores, ``[H, T]``, float32 (float64 for
            float64), -inf for a row with no key. Differentiable.
        seed: of dropout, see :func:`scaled_dot_product_attention`. Bits depend on packed positions.
        backend: see :func:`scaled_dot_product_attention`.

    Returns:
        ``out`` ``[T, H, E]`` in query's dtype, or the tuple ``(out[, weights][, lse])``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices or values that do not fit. Offsets are checked if they are on
            the CPU. Wrong ones on a GPU never make a kernel read out of bounds.

    Numerics: as :func:`scaled_dot_product_attention` and :func:`additive_attention`. NaN in one
    document stays there.

    Source: Dao, "FlashAttention-2", 2023; Krell et al., "Efficient Sequence Packing without
    Cross-contamination", 2021.

    Example:
        >>> q = torch.randn(12, 8, 64, requires_grad=True)  # documents of 5, 0 and 7 tokens
        >>> out = fastattn.varlen_attention(q, q, q, [0, 5, 5, 12], is_causal=True)  # [12, 8, 64]
    """
    if _unknown:
        raise arguments.unknown_keywords("varlen_attention", _unknown)
    options: dict[str, Any] = dict(
        weight=weight, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p, bias=bias,
        softcap=softcap, sink=sink, return_weights=return_weights, return_lse=return_lse,
        seed=seed, backend=backend,
    )  # fmt: skip
    if (others := arguments.overriding(query, key, value, weight, bias, sink)) is not None:
        return handle_torch_function(
            varlen_attention, others, query, key, value, cu_seqlens_q, cu_seqlens_k,
            is_causal=is_causal, window=window, **options,
        )  # fmt: skip
    arguments.check_bool("is_causal", is_causal)
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n is not None and not isinstance(n, Tensor):
            arguments.check_int(name, n, 0)
    _check_packed("query", query, "[T, H, D]")
    _check_packed("key", key, "[S, Hkv, D]")
    _check_packed("value", value, "[S, Hkv, E]")
    options["mask"] = _mask(query, key, cu_seqlens_q, cu_seqlens_k, is_causal, window)
    if isinstance(bias, relative.Relative):
        _check_same(cu_seqlens_q, cu_seqlens_k)
    if weight is not None:
        options |= {"score": "additive", "weight": _by_head(weight)}
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    results = attention(q, k, v, **options)
    if isinstance(results, Tensor):
        return _packed(results)
    return (_packed(results[0]), *(x[0] for x in results[1:]))


def _packed(out: Tensor) -> Tensor:
    """``[T, H, E]`` of ``[1, H, T, E]``, which is stored in that order."""
    return out.squeeze(0).transpose(0, 1)


def _by_head(weight: Tensor) -> Tensor:
    """``[H or 1, D]``: without heads, the additive function would take H for a batch dim."""
    one = isinstance(weight, Tensor) and weight.dim() == 1
    return weight[None] if one else weight


def _mask(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Mask:
    name, given_k = "cu_seqlens_k", cu_seqlens_k
    if given_k is None:
        name, given_k = "cu_seqlens_q", cu_seqlens_q

    def make() -> Mask:
        offsets = _offsets("cu_seqlens_q", cu_seqlens_q, "query", query)
        offsets_k = _offsets(name, given_k, "key", key)
        return jagged.mask_of(offsets, offsets_k, query.shape[0], is_causal, window)

    others = key.shape[0], query.device, is_causal
    return jagged.remembered((cu_seqlens_q, given_k), query.shape[0], others, window, make)


def _check_same(cu_seqlens_q: Offsets, cu_seqlens_k: Offsets | None) -> None:
    """Raises ValueError unless keys have the documents of the queries, as far as can be seen."""
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        return
    given = cu_seqlens_q, cu_seqlens_k
    offsets = [torch.as_tensor(x, device=getattr(x, "device", "cpu")) for x in given]
    if all(map(arguments.can_read, offsets)) and torch.equal(*offsets):
        return
    raise ValueError(
        "bias: a line of numbers has one diagonal for all documents: leave cu_seqlens_k out, which "
        "takes the documents of the queries, or write a tensor [H, T, S]"
    )


def _offsets(name: str, given: Offsets, packed: str, x: Tensor) -> Tensor:
    """``[n + 1]`` int64, checked against the tensor that it cuts."""
    offsets = intervals.checked_offsets(name, given, x.device)
    if offsets.device != x.device:
        raise ValueError(f"{name}: expected a tensor on {x.device}, got one on {offsets.device}")
    if arguments.can_read(offsets) and offsets[-1] > x.shape[0]:
        raise ValueError(
            f"{name}: expected to end within the {x.shape[0]} rows of {packed}, "
            f"got {int(offsets[-1])}"
        )
    return offsets


def _check_packed(name: str, x: object, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise arguments.no_tensor(name, x)
    if x.dim() != 3:
        hint = ": leave the batch dim out" if x.dim() == 4 else ""
        raise ValueError(f"{name}: expected {layout}, got {list(x.shape)}{hint}")
