"""How type checkers see the package. pyright reads this file in `make lint`; nothing runs it.

A wrong call has a `type: ignore`. An ignore that is not needed is an error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnknownMemberType=false

import torch
from torch import Tensor
from typing_extensions import assert_type

import fastattn

q = torch.randn(1, 2, 3, 4)
w = torch.randn(4)


def results(lse: bool, mean: bool) -> None:
    sdpa, additive, attention = (
        fastattn.scaled_dot_product_attention,
        fastattn.additive_attention,
        fastattn.attention,
    )
    assert_type(sdpa(q, q, q, None, 0.0, True), Tensor)
    assert_type(sdpa(q, q, q, return_weights="mean"), tuple[Tensor, Tensor])
    assert_type(sdpa(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(
        sdpa(q, q, q, return_weights="full", return_lse=True), tuple[Tensor, Tensor, Tensor]
    )
    assert_type(additive(q, q, q, w, dropout_p=0.1, seed=1), Tensor)
    assert_type(additive(q, q, q, w, return_weights="full"), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, score="gaussian", bandwidth=0.1), Tensor)
    assert_type(attention(q, q, q, is_causal=True, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, mask=fastattn.Mask(), seed=1, backend="eager"), Tensor)
    assert_type(fastattn.explain(q).backend, str | None)
    assert_type(fastattn.explain(torch.nn.Linear(2, 3), q).torch, dict[str, str])
    assert_type(fastattn.Mask().to_dense(2, 3), Tensor)
    sdpa(q, q, q, return_lse=lse)
    sdpa(q, q, q, return_weights="mean" if mean else None, return_lse=lse)


def mistakes(name: str) -> None:
    fastattn.scaled_dot_product_attention(q, q, q, return_weights="all")  # type: ignore
    fastattn.scaled_dot_product_attention(q, q, q, backend="gpu")  # type: ignore
    fastattn.scaled_dot_product_attention(q, q, q, mask=q)  # type: ignore
    fastattn.additive_attention(q, q, q, w, scale=1.0)  # type: ignore
    fastattn.attention(q, q, q, score="cosin")  # type: ignore
    fastattn.attention(q, q, q, causal=True)  # type: ignore
    print(fastattn.scaled_dot_product_attention(q, q, q, return_lse=True).shape)  # type: ignore
    fastattn.Mask(causal="upper_left")  # type: ignore
    fastattn.attention(q, q, q, score=name)  # type: ignore


modules = fastattn.MultiheadAttention(16, 2), fastattn.SelfAttention(16)
out, weights = modules[0](q, q, q)
