"""torch.library.opcheck: schemas, fake kernels (shape, stride, dtype), aliasing, tracing."""

import pytest
import torch
from helpers import SCORES

from fastattn.problem import record
from fastattn.problem.record import WEIGHTS
from fastattn.problem.schemas import Call, Saved

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.slow]

B, H, HKV, M, N, D, E = 2, 4, 2, 5, 7, 3, 6
FEATURES = {
    "plain": {},
    "masks": dict(kv_len=True, keep=True, kv_begin=True, band_lo=-3, band_hi=2),
    "bias": dict(bias=(1, H, M, N)),
    "weights": dict(weights="full"),
    "mean": dict(weights="mean", bias=(B, 1, 1, N)),
    "dropout": dict(dropout_p=0.5),
    "layouts": dict(layout=True),
    "tokens": dict(tokens=True),
    "half": dict(dtype=torch.bfloat16, bias=(M, N)),
    "wide": dict(dtype=torch.bfloat16, wide=True),
    "no-keys": dict(N=0),
}


def forward_arguments(score, name):
    f = dict(FEATURES[name])
    n, dtype = f.pop("N", N), f.pop("dtype", torch.float32)
    q, k, v = (
        torch.randn(B, h, r, c).to(dtype) for h, r, c in [(H, M, D), (HKV, n, D), (HKV, n, E)]
    )
    if f.pop("layout", False):
        q, k, v = (
            q.mT.contiguous().mT,
            k[:, :1].expand(B, HKV, n, D),
            v.transpose(1, 2).contiguous().transpose(1, 2),
        )
    if f.pop("tokens", False):  # [M, B, H, D] in memory: the output follows
        q = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    given = dict(scale=0.5, weights=WEIGHTS[f.pop("weights", "none")], score=record.SCORES[score])
    if score == "additive":
        given["w"] = torch.randn(H, D).to(dtype)
    if "bias" in f:
        shape = f.pop("bias")
        given["bias"] = torch.randn(shape).to(dtype).view((1,) * (4 - len(shape)) + shape)
    if f.pop("kv_len", False):
        given["kv_len"] = torch.tensor([[0], [n]], dtype=torch.int32)
    if f.pop("kv_begin", False):
        given["kv_begin"] = torch.arange(M, dtype=torch.int32)[None] // 2
    if f.pop("keep", False):
        given["keep"] = torch.rand(1, 1, M, n) < 0.7
    if "dropout_p" in f:
        given["seed"] = torch.tensor(5)
    return Call(q, k, v, **given, **f)


def backward_arguments(score, name):
    call = forward_arguments(score, name)
    out, lse, weights, stats = torch.ops.fastattn.forward(*call)
    grad_weights = None if call.weights == WEIGHTS["none"] else torch.randn_like(weights)
    grads = torch.randn_like(out, dtype=call.q.dtype), torch.randn_like(lse), grad_weights
    wanted = call.bias is not None and name != "mean"
    return (*call, *Saved(out, stats, *grads, bias_needs_grad=wanted))


features = pytest.mark.parametrize("name", FEATURES)
scores = pytest.mark.parametrize("score", SCORES)


@features
@scores
def test_forward(score, name):
    torch.library.opcheck(torch.ops.fastattn.forward.default, forward_arguments(score, name))


@scores
def test_beside_sinks(score):
    call = (*forward_arguments(score, "weights"), torch.randn(H))
    torch.library.opcheck(torch.ops.fastattn.forward.default, call)
    call = (*backward_arguments(score, "weights")[:-1], torch.randn(H))
    torch.library.opcheck(torch.ops.fastattn.backward.default, call)


@features
@scores
def test_backward(score, name):
    torch.library.opcheck(torch.ops.fastattn.backward.default, backward_arguments(score, name))


@features
@scores
def test_results_alias_nothing(score, name):
    args = backward_arguments(score, name)
    inputs = {
        x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor) and x.numel()
    }
    results = [
        *torch.ops.fastattn.forward(*args[: len(Call._fields)]),
        *torch.ops.fastattn.backward(*args),
    ]
    storages = [x.untyped_storage().data_ptr() for x in results if x.numel()]
    assert len(set(storages)) == len(storages)
    assert not inputs & set(storages)


def test_both_are_deterministic_and_have_no_autograd_of_their_own():
    for op in ("forward", "backward"):
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has(f"fastattn::{op}", "CPU")
        assert not has(f"fastattn::{op}", "Autograd")
