"""Attention sinks beside masks, a bias and what is returned, against the dense formula."""

import math

import torch

import fastattn
from fastattn import testing

B, H, M, N, D = 2, 4, 6, 37, 8


# The first row has no key.
KEEP = (torch.arange(N) < 5 * torch.arange(M)[:, None]) & (torch.arange(N) != 3)


def inputs(dtype=torch.float32, Hkv=H):
    rng = torch.Generator().manual_seed(0)
    shapes = (B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, D), (H,), (B, H, 1, N), (H, D)
    return [torch.randn(s, generator=rng).to(dtype) for s in shapes]


def dense(q, k, v, sink, bias, w, *, score, softcap, mean=False, keep=KEEP):
    """(out, weights, lse): the sink is one more column of logits."""
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    if score == "dot":
        s = q @ k.mT / math.sqrt(D)
    elif score == "gaussian":
        between = (q[:, :, :, None] - k[:, :, None]) / w.abs()[:, None, None]
        s = between.square().sum(-1) / -2
    else:
        s = (torch.tanh(q[:, :, :, None] + k[:, :, None]) * w[:, None, None]).sum(-1)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = (s + bias).masked_fill(~keep, -math.inf)
    s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    nothing = (s == -math.inf).all(-1, keepdim=True)  # not even a sink
    weights = torch.softmax(s.masked_fill(nothing, 0.0), -1)[..., :-1].masked_fill(nothing, 0.0)
    lse = torch.logsumexp(s.masked_fill(nothing, 0.0), -1).masked_fill(nothing[..., 0], -math.inf)
    return weights @ v, weights.mean(1) if mean else weights, lse


def ours(q, k, v, sink, bias, w, *, score, softcap, mean=False, backend="auto", keep=KEEP):
    options = dict(
        mask=fastattn.Mask(keep=keep), bias=bias, softcap=softcap, sink=sink, backend=backend,
        return_weights="mean" if mean else "full", return_lse=True,
    )  # fmt: skip
    if score == "dot":
        return fastattn.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    if score == "gaussian":
        options |= dict(score=score, bandwidth=w.abs()[:, None], enable_gqa=True)
        return fastattn.attention(q, k, v, **options)
    return fastattn.additive_attention(q, k, v, w, **options)


def gradients(function, tensors, dtype, **options):
    """Results and gradients by name."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
    results = function(*leaves, **options)
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in results)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    names = ("out", "weights", "lse", "q", "k", "v", "sink", "bias", "w")
    return {n: x for n, x in zip(names, (*results, *found), strict=True) if x is not None}


def check(dtype, backend, **options):
    """All results and gradients are within the budget."""
    tensors = inputs(dtype, Hkv=2)
    found = gradients(ours, tensors, dtype, backend=backend, **options)
    truth = gradients(dense, tensors, torch.float64, **options)
    peer = gradients(dense, tensors, dtype, **options)
    for name, x in truth.items():
        testing.assert_within_budget(found[name], peer[name], x, name)
