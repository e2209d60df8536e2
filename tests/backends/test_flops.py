"""FlopCounterMode counts our operators like torch's attention."""

import subprocess
import sys

import pytest
import torch
from helpers import attend, inputs
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from fastattn import Mask
from fastattn.backends import flops
from fastattn.problem import schemas

SIZES = [dict(), dict(H=4, Hkv=2), dict(B=1, H=3, M=1, N=9, D=8, E=8)]


def count(function):
    """Operations of a function and of the backward pass of its result."""
    with FlopCounterMode(display=False) as counter:
        out = function()
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True, mask=Mask(window=(2, 2)))])
def test_the_dot_product_counts_as_torchs(extension, sizes, options):
    tensors = inputs(grad=True, **sizes)
    q, k, v = tensors.values()
    forward, backward = count(lambda: attend(**tensors, **options))
    with sdpa_kernel(SDPBackend.MATH):
        dense, _ = count(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert forward == dense == flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    grad_shape = (*q.shape[:-1], v.shape[-1])
    expected = flop_counter.sdpa_backward_flop_count(grad_shape, q.shape, k.shape, v.shape)
    assert backward == expected


def test_the_additive_score_counts_as_a_product_with_its_weight(extension):
    tensors = inputs("additive", B=2, H=2, M=5, N=7, D=4, E=3, grad=True)
    pairs = 2 * 2 * 5 * 7
    # scores and output; scores again, the gradients of both their factors, of v, of the weights
    assert count(lambda: attend(**tensors)) == (2 * pairs * (4 + 3), 2 * pairs * (3 * 4 + 2 * 3))


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_what_modules_run_at_inference_counts_as_torchs(extension, batch_first):
    theirs = nn.MultiheadAttention(16, 2, batch_first=batch_first)
    x = torch.randn(3, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = count(lambda: theirs(x, x, x, need_weights=False)[0])
    weights = (theirs.in_proj_weight, None, theirs.out_proj.weight, None)
    operator = torch.ops.fastattn.multi_head_attention
    [*args] = x, *weights, 2, 8**-0.5
    shapes = [t.shape if isinstance(t, torch.Tensor) else t for t in args]
    assert (flops.multi_head_attention(*shapes, None, batch_first), 0) == expected
    assert operator in flop_counter.flop_registry
    keys = (3, 2, 9, 8)
    more = flops.multi_head_attention(*shapes, None, batch_first, None, keys, keys, 4) - expected[0]
    assert more == 2 * (3 * 5 * 2) * 4 * (8 + 8)
    M = x.shape[1 if batch_first else 0]
    fewer = flops.multi_head_attention(*shapes, None, batch_first, None, keys, keys, M, False)
    assert expected[0] - fewer == 2 * (3 * 5) * 16 * 32  # no projections of keys and values
    y = torch.randn(3, 7, 16) if batch_first else torch.randn(7, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = count(lambda: theirs(x, y, y, need_weights=False)[0])
    others = dict(key=y.shape)
    assert (flops.multi_head_attention(*shapes, None, batch_first, **others), 0) == expected


def test_every_operator_has_a_formula():
    names = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names()
             if n.startswith("fastattn::")}  # fmt: skip
    names -= set(schemas.OF_THE_MACHINE | schemas.CUDA_CHOOSE)
    assert {"forward", "triton_backward", "cuda_forward", "multi_head_attention"} <= names
    for name in names:
        assert getattr(torch.ops.fastattn, name) in flop_counter.flop_registry, name


@pytest.mark.slow
def test_torchs_counter_is_imported_by_who_counts_only():
    program = """
import sys, torch, fastattn
assert "torch.utils.flop_counter" not in sys.modules and "triton" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 2, 3, 4)
with FlopCounterMode(display=False) as counter:
    fastattn.scaled_dot_product_attention(q, q, q)
assert counter.get_total_flops() == 2 * 2 * 3 * 3 * (4 + 4), counter.get_total_flops()
assert not any(type(finder).__module__ == "fastattn.backends.flops" for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
