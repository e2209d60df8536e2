"""The public functions: PyTorch's attention interface and its extensions, over every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from fastattn import autograd, repeated, sinks
from fastattn.backends import direct, registry, watch, wgmma
from fastattn.problem import Mask, Score, arguments, call_cache, jagged, validate
from fastattn.problem.relative import ALiBi, RelativeBias

if TYPE_CHECKING:
    from typing_extensions import Unpack

Backend = Literal["auto", "cpu", "triton", "cuda", "eager"]
Returned = Literal["full", "mean"]
Results = Tensor | tuple[Tensor, ...]
Bias = Tensor | ALiBi | RelativeBias


class AnyOptions(TypedDict, total=False):
    """Keywords that the overloads of all functions share."""

    bias: Bias | None
    softcap: float | None
    sink: Tensor | None
    seed: int | Tensor | None
    backend: Backend


class Options(AnyOptions, total=False):
    """Those of functions that take a mask."""

    mask: Mask | None


# Overloads: what a function returns depends on return_weights and return_lse. The last one is for
# values that are known at run time only.


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: Returned, return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: Returned, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *,
    return_weights: Returned | None = ..., return_lse: bool = ..., **options: Unpack[Options],
) -> Results: ...  # fmt: skip
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
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
    r"""Scaled dot-product attention: a superset of PyTorch's function of the same name.

    ``out_i = sum_j dropout(softmax_j(scale * q_i . k_j + bias_ij)) v_j`` over the keys j that the
    masks keep.

    Args:
        query: ``[..., H, M, D]``, or ``[M, D]``. Any strides; float16, bfloat16, float32 or
            float64. Or a jagged nested tensor ``[B, H, j, D]``, like key and value. Results are
            then jagged too, and is_causal is the only mask.
        key: ``[..., Hkv, N, D]``, dtype and device of query. Batch dims broadcast.
        value: ``[..., Hkv, N, E]``; E may differ from D.
        attn_mask: broadcastable to ``[..., H, M, N]``. Bool: True keeps. Float (query's dtype or
            float32, and any half type under autocast): added to the scores, -inf masks,
            differentiable. Or a :class:`torch.nn.attention.bias.CausalBias`.
        dropout_p: probability of dropping an attention weight. Applied whenever it is > 0, as in
            torch.
        is_causal: keeps ``j <= i``, aligned at the upper left as in torch. So a single query sees
            key 0 alone: when decoding, leave it out, or pass ``Mask(causal="bottom_right")``. May
            be combined with the other masks.
        scale: factor on the scores, at most 1e30 in size; ``1 / sqrt(D)`` by default.
        enable_gqa: lets H be a multiple of Hkv; query head h uses key head ``h // (H // Hkv)``. Key
            and value are never expanded. ``Hkv = 1`` needs no flag.
        mask: structured masks, see :class:`fastattn.Mask`; ANDed with the others.
        bias: like a float attn_mask, and added to it. Its gradient has the shape of the bias. Or an
            :class:`ALiBi` or a :class:`RelativeBias`, which take no memory of M * N. Beside a float
            attn_mask they become a tensor ``[B, H, M, N]``.
        softcap: a number c from 1e-15 to 1e15, or None or 0 for no cap. Every score becomes
            ``c tanh(score / c)``, at most c in size. Bias and mask come after it.
        sink: ``[H]``, float32 or query's dtype: one more logit a head in the softmax, without a
            value. It is neither scaled nor capped, and differentiable. Weights of a row then sum to
            less than 1, and the log-sum-exp includes the sink: a row without keys has lse = sink.
            A head whose sink is -inf has none. What +inf gives is undefined.
        return_weights: also return the weights that multiply value, after dropout: ``"full"``
            (``[..., H, M, N]``) or their ``"mean"`` over heads (``[..., M, N]``). Differentiable.
        return_lse: also return the log-sum-exp of the masked scores, ``[..., H, M]``, float32
            (float64 for float64), -inf for a row with no key. Differentiable.
        seed: an int, an int64 tensor, or None to draw one from torch's generator. Dropout's random
            bits depend on the seed and on (b, h, i, j) only: they are the same on every backend.
        backend: ``"auto"``, or a name from :func:`fastattn.explain`; a named backend never falls
            back.

    Returns:
        ``out`` ``[..., H, M, E]`` in query's dtype, or the tuple ``(out[, weights][, lse])``. Its
        dims lie in memory in the order of query's, as PyTorch's do.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices or values that do not fit, or a named backend that cannot do the
            problem.

    Numerics: half types accumulate in float32. A row with no key has output 0, weights 0, lse -inf
    and gradients 0, never NaN. NaN or infinity in masked places changes no result. Results are
    deterministic. Double backward computes everything again, with dense matrices.

    Source: Vaswani et al., "Attention Is All You Need", 2017; tiled as in Dao, "FlashAttention-2",
    2023. Softcap: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.
    Sink: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024; learned as
    in OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.

    Example:
        >>> q = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> lengths = torch.tensor([128, 70])
        >>> out, weights = fastattn.scaled_dot_product_attention(
        ...     q, q, q, mask=fastattn.Mask(kv_len=lengths), return_weights="mean")
    """
    if _unknown:
        raise arguments.unknown_keywords("scaled_dot_product_attention", _unknown)
    call = None
    if seed is None and type(return_lse) is bool:
        call = call_cache.Call(
            query, key, value, None, attn_mask, mask, bias, sink, None, dropout_p, is_causal,
            enable_gqa, return_weights, backend, "dot", (scale, softcap),
        )  # fmt: skip
        if (type(dropout_p) is float and dropout_p) or torch._C._is_any_autocast_enabled():
            call = call.ready()
        if (found := again(call, return_lse)) is not None:
            return found
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, mask=mask, bias=bias, softcap=softcap, sink=sink,
        return_weights=return_weights, seed=seed,
    )  # fmt: skip
    if jagged.given(query, key, value):
        options |= {"return_lse": return_lse, "backend": backend}
        return jagged.call(scaled_dot_product_attention, query, key, value, options)
    if (others := arguments.overriding(query, key, value, attn_mask, bias, sink)) is not None:
        return handle_torch_function(
            scaled_dot_product_attention, others, query, key, value, **options,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    return _attend("dot", (query, key, value, None), return_lse, backend, call, **options)


@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: Returned, return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: Returned, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *,
    return_weights: Returned | None = ..., return_lse: bool = ..., **options: Unpack[Options],
) -> Results: ...  # fmt: skip
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
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
    r"""Additive (Bahdanau, MLP, concat) attention over projected queries and keys.

    ``out_i = sum_j dropout(softmax_j(sum_d weight_d tanh(q_id + k_jd) + bias_ij)) v_j`` over the
    keys that the masks keep. The fused backends store no tensor of M * N * D numbers, and M * N
    numbers only for returned weights. On a GPU these take up to 256 MiB more, for scores.

    Args:
        query: ``[..., M, D]`` already projected (``W_q x_q + b``), or ``[..., H, M, D]`` when
            weight is ``[H, D]``. Or a jagged nested tensor, ``[B, j, D]`` or ``[B, H, j, D]``, as
            in :func:`scaled_dot_product_attention`.
        key: ``[..., N, D]``, already projected, batch and head dims as query's (they broadcast).
        value: ``[..., N, E]``.
        weight: ``[D]``, or ``[H, D]`` for H heads. There is no scale: fold one into it.
        attn_mask: broadcastable to ``[..., M, N]`` (``[..., H, M, N]`` with heads), bool (True
            keeps) or float (added).
        dropout_p: probability of dropping an attention weight.
        is_causal: keeps ``j <= i``.
        mask: see :class:`fastattn.Mask`.
        bias: float, added to the scores, with a gradient of its own shape; or an :class:`ALiBi` or
            a :class:`RelativeBias`.
        softcap: see :func:`scaled_dot_product_attention`.
        sink: see there; ``[1]`` without heads.
        return_weights: also return the weights that multiply value, after dropout: ``"full"``
            (``[..., M, N]``, or ``[..., H, M, N]`` with heads) or their ``"mean"`` over heads
            (``[..., M, N]``).
        return_lse: also return the log-sum-exp, ``[..., M]`` (``[..., H, M]`` with heads).
        seed: see :func:`scaled_dot_product_attention`.
        backend: see :func:`scaled_dot_product_attention`.

    Returns:
        ``out`` ``[..., M, E]`` (``[..., H, M, E]`` with heads), or the tuple ``(out[, weights][,
        lse])``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices or values that do not fit, or a named backend that cannot do the
            problem.

    Numerics: as :func:`scaled_dot_product_attention`. Query and key may have any magnitude, with
    opposite signs too. In the fused kernels the absolute error of tanh is about 1e-7. Where every
    ``|q + k|`` is about 1e-3, the relative error of weight's gradient is therefore up to 1e-4.

    Source: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015.

    Example:
        >>> q, k, v = torch.randn(2, 10, 64), torch.randn(2, 20, 64), torch.randn(2, 20, 32)
        >>> out = fastattn.additive_attention(q, k, v, weight=torch.randn(64))  # [2, 10, 32]
    """
    if _unknown:
        raise arguments.unknown_keywords("additive_attention", _unknown)
    call = None
    if seed is None and type(return_lse) is bool:
        call = call_cache.Call(
            query, key, value, weight, attn_mask, mask, bias, sink, None, dropout_p, is_causal,
            False, return_weights, backend, "additive", (softcap,),
        )  # fmt: skip
        if (type(dropout_p) is float and dropout_p) or torch._C._is_any_autocast_enabled():
            call = call.ready()
        if (found := again(call, return_lse)) is not None:
            return found
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, mask=mask, bias=bias,
        softcap=softcap, sink=sink, return_weights=return_weights, seed=seed,
    )  # fmt: skip
    if jagged.given(query, key, value):
        options |= {"weight": weight, "return_lse": return_lse, "backend": backend}
        return jagged.call(additive_attention, query, key, value, options)
    given = query, key, value, weight, attn_mask, bias, sink
    if (others := arguments.overriding(*given)) is not None:
        return handle_torch_function(
            additive_attention, others, query, key, value, weight, **options,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    return _attend("additive", (query, key, value, weight), return_lse, backend, call, **options)


# Who computes calls of tensors of other types, or says NotImplemented. fastattn/__init__.py adds
# DTensor's when torch's is imported.
takers: list[Callable[..., Any]] = []


def _attend(
    score: Score,
    tensors: tuple[Any, ...],
    return_lse: bool,
    backend: str,
    call: call_cache.Call | None,
    **options: Any,
) -> Results:
    """Validates, chooses, runs, and gives the results the shapes of the arguments.

    ``tensors`` are query, key, value and weight, or bandwidth. The record is remembered by
    ``call``, which has what autocast makes of them; None if the record depends on more than that.
    """
    for take in takers:
        found = take(score, tensors, return_lse, backend, options)
        if found is not NotImplemented:
            return found
    arguments.check_bool("return_lse", return_lse)
    cast = arguments.autocast(score, *(tensors if call is None else call[:4]))
    sink = options.pop("sink", None)
    if call is not None and call.seed is not None:
        options["seed"] = call.seed
    inputs = validate.build(score, *cast, **options)
    if sink is not None:
        sinks.check(sink, inputs.q)
    p, biased = inputs.p, inputs.bias is not None
    canonical = inputs.q, inputs.k, inputs.v, inputs.w
    grad = autograd.needs_autograd(*canonical, inputs.bias, sink)
    waits = registry.may_wait(p, backend, biased, canonical[:3], grad)
    chosen = registry.select(p, backend, biased, grad, may_check=not waits)
    forward = registry.faster_forward(p, backend, chosen, biased)
    dims = inputs.has_head_dim, inputs.batch
    seen = call_cache.Known(p, chosen, *dims, forward=forward, waits=waits)
    watch.call(p, backend, biased, canonical[:3], grad)
    known = False
    if call is not None and registry.may_remember(p, chosen):
        known = call_cache.remember(seen, canonical, inputs.bias, call)
    found = run(seen, inputs.bias, canonical, return_lse, sink)
    if call is not None and chosen == "cpu" and not return_lse and (known or not grad):
        direct.remember_first(call, found)
    return found


def again(call: call_cache.Call, return_lse: bool) -> Results | None:
    """The results of a call that came before; None if none did."""
    planned = None if return_lse else direct.run(call)
    if planned is not None and planned is not direct.UNKNOWN:
        if type(planned) is not list:
            return planned
        if any(map(Tensor.is_inference, planned[4:])):  # beside query, key and value
            planned[4:] = map(autograd.that_autograd_saves, planned[4:])
        return repeated.attend(*planned)
    if (seen := call_cache.recall(call)) is None:
        return None
    known, bias = seen
    found = run(known, bias, known.tensors(*call[:4]), return_lse, call.sink)
    if planned is direct.UNKNOWN and known.backend == "cpu":
        direct.remember(call, found)
    return found


def run(
    seen: call_cache.Known,
    bias: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    return_lse: bool,
    sink: Tensor | None = None,
    average: bool = False,
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]] = autograd.attend,
) -> Results:
    """The output, or a tuple of it and what else the caller wants, in the caller's dims.

    ``average``: the caller wants the mean of the weights over heads. ``attend``: what computes.
    """
    p, backend, batch, (q, k, v, w) = seen.p, seen.backend, seen.batch, tensors
    if seen.forward is not None:
        grad = autograd.needs_autograd(q, k, v, w, bias, sink, later=False)  # which is guarded
        taken = registry.takes(p, grad)
        if taken and not (p.score == "dot" and wgmma.odd_strides((q, k, v))):
            backend = seen.forward
        elif seen.waits:
            backend = registry.select(p, bias=bias is not None)
    out, lse, weights = attend(backend, p, q, k, v, w, bias, sink)
    if average:
        wide = torch.promote_types(weights.dtype, torch.float32)
        weights = (weights.sum(1, dtype=wide) / max(p.H, 1)).to(weights.dtype)

    if seen.has_head_dim and p.weights == "none" and not return_lse and len(batch) == 1:
        return out

    def restore(x: Tensor, head_dim: bool = True) -> Tensor:
        if head_dim and not seen.has_head_dim:
            x = x.squeeze(1)
        return x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:])

    results = [restore(out)]
    if p.weights != "none":
        results.append(restore(weights, head_dim=p.weights == "full" and not average))
    if return_lse:
        results.append(restore(lse))
    return results[0] if len(results) == 1 else tuple(results)
