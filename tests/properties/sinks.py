"""Attention sinks: one more logit of every row, which has no value."""

import dataclasses
import math

import pytest
import torch
from helpers import SCORES, attend, inputs

import fastattn
from fastattn import Mask, testing
from fastattn.backends import registry
from fastattn.problem import validate
from fastattn.testing import Case

scores = pytest.mark.parametrize("score", SCORES)

EXACT = {  # logits near `top`, all of which are numbers of float32, and sinks around
    "score": dict(top=64.0),
    "scale": dict(top=256.0, scale=711 / 4096),  # times log2(e) and ln(2) it is another number
    "biased": dict(top=64.0, bias=torch.tensor(-128.0)),
    "softcap": dict(top=900.0, softcap=30.0),
}


@pytest.mark.parametrize("above", [-95.0, -60.0, -4.0, 0.0, 6.0, 60.0, 95.0])
@pytest.mark.parametrize("kind", EXACT)
def test_a_sink_adds_no_rounding_of_the_log_sum_exp(kind, above, backend):
    """A log-sum-exp near 64 is known to 4e-6, and so is a share that is made of it."""
    options = dict(scale=0.25) | EXACT[kind]
    scale, bias, cap = options["scale"], options.get("bias"), options.get("softcap")
    q, k = (torch.randint(-3, 4, (1, 2, n, 16)).float() for n in (3, 50))
    q[..., 0] = k[..., 0] = largest = round(math.sqrt(options.pop("top") / scale))
    v = torch.rand(1, 2, 50, 4)
    top = largest**2 * scale
    middle = cap if cap else top if bias is None else top + bias.item()

    def plain(sink):
        s = q.to(sink) @ k.to(sink).mT * scale
        s = cap * torch.tanh(s / cap) if cap else s if bias is None else s + bias
        s = torch.cat([s, sink[:, None, None].expand(1, 2, 3, 1)], -1)
        return torch.softmax(s, -1)[..., :-1] @ v.to(sink)

    def ours(sink):
        call = fastattn.scaled_dot_product_attention
        return call(q, k, v, sink=sink, backend=backend, **options)

    def results(function, dtype):
        sink = torch.tensor([middle, middle + 1], dtype=dtype).add_(above).requires_grad_()
        out = function(sink)
        return {"out": out.detach(), "grad": torch.autograd.grad(out.sum(), sink)[0]}

    found, peer = (results(f, torch.float32) for f in (ours, plain))
    for name, truth in results(plain, torch.float64).items():
        testing.assert_within_budget(found[name], peer[name], truth, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("M", [1, 40])
@scores
def test_sinks_far_above_and_below_every_score(score, M, dtype, backend):
    """Nothing overflows, and nothing but the head's own sink matters to it."""
    case = Case(
        "far", score=score, H=4, M=M, N=37, kv_len="rows", weights="full", lse=True, sink=0.0,
        dtype=dtype,
    )  # fmt: skip
    sink = torch.tensor([6e4, 60.0, -60.0, -math.inf], dtype=dtype)
    t = dataclasses.replace(testing.make(case), sink=sink)
    testing.oracle(case, t).check(case, testing.run(case, t, backend))


@pytest.mark.parametrize("M", [1, 20])
@scores
def test_sinks_of_samples_and_of_any_strides(score, M, backend):
    """Grouped heads of one query may be rows of one head."""
    x = {name: x.half() for name, x in inputs(score, B=3, H=4, Hkv=2, M=M, N=37).items()}
    sinks = torch.randn(4, 3, 2)[..., 0].mT.half()

    def both(sink, *of_samples):
        p, *tensors = validate.build(score, *of_samples, x.get("weight"), enable_gqa=True)[:6]
        out, lse, _, stats = registry.get(backend).forward(p, *tensors, sink)
        saved = out, stats, torch.ones_like(out), lse, None, False, sink
        return out, lse, registry.get(backend).backward(p, *tensors, *saved)[5]

    qkv = x["query"], x["key"], x["value"]
    found = both(sinks, *qkv)
    each = [both(sinks[n], *(y[n : n + 1] for y in qkv)) for n in range(3)]
    for ours, want in zip(found, map(torch.cat, zip(*each, strict=True)), strict=True):
        assert torch.equal(ours, want)
    _, without, absent = both(None, *qkv)
    assert absent is None
    torch.testing.assert_close(found[1], torch.logaddexp(without, sinks[..., None].float()))


@pytest.mark.parametrize("M", [1, 20])
@scores
def test_without_keys_the_log_sum_exp_is_the_sink(score, M, backend):
    x = {name: x.half() for name, x in inputs(score, H=4, Hkv=2, M=M, N=0).items()}
    sink = torch.randn(4, requires_grad=True)
    out, lse = attend(**x, sink=sink, return_lse=True, backend=backend)
    assert torch.equal(lse, sink[:, None].expand(2, 4, M))
    assert not out.any()
    grads = torch.full_like(out, torch.inf), torch.randn(2, 4, M)  # the first is of a constant
    [grad] = torch.autograd.grad((out, lse), sink, grads)
    torch.testing.assert_close(grad, grads[1].sum((0, 2)))


@pytest.mark.parametrize("sink", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
@scores
def test_the_largest_sinks_are_numbers(score, sink, backend):
    """The least one is how some switch a sink off: a row without keys is all its own then, too."""
    x = inputs(score, B=1, H=2, Hkv=2, M=3, N=37)
    mask = Mask(kv_len=torch.tensor([[37, 0, 37]]))
    sinks = torch.full((2,), sink, requires_grad=True)
    out, lse = attend(**x, mask=mask, sink=sinks, return_lse=True, backend=backend)
    [grad] = torch.autograd.grad((out, lse), sinks, (torch.ones_like(out), torch.ones_like(lse)))
    assert grad.tolist() == [3.0 if sink > 0 else 1.0] * 2


@pytest.mark.parametrize("M", [1, 20])
@scores
def test_a_row_without_keys_has_no_gradient_but_of_its_log_sum_exp(score, M, backend):
    x = {name: x.half() for name, x in inputs(score, B=1, H=2, Hkv=2, M=M, N=37).items()}
    mask = Mask(kv_len=torch.tensor([[37] * (M - 1) + [0]]))
    sink = torch.tensor([-3.0, -math.inf], requires_grad=True)
    out, lse = attend(**x, mask=mask, sink=sink, return_lse=True, backend=backend)
    last = torch.zeros_like(out)
    last[:, :, -1] = torch.inf
    [grad] = torch.autograd.grad((out, lse), sink, (last, torch.ones(1, 2, M)))
    taken = torch.exp(sink.detach()[:, None] - lse.detach().clamp(min=-1e30)).sum((0, 2))
    torch.testing.assert_close(grad, taken)
