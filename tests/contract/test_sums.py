"""Sums that hold for any logits: weights sum to 1, and dv sums to the sum of dO.

Both show that recomputed and returned weights are those whose sum the forward pass divided by.
"""

import pytest
import torch
from helpers import SCORES, attend, inputs

from fastattn import Mask

LOGITS = [1.0, 1e2, 1e4, 1e6, 1e10]
EPS = torch.finfo(torch.float32).eps
ULPS = 8

logits = pytest.mark.parametrize("logit", LOGITS, ids="{:.0e}".format)


def problem(score, logit, M, N, H=2, Hkv=2):
    """Tensors whose scores are about as large as `logit`."""
    call = inputs(score, B=1, H=H, Hkv=Hkv, M=M, N=N, D=16, E=5)
    for name in ("weight",) if score == "additive" else ("query", "key"):
        call[name] *= logit if name == "weight" else logit**0.5
    return call


def assert_sums(call, backend, **options):
    """Checks the sums, for rows that each keep a key, without dropout."""
    value = call["value"].requires_grad_()
    out, weights = attend(**call, return_weights="full", backend=backend, **options)
    assert ((weights.double().sum(-1) - 1).abs() <= ULPS * EPS).all()
    assert_column_sums(out, value)
    # Without returned weights, the forward pass may take another path.
    assert_column_sums(attend(**call, backend=backend, **options), value)


def assert_column_sums(out, value):
    grad_out = torch.randn_like(out)
    (grad_value,) = torch.autograd.grad(out, value, grad_out)
    found, expected = grad_value.double().sum((1, 2)), grad_out.double().sum((1, 2))
    assert ((found - expected).abs() <= ULPS * EPS * grad_out.double().abs().sum((1, 2))).all()


OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "kv-len": dict(mask=Mask(kv_len=torch.tensor([48]))),
    "keep": dict(mask=Mask(keep=torch.arange(128) % 3 != 1)),
    "bias": dict(bias=torch.linspace(-3, 3, 128)),
}


def assert_all_sums(score, logit, backend):
    for M, N in ((1, 128), (7, 128), (40, 64), (100, 128), (9, 300)):
        for name, options in OPTIONS.items() if N == 128 else [("plain", {})]:
            print(name)
            assert_sums(problem(score, logit, M, N), backend, **options)
    assert_sums(problem(score, logit, 1, 128, H=6), backend)


@logits
@pytest.mark.parametrize("score", SCORES)
def test_sums(backend, score, logit):
    assert_all_sums(score, logit, backend)


@logits
@pytest.mark.parametrize("score", SCORES)
def test_sums_of_an_instruction_set(isa, score, logit):
    assert_all_sums(score, logit, "cpu")


@pytest.mark.parametrize("size", [1.1e5, 3e8])
def test_equal_logits_beyond_2_to_the_31(isa, size):
    """Weights are 1 / N, however a logit is rounded."""
    x = torch.full((16, 1), size)
    out = attend(x, x, x, backend="cpu")
    assert torch.equal(out, x)


def strided(x):
    """The same numbers with rows that are not contiguous."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("M", [1, 5, 40])
def test_sums_do_not_depend_on_strides(isa, score, M, name):
    """A kernel's path depends on strides: both passes must take the same path."""
    call = problem(score, 1e4, M, 70)
    assert_sums(call | {name: strided(call[name])}, "cpu")


@pytest.mark.parametrize("lengths", [[40, 90, 70, 112, 200], None])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_sums_where_tiles_are_computed_in_several_ways(isa, size, lengths):
    """Some keys are far from the others, so their tiles round an additive score differently."""
    call = problem("additive", size, 512, 512, H=1, Hkv=1)
    for keys in (slice(100, 104), slice(300, 303)):
        call["key"][:, :, keys] *= 8
    mask = None if lengths is None else Mask.documents(lengths=lengths)
    assert_sums(call, "cpu", mask=mask)
