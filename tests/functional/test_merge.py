"""merge_attention: parts over disjoint keys equal one call over all of them."""

import itertools
import math

import pytest
import torch
from helpers import SCORES, assert_close, attend, inputs

import fastattn
from fastattn import Mask, merge_attention, testing

CUTS = (0, 3, 3, 7, 11)  # of 11 keys: the second part has none


def whole(made: dict, **options) -> tuple[torch.Tensor, ...]:
    return attend(**made, return_lse=True, **options)


def merged(made: dict, **options) -> tuple[torch.Tensor, ...]:
    """The same from a call for each part of the keys."""
    parts = []
    for first, last in itertools.pairwise(CUTS):
        own = {name: made[name][..., first:last, :] for name in ("key", "value")}
        parts.append(whole(made | own, **options))
    return merge_attention(*zip(*parts, strict=True))


def derived(function, made: dict, **options) -> list[torch.Tensor]:
    """Results, and the gradients of a function of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    out, lse = function(leaves, **options)
    loss = (out.double() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    loss = loss + lse.double().sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_the_whole(backend, score, dtype):
    made = inputs(score, N=11, dtype=dtype)
    f64 = {name: x.double() for name, x in made.items()}
    plain, truth = derived(whole, made, backend="eager"), derived(whole, f64, backend="eager")
    assert_close(derived(merged, made, backend=backend), plain, truth)


def test_rows_without_keys_and_garbage_in_absent_parts():
    q = torch.randn(2, 1, 3, 4)
    k, v = torch.randn(2, 2, 1, 5, 4)
    none = Mask(kv_len=torch.tensor([0, 5]))
    out, lse = fastattn.scaled_dot_product_attention(q, k, v, mask=none, return_lse=True)
    spoiled = out.clone()
    spoiled[0] = torch.nan  # its log-sum-exp says that it has no keys
    outs = [out.clone().requires_grad_(), spoiled.requires_grad_()]
    lses = [lse.clone().requires_grad_(), lse.clone().requires_grad_()]
    found, total = merge_attention(outs, lses)
    torch.testing.assert_close(found, out)
    assert torch.equal(total[0], torch.full((1, 3), -torch.inf))
    torch.testing.assert_close(total[1], lse[1] + math.log(2))
    grads = torch.autograd.grad(found.sum() + total[1].sum(), outs + lses)
    assert all(g.isfinite().all() and not g[0].any() for g in grads)


def test_logits_of_any_size():
    """The largest decides: nothing overflows, and sums are in float32."""
    outs = [torch.full((1, 2), x, dtype=torch.float16) for x in (1.0, 3.0)]
    lses = [torch.tensor([x]) for x in (1e30, 1e30)]
    out, lse = merge_attention(outs, lses)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.full((1, 2), 2.0, dtype=torch.float16))
    assert torch.equal(lse, lses[0])
    lses = [torch.tensor([x]) for x in (0.0, 1e3)]
    for order in (1, -1):  # wherever the largest stands
        out, lse = merge_attention(outs[::order], lses[::order])
        assert torch.equal(out, outs[1])
        assert torch.equal(lse, lses[1])


def test_sums_are_as_wide_as_the_outputs():
    outs, lses = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5).half()
    out, lse = merge_attention([*outs], [*lses])
    wide, exact = merge_attention([*outs], [*lses.double()])
    testing.assert_same_bits({"out": out, "lse": lse}, {"out": wide, "lse": exact.half()})


def test_gradgrad():
    parts = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    logs = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def merge(*x):
        return merge_attention(x[:2], x[2:])

    assert torch.autograd.gradgradcheck(merge, (*parts, *logs))


@pytest.mark.slow
def test_compiles_in_one_graph():
    made = inputs(N=11)
    found = torch.compile(lambda made: merged(made), fullgraph=True, backend="aot_eager")(made)
    torch.testing.assert_close(found, merged(made))


OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        (OUT, [LSE], TypeError, "outs: expected a list or tuple of tensors, got Tensor"),
        ([OUT], [None], TypeError, r"lses\[0\]"),
        ([OUT.int()], [LSE], TypeError, r"outs\[0\]: expected a floating-point tensor"),
        ([], [], ValueError, "expected one of each for every part, got 0 and 0"),
        ([OUT, OUT], [LSE], ValueError, "got 2 and 1"),
        ([OUT, OUT.half()], [LSE, LSE], ValueError, r"outs\[1\]: expected torch.float32"),
        ([OUT, OUT[:1]], [LSE, LSE], ValueError, r"outs\[1\], lses\[1\]: expected shapes"),
        ([OUT], [LSE[:, :2]], ValueError, r"outs\[0\], lses\[0\]: expected shapes"),
        ([OUT], [LSE.to("meta")], ValueError, "lses: expected the device of outs, cpu, got meta"),
        ([torch.tensor(1.0)], [torch.tensor(1.0)], ValueError, r"expected shapes \[..., M, E\]"),
    ],
)
def test_errors(outs, lses, error, message):
    with pytest.raises(error, match=message):
        merge_attention(outs, lses)
