"""A single NaN in a tile: the loop that packs it must see it, or masked pairs get it as 0 * NaN."""

import math

import pytest
import torch
from helpers import attend, everything, inputs

from fastattn import Mask

pytestmark = pytest.mark.usefixtures("extension")

M, N, D = 35, 70, 20  # every size has whole vectors and a tail
LAYOUTS = {"rows": lambda x: x, "columns": lambda x: x.mT.contiguous().mT}
PLACES = [
    *(("mask", name, 20) for name in ("query", "key", "value", "grad_out")),
    *((by, "value", 32) for by in ("mask", "bias")),  # values that are read where they lie
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("by", "name", "E"), PLACES)
def test_it_stays_from_pairs_that_are_masked(isa, by, name, E, layout):
    call = inputs(B=1, H=2, M=M, N=N, D=D, E=E) | {"grad_out": torch.randn(1, 2, M, E)}
    of_keys = name in ("key", "value")
    keep = torch.rand(M, N) < 0.6
    masks = dict(mask=Mask(keep=keep), bias=torch.zeros(M, N).masked_fill(~keep, -math.inf))
    options = {by: masks[by], "backend": "cpu"}
    for row in (3, 33, 69) if of_keys else (3, 33):
        for column in (2, 18):
            spoilt = call | {name: call[name].clone()}
            spoilt[name][..., row, column] = math.nan
            spoilt[name] = LAYOUTS[layout](spoilt[name])
            found = everything(spoilt, spoilt.pop("grad_out"), **options)
            masked = ~keep[:, row] if of_keys else ~keep[row]
            for result in ("out", "grad_query") if of_keys else ("grad_key", "grad_value"):
                assert found[result][:, :, masked].isfinite().all(), (result, row, column)


def test_gradients_of_masked_weights_reach_nothing(isa):
    """The entropy of weights has an infinite slope where a weight is 0."""
    keep = torch.rand(M, N) < 0.6
    call = inputs(B=1, H=2, M=M, N=N, D=D, E=D, grad=True)
    weights = attend(**call, mask=Mask(keep=keep), return_weights="full", backend="cpu")[1]
    grad, found = torch.randn(weights.shape), []
    for masked in (0.0, math.inf, math.nan):
        named = [call["query"], call["key"]]
        upstream = grad.masked_fill(~keep, masked)
        found.append(torch.autograd.grad(weights, named, upstream, retain_graph=True))
        assert all(map(torch.equal, found[-1], found[0]))
