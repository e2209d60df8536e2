"""Attention with a score chosen by name. Some of them become dot products here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

from fastattn import autograd, problem, sinks
from fastattn.backends import registry
from fastattn.functional import (
    Backend,
    Bias,
    Options,
    Results,
    Returned,
    _attend,
    additive_attention,
    again,
    scaled_dot_product_attention,
)
from fastattn.problem import Mask, arguments, call_cache, jagged, validate

if TYPE_CHECKING:
    from typing_extensions import Unpack

Score = Literal["scaled_dot", "dot", "cosine", "gaussian", "additive"]
SCORES: tuple[Score, ...] = get_args(Score)


class ScoreOptions(Options, total=False):
    """Keywords that the overloads of ``attention`` share."""

    score: Score
    weight: Tensor | None
    bandwidth: float | Tensor | None
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: Returned, return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: Returned, return_lse: Literal[True], **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_weights: Returned | None = ..., return_lse: bool = ..., **options: Unpack[ScoreOptions],
) -> Results: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Score = "scaled_dot",
    weight: Tensor | None = None,
    bandwidth: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_weights: Returned | None = None,
    return_lse: bool = False,
    seed: int | Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: NoReturn,
) -> Results:
    r"""Attention with a score chosen by name.

    The kernels of the dot product compute the first three. The other two have kernels of their own.

    ============== ===================================================== ====================
    score          s_ij                                                  own argument
    ============== ===================================================== ====================
    ``scaled_dot`` ``q_i . k_j * scale`` (``1 / sqrt(D)``)               ``scale`` (optional)
    ``dot``        ``q_i . k_j``
    ``cosine``     ``q_i . k_j / (|q_i| |k_j|) * scale`` (1)             ``scale`` (optional)
    ``gaussian``   ``-sum_d (q_id - k_jd)^2 / (2 bandwidth_d^2)``        ``bandwidth`` (1)
    ``additive``   ``sum_d weight_d tanh(q_id + k_jd)``                  ``weight``
    ============== ===================================================== ====================

    Args:
        query: ``[..., H, M, D]``; see :func:`scaled_dot_product_attention`, or
            :func:`additive_attention`. Jagged nested tensors are taken with every score.
        key: ``[..., Hkv, N, D]``.
        value: ``[..., Hkv, N, E]``.
        score: one of the table.
        weight: ``[D]`` or ``[H, D]``, additive only.
        bandwidth: a float, or a tensor that broadcasts to ``[..., H, 1, D]`` and may require grad;
            gaussian only. The softmax of this score is Nadaraya-Watson kernel regression.
            Differences are taken before they are squared: a small bandwidth costs no digits. It is
            1e-30 to 1e30, or infinity, which ignores the feature. Values of a tensor are not
            checked. A key farther than 1e19 bandwidths weighs 0. Under a softcap c its score is -c
            instead.
        attn_mask: as in :func:`additive_attention` for the additive score, as in
            :func:`scaled_dot_product_attention` for all others.
        dropout_p: as there.
        is_causal: as there.
        scale: factor on the scores, for the scores whose row of the table has one.
        enable_gqa: lets H be a multiple of Hkv. The additive score needs no flag.
        mask: as there.
        bias: as there.
        softcap: as there.
        sink: as there.
        return_weights: as there.
        return_lse: as there.
        seed: as there.
        backend: as there.

    Returns:
        As :func:`scaled_dot_product_attention`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an unknown score, an argument that the score does not have, shapes that do not
            fit, or a bandwidth out of range.

    Example:
        >>> x, y = torch.rand(50, 1), torch.rand(50, 1)
        >>> fit = fastattn.attention(x, x, y, score="gaussian", bandwidth=0.1)  # [50, 1]
    """
    if _unknown:
        raise arguments.unknown_keywords("attention", _unknown)
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, mask=mask, bias=bias,
        softcap=softcap, sink=sink, return_weights=return_weights, return_lse=return_lse,
        seed=seed, backend=backend,
    )  # fmt: skip
    own: dict[str, Any] = dict(
        score=score, weight=weight, bandwidth=bandwidth, scale=scale, enable_gqa=enable_gqa
    )
    if jagged.given(query, key, value):
        return jagged.call(attention, query, key, value, options | own)
    given = query, key, value, weight, bandwidth, attn_mask, bias, sink
    if (others := arguments.overriding(*given)) is not None:
        return handle_torch_function(attention, others, query, key, value, **own, **options)
    kernels, tensors, scale = _by_kernels(score, query, key, value, weight, bandwidth, scale)
    if kernels == "additive":
        return additive_attention(*tensors, **options)
    options["enable_gqa"] = enable_gqa
    if kernels == "gaussian":
        call = None
        if seed is None and type(return_lse) is bool:
            call = call_cache.Call(
                *tensors, attn_mask, mask, bias, sink, None, dropout_p, is_causal, enable_gqa,
                return_weights, backend, "gaussian", (softcap,),
            )  # fmt: skip
            if (type(dropout_p) is float and dropout_p) or torch._C._is_any_autocast_enabled():
                call = call.ready()
            if (found := again(call, return_lse)) is not None:
                return found
        del options["return_lse"], options["backend"]
        return _attend("gaussian", tensors, return_lse, backend, call, **options)
    return scaled_dot_product_attention(*tensors[:3], scale=scale, **options)


def explain(
    query: Any = None, key: Any = None, value: Any = None, weight: Any = None, **options: Any
) -> registry.Explanation:
    """Which backend would serve a call of a function: :func:`fastattn.explain` documents it."""
    if query is None:
        query = torch.zeros(1, 8, 16, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    key = query if key is None else key
    value = key if value is None else value
    if jagged.given(query, key, value):
        (query, key, value), options = jagged.packed(query, key, value, options)
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        return registry.Explanation(None, None, {}, "attention of nested tensors", arguments.NESTED)
    inputs, backend = checked(query, key, value, weight, **options)
    given = inputs.q, inputs.k, inputs.v
    grad = autograd.needs_autograd(*given, inputs.w, inputs.bias, options.get("sink"))
    return registry.explain(inputs.p, backend, inputs.bias is not None, given, grad)


def checked(
    query: Any,
    key: Any,
    value: Any,
    weight: Any,
    *,
    score: Score | None = None,
    bandwidth: float | Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> tuple[validate.Inputs, str]:
    """A validated call of a function by what it is given, which is not made, and its backend."""
    arguments.check_bool("return_lse", return_lse)  # every backend has that, and a sink
    if score is None:
        other = "scaled_dot" if bandwidth is None else "gaussian"
        score = other if weight is None else "additive"
    kernels, tensors, scale = _by_kernels(score, query, key, value, weight, bandwidth, scale)
    cast = arguments.autocast(kernels, *tensors)
    inputs = validate.build(kernels, *cast, scale=scale, **options)
    if sink is not None:
        sinks.check(sink, inputs.q)
    return inputs, backend


def _by_kernels(
    score: Score,
    query: Any,
    key: Any,
    value: Any,
    weight: Any,
    bandwidth: Any,
    scale: float | None,
) -> tuple[problem.Score, tuple[Any, Any, Any, Any], float | None]:
    """The score of the kernels, its tensors as ``_attend`` takes them, and its scale.

    Raises:
        ValueError: an unknown score, or an argument that it does not have.
    """
    arguments.check_choice("score", score, SCORES)
    if weight is not None and score != "additive":
        raise ValueError(f"weight: only the additive score has one, score is {score!r}")
    if bandwidth is not None and score != "gaussian":
        raise ValueError(f"bandwidth: only the gaussian score has one, score is {score!r}")
    if scale is not None and score not in ("scaled_dot", "cosine"):
        hint = ": write weight * scale for weight" if score == "additive" else ""
        raise ValueError(f"scale: the {score} score has none{hint}")
    if score == "additive":
        if weight is None:
            raise ValueError("weight: the additive score needs one, [D] or [H, D]")
        return score, (query, key, value, weight), None
    if score == "gaussian":
        return score, (query, key, value, bandwidth), None
    if score == "cosine":
        validate.check_points(query, key, value)
        query, key = normalize(query), normalize(key)
    if score != "scaled_dot" and scale is None:
        scale = 1.0
    return "dot", (query, key, value, None), scale


def normalize(x: Tensor) -> Tensor:
    """x / |x|, and 0 for 0, its gradient too: in float32 at least, for fp16's smallest numbers."""
    wide = x if x.dtype == torch.float64 else x.float()
    if x.stride(-1) != 1:  # the order of a sum depends on strides
        wide = wide.contiguous()
    if wide.numel() and arguments.can_read(wide.detach()):
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        least, most = norm.detach().aminmax()
        if least > 2**-20 and most < 2**20:  # the same bits as below, in a quarter of the time
            return (wide / norm).to(x.dtype)
    # A row of NaN that no result uses must get gradient 0: that of x / |x| would be 0 * NaN.
    finite = wide.isfinite().all(-1, keepdim=True)
    usable = finite & (wide != 0).any(-1, keepdim=True)
    safe = torch.where(usable, wide, 1.0)
    if x.shape[-1]:  # so that no sum of squares is 0 or infinite
        safe = safe / _power_of_two(safe.detach())
    unit = F.normalize(safe, dim=-1)
    return torch.where(usable, unit, torch.where(finite, 0.0, wide + torch.nan)).to(x.dtype)


def _power_of_two(x: Tensor) -> Tensor:
    """One near the largest number of each row: to divide by it rounds nothing."""
    most = 126 if x.dtype == torch.float32 else 1022
    return x.abs().amax(-1, keepdim=True).log2().floor().clamp(-most, most).exp2()


def where_finite(function: Callable[..., Tensor], x: Tensor, other: float | Tensor) -> Tensor:
    """``function(x, other)``; NaN and infinity in ``x`` stay, and give gradient 0 if unused."""
    finite = x.isfinite()
    return torch.where(finite, function(torch.where(finite, x, 0.0), other), x + 0.0 * other)
