"""How type checkers see the package. pyright reads this file in `make lint`; nothing runs it.

A wrong call has a `type: ignore`. An ignore that is not needed is an error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnknownMemberType=false

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

import fastattn
from fastattn import distributed

q = torch.randn(1, 2, 3, 4)
w = torch.randn(4)

Pair = tuple[Tensor, Tensor]
Multihead = tuple[Tensor, Tensor | None]


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
    fastattn.LuongAttention(16, method="cat")  # type: ignore
    fastattn.LocalAttention(16, alignment="none")  # type: ignore
    fastattn.LocationSensitiveAttention(16, 16, 16, location="next")  # type: ignore
    print(fastattn.AdditiveAttention(16, 16, 16)(q, q, q, need_weights=True).shape)  # type: ignore


def modules(q: Tensor) -> None:
    assert_type(fastattn.MultiheadAttention(16, 2)(q, q, q), Multihead)
    assert_type(fastattn.MultiheadAdditiveAttention(16, 2)(q, q, q, bias=q), Multihead)
    assert_type(fastattn.SelfAttention(16)(q), tuple[Tensor | None, Tensor])
    assert_type(fastattn.AdditiveAttention(16, 16, 16)(q, q, q), Tensor)
    assert_type(fastattn.LuongAttention(16, method="dot")(q, q, need_weights=True), Pair)
    assert_type(fastattn.LocalAttention(16, alignment="monotonic")(q, q, step=3), Tensor)
    assert_type(fastattn.CosineAttention()(q, q), Tensor)
    assert_type(fastattn.NadarayaWatson([0.1, 0.2])(q, q, q, need_weights=True), Pair)
    hard = fastattn.HardAttention(16)
    assert_type(hard(q, q), Tensor)
    assert_type(hard(q, q, return_choice=True), fastattn.HardChoice)
    steps = fastattn.LocationSensitiveAttention(16, 16, 16, location="both")
    assert_type(steps(q, None, q), tuple[Tensor, Tensor, fastattn.AlignmentState])


def devices(q: Tensor, mesh: DeviceMesh) -> None:
    attend = distributed.context_parallel_attention
    assert_type(attend(q, q, q, mesh, method="ring"), Tensor)
    assert_type(attend(q, q, q, mesh, is_causal=True, return_lse=True), tuple[Tensor, Tensor])
    attend(q, q, q, mesh, method="rings")  # type: ignore
