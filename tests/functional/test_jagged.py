"""Jagged nested tensors in the functions: the sequences, each for itself."""

import pytest
import torch
from helpers import assert_close

import fastattn

LENGTHS, KEYS = (3, 0, 70, 5), (4, 2, 70, 3)


def nested(lengths, *sizes, dtype=torch.float32, offsets=None):
    """``[B, H, j, D]``, and its values ``[T, H, D]`` as a leaf."""
    values = torch.randn(sum(lengths), *sizes).to(dtype).requires_grad_()
    if offsets is None:
        offsets = torch.tensor((0, *lengths)).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2), values


def draw(**options):
    """query, key and value, nested, and their leaves."""
    q, k = nested(LENGTHS, 4, 8, **options), nested(KEYS, 2, 8, **options)
    v = nested(KEYS, 2, 6, **options, offsets=k[0].offsets())
    return zip(q, k, v, strict=True)


def alone(leaves, is_causal, dtype):
    """PyTorch's function for one sequence after the other: outputs ``[T, H, E]``, gradients."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves)
    parts = zip(q.split(LENGTHS), k.split(KEYS), v.split(KEYS), strict=True)
    outs = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in part), is_causal=is_causal, enable_gqa=True
        ).transpose(0, 1)
        for part in parts
    ]
    return derived(torch.cat(outs), (q, k, v))


def derived(out, leaves):
    upstream = torch.linspace(-1, 1, out.numel()).to(torch.bfloat16).view(out.shape)
    total = (out * upstream.to(out.dtype)).sum()
    return out.detach(), *torch.autograd.grad(
        total, leaves, allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jagged_is_each_sequence_alone(backend, dtype, is_causal):
    tensors, leaves = draw(dtype=dtype)
    out = fastattn.scaled_dot_product_attention(
        *tensors, is_causal=is_causal, enable_gqa=True, backend=backend
    )
    assert out.shape == (*tensors[0].shape[:3], 6)  # the jagged sizes are equal too
    got = derived(out.transpose(1, 2).values(), leaves)
    assert_close(got, *(alone(leaves, is_causal, x) for x in (dtype, torch.float64)))


def test_log_sum_exp_is_jagged():
    tensors, leaves = draw()
    out, lse = fastattn.scaled_dot_product_attention(*tensors, enable_gqa=True, return_lse=True)
    offsets = tensors[0].offsets(), tensors[1].offsets()
    expected = fastattn.varlen_attention(*leaves, *offsets, enable_gqa=True, return_lse=True)
    assert lse.shape == out.shape[:3]
    assert torch.equal(lse.values(), expected[1])
    assert torch.equal(out.transpose(1, 2).values(), expected[0])


SCORES = {
    "additive": lambda x: {"weight": x},
    "gaussian": lambda x: {"bandwidth": x[:, None].exp()},
    "cosine": lambda x: {},
    "dot": lambda x: {},
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_every_score_with_heads(score, is_causal):
    """The parameter's gradient too. The float64 loop is by the eager backend."""
    lengths = LENGTHS, KEYS, KEYS
    leaves = [torch.randn(sum(n), 2, 8, requires_grad=True) for n in lengths]
    leaves.append(torch.randn(2, 8, requires_grad=True))

    def attend(q, k, v, own):
        options = SCORES[score](own)
        return fastattn.attention(q, k, v, score=score, is_causal=is_causal, **options)

    def together(*leaves):
        offsets = {n: torch.tensor((0, *n)).cumsum(0) for n in lengths}
        nested = [
            torch.nested.nested_tensor_from_jagged(x, offsets[n]).transpose(1, 2)
            for x, n in zip(leaves[:3], lengths, strict=True)
        ]
        return attend(*nested, leaves[3]).transpose(1, 2).values()

    def one_by_one(*leaves):
        parts = zip(*(x.split(n) for x, n in zip(leaves[:3], lengths, strict=True)), strict=True)
        outs = [attend(*(x.transpose(0, 1)[None] for x in part), leaves[3]) for part in parts]
        return torch.cat([x[0].transpose(0, 1) for x in outs])

    compare(together, one_by_one, leaves)


@pytest.mark.parametrize("score", ["additive", "scaled_dot"])
def test_without_heads(score):
    """[B, j, D], with a log-sum-exp [B, j]."""
    leaves = [torch.randn(sum(n), 8, requires_grad=True) for n in (LENGTHS, KEYS, KEYS)]
    leaves.append(torch.randn(8, requires_grad=True))

    def attend(q, k, v, weight):
        weight = weight if score == "additive" else None
        options = dict(weight=weight, return_lse=True, softcap=2.0)
        return fastattn.attention(q, k, v, score=score, **options)

    def together(q, k, v, weight):
        offsets = [torch.tensor((0, *n)).cumsum(0) for n in (LENGTHS, KEYS)]
        q = torch.nested.nested_tensor_from_jagged(q, offsets[0])
        k, v = (torch.nested.nested_tensor_from_jagged(x, offsets[1]) for x in (k, v))
        out, lse = attend(q, k, v, weight)
        return torch.cat([out.values(), lse.values()[:, None]], -1)

    def one_by_one(q, k, v, weight):
        parts = zip(q.split(LENGTHS), k.split(KEYS), v.split(KEYS), strict=True)
        found = [attend(*(x[None] for x in part), weight) for part in parts]
        return torch.cat([torch.cat([out[0], lse[0][:, None]], -1) for out, lse in found])

    compare(together, one_by_one, leaves)


def test_additive_attention_passes_its_options_on():
    (q, _), (k, _) = nested(LENGTHS, 2, 8), nested(KEYS, 2, 8)
    weight, options = torch.randn(2, 8), dict(return_lse=True, is_causal=True, softcap=2.0)
    found = fastattn.additive_attention(q, k, k, weight, **options)
    expected = fastattn.attention(q, k, k, score="additive", weight=weight, **options)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.transpose(1, 2).values(), y.transpose(1, 2).values())
    with pytest.raises(ValueError, match="backend: expected"):
        fastattn.additive_attention(q, k, k, weight, backend="fpga")


def compare(together, one_by_one, leaves):
    wide = [x.detach().double().requires_grad_() for x in leaves]
    calls = (together, leaves), (one_by_one, leaves), (one_by_one, wide)
    assert_close(*(derived(call(*x), x) for call, x in calls))


def test_explain():
    tensors, _ = draw()
    found = fastattn.explain(*tensors, enable_gqa=True)
    assert found.backend is not None
    assert "M=78 N=79" in str(found)


@pytest.mark.slow
def test_compiles_in_one_graph():
    def call(q, k, v):
        return fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    tensors, leaves = draw()
    expected = derived(call(*tensors).transpose(1, 2).values(), leaves)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = derived(compiled(*tensors).transpose(1, 2).values(), leaves)
    for ours, other in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, other)


Q, _ = nested(KEYS, 2, 8)
OTHER, _ = nested(KEYS, 2, 8)
FEW, _ = nested(KEYS[1:], 2, 8)
GAPS = torch.nested.nested_tensor_from_jagged(
    torch.zeros(9, 2, 8), torch.tensor([0, 4, 9]), torch.tensor([2, 3])
).transpose(1, 2)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([Q.transpose(1, 2)] * 3, {}, r"query: expected \[B, H, j, D\] or \[B, j, D\], jagged in"),
        ((Q, Q, OTHER), {}, "key and value: expected the same offsets"),
        ((Q, FEW, FEW), {}, "expected as many sequences, got 4 and 3"),
        ([GAPS] * 3, {}, r"query: expected no gaps .* write .contiguous\(\) before"),
        ([Q] * 3, {"bias": torch.zeros(1)}, "bias: .* none: call fastattn.varlen_attention"),
        ((Q, OTHER, OTHER), {"bias": fastattn.ALiBi(torch.ones(2))}, "bias: .* none"),
        ([Q] * 3, {"return_weights": "full"}, "return_weights: .* none"),
        ([Q] * 3, {"mask": fastattn.Mask(window=(1, 1))}, "mask: .* none"),
        ([Q] * 3, {"is_causal": 1}, "is_causal: expected a bool"),
        ([Q] * 3, {"backend": "fpga"}, "backend: expected"),
    ],
)
def test_errors(tensors, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fastattn.scaled_dot_product_attention(*tensors, **options)
