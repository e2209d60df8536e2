"""A row without keys has output 0, weights 0, log-sum-exp -inf, gradients 0, for any reason."""

import math

import pytest
import torch
from helpers import SCORES, assert_same_bits, attend, everything, inputs

from fastattn import Mask, testing

B, H, M, N = 2, 2, 6, 5
FIRST = torch.arange(N) < 2
scores = pytest.mark.parametrize("score", SCORES)


def rows(*empty):
    """[M] bool: True for the empty rows."""
    return torch.isin(torch.arange(M), torch.tensor(empty))


def bias_of(empty):
    return torch.where(empty[:, None], -math.inf, 0.0).expand(M, N).clone()


# Options, and the rows that they empty, [M] or [B, M] bool.
WAYS = {
    "kv-len": (dict(mask=Mask(kv_len=torch.tensor([0, 4]))), torch.tensor([[True], [False]])),
    "kv-len-rows": (
        dict(mask=Mask(kv_len=torch.tensor([[0, 5, 0, 1, 2, 3], [5, 4, 3, 2, 1, 0]]))),
        torch.stack([rows(0, 2), rows(5)]),
    ),
    "kv-begin": (dict(mask=Mask(kv_begin=[5, 1])), torch.tensor([[True], [False]])),
    "intervals": (
        dict(mask=Mask(kv_begin=[[0, 5, 3, 1, 2, 3]], kv_len=[[0, 5, 1, 2, 4, 4]])),
        rows(0, 1, 2),
    ),
    "bottom-right": (dict(mask=Mask(causal="bottom_right")), rows(0)),
    "window": (dict(mask=Mask(window=(0, 0))), rows(5)),
    "window-shifted": (dict(mask=Mask(causal="bottom_right", window=(0, 0))), rows(0)),
    "keep": (dict(mask=Mask(keep=~rows(1, 4)[:, None].expand(M, N))), rows(1, 4)),
    "keep-m": (dict(mask=Mask(keep=~rows(1, 4)[:, None])), rows(1, 4)),
    "keep-nothing": (dict(mask=Mask(keep=torch.tensor(False))), rows(*range(M))),
    "bool-mask": (dict(attn_mask=~rows(3)[:, None].expand(M, N)), rows(3)),
    "float-mask": (dict(attn_mask=bias_of(rows(3))), rows(3)),
    "bias": (dict(bias=bias_of(rows(0, 5))), rows(0, 5)),
    "bias-m": (dict(bias=torch.where(rows(2), -math.inf, 0.5)[:, None]), rows(2)),
    "keep-and-causal": (
        dict(mask=Mask(keep=torch.arange(N) > 2), is_causal=True), rows(0, 1, 2)),
    "kv-len-and-window": (
        dict(mask=Mask(kv_len=torch.tensor([2, 2]), window=(1, 1))), rows(3, 4, 5)),
    "bias-and-keep": (
        dict(bias=torch.where(FIRST, -math.inf, 0.0), mask=Mask(keep=FIRST)),
        rows(*range(M)),
    ),
}  # fmt: skip


def empties(name):
    options, empty = WAYS[name]
    return dict(options), empty.expand(B, M)[:, None].expand(B, H, M)


ways = pytest.mark.parametrize("name", WAYS)


@ways
@scores
def test_results_are_0_and_minus_infinity(backend, score, name):
    options, empty = empties(name)
    results = everything(inputs(score, B, H, M=M, N=N), backend=backend, **options)
    assert (results["out"][empty] == 0).all()
    assert (results["weights"][empty] == 0).all()
    assert (results["lse"][empty] == -math.inf).all()
    assert results["lse"][~empty].isfinite().all()
    torch.testing.assert_close(
        results["weights"][~empty].sum(-1), torch.ones_like(results["lse"][~empty])
    )


@ways
@scores
def test_gradients_are_0_and_nothing_is_nan(backend, score, name):
    options, empty = empties(name)
    results = everything(inputs(score, B, H, M=M, N=N), backend=backend, **options)
    assert (results["grad_query"][empty] == 0).all()
    gradients = {n: x for n, x in results.items() if n.startswith("grad_")}
    assert len(gradients) >= 3
    assert all(x.isfinite().all() for x in gradients.values())
    if empty.all():
        assert all((x == 0).all() for x in gradients.values())


@ways
@pytest.mark.parametrize("upstream", [1e30, math.inf, math.nan])
@scores
def test_no_upstream_gradient_passes_an_empty_row(backend, score, name, upstream):
    """For the gradients of output, weights and lse. The -inf of lse easily makes a loss NaN."""
    options, empty = empties(name)
    call = inputs(score, B, H, M=M, N=N)

    def gradients(value):
        leaves = {n: x.clone().requires_grad_() for n, x in call.items()}
        results = attend(
            **leaves, return_weights="full", return_lse=True, backend=backend, **options
        )
        grads = [torch.full_like(r, 0.5) for r in results]
        for grad in grads:
            grad[empty] = value
        return dict(enumerate(torch.autograd.grad(results, leaves.values(), grads)))

    assert_same_bits(gradients(upstream), gradients(0.0))


@ways
@scores
def test_double_backward_is_finite(backend, score, name):
    options, empty = empties(name)
    leaves = {n: x.requires_grad_() for n, x in inputs(score, B, H, M=M, N=N).items()}
    out, weights = attend(**leaves, return_weights="full", backend=backend, **options)
    loss = out.square().sum() + weights.square().sum()
    first = torch.autograd.grad(loss, leaves.values(), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves.values())
    assert all(g.isfinite().all() for g in second)
    assert (second[0][empty] == 0).all()


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_agree(backend, name, dtype):
    options, empty = empties(name)
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    results = everything(inputs("dot", B, H, M=M, N=N, dtype=dtype), backend=backend, **options)
    assert (results["out"][empty] == 0).all()
    assert (results["lse"][empty] == -math.inf).all()
    assert all(x.isfinite().all() for n, x in results.items() if n != "lse")


@ways
def test_mean_weights_of_an_empty_row(backend, name):
    options, empty = empties(name)
    call = inputs("dot", B, H, M=M, N=N)
    _, mean = attend(**call, return_weights="mean", backend=backend, **options)
    assert (mean[empty.all(1)] == 0).all()
    assert mean.isfinite().all()


def test_heads_are_empty_one_by_one(backend):
    keep = torch.ones(H, M, N, dtype=torch.bool)
    keep[0, 2] = False
    results = everything(inputs("dot", B, H, M=M, N=N), mask=Mask(keep=keep), backend=backend)
    assert (results["out"][:, 0, 2] == 0).all()
    assert (results["out"][:, 1, 2] != 0).all()


@scores
def test_no_keys_at_all(backend, score):
    results = everything(inputs(score, B, H, M=M, N=0), backend=backend)
    assert (results["out"] == 0).all()
    assert (results["lse"] == -math.inf).all()
    assert (results["grad_query"] == 0).all()
    assert results["grad_key"].shape == (B, H, 0, 4)


@pytest.mark.parametrize("sizes", [(130, 300), (1, 3000), (300, 20)], ids=str)
@scores
def test_whole_tiles_of_empty_rows(backend, score, sizes):
    """Larger than any tile, and larger than decoding's chunks of keys."""
    m, n = sizes
    case = testing.Case(
        f"empty-{m}-{n}", score, M=m, N=n, B=3, H=1, Hkv=1, D=4, E=4, kv_len="batch", lse=True
    )
    testing.check(case, backend)
