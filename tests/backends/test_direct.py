"""Repeated calls at inference: one C function, used only where nothing of PyTorch's could tell."""

import dataclasses
import os
import resource
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import spied
from properties import repeated_calls
from properties.repeated_calls import empty_table, heads  # noqa: F401
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import ALiBi, Mask, RelativeBias, functional, testing
from fastattn.backends import direct
from fastattn.problem import call_cache
from fastattn.problem.call_cache import Call
from fastattn.testing import GRID

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention

# What a plan may be made of: no log-sum-exp, and here no seed. Scores but these have no plans.
CASES = [
    dataclasses.replace(case, lse=False, dropout_p=0.0)
    for case in GRID
    if case.score in ("dot", "additive") and case.M * case.N <= 1 << 16
]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


@pytest.fixture
def ordinary(monkeypatch):
    """The calls that went the ordinary way."""
    return spied(monkeypatch, call_cache, "recall")


def known(*args, **options):
    """Calls as often as makes a plan, and returns what the ordinary way gives."""
    sdpa(*args, **options)
    return sdpa(*args, **options)


# ---- the same results ----


def test_results_of_the_grid_are_the_same_bits(ordinary):
    planned = 0
    for case in CASES:
        t, other = testing.make(case), testing.make(dataclasses.replace(case, name="other"))
        with call_cache.paused():
            want = testing.run(case, other, "cpu", grad=False)
        for _ in range(2):
            testing.run(case, t, "cpu", grad=False)
        ordinary.clear()
        got = testing.run(case, other, "cpu", grad=False)
        planned += not ordinary
        testing.assert_same_bits(got, want)
        assert got["out"].stride() == want["out"].stride()
    # The others have two masks that become one, a line of half numbers, or a dim of 0.
    assert planned > 0.7 * len(CASES)


KINDS = repeated_calls.MASKED | {
    "alibi": lambda: dict(bias=ALiBi(torch.rand(2), 1)),
    "alibi of samples": lambda: dict(bias=ALiBi(torch.rand(2, 2).mT, -(2**31)), is_causal=True),
    "relative": lambda: dict(bias=RelativeBias(torch.randn(2, 3).mT, torch.randint(0, 3, (5,)), 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_each_call(ordinary, kind, dtype):
    def draw():
        options = KINDS[kind]()
        if kind == "float":
            options["attn_mask"] = options["attn_mask"].to(dtype)
        return heads(dtype=dtype), options

    (args, options), (others, other_options) = draw(), draw()
    with call_cache.paused():
        want = sdpa(*others, **other_options)
    known(*args, **options)
    ordinary.clear()
    assert torch.equal(sdpa(*others, **other_options), want)
    assert not ordinary


def test_results_without_a_head_dim(ordinary):
    q, w = torch.randn(2, 3, 8), torch.randn(8)
    want, _, got = [fastattn.additive_attention(q, q, q, w) for _ in range(3)]
    assert torch.equal(got, want)
    assert got.stride() == want.stride()
    assert len(ordinary) == 2


def test_what_makes_another_call(ordinary):
    q, k, v = heads()
    keep = torch.ones(3, 5, dtype=torch.bool)
    calls = [
        lambda: sdpa(q, k, v),
        lambda: sdpa(q, k, v, scale=1.0),
        lambda: sdpa(q, k, v, scale=0.5),
        lambda: sdpa(q, k, v, scale=1),
        lambda: sdpa(q, k, v, is_causal=True),
        lambda: sdpa(q, k, v, softcap=1.0),
        lambda: sdpa(q, k, v, keep),
        lambda: sdpa(q, k, v, keep[:1]),
        lambda: sdpa(q, k, v, keep.float()),
        lambda: sdpa(q, k, v, bias=keep.float()),
        lambda: sdpa(q, k, v, bias=ALiBi(keep[0, :2].float())),
        lambda: sdpa(q, k, v, bias=ALiBi(keep[0, :2].float(), 1)),
        lambda: sdpa(q, k, v, bias=ALiBi(keep[:2, :2].float())),
        lambda: sdpa(q, k, v, bias=RelativeBias(keep[:, :2].float(), torch.arange(3))),
        lambda: sdpa(q, k, v, mask=Mask(keep=keep)),
        lambda: sdpa(q, k, v, mask=Mask(window=(1, 1))),
        lambda: sdpa(q, k, v, mask=Mask(window=(1, 0))),
        lambda: sdpa(q, k, v, mask=Mask(causal="bottom_right")),
        lambda: sdpa(q, k, v, mask=Mask(kv_len=torch.tensor([3, 4]))),
        lambda: sdpa(q, k, v, mask=Mask(kv_begin=torch.tensor([3, 4]))),
        lambda: sdpa(q[..., :7], k[..., :7], v),
        lambda: sdpa(q.mT.contiguous().mT, k, v),
        lambda: sdpa(*(x.half() for x in (q, k, v))),
        lambda: sdpa(q, k, v, return_weights="full")[1],
        lambda: sdpa(q, k, v, return_weights="mean")[1],
        lambda: sdpa(q.mT.contiguous().mT, k, v, bias=ALiBi(keep[0, :2].float())),
    ]  # fmt: skip
    want = [call() for call in calls]
    # A plan for any length serves all strides, and both keep and keep[:1].
    assert len(ordinary) == len(calls) - 2
    for call in calls:
        call()
    count, of_one_length = len(ordinary), 5  # four lines, and a diagonal at the bottom right
    assert count == len(calls) - 2 + of_one_length
    assert all(torch.equal(call(), x) for call, x in zip(calls, want, strict=True))
    assert len(ordinary) == count


def test_threads(ordinary):
    known(*heads())
    inputs = [heads() for _ in range(8)]
    with call_cache.paused():
        want = [sdpa(*x) for x in inputs]
    known(*heads())
    ordinary.clear()

    def is_right(n):
        return all(torch.equal(sdpa(*inputs[n]), want[n]) for _ in range(300))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(is_right, range(len(inputs))))
    assert not ordinary


# ---- what is kept ----


def test_no_tensor_is_kept(ordinary):
    tensors = [*heads(64, 64), torch.ones(64, 64, dtype=torch.bool), torch.tensor([3, 4])]
    for _ in range(3):
        out = sdpa(*tensors[:4], mask=Mask(kv_len=tensors[4]))
    assert len(ordinary) == 1
    other = torch.empty(1)
    assert out._use_count() == other._use_count()
    assert sys.getrefcount(out) == sys.getrefcount(other)
    alive = [weakref.ref(x) for x in (*tensors, out)]
    counts = [sys.getrefcount(x) for x in tensors]
    sdpa(*tensors[:4], mask=Mask(kv_len=tensors[4]))
    assert [sys.getrefcount(x) for x in tensors] == counts
    ordinary.clear()
    del tensors, out
    assert not any(x() is not None for x in alive)


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer keeps what was freed for a while")
def test_results_are_freed():
    tensors = heads(64, 64)
    known(*tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):  # each result has 8 KiB
        sdpa(*tensors)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


def test_nothing_is_planned_while_nothing_is_remembered(ordinary):
    with call_cache.paused():
        for n in range(3):
            sdpa(*heads())
            assert len(ordinary) == n + 1


def test_how_many_functions_of_python_a_call_takes():
    args, mask = heads(), Mask(kv_len=torch.tensor([3, 4]))
    known(*args, mask=mask)
    repeated_calls.assert_few_functions_of_python(lambda: sdpa(*args, mask=mask))


# ---- values ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("field", ["kv_len", "kv_begin"])
def test_limits_are_checked_at_every_call(ordinary, field, dtype):
    args = heads()
    for n, limit in enumerate((4, 5, 0, 6, 5, -1)):
        mask = Mask(**{field: torch.tensor([0, limit], dtype=dtype)})
        if 0 <= limit <= 5:
            sdpa(*args, mask=mask)
            assert len(ordinary) == (n + 1 if n < 1 or dtype is torch.int8 else 1 + (n > 3))
        else:
            with pytest.raises(ValueError, match=rf"mask.{field}: expected values in \[0, 5\]"):
                sdpa(*args, mask=mask)


def test_buckets_are_checked_at_every_call(ordinary):
    args, table = heads(), torch.randn(4, 2)
    for bucket in (3, 0, 1, 4, 2, -1):
        bias = RelativeBias(table, torch.tensor([0, bucket, 2]))
        if 0 <= bucket < 4:
            sdpa(*args, bias=bias)
        else:
            with pytest.raises(ValueError, match=r"bias\.buckets: expected rows of a table of 4"):
                sdpa(*args, bias=bias)
    assert len(ordinary) == 4


@pytest.mark.parametrize("kind", ["slopes", "table", "buckets", "added"])
def test_lines_that_are_left_to_the_ordinary_way(ordinary, kind):
    q, k, v = heads(dtype=torch.bfloat16)
    options = {
        "slopes": dict(bias=ALiBi(torch.rand(2).bfloat16())),
        "table": dict(bias=RelativeBias(torch.randn(4, 2).bfloat16(), torch.arange(3))),
        "buckets": dict(bias=RelativeBias(torch.randn(4, 2), torch.zeros(9).int()[:3])),
        "added": dict(bias=ALiBi(torch.rand(2)), attn_mask=torch.randn(3, 5)),
    }[kind]
    with call_cache.paused():
        want = sdpa(q, k, v, **options)
    for _ in range(4):
        assert torch.equal(sdpa(q, k, v, **options), want)
    assert len(ordinary) == 5


def test_strided_limits(ordinary):
    args, limits = heads(), torch.tensor([1, 2, 4, 3])
    with call_cache.paused():
        want = sdpa(*args, mask=Mask(kv_len=limits[::2].clone()))
    for _ in range(4):
        assert torch.equal(sdpa(*args, mask=Mask(kv_len=limits[::2])), want)
    assert len(ordinary) == 5


# ---- where somebody could tell ----


class Functions(TorchFunctionMode):
    """Notes the functions of torch that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def test_gradients(ordinary):
    q, k, v = heads()
    want = known(q, k, v)
    known(*heads(requires_grad=True))
    ordinary.clear()
    for leaf in (q, k, v):
        leaf.requires_grad_()
        out = sdpa(q, k, v)
        assert out.requires_grad
        with torch.no_grad():
            assert torch.equal(sdpa(q, k, v), want)
        with torch.inference_mode():
            assert sdpa(q, k, v).is_inference()
        leaf.requires_grad_(False)
    assert not ordinary  # tests/functional/test_repeated.py
    bias = torch.randn(3, 5)
    known(q, k, v, bias=bias)
    assert sdpa(q, k, v, bias=bias.requires_grad_()).requires_grad
    slopes = torch.rand(2)
    known(q, k, v, bias=ALiBi(slopes))
    assert sdpa(q, k, v, bias=ALiBi(slopes.requires_grad_())).requires_grad


def test_profilers_see_the_operator():
    args = heads()
    known(*args)
    with torch.profiler.profile() as profile:
        sdpa(*args)
    assert "fastattn::forward" in {event.name for event in profile.events()}


def test_modes_see_the_operator():
    args = heads()
    known(*args)
    with FlopCounterMode(display=False) as counter:
        sdpa(*args)
    assert counter.get_total_flops() > 0
    with Functions() as functions:
        sdpa(*args)
    assert any("fastattn.forward" in name for name in functions.seen)


def test_transforms_traces_and_autocast(ordinary):
    torch._dynamo.reset()
    q, k, v = heads()
    want = known(q, k, v)

    def dual():
        with forward_ad.dual_level():
            return sdpa(forward_ad.make_dual(q, q), k, v)

    def half():
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v)

    assert forward_ad._current_level < 0
    ways = {
        "vmap": lambda: torch.func.vmap(sdpa)(q[None], k[None], v[None])[0],
        "plain in vmap": lambda: torch.func.vmap(lambda x: x + sdpa(q, k, v))(torch.zeros(1))[0],
        "grad": lambda: torch.func.vjp(sdpa, q, k, v)[0],
        "dual": dual,
        "compile": lambda: torch.compile(sdpa, fullgraph=True, backend="aot_eager")(q, k, v),
        "trace": lambda: torch.jit.trace(lambda *x: sdpa(*x), (q, k, v), check_trace=False)(
            q, k, v
        ),
    }
    for name, way in ways.items():
        ordinary.clear()
        torch.testing.assert_close(way(), want, msg=name)
        assert ordinary or name == "compile", name
    assert half().dtype is torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
def test_under_autocast(ordinary, grad):
    """The plan is that of the tensors that autocast makes."""
    args = [x.requires_grad_(grad) for x in heads()]
    want = sdpa(*(x.bfloat16() for x in args))
    with torch.autocast("cpu", torch.bfloat16):
        known(*args)
        ordinary.clear()
        assert torch.equal(sdpa(*args), want)
    assert not ordinary


def test_tensors_that_are_not_their_memory(ordinary):
    q, k, v = heads()
    known(q, k, v)
    negative = torch._neg_view(q)
    want = sdpa(-q, k, v)
    assert torch.equal(sdpa(negative, k, v), want)
    assert len(ordinary) == 2

    class Own(torch.Tensor):
        pass

    assert type(sdpa(q.as_subclass(Own), k, v)) is Own
    assert len(ordinary) == 3
    meta = sdpa(*(x.to("meta") for x in (q, k, v)), backend="eager")
    assert meta.is_meta


def test_a_plan_is_made_of_the_call_that_came_last():
    args, other, keep = heads(), heads(), torch.rand(3, 5) < 0.7
    with call_cache.paused():  # no plan serves the second one
        results = {name: sdpa(*x, keep) for name, x in (("other", other), ("args", args))}
    calls = {name: Call(*x, attn_mask=keep) for name, x in (("other", other), ("args", args))}
    plans = {(m, n): plan(calls[m], results[n]) for m in calls for n in results}
    assert [pair for pair, made in plans.items() if made is not None] == [("args", "args")]
    both = Mask(keep=keep.clone())  # the kernels get one mask made of two
    out = sdpa(*args, keep, mask=both)
    assert plan(Call(*args, attn_mask=keep, mask=both), out) is None
    assert plan(Call(*args, attn_mask=keep), out) is None


@pytest.mark.parametrize("like", ["bias", "weight"])
def test_a_sink_in_the_memory_of_another_argument(like):
    args, x = heads(), torch.randn(2, 8)
    way = {
        "bias": lambda: sdpa(*args, bias=x[:, :1, None], sink=x[:, 0]),
        "weight": lambda: fastattn.additive_attention(*args, x, sink=x[:, 0]),
    }[like]
    with call_cache.paused():
        want = way()
    for _ in range(3):
        assert torch.equal(way(), want)


def plan(call, result):
    """Without its key."""
    return direct._FUNCTIONS.plan(call, result, False)[1]


def test_other_backends_have_no_plans(ordinary):
    args = heads(dtype=torch.float64)
    for _ in range(4):
        sdpa(*args)
    assert len(ordinary) == 4


def test_without_what_it_needs_of_torch(monkeypatch):
    with monkeypatch.context() as other_torch:
        other_torch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object())
        assert direct._set_up() is None
    assert direct._FUNCTIONS.set_up(torch.Tensor.__dlpack_c_exchange_api__) is False
    monkeypatch.delattr(torch._C._aoti, "alloc_tensors_by_stealing_from_void_ptrs")
    assert direct._set_up() is None
    monkeypatch.setattr(direct, "_FUNCTIONS", None)
    args = heads()
    want = known(*args)
    assert torch.equal(sdpa(*args), want)
    assert functional.direct is direct
