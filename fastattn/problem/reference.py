"""The dense oracle: attention and its gradients as the formulas say, in PyTorch, at any precision.

It is slow and needs much memory on purpose: every [B, H, M, N] matrix is written out, and
[B, H, M, N, D] for the other scores. Tests run it in float64 as the truth. The eager backend runs
it where no kernel can. Double backward differentiates :func:`backward`. Masks are read through
``Problem.kept`` only.

Shapes are canonical (see :class:`fastattn.problem.Problem`). Both functions compute in
``p.acc_dtype``.

The rules that plain PyTorch code gets wrong, and that hold here:

- a row with no key left has output 0, weights 0, log-sum-exp -inf and gradients 0;
- NaN or infinity in a masked key, value or query reaches nothing: a masked product is 0, even of
  0 and NaN. Elsewhere it reaches exactly the rows that use it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn.problem import Problem, arguments, record, relative
from fastattn.problem.record import Grads


def forward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out ``[B, H, M, E]``, lse ``[B, H, M]``, weights, stats) in ``p.acc_dtype``.

    ``sink`` ``[H]`` or ``[B, H]``: a logit of every row that has no value. The stats are those of
    :func:`probabilities`.
    """
    q, k, v, w, bias, sink = _upcast(p, q, k, v, w, bias, sink)
    kept = kept_pairs(p, bias)
    q, k, v = _blank_unused(p, q, k, v, kept)
    _, (lse, stats), dropped, _ = probabilities(p, q, k, w, bias, kept, sink=sink)
    out = _masked_matmul(dropped, per_head(p, v), kept)
    return out, lse, _returned_weights(p, dropped), stats


def backward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    grad_weights: Tensor | None = None,
    out: Tensor | None = None,
    stats: Tensor | None = None,
) -> Grads:
    """Gradients of (q, k, v, w, bias, sink) in ``p.acc_dtype``.

    Those of w ``[B, H, D]`` and of the sink ``[B, H]`` are per batch.

    With W = dropout(P) the weights and F the dropout factors, S the scores:

        dV = W^T dO               dP = F * (dO V^T + dW)      delta_i = sum_j P_ij dP_ij - dlse_i
        dS = P * (dP - delta)     dbias = dS                  dq, dk, dw: chain rule of the score

    A curve multiplies dS by its slope on the way to the score.

    dsink = -sum_i e^(sink - lse_i) delta_i.

    With ``out`` and ``stats`` of forward, delta_i has also ``dO_i . (O_i - sum_j W_ij V_j)``. Of a
    block of keys, these may be those of all keys: the gradients are then those of all keys, too.
    Beside a sink they have it in them.

    Made of differentiable operations, so that its own gradient is the double backward.
    """
    q, k, v, w, bias, sink = _upcast(p, q, k, v, w, bias, sink)
    grad_out, out = _upcast(p, grad_out, out)
    kept = kept_pairs(p, bias)
    q, k, v = _blank_unused(p, q, k, v, kept)
    probs, (lse, _), dropped, factors = probabilities(p, q, k, w, bias, kept, stats, sink)

    grad_dropped = grad_out @ per_head(p, v).mT
    if grad_weights is not None:
        share = grad_weights.to(p.acc_dtype)
        grad_dropped = grad_dropped + (share if p.weights == "full" else share[:, None] / p.H)
    grad_probs = grad_dropped if factors is None else grad_dropped * factors
    masked = None if kept is None else ~kept
    if masked is not None:  # garbage in a masked value makes grad_probs NaN where probs is 0
        grad_probs = _over(grad_probs, "masked_fill", masked, 0.0)
    # The rounding of dP then cancels in dP - delta. With dO . O it would not.
    delta = (probs * grad_probs).sum(-1, keepdim=True)
    if out is not None:
        others = out - _masked_matmul(dropped, per_head(p, v), kept)
        delta = delta + (grad_out * others).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.to(p.acc_dtype)[..., None]
    grad_scores = _over(_over(grad_probs, "sub", delta), "mul", probs)
    if masked is not None:
        grad_scores = _over(grad_scores, "masked_fill", masked, 0.0)

    grad_logits = grad_scores
    if record.is_curved(p):
        grad_scores = grad_scores * curve_slope(p, q, k, w)
        if masked is not None:
            grad_scores = _over(grad_scores, "masked_fill", masked, 0.0)
    grad_v = sum_groups(p, _masked_matmul(dropped.mT, grad_out, None if kept is None else kept.mT))
    grad_q, grad_k, grad_w = _SCORE_BACKWARD[p.score](p, q, k, w, kept, grad_scores)
    grad_bias = None
    if bias is not None:
        line = relative.is_line(bias, p.M, p.N)
        terms = relative.diagonal_sums(grad_logits) if line else grad_logits
        grad_bias = terms.sum_to_size(bias.shape)
    grad_sink = None
    if sink is not None:
        delta = delta.squeeze(-1)
        taken = sink_weight(sink, lse) if stats is None else known_sink_weight(sink, stats)
        if stats is not None:
            delta = without_empty_rows(delta, stats, grad_lse)
        grad_sink = -(taken * delta).sum(-1)
    return grad_q, grad_k, grad_v, grad_w, grad_bias, grad_sink


# ---- scores ----


def _scores(p: Problem, q: Tensor, k: Tensor, w: Tensor | None) -> Tensor:
    k = per_head(p, k)
    if p.score == "dot":
        return (q * p.scale) @ k.mT
    assert w is not None
    if p.score == "gaussian":
        return ((q[:, :, :, None] - k[:, :, None]) / _per_pair(w)).square().sum(-1) * -0.5
    t = torch.tanh(q[:, :, :, None] + k[:, :, None])  # [B, H, M, N, D]
    return (t @ w[:, None, :, None]).squeeze(-1)


def curve_slope(p: Problem, q: Tensor, k: Tensor, w: Tensor | None) -> Tensor:
    """d curve / d score, ``[B, H, M, N]``: 1 - tanh^2 with its digits where tanh is near 1.

    It is 0 where cosh^2 would overflow: a gaussian's distance there may be as large as 1 / 1e-35.
    """
    ratio = _scores(p, q, k, w) / p.softcap
    most = 350 if ratio.dtype == torch.float64 else 40
    return torch.cosh(ratio.clamp(-most, most)).pow(-2).masked_fill(ratio.abs() >= most, 0.0)


def _per_pair(w: Tensor) -> Tensor:
    """[H, D] or [B, H, D] -> [..., H, 1, 1, D]."""
    return w[..., None, None, :]


def _dot_backward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    kept: Tensor | None,
    grad_scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    grad_q = _masked_matmul(grad_scores, per_head(p, k), kept) * p.scale
    by_key = None if kept is None else kept.mT
    grad_k = _masked_matmul(grad_scores.mT, q, by_key, of_mT=True) * p.scale
    return grad_q, sum_groups(p, grad_k), None


def _additive_backward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    kept: Tensor | None,
    grad_scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    assert w is not None
    t = torch.tanh(q[:, :, :, None] + per_head(p, k)[:, :, None])  # [B, H, M, N, D]
    if kept is not None:
        t = t.masked_fill(~kept[..., None], 0.0)
    inner = grad_scores[..., None] * w[:, None, None] * (1 - t * t)
    grad_w = (grad_scores[..., None] * t).sum((2, 3))
    return inner.sum(3), sum_groups(p, inner.sum(2)), grad_w


def _gaussian_backward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    kept: Tensor | None,
    grad_scores: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    assert w is not None
    x = q[:, :, :, None] - per_head(p, k)[:, :, None]  # [B, H, M, N, D]
    # What is infinitely far has no gradients: it weighs 0, or a softcap has the slope 0 there.
    x = x.masked_fill((x / _per_pair(w)).isinf(), 0.0)
    if kept is not None:
        x = x.masked_fill(~kept[..., None], 0.0)
    x = x / _per_pair(w)
    inner = grad_scores[..., None] * x
    grad_w = (inner * x).sum((2, 3)) / w
    inner = inner / _per_pair(w)
    return -inner.sum(3), sum_groups(p, inner.sum(2)), grad_w


_SCORE_BACKWARD = {
    "dot": _dot_backward, "additive": _additive_backward, "gaussian": _gaussian_backward,
}  # fmt: skip


# ---- softmax, masks ----


def kept_pairs(p: Problem, bias: Tensor | None) -> Tensor | None:
    """The pairs that the mask and the bias keep, where -inf drops; None when nothing can."""
    if not record.kinds(p.mask) and bias is None:
        return None
    kept = p.kept()
    return kept if bias is None else kept & (matrix_of(p, bias) != -math.inf)


def matrix_of(p: Problem, bias: Tensor) -> Tensor:
    """A canonical bias that broadcasts to ``[B, H, M, N]``."""
    return relative.spread(bias, p.M, p.N) if relative.is_line(bias, p.M, p.N) else bias


def _blank_unused(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes keys and values that no query keeps, and queries that keep no key.

    No result depends on them. But 0 * NaN would enter the products that derivatives are made of. Of
    other strides these may add up in another order, and garbage is to change no bit.
    """
    if kept is None:
        return q, k, v
    if not _known_finite(q, k, v):
        kept = kept.expand(p.B, p.H, p.M, p.N)
        heads = _groups(p, kept) if p.Hkv else kept[:, :, None]
        unused = ~heads.any(2).any(2)[..., None]
        q = q.masked_fill(~kept.any(-1, keepdim=True), 0.0)
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    return q.contiguous(), k.contiguous(), v.contiguous()


def probabilities(
    p: Problem,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    kept: Tensor | None,
    stats: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, tuple[Any, Tensor], Tensor, Tensor | None]:
    """(P, (lse, stats), W, dropout factors): softmax of masked scores before and after dropout.

    ``stats`` ``[B, H, M, 2]`` are (shift, factor): ``P = exp(score - shift) * factor``. They may be
    given, where these keys are not all, and then there is no lse. What is given has any sink in it.
    """
    scores = _scores(p, q, k, w)
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if bias is not None:
        scores = scores + matrix_of(p, bias)
    masked = None if kept is None else ~kept
    if masked is not None:
        scores = _over(scores, "masked_fill", masked, -math.inf)
    lse = None
    if stats is not None:
        exp = _over(_over(scores, "sub", stats[..., :1]), "exp")
        probs = _over(exp, "mul", stats[..., 1:])
    else:
        probs, lse, stats = _softmax(p, scores, sink)
    if masked is not None:  # where a row is NaN, its masked weights are still 0
        probs = _over(probs, "masked_fill", masked, 0.0)
    factors = None if p.dropout is None else p.dropout.factors(p, p.acc_dtype)
    return probs, (lse, stats), probs if factors is None else probs * factors, factors


def _softmax(p: Problem, scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(P, lse, stats) of masked scores, beside a sink."""
    if p.N == 0:  # amax of nothing is an error
        row_max = scores.new_full((p.B, p.H, p.M, 1), -math.inf)
    else:
        row_max = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        row_max = torch.maximum(row_max, sink.detach()[..., None, None])
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    exp = _over(_over(scores, "sub", row_max), "exp")
    total = of_keys = exp.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink[..., None, None] - row_max)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (row_max + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
    stats = torch.cat([row_max, (1 / total).masked_fill(of_keys == 0, 0.0)], -1)
    return _over(exp, "div", total), lse, stats


def _over(x: Tensor, operation: str, *args: Any) -> Tensor:
    """A method's result in the memory of x, unless a derivative or a transform may read x.

    New memory of a few megabytes takes longer than the operation.
    """
    tensors = [y for y in (x, *args) if isinstance(y, Tensor)]
    recorded = torch.is_grad_enabled() and any(y.requires_grad for y in tensors)
    recorded |= forward_ad._current_level >= 0
    free = not recorded and all(map(arguments.has_memory, tensors))
    return getattr(x, operation + "_" if free else operation)(*args)


def sink_weight(sink: Tensor, lse: Tensor) -> Tensor:
    """What sinks ``[H]`` or ``[B, H]`` take of every row, whose log-sum-exp they are part of."""
    # That of a row without keys is -inf, and -inf - -inf would be NaN.
    return torch.exp(sink.to(lse.dtype)[..., None] - lse.clamp(min=torch.finfo(lse.dtype).min))


# Below it a factor has lost its digits: the sink has all of a row.
LEAST_FACTOR = 1e-35


def known_sink_weight(sink: Tensor, stats: Tensor, unit: float = 1.0) -> Tensor:
    """The same, of what forward saved of rows. ``unit``: the backend's ``shift_unit``."""
    shift, factor = stats[..., 0], stats[..., 1]
    taken = above_shift(sink, shift, unit).exp_().mul_(factor)
    own = sink.double()[..., None]
    alone = torch.exp(own - own.clamp(min=torch.finfo(own.dtype).min))
    return torch.where(factor < LEAST_FACTOR, alone, taken).to(stats.dtype)


def above_shift(sink: Tensor, shift: Tensor, unit: float) -> Tensor:
    """By how much a sink is above the shift of a row: in float64, as its exponential follows."""
    return torch.sub(sink.double()[..., None], shift, alpha=unit)


def without_empty_rows(delta: Tensor, stats: Tensor, grad_lse: Tensor | None) -> Tensor:
    """delta_i, where a row without keys has the output 0, whatever its gradient is."""
    alone = torch.zeros_like(delta) if grad_lse is None else -grad_lse.to(delta.dtype)
    return torch.where(stats[..., 1] == 0, alone, delta)


def _returned_weights(p: Problem, dropped: Tensor) -> Tensor:
    if p.weights == "none":
        return dropped.new_empty(0)
    return dropped if p.weights == "full" else dropped.sum(1) / max(p.H, 1)


def _masked_matmul(a: Tensor, b: Tensor, kept: Tensor | None, of_mT: bool = False) -> Tensor:
    """a @ b where a masked pair contributes nothing, whatever b holds there.

    The product leaves out the entries of b that are not finite. The rows that keep such an entry
    then get it added. Where values can be read, finite ones need neither. Products of other strides
    may add up in another order, so b is always contiguous: then garbage changes no bit.

    ``of_mT``: as (b.mT @ a.mT).mT, which is the order of torch's gradient of k in q @ k.mT. In the
    other order MKL sums long products of a few rows and columns with 12 times the error.
    """

    def product(b: Tensor) -> Tensor:
        return (b.mT @ a.mT).mT.contiguous() if of_mT else a @ b

    if kept is None:
        return product(b)
    if _known_finite(b):
        return product(b.contiguous())
    out = product(b.masked_fill(~b.isfinite(), 0.0).contiguous())
    used = kept.expand(a.shape).to(a.dtype)
    for special in (math.inf, -math.inf, math.nan):
        here = b.isnan() if math.isnan(special) else b == special
        out = out + torch.where(used @ here.to(a.dtype) > 0, special, 0.0)
    return out


def _known_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, where they can be read: then their sum is, if it has room."""
    return all(arguments.can_read(x) and math.isfinite(x.detach().sum()) for x in tensors)


# ---- heads, dtypes, broadcasts ----


def _upcast(p: Problem, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(p.acc_dtype) for t in tensors]


def per_head(p: Problem, x: Tensor) -> Tensor:
    """[B, Hkv, ...] -> [B, H, ...]."""
    return x if p.H == p.Hkv else x.repeat_interleave(p.H // p.Hkv, dim=1)


def sum_groups(p: Problem, x: Tensor) -> Tensor:
    """[B, H, ...] -> [B, Hkv, ...], the transpose of :func:`per_head`."""
    return x if p.H == p.Hkv else _groups(p, x).sum(2)


def _groups(p: Problem, x: Tensor) -> Tensor:
    """[B, H, ...] -> [B, Hkv, H / Hkv, ...]; batched gradients have no rule for unflatten."""
    return x.reshape(x.shape[0], p.Hkv, p.H // p.Hkv, *x.shape[2:])
