"""The public functions: PyTorch's interface, shape by shape, and our additions."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import attend, inputs
from torch import nn
from torch.nn.attention.bias import causal_upper_left

import fastattn
from fastattn import Mask, additive_attention, scaled_dot_product_attention, testing

M, N, D, E = 5, 7, 4, 3


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def assert_like_torch(backend, q, k, v, **options):
    """Our float32 is as close to torch's float64 as torch's float32 is, gradients as well."""
    names = [n for n, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def run(function, dtype, **more):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, *(options[n] for n in names))]
        tensors = dict(zip(names, leaves[3:], strict=True))
        out = function(*leaves[:3], **{**options, **more, **tensors})
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    ours = run(scaled_dot_product_attention, torch.float32, backend=backend)
    theirs = run(F.scaled_dot_product_attention, torch.float32)
    truth = run(F.scaled_dot_product_attention, torch.float64)
    for n, results in enumerate(zip(ours, theirs, truth, strict=True)):
        testing.assert_within_budget(*results, name=f"result {n}")


# ---- torch's interface ----

LEADS = [((), ()), ((2,), (2,)), ((2, 4), (2, 4)), ((3, 2, 4), (3, 2, 4)), ((2, 4), (1, 4)),
         ((1, 4), (3, 4)), ((3, 1, 4), (2, 4)), ((2, 2, 3, 4), (2, 1, 1, 4))]  # fmt: skip


@pytest.mark.parametrize(("lead", "kv_lead"), LEADS, ids=str)
def test_leading_dims_as_in_torch(backend, lead, kv_lead):
    assert_like_torch(backend, draw(*lead, M, D), draw(*kv_lead, N, D), draw(*kv_lead, N, E))


MASK_SHAPES = [(M, N), (1, N), (2, 1, 1, N), (4, M, N), (1, 4, 1, N), (2, 4, M, N)]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attn_mask_as_in_torch(backend, shape, kind):
    mask = draw(*shape) if kind == "float" else torch.rand(shape) < 0.8
    if kind == "bool":
        mask[..., 0] = True  # torch and fastattn may differ in rows without keys
    assert_like_torch(backend, draw(2, 4, M, D), draw(2, 4, N, D), draw(2, 4, N, E), attn_mask=mask)


@pytest.mark.parametrize("shape", [(M, 1), (2, 1, M, 1), (1, 1, 1, 1)], ids=str)
def test_attn_mask_that_broadcasts_over_keys(backend, shape):
    """It keeps whole rows, or adds a constant to a row, which softmax ignores."""
    named = inputs(H=4)
    plain = attend(**named, backend=backend)
    rows = torch.rand(shape) < 0.7
    kept = attend(**named, attn_mask=rows, backend=backend)
    assert torch.equal(kept, plain * rows)
    added = attend(**named, attn_mask=torch.randn(shape), backend=backend)
    torch.testing.assert_close(added, plain)


@pytest.mark.parametrize("shape", [(M, N), (3, M, N), (3, 1, N)], ids=str)
def test_attn_mask_of_three_dims_inputs(backend, shape):
    assert_like_torch(backend, draw(3, M, D), draw(3, N, D), draw(3, N, E), attn_mask=draw(*shape))


@pytest.mark.parametrize(("m", "n"), [(5, 7), (7, 5), (2, 6), (6, 2), (4, 4)])
def test_is_causal_is_top_left_as_in_torch(backend, m, n):
    assert_like_torch(backend, draw(2, m, D), draw(2, n, D), draw(2, n, E), is_causal=True)


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_enable_gqa_as_in_torch(backend, heads):
    kv = [draw(2, heads, N, D), draw(2, heads, N, E)]
    assert_like_torch(backend, draw(2, 6, M, D), *kv, enable_gqa=True)


BIASES = {  # of 2 heads: shape, and the option
    "attn_mask": ((M, N), lambda x: dict(attn_mask=x)),
    "bias": ((2, 1, N), lambda x: dict(bias=x)),
    "slopes": ((2,), lambda x: dict(bias=fastattn.ALiBi(x))),
    "table": ((5, 2), lambda x: dict(bias=fastattn.RelativeBias(x, torch.arange(5)))),
    "sink": ((2,), lambda x: dict(sink=x)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["scaled_dot", "additive", "gaussian"])
@pytest.mark.parametrize("name", BIASES)
def test_autocast_takes_half_biases(backend, name, score, dtype):
    """Without loss: bfloat16, in which this autocast computes, has fewer digits than float16."""
    shape, option = BIASES[name]
    call, given = inputs("additive" if score == "additive" else "dot"), torch.randn(shape).to(dtype)
    half, wide = given.clone().requires_grad_(), given.float().requires_grad_()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            out = fastattn.attention(**call, score=score, backend=backend, **option(x))
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    (found, grad), (expected, grad_wide) = run(half), run(wide)
    assert torch.equal(found, expected)
    testing.assert_within_budget(grad, grad_wide.to(dtype), grad_wide.double())
    with pytest.raises(TypeError, match="expected dtype"):
        fastattn.attention(**call, score=score, backend=backend, **option(given))


def test_a_device_without_autocast_under_that_of_another():
    x = torch.empty(1, 1, 2, D, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(x, x, x, backend="eager").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_half_biases_are_added_in_float32(backend, dtype):
    """Their sum in float16 may be -inf, which masks."""
    q, k, v, *biases = (draw(2, n).to(dtype) for n in (D, D, E, 2, 2))
    for a, b in (biases, [torch.full((2, 2), -6e4).to(dtype)] * 2):
        found = scaled_dot_product_attention(q, k, v, a, bias=b, backend=backend)
        wide = a.float() + b.float()
        assert torch.equal(found, scaled_dot_product_attention(q, k, v, wide, backend=backend))
        assert (found != 0).all()


@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -1.0])
def test_scale_as_in_torch(backend, scale):
    assert_like_torch(backend, draw(2, M, D), draw(2, N, D), draw(2, N, E), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_of_minus_infinity_masks_its_key(backend, dtype):
    """Whatever made it; torch.softmax gives NaN for a row of such scores alone."""
    q, k = (torch.rand(1, 2, n, D).to(dtype) + 0.1 for n in (M, N))
    others = scaled_dot_product_attention(q, k[:, :, 1:], k[:, :, 1:], backend=backend)
    v = k.clone()
    k[:, :, 0] = -torch.inf
    found = scaled_dot_product_attention(q, k, v, backend=backend)
    torch.testing.assert_close(found, others)
    found = scaled_dot_product_attention(q, torch.full_like(k, -torch.inf), v, backend=backend)
    assert (found == 0).all()


def test_arguments_stand_in_torchs_order():
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ("query key value attn_mask dropout_p is_causal scale enable_gqa".split())
    q, mask = torch.randn(2, M, D), torch.rand(M, M) < 0.8
    ours = scaled_dot_product_attention(q, q, q, mask | torch.eye(M).bool(), 0.0, False)
    theirs = F.scaled_dot_product_attention(q, q, q, mask | torch.eye(M).bool(), 0.0, False)
    torch.testing.assert_close(ours, theirs)


def test_torchs_modules_run_on_it(monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16)
    expected = layer(x)
    calls = []

    def ours(*args, **options):
        calls.append(1)
        return scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    torch.testing.assert_close(layer(x), expected)
    assert calls


# ---- our additions ----


@pytest.mark.parametrize("lead", [(), (2,), (2, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("weights", [None, "mean", "full"])
@pytest.mark.parametrize("lse", [False, True])
def test_results_and_their_shapes(backend, lead, weights, lse):
    results = scaled_dot_product_attention(
        torch.randn(*lead, M, D), torch.randn(*lead, N, D), torch.randn(*lead, N, E),
        return_weights=weights, return_lse=lse, backend=backend,
    )  # fmt: skip
    expected = [(*lead, M, E)]
    if weights is not None:
        # without a batch dim, dim -3 is still the head dim, and the mean drops it
        expected.append((*lead, M, N) if weights == "full" else (*lead[:-1], M, N))
    if lse:
        expected.append((*lead, M))
    results = results if isinstance(results, tuple) else (results,)
    assert [tuple(r.shape) for r in results] == expected


ADDITIVE_SHAPES = [
    ((), ()),
    ((2,), (2,)),
    ((2, 4), (2, 4)),
    ((3, 2, 4), (3, 2, 4)),
    ((3, 1), (1, 4)),
]


@pytest.mark.parametrize(("lead", "kv_lead"), ADDITIVE_SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_additive_shapes(backend, lead, kv_lead, per_head):
    full = torch.broadcast_shapes(lead, kv_lead)
    if per_head and not full:
        lead = kv_lead = full = (1,)
    q, k, v = draw(*lead, M, D), draw(*kv_lead, N, D), draw(*kv_lead, N, E)
    w = draw(full[-1], D) if per_head else draw(D)

    def naive(q, k, v, w):
        w = w[:, None, None] if per_head else w
        scores = (torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) * w).sum(-1)
        weights = scores.softmax(-1)
        return weights @ v, weights, scores.logsumexp(-1)

    f32 = [x.float() for x in (q, k, v, w)]
    ours = additive_attention(*f32, return_weights="full", return_lse=True, backend=backend)
    for results in zip(ours, naive(*f32), naive(q, k, v, w), strict=True):
        testing.assert_within_budget(*results)
    mean = additive_attention(*f32, return_weights="mean", backend=backend)[1]
    torch.testing.assert_close(mean, ours[1].mean(-3) if per_head else ours[1])


def test_mask_and_attn_mask_are_anded(backend):
    named = inputs()
    keep = torch.rand(5, 7) < 0.7
    both = attend(
        **named, attn_mask=keep, is_causal=True, mask=Mask(window=(2, -1)), backend=backend
    )
    i, j = torch.arange(5)[:, None], torch.arange(7)
    dense = keep & (j <= i) & (j >= i - 2)
    torch.testing.assert_close(both, attend(**named, attn_mask=dense, backend=backend))


def test_bias_adds_to_attn_mask(backend):
    named = inputs()
    mask, bias = torch.randn(5, 7), torch.randn(2, 1, 1, 7)
    both = attend(**named, attn_mask=mask, bias=bias, backend=backend)
    torch.testing.assert_close(both, attend(**named, bias=mask + bias, backend=backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_bias_beside_half_inputs(backend, dtype):
    """The bias is added without being rounded to the inputs' dtype."""
    named = inputs(dtype=dtype)
    named["query"] = torch.zeros_like(named["query"])
    bias = torch.zeros(5, 7)
    bias[:, 0] = 1.0 + 2**-12  # rounds to 1 in both half types
    _, lse = attend(**named, bias=bias, return_lse=True, backend=backend)
    expected = bias.double().logsumexp(-1).expand(2, 2, 5)
    testing.assert_within_budget(lse, bias.logsumexp(-1).expand(2, 2, 5), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results(dtype):
    named = inputs("additive", dtype=dtype)
    out, weights, lse = attend(**named, return_weights="full", return_lse=True)
    assert out.dtype == weights.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_inputs_are_left_as_they_are(backend):
    named = inputs("additive") | {"bias": torch.randn(5, 7)}
    copies = {name: x.clone() for name, x in named.items()}
    keep, kv_len = torch.rand(5, 7) < 0.5, torch.tensor([2, 7])
    mask = Mask(keep=keep.clone(), kv_len=kv_len.clone())
    leaves = {name: x.requires_grad_() for name, x in named.items()}
    attend(**leaves, mask=mask, backend=backend).sum().backward()
    assert all(torch.equal(named[name], copies[name]) for name in named)
    assert torch.equal(mask.keep, keep)
    assert torch.equal(mask.kv_len, kv_len)


@pytest.mark.parametrize("garbage", [torch.inf, torch.nan])
def test_minus_infinity_masks_whatever_is_added_there(garbage):
    q, k, v = draw(2, 2, M, D), draw(2, 2, N, D), draw(2, 2, N, E)
    numbers, first = draw(M, N), torch.arange(N) == 0
    dropped, spoiled = (numbers.masked_fill(first, x) for x in (-torch.inf, garbage))
    want = scaled_dot_product_attention(q, k, v, dropped, bias=numbers)
    for one, other in ((dropped, spoiled), (spoiled, dropped)):
        assert torch.equal(scaled_dot_product_attention(q, k, v, one, bias=other), want)


@pytest.mark.parametrize(("heads", "of_values"), [(0, 1), (1, 0)])
def test_one_head_broadcasts_to_none(heads, of_values):
    out = scaled_dot_product_attention(
        draw(2, 0, M, D), draw(2, heads, N, D), draw(2, of_values, N, E)
    )
    assert out.shape == (2, 0, M, E)


def test_arguments_are_documented():
    for name in ("scaled_dot_product_attention", "additive_attention", "attention", "explain",
                 "Mask"):  # fmt: skip
        assert "Args:" in getattr(fastattn, name).__doc__, name


def test_additive_attention_groups_heads_unasked():
    q, k, w = draw(1, 4, 3, 8), draw(1, 2, 5, 8), draw(4, 8)
    wide = k.repeat_interleave(2, 1)
    found, expected = additive_attention(q, k, k, w), additive_attention(q, wide, wide, w)
    torch.testing.assert_close(found, expected)


def test_a_causal_bias_beside_a_window():
    x = draw(1, 1, 4, 8)
    causal = causal_upper_left(4, 4)
    out = scaled_dot_product_attention(x, x, x, attn_mask=causal, mask=Mask(window=(1, -1)))
    both = Mask(causal="top_left", window=(1, -1))
    torch.testing.assert_close(out, scaled_dot_product_attention(x, x, x, mask=both))
