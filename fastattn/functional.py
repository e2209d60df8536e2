"""The public functions: PyTorch's attention interface, and more of it, over every backend."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

from fastattn import autograd
from fastattn.backends import operators, registry
from fastattn.problem import Mask, arguments, call_cache, validate


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
    bias: Tensor | None = None,
    return_weights: str | None = None,
    return_lse: bool = False,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **_unknown: NoReturn,
):
    r"""Scaled dot-product attention: a superset of PyTorch's function of the same name.

    ``out_i = sum_j dropout(softmax_j(scale * q_i . k_j + bias_ij)) v_j`` over the keys j that the
    masks keep.

    Args:
        query: ``[..., H, M, D]``, or ``[M, D]``. Any strides; float16, bfloat16, float32 or
            float64.
        key: ``[..., Hkv, N, D]``, dtype and device of query. Batch dims broadcast.
        value: ``[..., Hkv, N, E]``; E may differ from D.
        attn_mask: broadcastable to ``[..., H, M, N]``. Bool: True keeps. Float (query's dtype or
            float32): added to the scores, -inf masks, differentiable. Or a
            :class:`torch.nn.attention.bias.CausalBias`.
        dropout_p: probability of dropping an attention weight. Applied whenever it is > 0, as in
            torch.
        is_causal: keeps ``j <= i`` (upper-left aligned, torch's rule). May be combined with the
            other masks.
        scale: factor on the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: lets H be a multiple of Hkv; query head h uses key head ``h // (H // Hkv)``. Key
            and value are never expanded. ``Hkv = 1`` needs no flag.
        mask: structured masks, see :class:`fastattn.Mask`; ANDed with the others.
        bias: like a float attn_mask, and added to it. Its gradient has its own shape, whatever it
            broadcasts over.
        return_weights: ``None``, ``"full"`` (``[..., H, M, N]``) or ``"mean"`` over heads
            (``[..., M, N]``): the weights that multiply value, after dropout. Differentiable.
        return_lse: also return the log-sum-exp of the masked scores, ``[..., H, M]``, float32
            (float64 for float64), -inf for a row with no key. Differentiable.
        seed: dropout's random bits are a function of this and of (b, h, i, j), on every backend
            alike. An int, an int64 tensor, or None to draw one from torch's generator.
        backend: ``"auto"``, or a name from :func:`fastattn.explain`; a named backend never falls
            back.

    Returns:
        ``out`` ``[..., H, M, E]`` in query's dtype (stored as ``[..., M, H, E]``: merging the heads
        is a view), or the tuple ``(out[, weights][, lse])``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes, devices or values that do not fit, or a named backend that cannot do the
            problem.

    Numerics: half types accumulate in float32. A row with no key has output 0, weights 0, lse -inf
    and gradients 0, never NaN. NaN or infinity in masked places reaches nothing. Results are
    deterministic; double backward recomputes with dense matrices.

    Source: Vaswani et al., "Attention Is All You Need", 2017; tiled as in Dao, "FlashAttention-2",
    2023.

    Example:
        >>> q = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> lengths = torch.tensor([128, 70])
        >>> out, weights = fastattn.scaled_dot_product_attention(
        ...     q, q, q, mask=fastattn.Mask(kv_len=lengths), return_weights="mean")
    """
    if _unknown:
        raise arguments.unknown_keywords("scaled_dot_product_attention", _unknown)
    call = None
    if attn_mask is mask is bias is seed is None:
        call = (
            query, key, value, None, dropout_p, is_causal, enable_gqa, scale, return_weights,
            backend,
        )  # fmt: skip
        seen = call_cache.recall(*call)
        if seen is not None and type(return_lse) is bool:
            return _run(seen, (query, key, value, None), None, query.shape[:1], return_lse)
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, mask=mask, bias=bias, return_weights=return_weights, seed=seed,
    )  # fmt: skip
    if (others := arguments.overriding(query, key, value, attn_mask, bias)) is not None:
        return handle_torch_function(
            scaled_dot_product_attention, others, query, key, value, **options,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    return _attend("dot", (query, key, value), None, return_lse, backend, call, **options)


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
    bias: Tensor | None = None,
    return_weights: str | None = None,
    return_lse: bool = False,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **_unknown: NoReturn,
):
    r"""Additive (Bahdanau, MLP, concat) attention over projected queries and keys.

    ``out_i = sum_j dropout(softmax_j(sum_d weight_d tanh(q_id + k_jd) + bias_ij)) v_j`` over the
    keys that the masks keep. Nothing of size M * N * D, nor M * N, is stored by the fused backends.

    Args:
        query: ``[..., M, D]`` already projected (``W_q x_q + b``), or ``[..., H, M, D]`` when
            weight is ``[H, D]``.
        key: ``[..., N, D]``, already projected, batch and head dims as query's (they broadcast).
        value: ``[..., N, E]``.
        weight: ``[D]``, or ``[H, D]`` for H heads. There is no scale: fold one into it.
        attn_mask: broadcastable to ``[..., M, N]`` (``[..., H, M, N]`` with heads), bool (True
            keeps) or float (added).
        dropout_p: probability of dropping an attention weight.
        is_causal: keeps ``j <= i``.
        mask: see :class:`fastattn.Mask`.
        bias: float, added to the scores, with a gradient of its own shape.
        return_weights: ``None``, ``"full"`` or ``"mean"`` over heads (``[..., M, N]``).
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

    Numerics: as :func:`scaled_dot_product_attention`; right for any magnitude of query and key,
    opposite signs included. The fused kernels have tanh right to about 1e-7, not to so many digits:
    where every ``|q + k|`` is small, 1e-3 say, weight's gradient is right to 1e-4 of itself.

    Source: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015.

    Example:
        >>> q, k, v = torch.randn(2, 10, 64), torch.randn(2, 20, 64), torch.randn(2, 20, 32)
        >>> out = fastattn.additive_attention(q, k, v, weight=torch.randn(64))  # [2, 10, 32]
    """
    if _unknown:
        raise arguments.unknown_keywords("additive_attention", _unknown)
    call = None
    if attn_mask is bias is seed is None and call_cache.says_nothing(mask):
        call = (
            query, key, value, weight, dropout_p, is_causal, False, None, return_weights, backend,
        )  # fmt: skip
        seen = call_cache.recall(*call)
        if seen is not None and type(return_lse) is bool:
            tensors = seen.tensors(query, key, value, weight)
            return _run(seen, tensors, None, tensors[0].shape[:1], return_lse)
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, mask=mask, bias=bias,
        return_weights=return_weights, seed=seed,
    )  # fmt: skip
    if (others := arguments.overriding(query, key, value, weight, attn_mask, bias)) is not None:
        return handle_torch_function(
            additive_attention, others, query, key, value, weight, **options,
            return_lse=return_lse, backend=backend,
        )  # fmt: skip
    return _attend("additive", (query, key, value), weight, return_lse, backend, call, **options)


SCORES = ("scaled_dot", "dot", "cosine", "gaussian", "additive")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: str = "scaled_dot",
    weight: Tensor | None = None,
    bandwidth: float | Tensor | None = None,
    **options,
):
    r"""Attention with a score chosen by name; all of them run on the same kernels.

    ============== ===================================================== ====================
    score          s_ij                                                  own argument
    ============== ===================================================== ====================
    ``scaled_dot`` ``q_i . k_j * scale`` (``1 / sqrt(D)``)               ``scale`` (optional)
    ``dot``        ``q_i . k_j``
    ``cosine``     ``q_i . k_j / (|q_i| |k_j|) * scale`` (1)             ``scale`` (optional)
    ``gaussian``   ``-|q_i - k_j|^2 / (2 bandwidth^2)``                  ``bandwidth`` (1)
    ``additive``   ``sum_d weight_d tanh(q_id + k_jd)``                  ``weight``
    ============== ===================================================== ====================

    Args:
        query: ``[..., H, M, D]``; see :func:`scaled_dot_product_attention`, or
            :func:`additive_attention`.
        key: ``[..., Hkv, N, D]``.
        value: ``[..., Hkv, N, E]``.
        score: one of the table.
        weight: ``[D]`` or ``[H, D]``, additive only.
        bandwidth: positive float, or a tensor that broadcasts to ``[..., H, 1, 1]`` and may require
            grad; gaussian only. The softmax of this score is Nadaraya-Watson kernel regression.
        **options: those of the function that the score runs on (masks, dropout, weights, ...).

    Returns:
        As :func:`scaled_dot_product_attention`.

    Raises:
        ValueError: an unknown score, or an argument that the score does not have.

    Example:
        >>> x, y = torch.rand(50, 1), torch.rand(50, 1)
        >>> fit = fastattn.attention(x, x, y, score="gaussian", bandwidth=0.1)  # [50, 1]
    """
    if (others := arguments.overriding(query, key, value, weight, bandwidth)) is not None:
        return handle_torch_function(
            attention, others, query, key, value, score=score, weight=weight, bandwidth=bandwidth,
            **options,
        )  # fmt: skip
    arguments.check_choice("score", score, SCORES)
    if weight is not None and score != "additive":
        raise ValueError(f"weight: only the additive score has one, score is {score!r}")
    if bandwidth is not None and score != "gaussian":
        raise ValueError(f"bandwidth: only the gaussian score has one, score is {score!r}")
    if score == "additive":
        if weight is None:
            raise ValueError("weight: the additive score needs one, [D] or [H, D]")
        return additive_attention(query, key, value, weight, **options)
    if score in ("dot", "gaussian") and options.get("scale") is not None:
        raise ValueError(f"scale: the {score} score has none")
    if score == "dot":
        options["scale"] = 1.0
    elif score == "cosine":
        validate.check_points(query, key, value)
        query, key = _normalize(query), _normalize(key)
        options["scale"] = 1.0 if options.get("scale") is None else options["scale"]
    elif score == "gaussian":
        return _gaussian(query, key, value, 1.0 if bandwidth is None else bandwidth, options)
    return scaled_dot_product_attention(query, key, value, **options)


def _normalize(x: Tensor) -> Tensor:
    """x / |x|, and 0 for 0, its gradient too: in float32 at least, for fp16's smallest numbers."""
    wide = x if x.dtype == torch.float64 else x.float()
    # The gradient of a row of NaN is what reaches it, so 0 for one unused; x / |x| has 0 * NaN.
    finite = wide.isfinite().all(-1, keepdim=True)
    usable = finite & (wide != 0).any(-1, keepdim=True)
    unit = F.normalize(torch.where(usable, wide, 1.0), dim=-1)
    return torch.where(usable, unit, torch.where(finite, wide, wide + torch.nan)).to(x.dtype)


def _where_finite(function, x: Tensor, other: float | Tensor) -> Tensor:
    """``function(x, other)``; NaN and infinity in ``x`` stay, and unused reach no gradient."""
    finite = x.isfinite()
    return torch.where(finite, function(torch.where(finite, x, 0.0), other), x + 0.0 * other)


def _gaussian(query: Tensor, key: Tensor, value: Tensor, bandwidth: float | Tensor, options: dict):
    """-|q-k|^2 / 2h^2 = q.k / h^2 - |k|^2 / 2h^2 - |q|^2 / 2h^2: dot, key bias, row constant.

    The score depends on differences only, but its terms do not: hence both sides are centred first.
    """
    _check_gaussian(query, key, value, bandwidth, **options)
    query, key = _centred(query, key)
    precision = query.dtype
    # Farther keys weigh 0 like these; their squares would be infinite, and 0 * inf is NaN.
    key = key.clamp(-_far(precision), _far(precision))
    present = torch.where(key.isfinite(), key, 0.0)  # a NaN key still speaks through q . k
    bias = -0.5 * present.square().sum(-1).unsqueeze(-2)
    if options.get("enable_gqa") and min(query.dim(), key.dim()) >= 3 and bias.shape[-3] > 1:
        bias = bias.repeat_interleave(query.shape[-3] // bias.shape[-3], dim=-3)
    square = bandwidth * bandwidth
    bias = bias / square
    if options.get("bias") is not None:
        bias = bias + options["bias"].to(precision)
    options = {**options, "bias": bias, "scale": 1.0}
    attn_mask = options.get("attn_mask")
    if isinstance(attn_mask, Tensor) and attn_mask.dtype not in (torch.bool, precision):
        options["attn_mask"] = attn_mask.to(precision)
    dtype = value.dtype
    scaled = _where_finite(torch.div, query, square)
    results = scaled_dot_product_attention(scaled, key, value.to(precision), **options)
    if not isinstance(results, tuple):
        return results.to(dtype)
    *results, lse = results if options.get("return_lse") else (*results, None)
    results = [x.to(dtype) for x in results]
    if lse is None:
        return tuple(results)
    # A row without keys has no such term, and no gradient of it.
    query = torch.where(lse[..., None] == -torch.inf, 0.0, query)
    return (*results, lse - 0.5 * (query / bandwidth).square().sum(-1))


def _check_gaussian(
    query, key, value, bandwidth, *, attn_mask=None, bias=None, enable_gqa=False, **_
) -> None:
    validate.check_points(query, key, value)
    _, q, k, v = validate._to_4d(query, key, value, query.dim() >= 3)
    validate._match_heads(q, k, v, enable_gqa)
    if attn_mask is not None and not arguments.is_causal_bias(attn_mask):
        dtypes = (torch.bool, query.dtype, torch.float32)
        validate.check_dense("attn_mask", attn_mask, query, dtypes)
    if bias is not None:
        validate.check_dense("bias", bias, query, (query.dtype, torch.float32))
    if not isinstance(bandwidth, Tensor):
        arguments.check_real("bandwidth", bandwidth)
        if not bandwidth > 0:
            raise ValueError(f"bandwidth: expected a positive number, got {bandwidth}")
    elif any(n != 1 for n in bandwidth.shape[-2:]):  # it would scale features, or keys
        raise ValueError(f"bandwidth: expected [..., H, 1, 1], got {list(bandwidth.shape)}")


def _centred(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both less the mean query, in float32 at least: data far from 0 would lose all its digits.

    Centred on the queries: a masked key may hold anything, and has no say.
    """
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = query.to(precision), key.to(precision)
    dims = tuple(range(-min(query.dim(), 3), -1))
    # What is as far as that is garbage in a query without keys; it would move all others out there.
    near = torch.where(query.abs() <= _far(precision), query, 0.0).detach()
    centre = near.mean(dims, keepdim=True) if query.numel() else 0.0
    return query - centre, key - centre


def _far(precision: torch.dtype) -> float:
    """Where points count as infinitely far: a sum of squares is finite up to there."""
    return torch.finfo(precision).max ** 0.375


def explain(
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    weight: Tensor | None = None,
    **options,
) -> str:
    """Says which backend would serve a call and why the others would not.

    Args:
        query: as in :func:`scaled_dot_product_attention`, or :func:`additive_attention` when weight
            is given. Without arguments, a small float32 problem on the GPU if there is one, else on
            the CPU, is explained.
        key: as there; query by default.
        value: as there; key by default.
        weight: as there.
        **options: the call's other arguments.

    Returns:
        A printable table. Of nested tensors, which no function takes, what to call instead.

    Raises:
        TypeError: as the function.
        ValueError: as the function, but for a named backend that cannot do the problem.

    Example:
        >>> q = torch.randn(1, 8, 128, 64)
        >>> print(fastattn.explain(q, q, q, is_causal=True))
    """
    if query is None:
        query = torch.zeros(1, 8, 16, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    key = query if key is None else key
    value = key if value is None else value
    score = "dot" if weight is None else "additive"
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        return f"{score} attention of nested tensors\n{arguments.NESTED}"
    arguments.check_bool("return_lse", options.pop("return_lse", False))
    backend = options.pop("backend", "auto")
    tensors: Any = _autocast(query, key, value, weight)
    inputs = validate.build(score, *tensors, **options)
    return registry.explain(inputs.p, backend)


def _attend(score, qkv, weight, return_lse: bool, backend: str, call, **options):
    """Validates, chooses, runs, and gives the results the shapes of the arguments.

    ``call``: what to remember the record by; None if it holds more than these tell.
    """
    arguments.check_bool("return_lse", return_lse)
    *qkv, weight = _autocast(*qkv, weight)
    inputs = validate.build(score, *qkv, weight, **options)
    seen = call_cache.Known(inputs.p, registry.select(inputs.p, backend), inputs.has_head_dim)
    tensors = inputs[1:5]
    if call is not None:
        call_cache.remember(seen, tensors, *call)
    return _run(seen, tensors, inputs.bias, inputs.batch, return_lse)


def _run(seen: call_cache.Known, tensors, bias: Tensor | None, batch, return_lse: bool):
    """The output, or the tuple of it and of what else the caller wants, in batch dims ``batch``."""
    p, (q, k, v, w) = seen.p, tensors
    out, lse, weights = autograd.attend(seen.backend, p, q, k, v, w, bias)

    def restore(x: Tensor, head_dim: bool = True) -> Tensor:
        if head_dim and not seen.has_head_dim:
            x = x.squeeze(1)
        return x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:])

    results = [restore(out)]
    if p.weights != "none":
        results.append(restore(weights, head_dim=p.weights == "full"))
    if return_lse:
        results.append(restore(lse))
    return results[0] if len(results) == 1 else tuple(results)


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """torch's policy under autocast: float inputs, float64 apart, run in the autocast dtype."""
    first = tensors[0]
    if not torch._C._is_any_autocast_enabled() or not isinstance(first, Tensor):
        return list(tensors)
    device = first.device.type
    if not operators.has_autocast(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    ]
