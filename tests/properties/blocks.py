"""Blocks of a larger problem: whose bits they draw, and results that are sums later."""

import dataclasses

import pytest
import torch
from helpers import SCORES, inputs

from fastattn import Mask, blocks
from fastattn.backends import registry
from fastattn.blocks import Cut, Part
from fastattn.problem import Origin, validate

B, H, M, N = 3, 4, 37, 150
scores = pytest.mark.parametrize("score", SCORES)


def built(score, sizes=(B, H, M, N), dtype=torch.float32, **options):
    """(p, q, k, v, w, bias) of a problem that can be cut."""
    samples, heads, rows, keys = sizes
    named = inputs(score, samples, heads, M=rows, N=keys, D=16, E=16, dtype=dtype)
    return validate.build(score, *named.values(), **options)[:6]


@pytest.mark.parametrize("first", [(0, 0, 5, 8), (1, 3, 0, 60), (2, 1, 33, 132)], ids=str)
@scores
def test_a_block_drops_what_the_whole_drops(backend, score, first):
    p, *tensors = built(score, dropout_p=0.4, seed=77, return_weights="full")
    cut = Cut(*zip(first, (B, H, M, N), strict=True))
    part = blocks.block_of(p, cut)
    assert part.origin == Origin(*first, M, N)
    weights = Part(*registry.get(backend).forward(part, *blocks.tensors_of(p, cut, *tensors)))[2]
    kept = p.dropout.bits(p) >= p.dropout.threshold
    assert torch.equal(weights != 0, blocks.pairs_of(kept, cut))
    assert torch.equal(part.dropout.bits(part), blocks.pairs_of(p.dropout.bits(p), cut))


@pytest.mark.parametrize("i", [0, 5, 36])
@pytest.mark.parametrize("j", [0, 3, 149])
def test_a_block_has_the_band_of_the_whole(backend, i, j):
    mask = Mask(causal="bottom_right", window=(60, -1))
    p, *tensors = built("dot", mask=mask, return_weights="full")
    cut = Cut((0, B), (0, H), (i, M), (j, N))
    part = blocks.block_of(p, cut)
    weights = registry.get(backend).forward(part, *blocks.tensors_of(p, cut, *tensors))[2]
    kept = p.kept().expand(B, H, M, N)
    assert torch.equal(weights != 0, blocks.pairs_of(kept, cut))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@scores
def test_wide_results_are_float32(backend, score, dtype):
    """They are those of the same numbers before rounding."""
    p, *tensors = built(score, (1, 1, M, M), dtype)
    run = registry.get(backend)
    wide = dataclasses.replace(p, wide=True)
    if run.unsupported(wide):
        pytest.skip("; ".join(run.unsupported(wide)))
    grad_out = torch.randn(1, 1, M, 16).to(dtype)
    found = []
    for problem in (p, wide):
        out, _, _, stats = run.forward(problem, *tensors)
        saved = (out.to(dtype), stats, grad_out, None, None, False)
        found.append((out, *run.backward(problem, *tensors, *saved)[:3]))
    for narrow, full in zip(*found, strict=True):
        assert narrow.dtype == dtype
        assert full.dtype == torch.float32
        assert torch.equal(full.to(dtype), narrow)
        assert dtype == torch.float32 or not torch.equal(full, narrow.float())
