"""Errors name what the user wrote, and say what to write instead."""

import pytest
import torch

from fastattn import AdditiveAttention, Mask, SelfAttention
from fastattn import scaled_dot_product_attention as sdpa

Q, X = torch.randn(2, 4, 5, 8), torch.randn(2, 5, 8)
ADDITIVE = AdditiveAttention(8, 8, 4)

WRONG = {
    "lengths": (lambda: SelfAttention(8)(X, torch.tensor([3, 9])), r"^valid_lens: .* got 3 to 9$"),
    "lengths, additive": (lambda: ADDITIVE(X, X, X, torch.tensor([3.0])), "^valid_lens: .*dtype"),
    "lengths in a mask": (lambda: SelfAttention(8)(X, mask=Mask(kv_len=[3, 9])), "^mask.kv_len: "),
    "documents": (
        lambda: sdpa(Q, Q, Q, mask=Mask.documents(lengths=[2, 2])), "for 4 queries, .* are 5$"),
    "a dense mask": (
        lambda: sdpa(Q, Q, Q, mask=Mask(torch.ones(5, 5).bool())),
        r"^mask.causal: .* got a Tensor \[5, 5\]: write Mask\(keep=...\) for a dense mask$"),
    "causal": (
        lambda: sdpa(Q, Q, Q, mask=Mask(causal=True)),
        "got a bool: write causal='top_left', or causal='bottom_right'$"),
    "a column": (
        lambda: sdpa(Q, Q, Q, mask=Mask(kv_len=torch.ones(2, 1).long())), r"write .flatten\(\)$"),
    "features": (lambda: SelfAttention(8)(X[..., :7]), r"^x: expected 8 features, got \[2, 5, 7\]"),
    "features of queries": (lambda: ADDITIVE(X[..., :7], X, X), "^queries: expected 8 features"),
    "features of a step": (lambda: ADDITIVE(X[:, 0, :7], X, X), "^queries: expected 8 features"),
    "features of keys": (lambda: ADDITIVE(X, X[..., :7], X), "^keys: expected 8 features"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_any_sequence_of_lengths():
    expected = sdpa(Q, Q, Q, mask=Mask(kv_len=torch.tensor([3, 4])))
    assert torch.equal(sdpa(Q, Q, Q, mask=Mask(kv_len=range(3, 5))), expected)
