"""Gradients of a bias over several tiles: the first tile that meets a sum sets it, the others add.

The bias's broadcast dims decide which tile is first. That tile may be masked, in part or whole.
"""

import functools

import pytest
import torch
from helpers import attend, inputs

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
SHAPES = {
    "mn": (M, N),
    "hmn": (2, M, N),
    "bmn": (2, 1, M, N),
    "bhmn": (2, 2, M, N),
    "n": (N,),
    "hn": (2, 1, N),
    "m": (M, 1),
    "bm": (2, 1, M, 1),
}


@pytest.fixture
def memory_of_nan():
    """New tensors are full of NaN, so that elements which are never written show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@functools.lru_cache(maxsize=1)  # the instruction sets need the same one in turn
def gradients(shape, mask, dtype):
    """The gradient as a function of (cast, backend); then plain PyTorch's, and the truth.

    Of several draws where it has few elements: whose largest error is larger is chance then.
    """
    few = torch.Size(SHAPES[shape]).numel() < 1000
    calls = [draw(shape, dtype) for _ in range(4 if few else 1)]

    def gradient(cast, backend):
        found = []
        for call in calls:
            *leaves, grad_out = (cast(x).requires_grad_() for x in call.values())
            named = dict(zip(call, leaves, strict=False))
            out = attend(**named, mask=Mask(**MASKS[mask]), backend=backend)
            found += torch.autograd.grad(out, named["bias"], grad_out)
        return torch.stack(found)

    return gradient, gradient(torch.clone, "eager"), gradient(lambda x: x.double(), "eager")


def draw(shape, dtype):
    """The arguments of a call, and the gradient of its output."""
    return {
        **inputs(H=2, M=M, N=N, D=24, E=24, dtype=dtype),
        "bias": torch.randn(SHAPES[shape]).to(dtype),
        "sink": torch.randn(2).to(dtype),  # without one, the sum over all keys is 0
        "grad_out": torch.randn(2, 2, M, 24).to(dtype),
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_sum_is_complete(isa, memory_of_nan, shape, mask, dtype):
    gradient, plain, truth = gradients(shape, mask, dtype)
    testing.assert_within_budget(gradient(torch.clone, "cpu"), plain, truth, "grad_bias")


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
