"""Rows that begin with a logit as their maximum, where others than the expected key may have it."""

import dataclasses

import pytest
import torch

import fastattn
from fastattn import Mask, RelativeBias, testing
from fastattn.testing import Case

M, N = 70, 300
i, j = torch.arange(M)[:, None], torch.arange(N)
MASKS = {
    "none": Mask(),
    "causal": Mask(causal="top_left"),
    "short": Mask(kv_len=[30, 300]),  # most rows lack the key at their own place
    "late": Mask(kv_begin=[140, 0]),
    "far": Mask(keep=(i - j).abs() > 30),  # every row lacks it
    "rows": Mask(kv_len=(i[:, 0] - 20).clamp(min=0).expand(2, M)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
def test_a_key_that_is_masked(kind, dtype, isa):
    """Its bias is far above all others, by more than a weight can tell."""
    case = Case(f"far-{kind}", H=4, M=M, N=N, bias="alibi", bias_dtype=torch.float32, lse=True,
                dtype=dtype)  # fmt: skip
    slopes = torch.tensor([8.0, 0.5, 100.0, -1.0])
    t = dataclasses.replace(testing.make(case), bias=slopes, mask=MASKS[kind])
    testing.oracle(case, t).check(case, testing.run(case, t, "cpu"))


def test_logits_that_are_rounding_alone(isa):
    """Scores cancel to 0, and their rounding is larger than a weight can tell."""
    case = Case("cancel", B=1, H=16, Hkv=16, M=M, N=N, D=64, bias="alibi", weights="full",
                magnitude=1e5)  # fmt: skip
    t = testing.make(case)
    q = t.q[:, :, :1]
    k = torch.stack([q[..., 1::2], -q[..., ::2]], -1).flatten(-2)
    t = dataclasses.replace(t, q=q.expand_as(t.q), k=k.expand_as(t.k))
    testing.assert_invariants(case, t, testing.run(case, t, "cpu", grad=False))


def test_biases_whose_rounding_is_larger_than_a_weight_can_tell(isa):
    """A score is 512 and rounding, which decides whether a logit is 2^33 or 2^33 + 1024."""
    q = 10 * torch.randn(1, 4, M, 32).repeat_interleave(2, -1)
    k = 10 * torch.randn(1, 4, N, 32, 1) * torch.tensor([1.0, -1.0])  # their products are 0
    k = k.flatten(-2)
    q[..., :2], k[..., :2] = torch.tensor([1.0, 0.0]), 512
    bias = RelativeBias(torch.full((3, 4), 2.0**33), torch.arange(3))
    named = dict(scale=1.0, bias=bias, mask=Mask(window=(0, 0)), backend="cpu")
    out = fastattn.scaled_dot_product_attention(q, k, torch.ones_like(k), **named)
    assert torch.equal(out, torch.ones_like(q))


@pytest.mark.parametrize("M", [3, 70])
def test_a_table_with_infinities(M, isa):
    case = Case("table", H=2, M=M, N=2500 if M == 3 else N, bias="relative", lse=True)
    t = testing.make(case)
    table = t.bias.clone()
    table[::2] = -torch.inf
    table[21] = 90.0
    t = dataclasses.replace(t, bias=table)
    testing.oracle(case, t).check(case, testing.run(case, t, "cpu"))
