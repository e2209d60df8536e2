"""Plans for any length, of calls with any dims: at inference and in training."""

import sys

import pytest
import torch
from properties.repeated_calls import empty_table, heads  # noqa: F401

import fastattn
from fastattn import Mask, repeated, testing
from fastattn.problem import call_cache, validate

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked: those that no plan and no record served."""
    calls, build = [], validate.build

    def spy(*args, **options):
        calls.append(args)
        return build(*args, **options)

    monkeypatch.setattr(validate, "build", spy)
    return calls


LAYOUTS = {
    "heads first": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "time major": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "columns": lambda x: x.mT.contiguous().mT,
    "cache": lambda x: torch.cat([x, x.new_full(x.shape, torch.nan)], 2)[:, :, : x.shape[2]],
    "one sample": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, "mean", "full"])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True, scale=0.3), dict(softcap=2.0)])
def test_one_call_makes_the_plan_of_all(checked, dtype, weights, options):
    options = options | dict(return_weights=weights)
    lengths = (3, 5), (3, 6), (1, 1), (1, 5), (40, 1), (9, 300), (130, 70)
    inputs = [heads(*x, dtype) for x in lengths]
    calls = [[change(x) for x in args] for args in inputs for change in LAYOUTS.values()]
    with call_cache.paused():  # which forgets all calls
        wanted = [sdpa(*args, **options) for args in calls]
    sdpa(*heads(dtype=dtype), **options)
    known = dict(call_cache.table())
    checked.clear()
    with testing.poisoned():
        results = [sdpa(*args, **options) for args in calls]
    for found, want in zip(results, wanted, strict=True):
        pairs = [(found, want)] if weights is None else zip(found, want, strict=True)
        for x, y in pairs:
            assert torch.equal(x, y)
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    assert not checked
    assert call_cache.table() == known


def drawn_mask(*shape):
    return torch.rand(shape) < 0.7


# Options of a call with M queries and N keys; the last two have several of them.
MASKED = {
    "keys of samples": lambda M, N: dict(attn_mask=drawn_mask(2, 1, 1, N)),
    "rows": lambda M, N: dict(attn_mask=drawn_mask(1, 2, M, 1)),
    "pairs": lambda M, N: dict(mask=Mask(keep=drawn_mask(2, 2, M, N))),
    "pairs, columns first": lambda M, N: dict(mask=Mask(keep=drawn_mask(2, 1, N, M).mT)),
    "pairs for all": lambda M, N: dict(attn_mask=drawn_mask(M, N)),
    "pairs of heads": lambda M, N: dict(mask=Mask(keep=drawn_mask(2, M, N))),
    "keys for all": lambda M, N: dict(attn_mask=torch.randn(1, N)),
    "one for all": lambda M, N: dict(attn_mask=drawn_mask(1, 1, 1, 1)),
    "floats": lambda M, N: dict(attn_mask=torch.randn(2, 1, 1, N)),
    "bias": lambda M, N: dict(bias=torch.randn(1, 2, M, 2 * N)[..., ::2]),
    "lengths": lambda M, N: dict(mask=Mask(kv_len=torch.randint(N + 1, (2,)))),
    "begins": lambda M, N: dict(mask=Mask(kv_begin=torch.randint(N + 1, (2,), dtype=torch.int32))),
    "window": lambda M, N: dict(mask=Mask(window=(2, 1))),
    "nothing": lambda M, N: dict(mask=Mask()),
    "many": lambda M, N: dict(
        mask=Mask(window=(3, 0), kv_len=torch.randint(N + 1, (2,)), keep=drawn_mask(2, 1, M, N)),
        bias=torch.randn(1, 1, M, N),
        return_weights="mean",
    ),
    "many, softcap": lambda M, N: dict(
        attn_mask=torch.randn(2, 2, M, 1), is_causal=True, softcap=2.0, scale=0.3
    ),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_and_biases_too(checked, kind):
    torch.manual_seed(0)
    lengths = (3, 5), (3, 6), (1, 1), (1, 5), (40, 1), (2, 1), (9, 300), (130, 70)
    calls = [(heads(M, N), MASKED[kind](M, N)) for M, N in lengths]
    with call_cache.paused():
        wanted = [sdpa(*args, **options) for args, options in calls]
    sdpa(*heads(), **MASKED[kind](3, 5))
    known = dict(call_cache.table())
    checked.clear()
    with testing.poisoned():
        results = [sdpa(*args, **options) for args, options in calls]
    for found, want in zip(results, wanted, strict=True):
        pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, want)]
        assert all(torch.equal(x, y) for x, y in pairs)
    assert not checked
    assert call_cache.table() == known


def test_a_decoder_whose_keys_grow(checked):
    q, k, v = torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 70, 8)
    sdpa(q, k[:, :, :1], v[:, :, :1], enable_gqa=True)
    checked.clear()
    with torch.inference_mode():
        for n in range(2, 70):
            sdpa(q, k[:, :, :n], v[:, :, :n], enable_gqa=True)
    assert not checked


def test_what_does_not_fit_raises_as_ever():
    q, k, v = heads()
    sdpa(q, k, v)
    wrong = {
        "same length": (q, k, v[:, :, :4]),
        "same last dim": (q, k[..., :4], v),
        "expected as many key as query heads": (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        "broadcast": (q, *(x.repeat(3, 1, 1, 1) for x in (k, v))),
        "the dtype of query": (q, k.half(), v),
    }
    for message, args in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            sdpa(*args)


def test_masks_that_do_not_fit_raise_as_ever():
    q, k, v = heads(3, 5)
    for kind in ("pairs", "floats", "keys for all", "lengths", "begins"):
        sdpa(q, k, v, **MASKED[kind](3, 5))
    limit = torch.tensor([1, 6])
    wrong = [
        ("broadcasts", dict(mask=Mask(keep=drawn_mask(2, 2, 3, 6)))),
        ("broadcasts", dict(mask=Mask(keep=drawn_mask(2, 2, 2, 5)))),
        ("broadcasts", dict(attn_mask=torch.randn(2, 1, 1, 4))),
        ("broadcasts", dict(attn_mask=torch.randn(3, 4))),
        ("broadcasts", dict(attn_mask=torch.randn(2, 5))),
        ("in .0, 5.", dict(mask=Mask(kv_len=limit))),
        ("in .0, 5.", dict(mask=Mask(kv_len=-limit))),
        ("in .0, 5.", dict(mask=Mask(kv_begin=limit.int()))),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            sdpa(q, k, v, **options)


@pytest.mark.parametrize("which", [(0,), (1, 2), (2,)])
@pytest.mark.parametrize("dim", [0, 1])
def test_inputs_that_broadcast(checked, which, dim):
    """The output has the layout of what the query becomes."""
    inputs = [[LAYOUTS["time major"](x) for x in heads(N=N)] for N in (5, 6, 7)]
    inputs = [
        [x.narrow(dim, 0, 1) if n in which else x for n, x in enumerate(args)] for args in inputs
    ]
    with call_cache.paused():
        wanted = [sdpa(*args) for args in inputs]
    checked.clear()
    for args, want in zip(inputs, wanted, strict=True):
        found = sdpa(*args)
        assert torch.equal(found, want)
        assert found.stride() == want.stride()
    assert len(checked) == 1


def test_empty_calls():
    sdpa(*heads())
    for M, N in ((0, 5), (3, 0)):
        out = sdpa(*heads(M, N))
        assert out.shape == (2, 2, M, 8)
        assert not out.any()


# ---- gradients ----


@pytest.fixture
def ordinary(monkeypatch):
    """The backward passes of repeated calls that no plan served."""
    passes, gradients = [], repeated._gradients
    monkeypatch.setattr(repeated, "_gradients", lambda *a: passes.append(a) or gradients(*a))
    return passes


def pulled(args, options, wanted, second=False):
    """Results, their gradients, and gradients of these if ``second``."""
    found = sdpa(*args, **options)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(0)
    grads = [torch.randn(x.shape).to(x.dtype) for x in found]
    first = torch.autograd.grad(found, wanted, grads, create_graph=second)
    loss = sum(x.float().square().sum() for x in first) if second else None
    return [*found, *first, *(torch.autograd.grad(loss, wanted) if second else ())]


GRADED = MASKED | {"plain": lambda M, N: {}, "causal": lambda M, N: dict(is_causal=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GRADED)
def test_gradients_too(checked, ordinary, kind, dtype):
    calls = []
    for M, N in ((3, 5), (3, 6), (1, 1), (1, 5), (40, 1), (9, 300), (130, 70)):
        for change in LAYOUTS.values():
            args = [change(x).detach().requires_grad_() for x in heads(M, N, dtype)]
            options = GRADED[kind](M, N)
            for name in {"attn_mask", "bias"} & set(options):
                if (x := options[name]).is_floating_point():
                    options[name] = x.to(dtype).requires_grad_()
                    args.append(options[name])
            calls.append((args[:3], options, args))
    with call_cache.paused():
        wanted = [pulled(*call) for call in calls]
    pulled(*calls[0]), pulled(*calls[0])
    checked.clear(), ordinary.clear()
    with testing.poisoned():
        results = [pulled(*call) for call in calls]
    for found, want in zip(results, wanted, strict=True):
        for x, y in zip(found, want, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()
    assert not checked
    assert not ordinary


@pytest.mark.parametrize("needed", range(1, 8))
def test_which_gradients_are_wanted(needed):
    """One plan serves them all, and calls without."""
    calls = [heads(M, N) for M, N in ((3, 5), (4, 6), (3, 5), (2, 7))]
    wanted = [[x.requires_grad_() for n, x in enumerate(a) if needed >> n & 1] for a in calls]
    with torch.no_grad():
        sdpa(*calls[0])
    for args, leaves in zip(calls, wanted, strict=True):
        found = pulled(args, {}, leaves)
        with call_cache.paused():
            want = pulled(args, {}, leaves)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["plain", "pairs of heads", "floats", "lengths"])
def test_second_derivatives_have_the_lengths_of_their_call(kind):
    lengths = (3, 5), (4, 6), (4, 6), (1, 7), (3, 5)
    calls = [(heads(M, N, requires_grad=True), GRADED[kind](M, N)) for M, N in lengths]
    with call_cache.paused():
        wanted = [pulled(args, options, args, True) for args, options in calls]
    for (args, options), want in zip(calls, wanted, strict=True):
        found = pulled(args, options, args, True)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


# ---- other dims ----

# What stands before [rows, columns] of queries, of keys and of values.
ALIKE = {
    "2": ((), (), ()),
    "3": ((2,), (2,), (2,)),
    "3, one head": ((1,), (1,), (1,)),
    "4, grouped": ((2, 4), (2, 2), (2, 2)),
    "5": ((2, 3, 2), (2, 3, 2), (2, 3, 2)),
    "5 of 1": ((1, 1, 2), (1, 1, 2), (1, 1, 2)),
    "6": ((2, 1, 2, 2), (2, 1, 2, 2), (2, 1, 2, 2)),
}
BROADCAST = {
    "keys of 1 sample": ((2, 2), (1, 2), (1, 2)),
    "keys without samples": ((2, 2), (2,), (2,)),
    "keys without heads": ((2, 2), (), ()),
    "queries of 1 sample": ((1, 2), (3, 2), (3, 2)),
    "samples of values": ((2,), (2,), (3, 2)),
    "queries without heads": ((), (2,), (2,)),
    "queries of 1 head": ((2, 1), (2, 2), (2, 1)),
    "5, all keys alike": ((2, 3, 2), (2,), (1, 1, 2)),
}
ROWS = {
    "contiguous": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "cache": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -2)[..., : x.shape[-2], :],
    "tokens first": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
    "tokens before heads": lambda x: (
        x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x
    ),
}
OTHERS = {
    "plain": lambda M, N: {},
    "causal, weights": lambda M, N: dict(is_causal=True, return_weights="full"),
    "mask, mean": lambda M, N: dict(attn_mask=drawn_mask(M, N), return_weights="mean"),
    "bias": lambda M, N: dict(bias=torch.randn(1, N, requires_grad=True)),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("lead", ALIKE | BROADCAST)
def test_any_dims(checked, ordinary, lead, kind):
    def draw(M, N, change):
        shapes = zip((ALIKE | BROADCAST)[lead], (M, N, N), strict=True)
        args = [change(torch.randn(*x, n, 8)) for x, n in shapes]
        return args, OTHERS[kind](M, N) | dict(enable_gqa=True)

    def graded(args, options):
        leaves = [x.detach().requires_grad_() for x in args]
        return pulled(leaves, options, leaves + [x for x in [options.get("bias")] if x is not None])

    lengths = (3, 5), (1, 1), (1, 6), (4, 1), (9, 130)
    calls = [draw(*x, change) for x in lengths for change in ROWS.values()]
    with call_cache.paused(), torch.no_grad():
        wanted = [sdpa(*args, **options) for args, options in calls]
    with call_cache.paused():
        gradients = [graded(*call) for call in calls]
    graded(*calls[0]), graded(*calls[0])
    checked.clear(), ordinary.clear()
    with torch.no_grad():
        results = [sdpa(*args, **options) for args, options in calls]
    assert not checked
    for found, want in zip(results, wanted, strict=True):
        pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, want)]
        for x, y in pairs:
            assert torch.equal(x, y)
            assert (x.shape, x.stride()) == (y.shape, y.stride())
    for call, want in zip(calls, gradients, strict=True):
        for x, y in zip(graded(*call), want, strict=True):
            assert torch.equal(x, y)
            assert x.shape == y.shape
    assert bool(checked) == (lead in BROADCAST)  # their gradients are sums
    assert not ordinary


def test_a_limit_of_samples_and_limits_of_rows_look_alike():
    calls = [
        (torch.randn(2, M, 8), torch.randn(2, 5, 8), Mask(kv_len=torch.arange(M) % 5 + 1))
        for M in (1, 3, 1, 3, 4, 2)
    ]
    with call_cache.paused():
        wanted = [sdpa(q, k, k, mask=mask) for q, k, mask in calls]
    for (q, k, mask), want in zip(calls, wanted, strict=True):
        assert torch.equal(sdpa(q, k, k, mask=mask), want)
    q, k, mask = calls[1]
    with pytest.raises(ValueError, match="made for 3"):
        sdpa(q[:, :2], k, k, mask=mask)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", ["2", "3", "5"])
def test_how_many_functions_of_python_a_new_length_takes(lead, grad):
    """As many as a known length of four dims: tests/backends/test_direct.py, test_repeated.py."""
    counted = []
    for n in (4, 5, 5, 6):
        x = torch.randn(*ALIKE[lead][0], n, 8, requires_grad=grad)
        counted.clear()
        sys.setprofile(lambda frame, kind, _: counted.append(frame) if kind == "call" else None)
        try:
            out = sdpa(x, x, x)
            out.sum().backward() if grad else None
        finally:
            sys.setprofile(None)
    assert 0 < len(counted) <= (31 if grad else 8)


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda M, N: Mask(causal="bottom_right"),
        lambda M, N: Mask(causal="bottom_right", window=(2, 0)),
        lambda M, N: Mask(kv_len=torch.arange(2 * M).view(2, M) % N),
    ],
)
def test_what_moves_with_the_lengths_has_plans_for_each(checked, mask_of):
    lengths = [n for n in ((3, 5), (3, 9), (2, 9), (3, 5)) for _ in range(3)]
    calls = [(heads(*n), mask_of(*n)) for n in lengths]
    with call_cache.paused():
        wanted = [sdpa(*args, mask=mask) for args, mask in calls]
    checked.clear()
    for (args, mask), want in zip(calls, wanted, strict=True):
        assert torch.equal(sdpa(*args, mask=mask), want)
    assert len(checked) == len(set(lengths))
