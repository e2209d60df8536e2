"""What the functions return, by what they are asked for: each of them has these five overloads.

The last is for a bool that only the program knows. tests/functional/test_typing.py holds these
signatures against those of functional.py.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from fastattn.problem import Mask

_Backend = Literal["auto", "cpu", "triton", "cuda", "eager"]
_Score = Literal["scaled_dot", "dot", "cosine", "gaussian", "additive"]
_Weights = Literal["full", "mean"]

class _Options(TypedDict, total=False):
    mask: Mask | None
    bias: Tensor | None
    seed: int | Tensor | None
    backend: _Backend

class _ScoreOptions(_Options, total=False):
    score: _Score
    weight: Tensor | None
    bandwidth: float | Tensor | None
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: _Weights, return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: _Weights, return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: _Weights | None = ..., return_lse: bool = ..., **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: _Weights, return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: _Weights, return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: _Weights | None = ..., return_lse: bool = ..., **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[_ScoreOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: _Weights, return_lse: Literal[False] = ..., **options: Unpack[_ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[_ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: _Weights, return_lse: Literal[True], **options: Unpack[_ScoreOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: _Weights | None = ..., return_lse: bool = ..., **options: Unpack[_ScoreOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def explain(
    query: Tensor | None = ...,
    key: Tensor | None = ...,
    value: Tensor | None = ...,
    weight: Tensor | None = ...,
    **options: Any,
) -> str: ...

SCORES: tuple[_Score, ...]

# What modules use beside these.
def _normalize(x: Tensor) -> Tensor: ...
def _centred(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]: ...
def _where_finite(function: Callable[..., Tensor], x: Tensor, other: float | Tensor) -> Tensor: ...
