"""Repeated calls with dropout: the plans of calls without, and a seed that each call draws."""

import pytest
import torch
from properties.repeated_calls import MASKED, empty_table, heads, pulled  # noqa: F401

import fastattn
from fastattn.problem import call_cache

pytestmark = pytest.mark.usefixtures("extension", "empty_table")


def drawn(seed, args, options, **more):
    """Results and gradients of a call that draws its seed after this one."""
    torch.manual_seed(seed)
    return pulled(args, options, args, **more)


def compared(ordinary, args, other, options, **more):
    """Whether ``other`` gives the bits of new calls once ``args`` have a plan."""
    with call_cache.paused():
        want = [drawn(seed, other, options, **more) for seed in (1, 2)]
    assert not torch.equal(want[0][0], want[1][0])
    for seed in range(3):
        drawn(seed, args, options, **more)
    ordinary.clear()
    for seed, wanted in zip((1, 2), want, strict=True):
        assert all(map(torch.equal, drawn(seed, other, options, **more), wanted))


@pytest.mark.parametrize("weights", [None, "full", "mean"])
@pytest.mark.parametrize("kind", MASKED)
def test_the_bits_of_new_calls(ordinary, kind, weights):
    args, other = (heads(requires_grad=True) for _ in range(2))
    options = MASKED[kind]() | dict(dropout_p=0.4, return_weights=weights)
    compared(ordinary, args, other, options)
    assert not ordinary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_lengths(ordinary, dtype):
    args = heads(dtype=dtype, requires_grad=True)
    compared(ordinary, args, heads(9, 40, dtype, requires_grad=True), dict(dropout_p=0.4))
    assert not ordinary


def test_second_gradients(ordinary):
    args, other = (heads(requires_grad=True) for _ in range(2))
    compared(ordinary, args, other, dict(dropout_p=0.4), second=True)


def test_another_probability_has_another_plan():
    (q, k, v), kept = heads(60, 60), {}
    for _ in range(3):
        for p in (0.25, 0.75, 1.0):
            found = fastattn.scaled_dot_product_attention(
                q, k, v, dropout_p=p, return_weights="full"
            )
            kept[p] = (found[1] != 0).float().mean().item()
    assert kept[0.25] > 0.6 > 0.4 > kept[0.75] > kept[1.0] == 0


@pytest.mark.parametrize("grad", [True, False])
def test_additive(ordinary, grad):
    args = [*heads(requires_grad=grad), torch.randn(8, requires_grad=grad)]
    attended = {}
    for where in ("new", "planned"):
        for _ in range(4):
            torch.manual_seed(3)
            with call_cache.paused() if where == "new" else torch.enable_grad():
                ordinary.clear()
                out = fastattn.additive_attention(*args, dropout_p=0.4)
                more = torch.autograd.grad(out.sum(), args) if grad else ()
        attended[where] = [out, *more]
    assert not ordinary
    assert all(map(torch.equal, attended["planned"], attended["new"]))
