"""The oracle: against PyTorch, against loops, its gradients against autograd's."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastattn import Mask
from fastattn.problem import reference, validate

# Each feature has a branch in the reference; q [2, 4, 5, 3], k and v with 2 heads of 7 keys.
FEATURES = {
    "plain": {},
    "top-left": dict(mask=Mask(causal="top_left")),
    "bottom-right": dict(mask=Mask(causal="bottom_right", window=(2, 0))),
    "kv-len": dict(mask=Mask(kv_len=torch.tensor([0, 5]))),
    "kv-len-rows": dict(mask=Mask(kv_len=torch.tensor([[0, 1, 2, 3, 4], [7, 6, 5, 4, 0]]))),
    "keep": dict(mask=Mask(keep=torch.arange(4 * 5 * 7).view(4, 5, 7) % 3 == 0)),
    "bias": dict(bias=(2, 4, 5, 7)),
    "bias-n": dict(bias=(7,)),
    "bias-m": dict(bias=(4, 5, 1)),
    "bias-inf": dict(bias=(5, 7), bias_inf=True),
    "weights": dict(return_weights="full"),
    "weights-mean": dict(return_weights="mean", mask=Mask(causal="top_left")),
    "dropout": dict(dropout_p=0.4, seed=3, return_weights="full"),
    "sink": dict(sink=True, mask=Mask(kv_len=torch.tensor([0, 5])), return_weights="full"),
    "sink-dropout": dict(sink=True, dropout_p=0.4, seed=3, return_weights="mean"),
    "dropout-all": dict(dropout_p=1.0, seed=3),
}


def build(score, name, dtype=torch.float64):
    """Canonical inputs of a feature: (p, q, k, v, w, bias, sink), leaves that require grad."""
    options = dict(FEATURES[name])
    bias_shape, bias_inf = options.pop("bias", None), options.pop("bias_inf", False)

    def leaf(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()

    bias = None if bias_shape is None else leaf(*bias_shape)
    if bias_inf:
        bias.data[0], bias.data[1, ::2] = -math.inf, -math.inf
    sink = leaf(4) if options.pop("sink", False) else None
    q, k, v = leaf(2, 4, 5, 3), leaf(2, 2, 7, 3), leaf(2, 2, 7, 2)
    w = leaf(4, 3) if score == "additive" else None
    built = validate.build(score, q, k, v, w, enable_gqa=True, bias=bias, **options)
    bias4d = None if bias is None else built.bias
    return built.p, [q, k, v, w, bias4d, sink]


features = pytest.mark.parametrize("name", FEATURES)
scores = pytest.mark.parametrize("score", ["dot", "additive"])


@features
@scores
def test_backward_is_the_gradient_of_forward(score, name):
    p, tensors = build(score, name)
    out, lse, weights, _ = reference.forward(p, *tensors)
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    grads.append(None if p.weights == "none" else torch.randn_like(weights))
    outputs = [(x, g) for x, g in zip((out, lse, weights), grads, strict=True) if g is not None]
    # autograd gives NaN for the log of an empty sum: such rows are constants
    outputs[1] = (torch.where(lse.isinf(), 0.0, lse), torch.where(lse.isinf(), 0.0, grads[1]))
    present = [t for t in tensors if t is not None]
    expected = torch.autograd.grad(
        [x for x, _ in outputs], present, [g for _, g in outputs], materialize_grads=True
    )
    found = [g for g in reference.backward(p, *tensors, *grads) if g is not None]
    for mine, theirs, t in zip(found, expected, present, strict=True):
        mine = mine.sum(0) if mine.shape[1:] == t.shape else mine  # w, sink: per batch entry
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(is_causal=True),
        dict(attn_mask=torch.arange(35).view(5, 7) % 3 != 1),
        dict(attn_mask=torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7)),
        dict(scale=0.3),
    ],
    ids=["plain", "causal", "bool", "float", "scale"],
)
def test_dot_agrees_with_torch(options):
    q, k, v = (torch.randn(2, 4, n, 3, dtype=torch.float64) for n in (5, 7, 7))
    built = validate.build("dot", q, k, v, **options)
    out, *_ = reference.forward(*built[:6])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **options))


def test_additive_agrees_with_loops():
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (4, 5, 5))
    w = torch.randn(2, 3, dtype=torch.float64)
    out, lse, weights, _ = reference.forward(
        *validate.build("additive", q, k, v, w, return_weights="full")[:6]
    )
    for h in range(2):
        for i in range(4):
            scores = [
                sum(float(w[h, d]) * math.tanh(q[0, h, i, d] + k[0, h, j, d]) for d in range(3))
                for j in range(5)
            ]
            exp = [math.exp(s) for s in scores]
            row = torch.tensor([e / sum(exp) for e in exp], dtype=torch.float64)
            torch.testing.assert_close(weights[0, h, i], row)
            torch.testing.assert_close(out[0, h, i], row @ v[0, h])
            torch.testing.assert_close(lse[0, h, i].item(), math.log(sum(exp)))


def test_lse_is_that_of_the_masked_scores():
    q, k = (
        torch.randn(1, 1, 4, 3, dtype=torch.float64),
        torch.randn(1, 1, 6, 3, dtype=torch.float64),
    )
    built = validate.build("dot", q, k, k, mask=Mask(causal="top_left"), scale=1.0)
    _, lse, *_ = reference.forward(*built[:6])
    expected = [torch.logsumexp(q[0, 0, i] @ k[0, 0, : i + 1].T, -1) for i in range(4)]
    torch.testing.assert_close(lse[0, 0], torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computes_in_the_accumulation_type(dtype):
    p, tensors = build("dot", "bias", dtype)
    out, lse, *_ = reference.forward(p, *tensors)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    grads = reference.backward(p, *tensors, torch.ones_like(out))
    assert {out.dtype, lse.dtype, *(g.dtype for g in grads if g is not None)} == {wanted}


def test_masked_matmul_keeps_garbage_out_and_puts_used_infinities_back():
    kept = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
    a = torch.where(kept, 0.5, 0.0)
    for special in (math.inf, -math.inf, math.nan):
        b = torch.tensor([[1.0], [special], [2.0]])
        out = reference._masked_matmul(a, b, kept).squeeze(-1)
        assert out[0] == 1.5
        torch.testing.assert_close(out[1].item(), special, equal_nan=True)
        assert out[2] == 0.0


def test_masked_matmul_of_finite_values_is_one_product():
    kept = torch.tensor([[True, False], [True, True]])
    a, b = torch.where(kept, 0.5, 0.0), torch.tensor([[1.0], [2.0]])
    for value, products in ((2.0, 1), (math.inf, 4)):
        b[1] = value
        with torch.profiler.profile() as profile:
            reference._masked_matmul(a, b, kept)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["aten::matmul"] == products


@pytest.mark.parametrize("layout", [(9, 3), (3, 9)], ids=str)
def test_garbage_changes_no_bit_of_a_masked_product(layout):
    """Whatever the strides: the product of other ones adds up in another order."""
    b = torch.randn(8, *layout, dtype=torch.float64)
    b = b if layout == (9, 3) else b.mT
    kept = torch.arange(9) < 7
    a = torch.randn(8, 15, 9, dtype=torch.float64) * kept
    spoilt = b.clone()
    spoilt[:, ~kept] = math.nan
    found = [reference._masked_matmul(a, x, kept) for x in (b, spoilt)]
    assert found[0].equal(found[1])
