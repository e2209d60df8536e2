"""Calls that repeat: inputs, masks of every kind, and a table that knows none of them."""

import sys

import pytest
import torch

import fastattn
from fastattn import Mask
from fastattn.problem import call_cache

# What a call has beside its inputs; each draws new tensors.
MASKED = {
    "plain": dict,
    "causal": lambda: dict(is_causal=True, scale=0.3, softcap=2.0),
    "bool": lambda: dict(attn_mask=torch.rand(3, 5) < 0.7),
    "float": lambda: dict(attn_mask=torch.randn(2, 1, 3, 5)),
    "bias": lambda: dict(bias=torch.randn(2, 3, 5), mask=Mask(keep=torch.rand(3, 5) < 0.7)),
    "lengths": lambda: dict(mask=Mask(kv_len=torch.randint(0, 6, (2,)), window=(1, -1))),
    "rows": lambda: dict(
        mask=Mask(kv_len=torch.randint(3, 6, (2, 3)), kv_begin=torch.randint(0, 3, (1, 3)).int())
    ),
    "sink": lambda: dict(sink=torch.randn(2), is_causal=True),
    "sink of strides": lambda: dict(sink=torch.randn(2, 3)[:, 1], attn_mask=torch.rand(3, 5) < 0.7),
}


@pytest.fixture
def empty_table(monkeypatch):
    """No call is known."""
    monkeypatch.setattr(call_cache, "_KNOWN", {})


def heads(M=3, N=5, dtype=torch.float32, requires_grad=False):
    """[q, k, v] of two samples and two heads."""
    shapes = (2, 2, M, 8), (2, 2, N, 8), (2, 2, N, 8)
    return [torch.randn(x).to(dtype).requires_grad_(requires_grad) for x in shapes]


def pulled(args, options, wanted, second=False):
    """Results, their gradients, and gradients of these if ``second``."""
    found = fastattn.scaled_dot_product_attention(*args, **options)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(0)
    grads = [torch.randn(x.shape).to(x.dtype) for x in found]
    first = torch.autograd.grad(found, wanted, grads, create_graph=second)
    loss = sum(x.float().square().sum() for x in first) if second else None
    return [*found, *first, *(torch.autograd.grad(loss, wanted) if second else ())]


def assert_few_functions_of_python(attend, grad=False) -> None:
    """Of a call with a plan, and of the backward pass of its sum if ``grad``."""
    names, most = [], 31 if grad else 8
    sys.setprofile(lambda frame, kind, _: kind == "call" and names.append(frame.f_code.co_name))
    try:
        out = attend()
        out.sum().backward() if grad else None
    finally:
        sys.setprofile(None)
    assert 0 < len(names) - 1 <= most, "\n".join(names)  # 1: ``attend`` itself
