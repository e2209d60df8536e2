"""Attention sinks: what the grid does not reach."""

import dataclasses
import math

import pytest
import torch
from helpers import BACKENDS
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import sinks, testing
from fastattn.backends import eager
from fastattn.problem import validate
from fastattn.testing import Case


@pytest.mark.parametrize("logit", [-30.0, -8.0, 0.0, 8.0, 30.0])
def test_the_gradient_of_a_sink_of_any_weight(logit):
    """The sum over rows has terms of one sign, so that nothing cancels in it."""
    q, k = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 500, 16)
    v = torch.rand(1, 2, 500, 4)

    def plain(sink):
        s = q.to(sink) @ k.to(sink).mT / 4
        s = torch.cat([s, sink[:, None, None].expand(1, 2, 20, 1)], -1)
        return torch.softmax(s, -1)[..., :-1] @ v.to(sink)

    def with_sink(sink):
        return fastattn.scaled_dot_product_attention(q, k, v, sink=sink)

    def gradient(function, dtype):
        sink = torch.full((2,), logit, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(function(sink).sum(), sink)[0]

    found, peer = (gradient(f, torch.float32) for f in (with_sink, plain))
    testing.assert_within_budget(found, peer, gradient(plain, torch.float64))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("upstream", [2e-5, 3e3])
def test_gradients_whose_products_no_half_type_has(upstream, backend):
    """Products of results and upstream gradients, all of one sign, beyond both ends of fp16.

    Plain PyTorch has them in fp16. Here each result is rounded once, and so is their sum.
    """
    case = Case("far", M=64, N=700, weights="full", sink=7.0, dtype=torch.float16)
    t = testing.make(case)
    own = {name: getattr(t, name).abs() * upstream for name in ("grad_out", "grad_weights")}
    t = dataclasses.replace(t, v=t.v.abs() * 30, sink=t.sink.float(), **own)
    found, truth = testing.run(case, t, backend), testing.oracle(case, t).truth
    error = (found["grad_sink"] - truth["grad_sink"]) / truth["grad_sink"]
    assert error.abs().max() < torch.finfo(torch.float16).eps / 2


B, H, M, N, D = 2, 4, 6, 37, 8


def inputs():
    rng = torch.Generator().manual_seed(0)
    shapes = (B, H, M, D), (B, H, N, D), (B, H, N, D), (H,)
    return [torch.randn(shape, generator=rng) for shape in shapes]


def call(sink, **options):
    q, k, v, _ = inputs()
    return fastattn.scaled_dot_product_attention(q, k, v, sink=sink, **options)


@pytest.mark.parametrize("value", [-math.inf, -1e30])
def test_a_sink_that_weighs_nothing_changes_nothing(value):
    assert torch.equal(call(torch.full((H,), value)), call(None))


def test_garbage_in_gradients_of_what_is_always_0():
    """The output of a row without keys, and the weights that a mask drops."""
    q, sink = torch.randn(2, 2, 3, 4), torch.randn(2, requires_grad=True)
    mask = fastattn.Mask(keep=torch.ones(3, 3).tril(-1).bool())
    results = fastattn.scaled_dot_product_attention(
        q, q, q, mask=mask, sink=sink, return_weights="full"
    )
    ones = [torch.ones_like(x) for x in results]
    spoiled = [one.masked_fill(x == 0, torch.nan) for one, x in zip(ones, results, strict=True)]
    want, found = (
        torch.autograd.grad(results, sink, grads, retain_graph=True)[0] for grads in (ones, spoiled)
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_gradient_of_a_sink_of_minus_infinity_is_0(backend):
    """Beside a row without keys, too, whose log-sum-exp is the same."""
    q, sink = torch.randn(1, 2, 3, 4), torch.full((2,), -math.inf, requires_grad=True)
    mask = fastattn.Mask(keep=torch.ones(3, 3).tril(-1).bool())
    out = fastattn.scaled_dot_product_attention(q, q, q, mask=mask, sink=sink, backend=backend)
    assert not torch.autograd.grad(out.sum(), sink)[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_half_types_are_those_of_a_few_rows_each(monkeypatch, dtype):
    """What processes merge. Of one row where that is more than a copy is to have."""
    q, k, v, sink = (x.to(dtype) for x in inputs())
    p, *tensors = validate.build("dot", q, k, v, return_weights="full")[:6]

    def results():
        merged = eager.forward(p, *tensors)
        found = out, _, weights, stats = sinks.fold(sink, 1.0, *merged)
        upstream = out.sin(), None, weights.sin()
        return (*found, sinks.gradient(sink, 1.0, out, weights, stats, *upstream))

    want = results()
    for most in (1, 2 * B * H * D):
        monkeypatch.setattr(sinks, "_AT_ONCE", most)
        for x, y in zip(results(), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_mean_of_weights_over_no_heads_is_0(dtype):
    x, options = torch.randn(2, 0, 3, 4, dtype=dtype), dict(return_weights="mean")
    for sink in (None, torch.zeros(0)):
        _, weights = fastattn.scaled_dot_product_attention(x, x, x, sink=sink, **options)
        assert torch.equal(weights, torch.zeros(2, 3, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_weights_is_rounded_once(dtype):
    q, sink = torch.randn(2, 3, 20, 8).to(dtype), torch.randn(3)
    exact = [x.double() for x in (q, q, q, sink)]
    mean, want = (
        fastattn.scaled_dot_product_attention(*qkv, sink=own, return_weights="mean")[1].double()
        for *qkv, own in ((q, q, q, sink), exact)
    )
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(mean, want, rtol=1.02 * rounding, atol=0)


def test_the_mean_of_one_row_without_heads():
    q, k, weight, sink = torch.randn(2, 1, 8), torch.randn(2, 5, 8), torch.randn(8), torch.zeros(1)
    full, mean = (
        fastattn.additive_attention(q, k, k, weight, sink=sink, return_weights=returned)[1]
        for returned in ("full", "mean")
    )
    assert torch.equal(mean, full)


def two_heads():
    q, sink = (x.double()[:1, :2] if x.dim() > 1 else x[:2].double() for x in inputs()[::3])
    return q[:, :, :3, :3].clone().requires_grad_(), sink.clone().requires_grad_()


@pytest.mark.parametrize("returned", [None, "full", "mean"])
def test_derivatives(returned):
    """The first row has no key."""
    mask = fastattn.Mask(keep=torch.ones(3, 3).tril(-1).bool())

    def attend(q, sink):
        return fastattn.scaled_dot_product_attention(
            q, q, q, sink=sink, return_weights=returned, return_lse=returned is not None, mask=mask
        )

    batched = dict(check_batched_grad=True)
    assert torch.autograd.gradcheck(attend, two_heads(), check_forward_ad=True, **batched)
    assert torch.autograd.gradgradcheck(attend, two_heads(), check_fwd_over_rev=True, **batched)


def test_a_sink_that_is_constant():
    q, sink = two_heads()

    def attend(q):
        return fastattn.scaled_dot_product_attention(
            q, q, q, sink=sink.detach(), return_weights="full"
        )

    assert torch.autograd.gradcheck(attend, q, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, q, check_fwd_over_rev=True)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_vmap(dims):
    def attend(q, sink):
        return fastattn.scaled_dot_product_attention(q, q, q, sink=sink)

    def gradient(q, sink):
        return torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1))(q, sink)

    leaves = [x.detach() for x in two_heads()]
    several = [torch.stack([x, x + 1]) for x in leaves]
    given = [x if d is None else s for x, s, d in zip(leaves, several, dims, strict=True)]
    for function in (attend, gradient):
        mapped = torch.vmap(function, dims)(*given)
        each = [
            function(*(x if d is None else x[n] for x, d in zip(given, dims, strict=True)))
            for n in range(2)
        ]
        expected = (
            torch.stack(each)
            if function is attend
            else tuple(map(torch.stack, zip(*each, strict=True)))
        )
        torch.testing.assert_close(mapped, expected)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that torch's own operators make."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        made = isinstance(result, torch.Tensor) and result.data_ptr() not in given
        if made and func.namespace == "aten":
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_output_is_made(dtype):
    q = torch.randn(1, 2, 2048, 64, dtype=dtype, requires_grad=True)
    with Largest() as found:
        fastattn.scaled_dot_product_attention(q, q, q, sink=torch.zeros(2))
    assert found.elements <= q.numel() // q.shape[3]


def test_a_call_like_one_before_has_its_own_sink():
    sink = torch.randn(H)
    for kind in ("full", "mean", None):
        options = dict(return_weights=kind, return_lse=True)
        for given in (sink, sink, sink + 3, None):
            results = call(given, **options)
            without = call(None, **options)
            assert [x.shape for x in results] == [x.shape for x in without]
            expected = without[-1]
            if given is not None:
                expected = torch.logaddexp(expected, given[:, None])
            torch.testing.assert_close(results[-1], expected)
    with pytest.raises(ValueError, match="sink"):
        call(torch.zeros(H + 1))
    with pytest.raises(TypeError, match="sink"):
        call(sink.double())


@pytest.mark.parametrize(
    ("sink", "error", "says"),
    [
        (torch.zeros(3), ValueError, r"expected \[4\], one for each head, got \[3\]"),
        (torch.zeros(4, 1), ValueError, r"expected \[4\]"),
        (torch.zeros(4, dtype=torch.long), TypeError, "sink: expected dtype float32"),
        (1.0, TypeError, "sink: expected a Tensor"),
    ],
)
def test_bad_sinks(sink, error, says):
    with pytest.raises(error, match=says):
        call(sink)
