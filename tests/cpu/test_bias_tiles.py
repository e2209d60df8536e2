"""Gradients of a bias over several tiles: the first tile that meets a sum sets it, the others add.

The bias's broadcast dims decide which tile is first. That tile may be masked, in part or whole.
"""

import dataclasses
import functools

import pytest
import torch
from helpers import attend

from fastattn import Mask, testing
from fastattn.testing import Case

pytestmark = pytest.mark.usefixtures("extension")

M, N = 150, 600  # three blocks of rows, at least three tiles of keys with any instruction set

MASKS = {
    "none": {},
    "first batch short": dict(kv_len=torch.tensor([40, N])),
    "last batch short": dict(kv_len=torch.tensor([N, 40])),
    "first batch empty": dict(kv_len=torch.tensor([0, 333])),
    "causal": dict(causal="top_left"),
    "window": dict(window=(30, 0)),
}
SHAPES = ["mn", "hmn", "bmn", "bhmn", "n", "hn", "m", "bm"]


@pytest.fixture
def memory_of_nan():
    """New tensors are full of NaN, so that elements which are never written show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@functools.lru_cache(maxsize=1)  # the instruction sets need the same one in turn
def known(shape, mask, dtype):
    """A case, its tensors, and what is right. Without a sink, the sum over all keys is 0."""
    case = Case("tiles", M=M, N=N, D=24, E=24, bias=shape, sink=0.0, dtype=dtype)
    t = dataclasses.replace(testing.make(case), mask=Mask(**MASKS[mask]))
    return case, t, testing.oracle(case, t)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_sum_is_complete(isa, memory_of_nan, shape, mask, dtype):
    case, t, oracle = known(shape, mask, dtype)
    oracle.check(case, testing.run(case, t, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_groups_of_batches_have_sums_of_their_own(memory_of_nan, dtype):
    """Sums of few keys take little memory beside the queries, so batches are summed in groups."""
    case = Case("groups", B=6, M=20, N=32, D=64, E=8, bias="mn", dtype=dtype)
    testing.check(case, "cpu")


@pytest.mark.parametrize("shape", ["mn", "m", "n", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("none", "bhmn")
def test_sums_of_nothing_are_0(memory_of_nan, none, shape, dtype):
    sizes = {"b": 2, "h": 2, "m": 4, "n": 5, "1": 1} | {none: 0}
    q = torch.randn(*(sizes[dim] for dim in "bhm"), 8, dtype=dtype)
    k = torch.randn(*(sizes[dim] for dim in "bhn"), 8, dtype=dtype)
    rows = sizes["m"] if "m" in shape else 1
    columns = sizes["n"] if "n" in shape else 1
    bias = torch.randn(rows, columns, dtype=dtype, requires_grad=True)
    attend(q, k, k, bias=bias, backend="cpu").sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))
