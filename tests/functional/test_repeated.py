"""Repeated calls in training: one C function each way, and nothing else is different."""

import dataclasses
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from properties import repeated_calls
from properties.repeated_calls import MASKED, empty_table  # noqa: F401
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import ALiBi, Mask, testing
from fastattn.problem import call_cache
from fastattn.testing import GRID

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention

CASES = [
    dataclasses.replace(case, lse=False, dropout_p=0.0)
    for case in GRID
    if case.score in ("dot", "additive") and case.M * case.N <= 1 << 14
]


def heads(M=3, N=5, dtype=torch.float32):
    return repeated_calls.heads(M, N, dtype, requires_grad=True)


def results(args, grad_out, wanted=None, **options):
    """[output, gradients of ``wanted``]: of q, k and v if nothing else."""
    out = sdpa(*args, **options)
    return [out, *torch.autograd.grad(out, args if wanted is None else wanted, grad_out)]


def known(args, grad_out=None, wanted=None, **options):
    """Repeats until both passes have a plan, and returns what the ordinary way gives.

    Nothing is remembered while that computes, and everything is forgotten.
    """
    if grad_out is None:
        grad_out = torch.ones_like(args[0])
    with call_cache.paused():
        want = results(args, grad_out, wanted, **options)
    for _ in range(3):
        results(args, grad_out, wanted, **options)
    return want


def same_bits(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


# ---- the same results ----


def test_gradients_of_the_grid_are_the_same_bits(ordinary):
    planned = 0
    for case in CASES:
        t, other = testing.make(case), testing.make(dataclasses.replace(case, name="other"))
        with call_cache.paused():
            want = testing.run(case, other, "cpu")
        for _ in range(3):
            testing.run(case, t, "cpu")
        ordinary.clear()
        got = testing.run(case, other, "cpu")
        planned += not ordinary
        testing.assert_same_bits(got, want)
    # The others have a line of biases, two masks that become one, or a dim of 0.
    assert planned > 0.7 * len(CASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKED)
def test_tensors_are_those_of_each_call(ordinary, kind, dtype):
    def draw():
        args, options, wanted = heads(dtype=dtype), MASKED[kind](), []
        for name in {"attn_mask", "bias", "sink"} & set(options):
            if (x := options[name]).is_floating_point():
                options[name] = x.to(dtype).requires_grad_()
                wanted.append(options[name])
        return args, torch.randn(2, 2, 3, 8).to(dtype), [*args, *wanted], options

    (*call, options), (*other, other_options) = draw(), draw()
    with call_cache.paused():
        want = results(*other, **other_options)
    for _ in range(3):
        results(*call, **options)
    ordinary.clear()
    same_bits(results(*other, **other_options), want)
    assert not ordinary


@pytest.mark.parametrize("returned", ["full", "mean"])
def test_weights(ordinary, returned):
    grads = torch.randn(2, 2, 3, 8), torch.randn((2, 2, 3, 5) if returned == "full" else (2, 3, 5))

    def pulled(args, used):
        found = sdpa(*args, return_weights=returned)
        picked = [found[n] for n in used]
        return [*found, *torch.autograd.grad(picked, args, [grads[n] for n in used])]

    for used in ([0], [1], [0, 1]):
        args = heads()
        with call_cache.paused():
            want = pulled(args, used)
        for _ in range(3):
            pulled(heads(), used)
        ordinary.clear()
        same_bits(pulled(args, used), want)
        assert not ordinary


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("returned", [None, "full", "mean"])
@pytest.mark.parametrize("score", ["dot", "additive", "additive with heads"])
def test_tensors_of_three_dims(ordinary, score, returned, first):
    """The dot product has heads in the first dim, and no samples. So has the additive score, if its
    weight has heads."""
    attend = sdpa if score == "dot" else fastattn.additive_attention
    weight = {"dot": (), "additive": ((8,),), "additive with heads": ((first, 8),)}[score]

    def draw():
        shapes = (first, 3, 8), (first, 5, 8), (first, 5, 8), *weight, (first, 3, 5)
        *args, bias = (torch.randn(x, requires_grad=True) for x in shapes)
        return args, bias

    def pulled(args, bias):
        found = attend(*args, bias=bias, return_weights=returned)
        found = found if returned else (found,)
        torch.manual_seed(0)
        grads = [torch.randn(x.shape) for x in found]
        return [*found, *torch.autograd.grad(found, [*args, bias], grads)]

    args = draw()
    with call_cache.paused():
        want = pulled(*args)
    for _ in range(3):
        pulled(*draw())
    ordinary.clear()
    same_bits(pulled(*args), want)
    assert not ordinary


def test_one_tensor_in_three_places(ordinary):
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    other = torch.randn(2, 2, 4, 8, requires_grad=True)
    want = known([x, x, x], wanted=[x])
    grad_out = torch.ones(2, 2, 4, 8)
    ordinary.clear()
    same_bits(results([x, x, x], grad_out, [x]), want)
    three = [x, other, x.detach().clone().requires_grad_()]
    got = results(three, grad_out)
    assert not ordinary
    with call_cache.paused():
        same_bits(got, results(three, grad_out))


def test_one_tensor_in_place_of_two_limits():
    args, same = heads(), torch.tensor([3, 4])
    other = Mask(kv_begin=torch.tensor([0, 1]), kv_len=torch.tensor([4, 5]))
    want = known(args, mask=other)
    call_cache.forget()
    with torch.no_grad():
        for _ in range(3):
            sdpa(*args, mask=Mask(kv_begin=same, kv_len=same))
    same_bits(results(args, torch.ones(2, 2, 3, 8), mask=other), want)


@pytest.mark.parametrize("needed", range(1, 8))
def test_which_gradients_are_wanted(ordinary, needed):
    args = heads()
    for n, x in enumerate(args):
        x.requires_grad_(bool(needed >> n & 1))
    wanted = [x for x in args if x.requires_grad]
    want = known(args, wanted=wanted)
    ordinary.clear()
    same_bits(results(args, torch.ones(2, 2, 3, 8), wanted), want)
    assert not ordinary


def test_layouts_of_the_gradient(ordinary):
    args = heads()
    known(args)
    base = torch.randn(2, 2, 3, 8)
    layouts = {
        "expanded": base[:1, :1, :1, :1].expand(2, 2, 3, 8),
        "tokens": base.transpose(1, 2).contiguous().transpose(1, 2),
        "columns": base.mT.contiguous().mT,
        "sliced": torch.randn(2, 2, 3, 16)[..., ::2],
    }
    for grad_out in layouts.values():
        with call_cache.paused():
            want = results(args, grad_out)
        known(args, grad_out)
        ordinary.clear()
        same_bits(results(args, grad_out), want)
        assert not ordinary


def test_plans_for_layouts_are_few(ordinary):
    """Where a plan is for one length, each layout of the gradient has one."""
    args, options = heads(), dict(mask=Mask(causal="bottom_right"))
    known(args, **options)
    [(_, trained)] = [x for x in call_cache.table().values() if type(x) is tuple and len(x) == 2]
    counts = []
    for n in range(40):
        results(args, torch.randn(2, 2, 3, 8 + n)[..., :8], **options)
        counts.append(len(trained.backward))
    assert max(counts) == 16


# ---- autograd's promises ----


def test_second_derivatives(ordinary):
    args = heads()
    grad_out = torch.ones(2, 2, 3, 8)

    def second():
        out = sdpa(*args, is_causal=True)
        grads = torch.autograd.grad(out, args, grad_out, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), args)

    with call_cache.paused():
        want = second()
    known(args, is_causal=True)
    ordinary.clear()
    same_bits(second(), want)
    assert ordinary == ["backward"]


def test_batches_of_gradients():
    args = heads()
    grads = torch.randn(4, 2, 2, 3, 8)
    known(args)
    pulled = torch.autograd.grad(sdpa(*args), args, grads, is_grads_batched=True)
    for n, grad_out in enumerate(grads):
        for got, want in zip(pulled, results(args, grad_out)[1:], strict=True):
            torch.testing.assert_close(got[n], want)


def test_what_was_saved_must_not_change():
    args = heads()
    mask = Mask(kv_len=torch.tensor([3, 4]).int())
    known(args, mask=mask)
    for n in range(3):
        moved = [arg + 0 for arg in args]
        out = sdpa(*moved, mask=mask)
        moved[n].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = sdpa(*args, mask=mask)
    mask.kv_len.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_limits_of_64_bits_may_change(ordinary):
    """The ordinary way saves 32-bit numbers, which are not the caller's."""
    args, grad_out = heads(), torch.ones(2, 2, 3, 8)
    mask = Mask(kv_begin=torch.tensor([0, 1]), kv_len=torch.tensor([[3, 4, 5], [5, 4, 3]]))
    want = known(args, mask=mask)
    ordinary.clear()
    out = sdpa(*args, mask=mask)
    mask.kv_len.fill_(1), mask.kv_begin.fill_(1)
    same_bits([out, *torch.autograd.grad(out, args, grad_out)], want)
    assert not ordinary
    with torch.inference_mode():  # autograd saves no tensor that is made here
        mask = Mask(kv_len=torch.tensor([3, 4]))
    same_bits(known(args, mask=mask), results(args, grad_out, mask=mask))


def test_an_output_is_the_callers():
    args = heads()
    known(args)
    out = sdpa(*args)
    assert out.is_leaf is False
    assert not out._is_view()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(2).sum().backward()


def test_backward_twice(ordinary):
    args = heads()
    known(args)
    out = sdpa(*args)
    first = torch.autograd.grad(out.sum(), args, retain_graph=True)
    same_bits(torch.autograd.grad(out.sum(), args), first)
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


def test_hooks_of_saved_tensors(ordinary):
    args, packed = heads(), []
    known(args)
    ordinary.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        sdpa(*args).sum().backward()
    assert ordinary == ["forward"]
    assert len(packed) == 5


@pytest.mark.parametrize("earlier", range(5))
def test_checkpoints_begin_at_any_call(earlier):
    """The ordinary way and the plans save other tensors, and a checkpoint counts them."""
    args, mask = heads(), Mask(kv_len=torch.tensor([3, 4]))
    grad_out = torch.ones(2, 2, 3, 8)
    for _ in range(earlier):
        results(args, grad_out, mask=mask)
    for _ in range(3):
        out = checkpoint(lambda *x: sdpa(*x, mask=mask), *args, use_reentrant=False)
        got = torch.autograd.grad(out, args, grad_out)
        same_bits(got, results(args, grad_out, mask=mask)[1:])


def test_memory_is_freed():
    args = heads(64, 64)
    mask = Mask(kv_len=torch.tensor([3, 4]))
    known(args, mask=mask)
    out = sdpa(*(x + 0 for x in args), mask=mask)
    alive = [weakref.ref(x) for x in (out, mask.kv_len, *out.grad_fn.saved_tensors[3:4])]
    out.sum().backward()
    counts = [sys.getrefcount(x) for x in args]
    sdpa(*args, mask=mask).sum().backward()
    assert [sys.getrefcount(x) for x in args] == counts
    del out, mask
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_the_table_is_forgotten_before_backward():
    args = heads()
    want = known(args)
    out = sdpa(*args)
    call_cache.forget()
    same_bits(torch.autograd.grad(out, args, torch.ones(2, 2, 3, 8)), want[1:])


def test_threads(ordinary):
    inputs = [(heads(), torch.randn(2, 2, 3, 8)) for _ in range(6)]
    with call_cache.paused():
        want = [results(*x) for x in inputs]
    for _ in range(3):
        results(*inputs[0])
    ordinary.clear()

    def is_right(n):
        return all(all(map(torch.equal, results(*inputs[n]), want[n])) for _ in range(100))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(is_right, range(len(inputs))))
    assert not ordinary


# ---- where somebody could tell ----


def test_values_of_limits():
    args = heads()
    known(args, mask=Mask(kv_len=torch.tensor([3, 4])))
    with pytest.raises(ValueError, match=r"mask.kv_len: expected values in \[0, 5\]"):
        sdpa(*args, mask=Mask(kv_len=torch.tensor([3, 6])))


def test_modes_and_profilers_see_backward():
    args = heads()
    known(args)
    out = sdpa(*args)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), args)
    assert counter.get_total_flops() > 0
    out = sdpa(*args)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out.sum(), args)
    assert "fastattn::backward" in {event.name for event in profile.events()}


def test_what_has_no_plan_in_training(ordinary):
    slopes = torch.rand(2, requires_grad=True)
    ways = {
        "line": lambda: sdpa(*heads(), bias=ALiBi(slopes)),
        "lse": lambda: sdpa(*heads(), return_lse=True)[1],
    }
    for name, way in ways.items():
        for _ in range(3):
            ordinary.clear()
            way().sum().backward()
        assert ordinary == ["forward"], name


def test_how_many_functions_of_python_a_call_takes():
    args, mask = heads(), Mask(kv_len=torch.tensor([3, 4]))
    known(args, torch.ones(()).expand(2, 2, 3, 8), mask=mask)
    repeated_calls.assert_few_functions_of_python(lambda: sdpa(*args, mask=mask), grad=True)
