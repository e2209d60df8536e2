"""Inputs that kernels read in place: gradients of few queries, a bias that masks nothing."""

import dataclasses
import math

import pytest
import torch
from helpers import attend, everything, inputs

from fastattn import Mask, RelativeBias, testing
from fastattn.testing import Case

pytestmark = pytest.mark.usefixtures("extension")


# ---- few queries ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "D"), [(1, 40), (2, 40), (4, 40), (7, 40), (12, 72)])
def test_gradients_of_few_queries(isa, M, D, dtype):
    """Heads that share keys, sizes with tails, and all kinds of mask at once."""
    sizes = dict(B=2, H=6, Hkv=2, M=M, N=300, D=D, E=70, dtype=dtype, lse=True)
    for masks in ({}, dict(kv_len="rows", keep="bhmn", causal="bottom_right")):
        testing.check(Case(f"few-{M}", **sizes, **masks, weights="mean", dropout_p=0.2), "cpu")


ONE_STEP = {
    "plain": {},
    "bmhd": dict(layout="bmhd"),
    "masks": dict(kv_len="rows", keep="bhmn", bias="hn", bias_inf=True, causal="bottom_right"),
    "dropout": dict(weights="mean", dropout_p=0.2),
    "saturated": dict(opposite=25.0),
    "wide": dict(magnitude=30.0, keep="bn"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ONE_STEP)
def test_additive_gradients_of_one_query(isa, masks, dtype):
    """One step of a decoder, where a key's gradient is no sum. Every size has a tail."""
    for D, N in ((1, 5), (40, 300), (129, 67)):
        sizes = dict(B=2, H=3, Hkv=3, M=1, N=N, D=D, E=70, dtype=dtype, lse=True)
        testing.check(Case(f"step-{D}", "additive", **sizes, **ONE_STEP[masks]), "cpu")


@pytest.mark.parametrize("N", [2, 70])
def test_additive_gradients_of_one_query_whatever_the_strides_of_values(isa, N):
    """If keys are equal, an error is the same in all scores: only a difference between paths shows.

    Forward and backward must therefore compute a score in the same way.
    """
    case = Case("step-values", "additive", M=1, N=N, D=129, E=4, weights="full", lse=True)
    drawn = testing.make(case)
    w = drawn.w[..., :1].expand_as(drawn.w)
    v = drawn.v.mT.contiguous().mT
    t = dataclasses.replace(drawn, w=w, k=drawn.k[:, :, :1].expand_as(drawn.k), v=v)
    oracle, ours = testing.oracle(case, t), testing.run(case, t, "cpu")
    for name, x in ours.items():
        truth, peer, scale = oracle[name]
        testing.assert_within_budget(x, peer, truth, name, scale)


def test_additive_garbage_of_one_query_reaches_its_own_gradients_alone(isa):
    """NaN in one key and in another batch entry's query, and garbage in a masked key."""
    call = inputs("additive", B=3, H=1, M=1, N=70, D=40, E=24)
    keep = torch.ones(3, 1, 1, 70, dtype=torch.bool)
    keep[2, :, :, 30] = False
    clean = everything(call, mask=Mask(keep=keep), backend="cpu")
    call["key"][0, 0, 20, 3] = call["query"][1] = math.nan
    call["key"][2, 0, 30] = call["value"][2, 0, 30] = torch.tensor(math.nan)
    found = everything(call, mask=Mask(keep=keep), backend="cpu")
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert torch.equal(found[name][2], clean[name][2]), name
    assert found["grad_key"][:2].isnan().all()
    assert found["grad_query"][:2].isnan().all()


ONE_QUERY = {
    "plain": {},
    "lengths": dict(kv_len="batch"),
    "all": dict(kv_len="rows", keep="bhmn", bias="hn", bias_inf=True, causal="bottom_right"),
    "bias": dict(bias="bhmn", causal="bottom_right"),
    "heads": dict(keep="hn"),
    "window": dict(window=(70, 0), causal="bottom_right"),
    "first-key": dict(causal="top_left"),
}


SHARED = [
    *(Case(f"{n}", H=2 * n, Hkv=2, dtype=torch.float32) for n in (2, 3, 4, 7, 12)),
    *(Case(f"{n}", H=2 * n, Hkv=2, dtype=torch.bfloat16, layout="bmhd") for n in (2, 3, 4, 7, 12)),
    Case("weights", H=6, Hkv=2, weights="mean"),
    Case("dropout", H=6, Hkv=2, dropout_p=0.3),
]


@pytest.mark.parametrize("masks", ONE_QUERY)
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_one_query_of_heads_that_share_keys(isa, case, masks):
    """Any number of heads, which the kernels treat as rows of one head. The sizes have tails."""
    sizes = dict(B=3, M=1, N=300, D=40, E=70, lse=True)
    testing.check(dataclasses.replace(case, **sizes, **ONE_QUERY[masks]), "cpu")


@pytest.mark.parametrize("group", [2, 4, 7])
def test_a_value_that_one_head_masks_reaches_the_others_alone(isa, group):
    """Values are read once for all heads of a group, but some heads may mask them."""
    call = inputs(B=1, H=group, Hkv=1, M=1, N=200, D=24, E=24)
    call["value"][..., 50, :] = math.nan
    call["value"][..., 60, 3] = math.inf
    keep = torch.ones(1, group, 1, 200, dtype=torch.bool)
    keep[:, 0, :, 50] = keep[:, :, :, 60] = False
    out = attend(**call, mask=Mask(keep=keep), backend="cpu")
    assert out[:, 0].isfinite().all()
    assert out[:, 1:].isnan().all()


@pytest.mark.parametrize("score", ["dot", "additive"])
@pytest.mark.parametrize("M", [1, 7])
def test_values_of_few_queries_whatever_their_strides(isa, score, M):
    """Packed values are summed in the short chains of values in place."""
    call = inputs(score, B=2, H=4, Hkv=2, M=M, N=300, D=24, E=20)
    mask = Mask(keep=torch.rand(1, 4, M, 300) > 0.3)
    usual = attend(**call, mask=mask, backend="cpu")
    call["value"] = call["value"].mT.contiguous().mT
    assert torch.equal(attend(**call, mask=mask, backend="cpu"), usual)


@pytest.mark.parametrize("M", [1, 3])
def test_weights_of_0_change_no_bit_of_a_sum(isa, M):
    """Chains end at the same keys, whether masked ones are left out or have a weight of 0."""
    call = inputs(B=1, M=M, N=300, D=24, E=20)
    masked = torch.rand(300) < 0.3
    found = [
        attend(**call, bias=torch.zeros(M, 300).masked_fill(masked, least), backend="cpu")
        for least in (-1e30, -math.inf)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["query", "grad_out"])
def test_garbage_of_one_query_stays_from_keys_it_masks(name):
    """Query 0 holds NaN and keeps the first half of the keys: the rest has finite gradients."""
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


@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("one", [2.0, -2.0])
def test_an_infinite_query_reaches_what_it_keeps_whatever_the_sign_of_0(isa, one, causal):
    """Its scores are -inf, so gradients of logits are 0, or -0 where a value is below others."""
    query, key, value = torch.ones(1, 1, 4, 2), -torch.ones(1, 1, 40, 2), torch.ones(1, 1, 40, 1)
    query[..., 2, 0], value[..., 1, 0] = math.inf, one
    tensors = [x.requires_grad_() for x in (query, key, value)]
    found = attend(*tensors, scale=1.0, mask=Mask(causal=causal), backend="cpu")
    [grad] = torch.autograd.grad(found.sum(), tensors[1])
    kept = Mask(causal=causal).to_dense(4, 40)[0, 0, 2]
    assert torch.equal(grad[0, 0, :, 0].isnan(), kept)


# ---- bias ----

SIZES = dict(B=2, H=3, M=70, N=256, D=40, E=24)  # whole vectors of keys


@pytest.mark.parametrize("layout", ["bhmn", "hmn", "mn", "hm", "bn", ""])
def test_bias_of_whole_tiles(isa, layout):
    case = Case("bias", **SIZES, Hkv=3, bias=layout, lse=True)
    testing.check(case, "cpu")
    testing.check(dataclasses.replace(case, causal="top_left", keep="mn"), "cpu")
    testing.check(dataclasses.replace(case, dropout_p=0.3, weights="full"), "cpu")


@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min, -1e37, 2e38])
def test_one_extreme_bias_in_a_plain_tile(isa, value):
    """One value moves its whole tile to another path, which must give the same results."""
    call, bias = inputs(**SIZES), torch.randn(1, 3, 70, 256)
    bias[:, :, 5, 17] = value
    found = everything(call, bias=bias, backend="cpu")
    double = {name: x.double() for name, x in call.items()}
    plain = everything(call, bias=bias, backend="eager")
    truth = everything(double, bias=bias.double(), backend="eager")
    for name, x in found.items():
        testing.assert_within_budget(x, plain[name], truth[name], name)


def test_nan_in_a_bias_of_whole_tiles_stays_in_its_row(isa):
    call, bias = inputs(**SIZES), torch.randn(1, 1, 70, 256)
    bias[:, :, 5, 17] = math.nan
    out = everything(call, bias=bias, backend="cpu")["out"]
    assert out[:, :, 5].isnan().all()
    assert torch.cat([out[:, :, :5], out[:, :, 6:]], 2).isfinite().all()


def test_keys_behind_an_infinite_bias_reach_nothing(isa):
    call, bias = inputs(**SIZES), torch.randn(1, 1, 70, 256)
    bias[..., 100:130] = -math.inf
    call["key"][:, :, 100:130] = call["value"][:, :, 100:130] = math.nan
    for name, x in everything(call, bias=bias, backend="cpu").items():
        assert x.isfinite().all(), name


def test_keys_behind_an_infinite_line_reach_nothing(isa):
    """The bias masks a key from row 35 on, and an interval does before."""
    call, rows = inputs(**SIZES), torch.arange(70)
    table = torch.zeros(61, 3)
    table[0] = -math.inf  # 30 keys back, or more
    begins = torch.where(rows < 35, 6, 0).expand(2, 70)
    call["key"][:, :, 5] = call["value"][:, :, 5] = math.nan
    options = dict(bias=RelativeBias(table, torch.arange(61)), mask=Mask(kv_begin=begins))
    leaves = [x.requires_grad_() for x in call.values()]
    out = attend(*leaves, **options, backend="cpu")
    for x in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert x.isfinite().all()


def test_a_row_of_the_smallest_bias_is_uniform(isa):
    bias = torch.zeros(1, 1, 70, 256)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    weights = everything(inputs(**SIZES), bias=bias, backend="cpu")["weights"]
    assert torch.equal(weights[:, :, 5], torch.full_like(weights[:, :, 5], 1 / 256))


def test_a_bias_of_0_and_infinity_is_a_mask(isa):
    """Tiles in which the bias is 0 run the code of full tiles."""
    call = inputs(**SIZES)
    double = {name: x.double() for name, x in call.items()}
    keep = torch.ones(1, 1, 70, 256, dtype=torch.bool).tril(100)
    bias = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    biased = everything(call, bias=bias, backend="cpu")
    plain = everything(call, mask=Mask(keep=keep), backend="eager")
    truth = everything(double, mask=Mask(keep=keep), backend="eager")
    for name, x in truth.items():
        testing.assert_within_budget(biased[name], plain[name], x, name)
