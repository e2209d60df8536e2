"""The softcap of logits: its meaning, arguments and transforms. The grid has its errors."""

import functools
import math

import pytest
import torch

import fastattn
from fastattn.problem import call_cache

ATTEND = {
    "dot": fastattn.scaled_dot_product_attention,
    "additive": lambda q, k, v, **options: fastattn.additive_attention(
        q, k, v, torch.ones(q.shape[1], q.shape[3], dtype=q.dtype), **options
    ),
    "gaussian": functools.partial(fastattn.attention, score="gaussian", bandwidth=1.5),
}
FORMULAS = {
    "dot": lambda q, k: (q * k).sum(-1),
    "additive": lambda q, k: torch.tanh(q + k).sum(-1),
    "gaussian": lambda q, k: (q - k).square().sum(-1) / (-2 * 1.5**2),
}
SCORES = pytest.mark.parametrize("score", ATTEND)


def inputs(dtype=torch.float32, B=2, H=2, M=5, N=7, D=4):
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, H, n, D, generator=rng, dtype=torch.float64).to(dtype) for n in (M, N, N)
    ]


@SCORES
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_logit_passes_the_cap_before_the_bias(score, backend):
    q, k, v = inputs()
    options = dict(return_weights="full", backend=backend)
    weights = ATTEND[score](1e3 * q, k, v, softcap=0.5, **options)[1]
    # Two logits are at most 2 * 0.5 apart.
    assert weights.amax(-1).div(weights.amin(-1)).max() <= math.e * (1 + 1e-5)
    bias = torch.zeros(7).index_fill_(0, torch.tensor([2]), 100.0)
    weights = ATTEND[score](1e3 * q, k, v, softcap=0.5, bias=bias, **options)[1]
    assert (weights[..., 2] == 1).all()


@SCORES
def test_a_far_cap_is_none(score):
    q, k, v = inputs()
    torch.testing.assert_close(ATTEND[score](q, k, v, softcap=1e6), ATTEND[score](q, k, v))


@pytest.mark.parametrize("none", [None, 0, 0.0])
def test_zero_is_no_cap(none):
    q, k, v = inputs()
    assert torch.equal(ATTEND["dot"](q, k, v, softcap=none), ATTEND["dot"](q, k, v))


def test_remembered_calls_differ_by_their_cap():
    q, k, v = inputs()
    call_cache.forget()
    first, second = (ATTEND["dot"](q, k, v, softcap=c) for c in (0.5, 1.0))
    assert not torch.equal(first, second)
    assert torch.equal(ATTEND["dot"](q, k, v, softcap=0.5), first)


@pytest.mark.parametrize(
    ("cap", "error"),
    [(-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError), (1e-20, ValueError),
     (True, TypeError), ("50", TypeError), (torch.ones(()), TypeError)],
)  # fmt: skip
@SCORES
def test_bad_caps(score, cap, error):
    q, k, v = inputs()
    for _ in range(2):  # a call that was remembered too
        ATTEND[score](q, k, v, softcap=1.0)
        with pytest.raises(error, match=r"^softcap: expected"):
            ATTEND[score](q, k, v, softcap=cap)


def test_explain_names_the_cap():
    assert "softcap 50" in str(fastattn.explain(*inputs(), softcap=50.0))


@SCORES
@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_scores_of_the_cap(score, scale):
    q, k, v = inputs()
    options = dict(scale=scale) if score == "dot" else {}
    lse = ATTEND[score](q, k[:, :, :1], v[:, :, :1], softcap=0.7, return_lse=True, **options)[1]
    k = k[:, :, :1]
    s = FORMULAS[score](q, k) * options.get("scale", 1.0)
    torch.testing.assert_close(lse, 0.7 * torch.tanh(s / 0.7))


@SCORES
def test_derivatives(score):
    q, k, v = (x.requires_grad_() for x in inputs(torch.float64, B=1, H=2, M=2, N=3, D=2))
    bias = torch.randn(1, 2, 1, 3, dtype=torch.float64).requires_grad_()

    def attend(q, k, v, bias):
        keep = torch.tensor([[True, False, True], [True, True, True]])
        return ATTEND[score](q, k, v, bias=bias, softcap=0.5, mask=fastattn.Mask(keep=keep))

    assert torch.autograd.gradcheck(attend, (q, k, v, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias))


@SCORES
def test_double_backward_of_the_kernels(score):
    def second(dtype):
        q, k, v = (x.requires_grad_() for x in inputs(dtype))
        out = ATTEND[score](q, k, v, softcap=0.5)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (q, k, v))

    for a, b in zip(second(torch.float32), second(torch.float64), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_second_derivatives_far_above_the_cap_are_0():
    """At a ratio of 144, whose cosh is no number of float32."""
    q, k, v = (torch.full_like(x, 6.0).requires_grad_() for x in inputs())
    out = ATTEND["dot"](q, k, v, softcap=0.5)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert not any(x.any() for x in torch.autograd.grad(grad.sum(), (q, k)))


@SCORES
def test_vmap(score):
    q, k, v = inputs()

    def attend(q):
        return ATTEND[score](q, k, v, softcap=0.5)

    several = torch.stack([q, 2 * q])
    wanted = torch.stack([attend(x) for x in several])
    torch.testing.assert_close(torch.vmap(attend)(several), wanted)
