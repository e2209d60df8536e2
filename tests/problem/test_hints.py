"""Errors name what the user wrote, and say what to write instead."""

import numpy as np
import pytest
import torch

import fastattn
from fastattn import AdditiveAttention, Mask, MultiheadAttention, SelfAttention
from fastattn import scaled_dot_product_attention as sdpa

Q, X = torch.randn(2, 4, 5, 8), torch.randn(2, 5, 8)
ADDITIVE = AdditiveAttention(8, 8, 4)
HEADS = MultiheadAttention(8, 2).eval()

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
    "a window": (
        lambda: sdpa(Q, Q, Q, mask=Mask(window=3)),
        r"^mask.window: .* got 3: write \(3, 3\), or \(3, 0\) without later keys$"),
    "a window of documents": (
        lambda: Mask.documents(lengths=[5], window=3), r"^window: .* got 3: write \(3, 3\), or"),
    "half a window": (
        lambda: sdpa(Q, Q, Q, mask=Mask(window=(3,))), r"^mask.window: .* ints, got \(3,\)$"),
    "a column": (
        lambda: sdpa(Q, Q, Q, mask=Mask(kv_len=torch.ones(2, 1).long())), r"write .flatten\(\)$"),
    "lengths of heads": (
        lambda: sdpa(X, X, X, mask=Mask(kv_len=[5, 3])),
        r"^mask.kv_len: .* got \[2\]: query has 2 heads and no samples, write query\[:, None\]"),
    "bandwidths of heads": (
        lambda: fastattn.attention(Q, Q, Q, score="gaussian", bandwidth=torch.ones(4, 8)),
        r"^bandwidth: .* got \[4, 8\]: for each head write bandwidth\[:, None\]$"),
    "bandwidths of samples": (
        lambda: fastattn.attention(Q, Q, Q, score="gaussian", bandwidth=torch.ones(2, 8)),
        r"^bandwidth: .* got \[2, 8\]$"),
    "whole bandwidths": (
        lambda: fastattn.attention(Q, Q, Q, score="gaussian", bandwidth=torch.ones(8).long()),
        r"^bandwidth: expected a tensor of floats, got torch.int64$"),
    "bandwidths elsewhere": (
        lambda: fastattn.attention(Q, Q, Q, score="gaussian", bandwidth=X[0, 0].to("meta")),
        r"^bandwidth: expected the device of query, cpu, got meta$"),
    "a seed elsewhere": (
        lambda: sdpa(Q, Q, Q, dropout_p=0.5, seed=torch.ones((), device="meta").long()),
        r"^seed: expected one int64 on cpu, got torch.int64 \[\] on meta$"),
    "numpy": (
        lambda: sdpa(Q.numpy(), Q, Q),
        r"^query: expected a Tensor, got ndarray: write torch.from_numpy\(x\)$"),
    "numpy mask": (
        lambda: sdpa(Q, Q, Q, mask=Mask(keep=np.ones((5, 5), bool))), r"^mask.keep: .*from_numpy"),
    "numpy bias": (lambda: sdpa(Q, Q, Q, bias=np.ones((5, 5))), r"^bias: .*RelativeB.*from_numpy"),
    "numpy lengths": (
        lambda: sdpa(Q, Q, Q, mask=Mask(kv_len=np.array([1, 2]))),
        r"^mask.kv_len: expected integers, a tensor or a list, got ndarray: write .*from_numpy"),
    "numpy, packed": (
        lambda: fastattn.varlen_attention(X[0].numpy(), X, X, [0, 2]), "^query: .*from_numpy"),
    "numpy, module": (lambda: ADDITIVE(X.numpy(), X, X), "^queries: .*from_numpy"),
    "numpy, heads": (lambda: HEADS(X.numpy(), X, X), "^query: .*from_numpy"),
    "unsigned lengths": (
        lambda: sdpa(Q, Q, Q, mask=Mask(kv_len=torch.ones(2, dtype=torch.uint16))),
        r"^mask.kv_len: expected dtype int32.* got torch.uint16: write x.long\(\)$"),
    "unsigned documents": (
        lambda: Mask.documents(lengths=torch.ones(2, dtype=torch.uint16)),
        r"^lengths: expected integers, got torch.uint16: write x.long\(\)$"),
    "fractions of documents": (
        lambda: Mask.documents(lengths=torch.ones(2)),
        r"^lengths: expected integers, got torch.float32: write x.long\(\)$"),
    "truths of lengths": (
        lambda: sdpa(Q, Q, Q, mask=Mask(kv_len=torch.ones(2, dtype=torch.bool))),
        r"^mask.kv_len: .* got torch.bool: a bool mask goes to attn_mask or mask=Mask"),
    "longest": (
        lambda: fastattn.varlen_attention(X, X, X, [0, 2], None, "x"), "^max_seqlen_q: .* got str"),
    "longest key": (
        lambda: fastattn.varlen_attention(X, X, X, [0, 2], None, 2, 2.5), "^max_seqlen_k: .*float"),
    "weights": (lambda: ADDITIVE(X, X, X, need_weights="y"), "^need_weights: expected a bool, got"),
    "no weights": (lambda: ADDITIVE(X, X, X, need_weights=None), "^need_weights: expected"),
    "weights of one": (lambda: SelfAttention(8)(X, need_weights="y"), "^need_weights: expected"),
    "mean of one": (
        lambda: SelfAttention(8)(X, average_attn_weights="x"), "^average_attn_weights: expected"),
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
