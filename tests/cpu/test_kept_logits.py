"""Returned weights of logits that the forward pass kept, and of scores recomputed for them."""

import dataclasses

import pytest
import torch

from fastattn import Mask, testing
from fastattn.testing import Case, assert_same_bits, run

pytestmark = pytest.mark.usefixtures("extension")

PROBLEMS = {
    "plain": {},
    "mean": dict(weights="mean"),
    "dropout": dict(weights="mean", dropout_p=0.2),
    "masks": dict(kv_len="rows", keep="bhmn", bias="hn", bias_inf=True, causal="bottom_right"),
    "documents": dict(kv_begin="sorted", weights="mean"),
    "window": dict(window=(40, 3)),
    "blocks": dict(keep="mn", weights="mean"),
    "softcap": dict(softcap=3.0),
    "few": dict(M=5, N=700, weights="mean"),  # enough work for other threads
    "forms": dict(weights="mean"),
    "bfloat16": dict(dtype=torch.bfloat16, weights="mean", bias="bmn"),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("score", ["dot", "additive", "gaussian"])
def test_both_ways_give_the_same_bits(isa, score, name, set_threads):
    """One thread has enough tasks that keep logits; 64 threads do not."""
    sizes = dict(B=1, H=4, Hkv=2, M=150, N=300, D=24, E=20, weights="full", lse=True)
    case = Case(f"kept-{name}", score, **(sizes | PROBLEMS[name]))
    t = testing.make(case)
    if name == "blocks":  # some strips of rows lack columns
        keep = torch.rand(10, 19).lt(0.3).repeat_interleave(16, 0).repeat_interleave(16, 1)
        t = dataclasses.replace(t, mask=Mask(keep=keep[:150, :300]))
    if name == "forms":  # values that do not fit into halves, where AMX-FP16 takes those
        t.v[:, :, ::7] *= 2.0**-40
    found = []
    for threads in (1, 64):
        set_threads(threads)
        found.append(run(case, t, "cpu", grad=False))
    assert_same_bits(*found)
