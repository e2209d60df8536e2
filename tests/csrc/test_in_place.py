"""Inputs that kernels read where they lie: gradients of few queries, a bias that masks nothing."""

import dataclasses
import math

import pytest
import torch
from helpers import everything, inputs

from fastattn import Mask, testing
from fastattn.testing import Case

pytestmark = pytest.mark.usefixtures("extension")


# ---- few queries (M <= 4) ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [1, 2, 4])
def test_gradients_of_few_queries(isa, M, dtype):
    """Heads that share keys, sizes with tails, and every kind of mask at once."""
    sizes = dict(B=2, H=6, Hkv=2, M=M, N=300, D=40, E=70, dtype=dtype, lse=True)
    for masks in ({}, dict(kv_len="rows", keep="bhmn", causal="bottom_right")):
        testing.check(Case(f"few-{M}", **sizes, **masks, weights="mean", dropout_p=0.2), "cpu")


@pytest.mark.parametrize("name", ["query", "grad_out"])
def test_garbage_of_one_query_stays_from_keys_it_masks(name):
    """Query 0 holds NaN and keeps the first half of the keys only: the rest has whole gradients."""
    call = inputs(B=1, H=4, Hkv=2, M=2, N=40, D=24, E=24)
    grad_out = torch.randn(1, 4, 2, 24)
    keep = torch.ones(1, 1, 2, 40, dtype=torch.bool)
    keep[:, :, 0, 20:] = False
    spoiled = grad_out if name == "grad_out" else call["query"]
    spoiled[:, :, 0] = math.nan
    found = everything(call, grad_out=grad_out, mask=Mask(keep=keep), backend="cpu")
    for grad in (found["grad_key"], found["grad_value"]):
        assert grad[:, :, 20:].isfinite().all()
    assert found["grad_key"][:, :, :20].isnan().any()
    assert found["grad_query"][:, :, 1].isfinite().all()


# ---- bias ----

TILED = dict(B=2, H=3, Hkv=3, M=70, N=256, D=40, E=24, lse=True)  # whole vectors of keys


@pytest.mark.parametrize("layout", ["bhmn", "hmn", "mn", "hm", "bn", ""])
def test_bias_of_whole_tiles(isa, layout):
    case = Case("bias", **TILED, bias=layout)
    testing.check(case, "cpu")
    testing.check(dataclasses.replace(case, causal="top_left", keep="mn"), "cpu")
    testing.check(dataclasses.replace(case, dropout_p=0.3, weights="full"), "cpu")


@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min, -1e37, 2e38])
def test_one_extreme_bias_in_a_plain_tile(isa, value):
    """It sends its whole tile another way, which must give what a bias alone in its tile does."""
    sizes = {n: TILED[n] for n in ("B", "H", "M", "N", "D", "E")}
    call, bias = inputs(**sizes), torch.randn(1, 3, 70, 256)
    bias[:, :, 5, 17] = value
    found = everything(call, bias=bias, backend="cpu")
    double = {name: x.double() for name, x in call.items()}
    plain = everything(call, bias=bias, backend="eager")
    truth = everything(double, bias=bias.double(), backend="eager")
    for name, x in found.items():
        testing.assert_within_budget(x, plain[name], truth[name], name)


def test_nan_in_a_bias_of_whole_tiles_stays_in_its_row(isa):
    sizes = {n: TILED[n] for n in ("B", "H", "M", "N", "D", "E")}
    call, bias = inputs(**sizes), torch.randn(1, 1, 70, 256)
    bias[:, :, 5, 17] = math.nan
    out = everything(call, bias=bias, backend="cpu")["out"]
    assert out[:, :, 5].isnan().all()
    assert torch.cat([out[:, :, :5], out[:, :, 6:]], 2).isfinite().all()


def test_keys_behind_an_infinite_bias_reach_nothing(isa):
    sizes = {n: TILED[n] for n in ("B", "H", "M", "N", "D", "E")}
    call, bias = inputs(**sizes), torch.randn(1, 1, 70, 256)
    bias[..., 100:130] = -math.inf
    call["key"][:, :, 100:130] = call["value"][:, :, 100:130] = math.nan
    for name, x in everything(call, bias=bias, backend="cpu").items():
        assert x.isfinite().all(), name


def test_a_row_of_the_smallest_bias_is_uniform(isa):
    sizes = {n: TILED[n] for n in ("B", "H", "M", "N", "D", "E")}
    bias = torch.zeros(1, 1, 70, 256)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    weights = everything(inputs(**sizes), bias=bias, backend="cpu")["weights"]
    assert torch.equal(weights[:, :, 5], torch.full_like(weights[:, :, 5], 1 / 256))


def test_a_bias_of_0_and_infinity_is_a_mask(isa):
    """Tiles of zeros run the code of full tiles."""
    sizes = {n: TILED[n] for n in ("B", "H", "M", "N", "D", "E")}
    call = inputs(**sizes)
    double = {name: x.double() for name, x in call.items()}
    keep = torch.ones(1, 1, 70, 256, dtype=torch.bool).tril(100)
    bias = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    biased = everything(call, bias=bias, backend="cpu")
    plain = everything(call, mask=Mask(keep=keep), backend="eager")
    truth = everything(double, mask=Mask(keep=keep), backend="eager")
    for name, x in truth.items():
        testing.assert_within_budget(biased[name], plain[name], x, name)
