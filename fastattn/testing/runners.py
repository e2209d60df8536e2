"""Three ways to compute a case: ours, the float64 reference, plain PyTorch. Results have names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import functional, scores
from fastattn.problem import Problem, record, reference, validate
from fastattn.testing.cases import INPUTS, Case, Tensors, given_bias, is_relative


def _leaf(x: Tensor | None, dtype: torch.dtype | None = None, grad: bool = True) -> Tensor | None:
    """A leaf with x's strides; x itself if it can have no gradient."""
    if x is None or not x.is_floating_point():
        return x
    return (x if dtype is None else x.to(dtype)).detach().requires_grad_(grad)


def _leaves(case: Case, t: Tensors, dtype: torch.dtype | None) -> dict[str, Any]:
    added = ("bias", "attn_mask", "sink")
    return {n: _leaf(getattr(t, n), dtype, n not in added or case.bias_grad) for n in INPUTS}


def _results(
    case: Case,
    t: Tensors,
    call: Callable[..., Any],
    dtype: torch.dtype | None,
    with_grad: bool = True,
) -> dict[str, Tensor]:
    """Runs call(q, k, v, ...) with all INPUTS, to (out[, weights][, lse]), and its backward."""
    leaves = _leaves(case, t, dtype)
    with torch.set_grad_enabled(with_grad):
        outputs = call(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = ["out", *(["weights"] if case.weights else []), *(["lse"] if case.lse else [])]
    results = dict(zip(names, outputs, strict=True))
    if not with_grad:
        return results
    upstream: dict[str, Any] = {"out": t.grad_out, "weights": t.grad_weights, "lse": t.grad_lse}
    grads = [upstream[name].to(x.dtype) for name, x in results.items()]
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    pulled = torch.autograd.grad(
        list(results.values()), list(wanted.values()), grads, allow_unused=True
    )
    for (name, leaf), grad in zip(wanted.items(), pulled, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


DROPOUT_SEED = 0x1234_5678_9ABC_DEF0


def run(case: Case, t: Tensors, backend: str = "auto", grad: bool = True) -> dict[str, Tensor]:
    """Our result on a backend; ``grad``: with its gradients."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        bias: Tensor | None,
        attn_mask: Tensor | None,
        bandwidth: Tensor,
        sink: Tensor | None,
    ) -> Any:
        options: dict[str, Any] = dict(bias=given_bias(case, bias), attn_mask=attn_mask, sink=sink)
        options |= dict(backend=backend, return_weights=case.weights, return_lse=case.lse)
        if record.kinds(t.mask):
            options |= dict(mask=t.mask)
        if case.softcap:
            options |= dict(softcap=case.softcap)
        if case.dropout_p:
            options |= dict(dropout_p=case.dropout_p, seed=DROPOUT_SEED)
        if case.score == "additive":
            return functional.additive_attention(q, k, v, w, **options)
        options |= dict(enable_gqa=True, scale=case.scale)
        if case.score == "dot":
            return functional.scaled_dot_product_attention(q, k, v, **options)
        return scores.attention(q, k, v, score=case.score, bandwidth=bandwidth, **options)

    return _results(case, t, call, None, grad)


def _build(
    case: Case,
    t: Tensors,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    scale: float | None,
) -> validate.Inputs:
    """``w``: the weight of the additive score, the bandwidth of the gaussian."""
    score: Any = case.score if w is not None else "dot"
    return validate.build(
        score, q, k, v, w, mask=t.mask, bias=given_bias(case, bias),
        attn_mask=attn_mask, scale=scale, softcap=case.softcap, enable_gqa=True,
        dropout_p=case.dropout_p, seed=DROPOUT_SEED, return_weights=case.weights,
    )  # fmt: skip


def _kept(case: Case, t: Tensors) -> tuple[Problem, Tensor]:
    """The record of a case, and the pairs that masks and biases keep, ``[B, H, M, N]``."""
    p, *_, added, _, _ = _build(
        case, t, t.q, t.k, t.v, _parameter(t.w, t.bandwidth), t.bias, t.attn_mask, case.scale
    )
    kept = p.kept().expand(p.B, p.H, p.M, p.N)
    return p, kept if added is None else kept & (reference.matrix_of(p, added) != -math.inf)


def _used_keys(p: Problem, kept: Tensor) -> Tensor:
    """``[B, Hkv, N]``: keys that some row of some head keeps."""
    return (kept.unflatten(1, (p.Hkv, -1)) if p.Hkv else kept[:, :, None]).any(2).any(2)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _parameter(w: Tensor | None, bandwidth: Tensor | None) -> Tensor | None:
    return w if bandwidth is None else bandwidth


def _canonical(case: Case, t: Tensors, leaves: dict[str, Any]) -> tuple:
    """(p, q, k, v, w, bias, sink) of a score of the record, made of leaves."""
    x = dict(leaves)
    q, k, scale = x.pop("q"), x.pop("k"), case.scale
    if case.score == "cosine":
        q, k, scale = _unit(q), _unit(k), 1.0 if scale is None else scale
    w, sink = _parameter(x.pop("w"), x.pop("bandwidth")), x.pop("sink")
    return *_build(case, t, q, k, w=w, scale=scale, **x)[:6], sink


def _summed(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """A gradient of each sample, or its sum over the batch where all samples share x."""
    return grad if grad is None or x is None or grad.dim() == x.dim() else grad.sum(0)


def _upstream(t: Tensors) -> list[Any]:
    return [None if x is None else x.double() for x in (t.grad_out, t.grad_lse, t.grad_weights)]


def exact(case: Case, t: Tensors) -> dict[str, Tensor]:
    """The float64 reference and its explicit gradients."""

    def compute(p: Problem, *args: Any) -> tuple[tuple, tuple]:
        return reference.forward(p, *args)[:3], reference.backward(p, *args, *_upstream(t))

    return explicit(case, t, torch.float64, compute)


def explicit(
    case: Case, t: Tensors, dtype: torch.dtype | None, compute: Callable[..., tuple[tuple, tuple]]
) -> dict[str, Tensor]:
    """Results and gradients of ``compute(p, q, k, v, w, bias, sink)`` on the canonical tensors.

    It returns (out, lse, weights), and the gradients of q, k, v, w, bias and sink.
    """
    leaves = _leaves(case, t, dtype)
    p, *made = _canonical(case, t, leaves)
    args: list[Any] = [None if x is None else x.detach() for x in made]
    (out, lse, weights), pulled = compute(p, *args)
    grads = [_summed(grad, x) for grad, x in zip(pulled, args, strict=True)]
    results = {"out": out}
    if case.weights:
        results["weights"] = weights
    if case.lse:
        results["lse"] = lse
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    pairs = [(x, g) for x, g in zip(made, grads, strict=True) if x is not None and x.requires_grad]
    ends, upstream = zip(*pairs, strict=True)
    pulled = torch.autograd.grad(ends, list(wanted.values()), upstream)
    return results | {f"grad_{n}": g for n, g in zip(wanted, pulled, strict=True)}


def plain(case: Case, t: Tensors) -> dict[str, Tensor]:
    """What a user would write in PyTorch, in the case's dtype: the peer in the error budget."""
    p, kept = _kept(case, t)
    has_key = kept.any(-1, keepdim=True)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        bias: Tensor | None,
        attn_mask: Tensor | None,
        bandwidth: Tensor,
        sink: Tensor | None,
    ) -> tuple[Tensor, ...]:
        k, v = (x.repeat_interleave(case.H // case.Hkv, dim=1) if case.Hkv else x for x in (k, v))
        if case.score == "dot":
            scores = (q @ k.mT) * p.scale
        elif case.score == "cosine":
            scores = (_unit(q) @ _unit(k).mT) * (1.0 if case.scale is None else case.scale)
        elif case.score == "gaussian":
            between = (q[:, :, :, None] - k[:, :, None]) / bandwidth.unsqueeze(-2)
            scores = between.square().sum(-1) / -2
        else:
            scores = (torch.tanh(q[:, :, :, None] + k[:, :, None]) * w[:, None, None]).sum(-1)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if bias is not None and is_relative(case):
            bias = given_bias(case, bias).to_dense(case.M, case.N)
        for x in (bias, attn_mask):
            if x is not None and x.is_floating_point():
                scores = scores + x.to(q.dtype)
        # Rows without a key keep all keys here, and are zeroed later: plain PyTorch would give NaN.
        scores = scores.masked_fill(~kept & has_key, -math.inf)
        scores = torch.where(has_key, scores, 0.0)
        without = torch.tensor(-math.inf)  # the log-sum-exp of a row without keys
        if sink is not None:
            without = sink[:, None].masked_fill(sink[:, None] == -math.inf, -math.inf)
            scores = torch.cat([scores, without[..., None].expand(*scores.shape[:-1], 1)], -1)
        weights = torch.softmax(scores, -1)[..., : case.N] * has_key
        if p.dropout is not None:
            weights = weights * p.dropout.factors(p, q.dtype)
        lse = torch.where(has_key.squeeze(-1), torch.logsumexp(scores, -1), without)
        returned = {None: (), "full": (weights,), "mean": (weights.mean(1),)}[case.weights]
        return (weights @ v, *returned, *((lse,) if case.lse else ()))

    return _results(case, t, call, case.dtype)
