"""Properties of a softmax whose logits are all near one large number.

The sums of weights, and of the gradient of V over its rows, are known without an oracle. A
comparison with float64 has to allow for rounding of the logits. These sums show that forward,
returned weights and backward use the same logit, to the last bit.
"""

import torch

import fastattn

LOGITS = (1e2, 1e4, 1e6, 1e10)
ULPS = 8


def problem(logit: float, dtype: torch.dtype, M: int, N: int, device="cpu"):
    """(q, k, v) of one head. Most dims of q and k are equal; the rest make logits differ."""
    D, equal = 32, 24
    rng = torch.Generator().manual_seed(int(logit) + M + N)
    q, k, v = (torch.randn(1, 1, n, D, generator=rng) for n in (M, N, N))
    q[..., :equal] = k[..., :equal] = (logit * D**0.5 / equal) ** 0.5
    return tuple(x.to(dtype).to(device).requires_grad_() for x in (q, k, v))


def check(logit: float, dtype: torch.dtype, M: int, N: int, backend: str, device="cpu", **options):
    """The weights of a row sum to 1, and the rows of dV sum to the sum of dO's rows."""
    q, k, v = problem(logit, dtype, M, N, device)
    out, weights = fastattn.scaled_dot_product_attention(
        q, k, v, return_weights="full", backend=backend, **options
    )
    rng = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=rng).to(dtype).to(device)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    assert all(x.isfinite().all() for x in (out, weights, *grads))
    allowed = ULPS * torch.finfo(dtype).eps
    assert (weights.double().sum(-1) - 1).abs().max() <= allowed
    terms = grad.double()
    apart = (grads[2].double().sum(2) - terms.sum(2)).abs()
    assert (apart <= allowed * terms.abs().sum(2)).all(), (apart / terms.abs().sum(2)).max()
