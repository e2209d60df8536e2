"""Repeated calls whose arguments are alike but for strides, or numbers of more than 64 bits."""

import pytest
import torch
from helpers import spied
from properties.repeated_calls import empty_table, heads  # noqa: F401

import fastattn
from fastattn import ALiBi, RelativeBias
from fastattn.problem import call_cache

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention


def test_strides_of_a_weight():
    q, k, v = heads()
    weight = torch.randn(2, 8)
    weights = [weight, weight.T.contiguous().T, torch.cat([weight, weight])[::3]]
    with call_cache.paused():
        wanted = [fastattn.additive_attention(q, k, v, w) for w in weights]
    for _ in range(3):
        for w, want in zip(weights, wanted, strict=True):
            assert torch.equal(fastattn.additive_attention(q, k, v, w), want)


def test_numbers_of_more_than_64_bits():
    args, scales = heads(), (-1, 2**70)
    with call_cache.paused():
        wanted = [sdpa(*args, scale=scale) for scale in scales]
    for scale, want in zip(scales, wanted, strict=True):
        for _ in range(4):
            assert torch.equal(sdpa(*args, scale=scale), want)


def test_strided_parts_of_lines(monkeypatch):
    args, ordinary = heads(), spied(monkeypatch, call_cache, "recall")
    for bias in (
        ALiBi(torch.rand(4)[::2]),
        ALiBi(torch.rand(2, 2).T),
        RelativeBias(torch.randn(2, 4).T, torch.arange(3)),
        RelativeBias(torch.randn(4, 2), torch.tensor([0, 9, 1, 9, 3, 9])[::2]),
    ):
        with call_cache.paused():
            want = sdpa(*args, bias=bias)
        ordinary.clear()
        for _ in range(4):
            assert torch.equal(sdpa(*args, bias=bias), want)
        assert len(ordinary) < 4
