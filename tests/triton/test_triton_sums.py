"""Sums over many tiles of fp32: docs/decisions/0033. The interpreter adds terms as a GPU does.

tests/properties/long_sums.py compares with this machine's BLAS, which may be as far off as one long
sum. So errors are counted here, in ulp of the largest result.
"""

import dataclasses
import itertools

import pytest
import torch

from fastattn import testing
from fastattn.kernels.host import config
from fastattn.kernels.loop import grad_key
from fastattn.testing import GRID, Case
from fastattn.testing.budget import error, largest


@pytest.fixture(autouse=True)
def interpreted(device, carried):
    if device.type == "cuda":
        pytest.skip("on a GPU long sums run in tests/contract/test_properties.py")


def errors(score, grad, **sizes):
    """In ulp, by name, of a problem whose sums have terms of one sign."""
    case = Case("long", score=score, B=1, H=1, Hkv=1, D=2, E=2, **sizes)
    t = testing.make(case)
    t.q.data = t.q / 2 + 3.0 * grad
    t.v.data += 2.0
    t.grad_out += 2.0
    truth, found = testing.exact(case, t), testing.run(case, t, "triton", grad=grad)
    eps = torch.finfo(torch.float32).eps
    return {name: error(x, truth[name]) / (eps * largest(truth[name])) for name, x in found.items()}


@pytest.mark.parametrize("score", ["dot", "additive", "gaussian"])
def test_products_of_tiles_of_keys_are_added(score):
    assert errors(score, grad=False, M=17, N=2048)["out"] < 8  # 12 to 17 in one sum


@pytest.fixture
def many_row_blocks(monkeypatch):
    """Keys meet rows by 16, as on a GPU. All else takes few programs, which saves time."""
    blocks = {"fwd": 256, "dq": 256, "tile": 256, "dkdv": 16}
    for score, (kernel, rows) in itertools.product(("dot", "additive"), blocks.items()):
        sizes = dict.fromkeys(config.HEAD_SIZES, config._row((rows, 16, 4, 1)))
        name = config.row_name(score, kernel)
        monkeypatch.setitem(config.TABLE[name], ("interpreter", 4), sizes)


def test_keys_have_sums_of_turns_of_row_blocks(many_row_blocks, monkeypatch):
    monkeypatch.setattr(grad_key.TURN, "value", 16)  # of 256 row blocks
    found = errors("dot", grad=True, M=4096, N=8)
    assert found["grad_k"] < 2  # 3.4 in a sum of all blocks
    assert found["grad_v"] < 1.5  # 3.1


def test_gradients_of_additive_keys_are_summed_in_float64(many_row_blocks):
    assert errors("additive", grad=True, M=1024, N=8)["grad_k"] < 1


# ---- turns beside masks and groups of heads: a case of the grid has one turn ----

NAMES = ("causal-tall", "window", "documents-70", "kv-len", "all-masks", "garbage-groups")
FLOATS = [c for c in GRID if (c.score, c.dtype) == ("dot", torch.float32)]
CASES = [dataclasses.replace(c, M=80) for c in FLOATS if c.name in NAMES]  # five row blocks


@pytest.fixture
def turns(many_row_blocks, monkeypatch):
    """Turns of two row blocks at most. The list gets (number, row blocks) of each."""
    monkeypatch.setattr(grad_key.TURN, "value", 2)
    made, share = [], grad_key.share_of_blocks

    def listed(turn, turns, blocks):
        begin, *_, end = part = share(turn, turns, blocks)
        made.append((int(turn), int(end - begin)))
        return part

    monkeypatch.setattr(grad_key, "share_of_blocks", listed)
    return made


def assert_several(turns):
    """Some keys have more than one turn, and no turn is without row blocks."""
    assert max(turn for turn, _ in turns) > 0
    assert {blocks for _, blocks in turns} == {1, 2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_visit_each_row_block_once(case, turns):
    testing.check(case, "triton")
    assert_several(turns)


def test_turns_visit_each_block_of_a_mask_once(turns):
    case = Case("blocks", keep="bhmn", keep_rate=0.8, Hkv=1, M=80, N=70)
    t = testing.make(case)
    blocks = t.mask.keep[..., ::16, ::16].repeat_interleave(16, 2).repeat_interleave(16, 3)
    t.mask = dataclasses.replace(t.mask, keep=blocks[..., : case.M, : case.N])
    testing.oracle(case, t).check(case, testing.run(case, t, "triton"))
    assert_several(turns)
