"""What a block is, and that partial results are rounded once. The grid in blocks: test_grid.py."""

import dataclasses
import itertools

import pytest
import torch

from fastattn import Mask, blocks, testing
from fastattn.backends import eager, operators
from fastattn.blocks import Cut, Part
from fastattn.problem import validate
from fastattn.testing.blocks import Blocks

# ---- what a block is ----


def problem(**options):
    q, k = torch.randn(2, 6, 9, 4), torch.randn(2, 2, 14, 4)
    return validate.build("dot", q, k, k, enable_gqa=True, **options)[:6]


def test_blocks_of_a_block_are_blocks_of_the_whole():
    p, *_ = problem(mask=Mask(causal="bottom_right", kv_len=[14, 5]))
    inner = blocks.block_of(blocks.block_of(p, Cut((0, 2), (3, 6), (2, 9), (4, 14))),
                            Cut((1, 2), (0, 3), (1, 5), (2, 9)))  # fmt: skip
    direct = blocks.block_of(p, Cut((1, 2), (3, 6), (3, 7), (6, 13)))
    assert inner.origin == direct.origin == (1, 3, 3, 6, 9, 14)
    assert inner.band() == direct.band()
    assert torch.equal(inner.kept(), direct.kept())


@pytest.mark.parametrize(
    ("h", "key_heads"), [((0, 3), (0, 1)), ((3, 6), (1, 2)), ((4, 6), (1, 2)), ((0, 6), (0, 2))]
)
def test_key_heads_of_a_block(h, key_heads):
    p, *_ = problem()
    assert blocks.key_heads(p, blocks.whole(p)._replace(h=h)) == key_heads


@pytest.mark.parametrize("h", [(0, 4), (2, 6), (2, 4)])
def test_heads_that_share_key_heads_with_others(h):
    p, *_ = problem()
    with pytest.raises(ValueError, match="expected whole groups of 3"):
        blocks.block_of(p, blocks.whole(p)._replace(h=h))


def test_with_dropout_keys_begin_at_multiples_of_4():
    p, *_ = problem(dropout_p=0.1, seed=1)
    with pytest.raises(ValueError, match="multiple of 4 with dropout, got 6"):
        blocks.block_of(p, blocks.whole(p)._replace(j=(6, 14)))


def test_a_block_outside_the_band_keeps_nothing():
    p, *_ = problem(mask=Mask(causal="top_left", window=(2, -1)))
    for i, j, m, n in itertools.product(range(9), range(14), (1, 3), (1, 2)):
        cut = blocks.whole(p)._replace(i=(i, min(i + m, 9)), j=(j, min(j + n, 14)))
        block = blocks.block_of(p, cut)
        assert blocks.keeps_nothing(block) == (not block.kept().any())
    assert blocks.keeps_nothing(blocks.block_of(p, blocks.whole(p)._replace(i=(3, 3))))


def test_no_merge_has_no_key():
    mask = Mask(causal="top_left", kv_len=[14, 0])
    p, *tensors = problem(mask=mask, bias=torch.tensor(-1000.0))
    cuts = [blocks.whole(p)._replace(j=j) for j in ((0, 7), (7, 14))]
    parts = [
        Part(*eager.forward(blocks.block_of(p, cut), *blocks.tensors_of(p, cut, *tensors)))
        for cut in cuts
    ]
    merged, shares = blocks.merge(1.0, parts)
    assert not merged.out[1].any()
    assert (merged.lse[1] == -torch.inf).all()
    assert not any(share[1].any() for share in shares)
    torch.testing.assert_close(sum(shares)[0], torch.ones(6, 9))


def test_a_weight_of_0_has_no_part_in_the_gradient_of_lse():
    """Whatever its gradient is: that of a logarithm is infinite there."""
    weights, grads = torch.tensor([[[[0.0, 0.5, 0.5]]], [[[torch.inf, 1.0, 2.0]]]]).split(1)
    cut = Cut((0, 1), (0, 1), (0, 1), (1, 2))
    assert blocks.grad_lse_of(cut, None, weights, grads).item() == -1.0


# ---- partial results are wide ----


def relative(x, truth):
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("name", ["cpu", "eager"])
def test_many_wide_blocks_round_once(name):
    """The largest error of bf16 results by 16 blocks of keys is that of one call."""
    case = testing.Case("wide", B=1, M=128, N=1024, D=64, E=64, dtype=torch.bfloat16)
    t = testing.make(case)
    truth = testing.exact(case, t)
    if name == "cpu" and operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)
    inputs = validate.build("dot", t.q, t.k, t.v)
    p, *tensors = inputs[:6]
    found = {}
    for wide, pieces in ((False, 1), (True, 16), (False, 16)):
        each = p.N // pieces
        cuts = [blocks.whole(p)._replace(j=(j, j + each)) for j in range(0, p.N, each)]
        run = Blocks(name, dataclasses.replace(p, wide=wide), tuple(tensors), [cuts])
        part = run.forward()
        grads = run.backward(part, t.grad_out, None, None)
        results = {"out": part.out.bfloat16(), "grad_q": grads[0]}
        found[wide, pieces] = {n: relative(x, truth[n]) for n, x in results.items()}
    for result in ("out", "grad_q"):
        whole, wide, rounded = (found[key][result] for key in found)
        assert wide < 1.05 * whole, result
        assert rounded > 1.1 * whole, result
