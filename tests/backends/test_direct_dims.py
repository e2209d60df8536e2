"""Calls of any dims have the plans of four: each tensor is a view, as the ordinary way makes it."""

import pytest
import torch
from properties import repeated_calls
from properties.repeated_calls import empty_table, pulled  # noqa: F401
from torch.autograd import forward_ad

import fastattn
from fastattn import Mask
from fastattn.problem import call_cache

pytestmark = pytest.mark.usefixtures("extension", "empty_table")
sdpa = fastattn.scaled_dot_product_attention

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
    "mask, mean": lambda M, N: dict(attn_mask=torch.rand(M, N) < 0.7, return_weights="mean"),
    "bias": lambda M, N: dict(bias=torch.randn(1, N, requires_grad=True)),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("lead", ALIKE | BROADCAST)
def test_any_dims(checked, ordinary_gradients, lead, kind):
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
    if lead in BROADCAST:
        with torch.no_grad():
            sdpa(*calls[0][0], **calls[0][1])
    checked.clear(), ordinary_gradients.clear()
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
    assert not ordinary_gradients


@pytest.mark.parametrize("place", ["query", "key", "attn_mask", "bias", "part of a mask"])
def test_samples_that_are_no_single_dim_in_memory(place):
    """The ordinary way copies these, so no plan of any length serves them."""

    def draw(M, N, apart):
        shapes = dict(query=(M, 8), key=(N, 8), value=(N, 8), attn_mask=(M, N), bias=(M, N))
        lead = (2, 3, 1)
        given = {name: torch.randn(*lead, *rows) for name, rows in shapes.items()}
        if apart and place in given:
            given[place] = given[place].transpose(0, 1).contiguous().transpose(0, 1)
        elif apart:
            given["attn_mask"] = given["attn_mask"][:, :1]
        if place == "bias":
            del given["attn_mask"]
        else:
            masked = apart and place == "part of a mask"
            given["mask"] = Mask(keep=torch.rand(1, 3, 1, M, N) < 0.9 if masked else None)
            del given["bias"]
        args = [given.pop(name).requires_grad_() for name in ("query", "key", "value")]
        return args, given, args

    calls = [draw(M, N, bool(n % 3)) for n, (M, N) in enumerate([(3, 5), (4, 6), (3, 5)] * 4)]
    with call_cache.paused():
        wanted = [pulled(*call) for call in calls]
    for _ in range(2):
        for call, want in zip(calls, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(pulled(*call), want, strict=True))


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
    with pytest.raises(ValueError, match=r"mask\.kv_len: expected"):
        sdpa(q[:, :2], k, k, mask=mask)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", ["2", "3", "5"])
def test_how_many_functions_of_python_a_new_length_takes(lead, grad):
    """As many as a known length of four dims."""
    *known, new = (torch.randn(*ALIKE[lead][0], n, 8, requires_grad=grad) for n in (4, 5, 5, 6))
    for x in known:
        out = sdpa(x, x, x)
        out.sum().backward() if grad else None
    repeated_calls.assert_few_functions_of_python(lambda: sdpa(new, new, new), grad)


# ---- where somebody could tell ----


class Own(torch.Tensor):
    pass


def autocast(*args):
    with torch.autocast("cpu", torch.bfloat16):
        return sdpa(*args)


def dual(q, k, v):
    with forward_ad.dual_level():
        return torch.stack([*forward_ad.unpack_dual(sdpa(forward_ad.make_dual(q, q), k, v))])


WAYS = {
    "vmap": lambda *args: torch.func.vmap(sdpa)(*(torch.stack([x, x + 1]) for x in args)),
    "grad": lambda *args: torch.func.grad(lambda *x: sdpa(*x).square().sum())(*args),
    "dual": dual,
    "compile": torch.compile(lambda *args: sdpa(*args), backend="aot_eager"),
    "autocast": autocast,
    "subclass": lambda q, k, v: sdpa(q.as_subclass(Own), k, v),
    "parameter": lambda q, k, v: sdpa(torch.nn.Parameter(q), k, v),
    "negative": lambda q, k, v: sdpa(torch._neg_view(q), k, v),
    "no batch": lambda *args: sdpa(*(x[:0] for x in args)),
    "no queries": lambda q, k, v: sdpa(q[..., :0, :], k, v),
    "no keys": lambda q, k, v: sdpa(q, k[..., :0, :], v[..., :0, :]),
    "float64": lambda *args: sdpa(*(x.double() for x in args)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lead", ["2", "3", "5", "keys of 1 sample", "queries without heads"])
def test_other_ways_to_call(lead, way):
    torch._dynamo.reset()
    leads = (ALIKE | BROADCAST)[lead]
    args = [torch.randn(*x, n, 8) for x, n in zip(leads, (3, 5, 5), strict=True)]
    with call_cache.paused():
        want = WAYS[way](*args)
    for grad in (False, True, True, True):
        sdpa(*(x.clone().requires_grad_(grad) for x in args)).sum()
    for _ in range(3):
        got = WAYS[way](*args)
        assert type(got) is type(want)
        assert torch.equal(got, want)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
