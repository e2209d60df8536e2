"""Plans for any length, of calls of four dims: at inference and in training."""

import pytest
import torch
from properties.repeated_calls import empty_table, heads, pulled  # noqa: F401

import fastattn
from fastattn import Mask, testing
from fastattn.problem import call_cache

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention


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


def test_more_keys_than_32_bits_count():
    q = torch.zeros(1, 1, 1, 1)

    def call(N):
        k = q.expand(1, 1, N, 1)
        return sdpa(q, k, k, mask=Mask(kv_len=torch.tensor([N - 1])))

    for known in range(2):  # before any plan, and beside one
        with pytest.raises(ValueError, match="key: expected sizes of at most 2147483647"):
            call(2**31)
        for N in (10, 11, 12):
            call(N)
        assert bool(call_cache.table()), known


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


GRADED = MASKED | {
    "plain": lambda M, N: {},
    "causal": lambda M, N: dict(is_causal=True),
    "sink": lambda M, N: dict(sink=torch.randn(2), attn_mask=torch.randn(M, N)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GRADED)
def test_gradients_too(checked, ordinary_gradients, kind, dtype):
    calls = []
    for M, N in ((3, 5), (3, 6), (1, 1), (1, 5), (40, 1), (9, 300), (130, 70)):
        for change in LAYOUTS.values():
            args = [change(x).detach().requires_grad_() for x in heads(M, N, dtype)]
            options = GRADED[kind](M, N)
            for name in {"attn_mask", "bias", "sink"} & set(options):
                if (x := options[name]).is_floating_point():
                    options[name] = x.to(dtype).requires_grad_()
                    args.append(options[name])
            calls.append((args[:3], options, args))
    with call_cache.paused():
        wanted = [pulled(*call) for call in calls]
    pulled(*calls[0]), pulled(*calls[0])
    checked.clear(), ordinary_gradients.clear()
    with testing.poisoned():
        results = [pulled(*call) for call in calls]
    for found, want in zip(results, wanted, strict=True):
        for x, y in zip(found, want, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()
    assert not checked
    assert not ordinary_gradients


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


def test_a_plan_beside_sinks_serves_any_length(checked):
    sink, others = torch.randn(2), torch.randn(2, 3)[:, 1]
    q, k, v = heads(1, 9)
    with call_cache.paused():
        want = sdpa(q, k, v, sink=sink * 2), sdpa(q, k, v, sink=others), sdpa(q, k, v)
    sdpa(*heads(), sink=sink)
    checked.clear()
    assert torch.equal(sdpa(q, k, v, sink=sink * 2), want[0])
    assert not checked
    assert torch.equal(sdpa(q, k, v, sink=others), want[1])
    assert torch.equal(sdpa(q, k, v), want[2])
