"""Known calls give the same results as new ones."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from helpers import spied

import fastattn
from fastattn.backends import registry
from fastattn.problem import call_cache, validate

sdpa = fastattn.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """An empty table of known calls."""
    monkeypatch.setattr(call_cache, "_KNOWN", {})
    return call_cache._KNOWN


@pytest.fixture
def built(monkeypatch):
    """The calls of which a record is built: the new ones."""
    return spied(monkeypatch, validate, "build")


def heads(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (1, 2, 4, 8), generator=rng).to(dtype)


def results(returned):
    return returned if isinstance(returned, tuple) else (returned,)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "scale": 0.5}, {"return_weights": "mean"}, {"return_lse": True}],
)
def test_seen_or_not_the_results_are_the_same(built, table, options):
    first, second = ([heads(seed=2 * n + m) for n in range(3)] for m in range(2))
    want = results(sdpa(*second, **options))
    table.clear()
    sdpa(*first, **options)
    assert len(built) == 2
    got = results(sdpa(*second, **options))
    assert len(built) == 2
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_what_makes_another_call(built):
    q = heads()
    others = [
        {"is_causal": True}, {"scale": 0.5}, {"return_weights": "full"}, {"backend": "eager"},
        {"enable_gqa": True}, {"dropout_p": 0.5}, {"dropout_p": 0.25},
    ]  # fmt: skip
    for options in ({}, *others, *others):
        sdpa(q, q, q, **options)
    sdpa(heads(1, 2, 5, 8), q, q, is_causal=True, return_lse=True)
    sdpa(q.double(), q.double(), q.double())
    assert len(built) == len(others) + 3
    sdpa(heads(1, 2, 5, 8), q, q)  # has the plan of any length
    assert len(built) == len(others) + 3


def test_errors_are_found_again():
    q = heads()
    sdpa(q, q, q, is_causal=True, scale=1.0)
    for _ in range(2):
        with pytest.raises(TypeError, match="is_causal"):
            sdpa(q, q, q, is_causal=1, scale=1.0)
        with pytest.raises(TypeError, match="dtype"):
            sdpa(q, q.double(), q, is_causal=True, scale=1.0)
        with pytest.raises(TypeError, match="layout"):
            sdpa(q, q, q.to_sparse(), is_causal=True, scale=1.0)
        for p in (None, torch.zeros(2)):
            with pytest.raises(TypeError, match="dropout_p"):
                sdpa(q, q, q, dropout_p=p, is_causal=True, scale=1.0)
        with pytest.raises(ValueError, match="backend"):
            sdpa(q, q, q, backend="other")
        with pytest.raises((TypeError, ValueError)):
            sdpa(q, q, q, return_weights=["mean"])


def test_numbers_that_equal_a_known_one_are_refused_as_before():
    q = heads()
    sdpa(q, q, q, scale=1.0)
    for other in (True, np.True_, Decimal(1)):
        with pytest.raises(TypeError, match="scale: expected a float or None, got"):
            sdpa(q, q, q, scale=other)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_arrays_are_refused_in_our_words(name):
    q = heads()
    with pytest.raises(TypeError, match=f"{name}: expected .*ndarray"):
        sdpa(q, q, q, **{name: np.ones((4, 4), bool)})


@pytest.mark.parametrize("mask", ["causal", 1, {}])
def test_a_mask_of_another_type_is_refused_in_our_words(mask):
    with pytest.raises(TypeError, match=r"mask: expected a fastattn\.Mask, got (str|int|dict)"):
        sdpa(heads(), heads(), heads(), mask=mask)
    with pytest.raises(TypeError, match="attn_mask: expected a Tensor, got Mask: write mask="):
        sdpa(heads(), heads(), heads(), fastattn.Mask(causal="top_left"))


def test_autocast_is_not_forgotten(table):
    q = heads()
    for _ in range(2):
        assert sdpa(q, q, q).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert sdpa(q, q, q).dtype == torch.bfloat16
    assert sum(type(x) is call_cache.Known for x in table.values()) == 2  # and plans


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_under_autocast_a_call_is_that_of_its_tensors(built, kind):
    q, half = kind(heads()), heads().bfloat16()
    want = sdpa(half, half, half, bias=half[..., :4])
    assert len(built) == 1
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert torch.equal(sdpa(q, q, q, bias=half[..., :4]), want)
    assert len(built) == 1 or kind is torch.nn.Parameter  # which needs a new record


def test_gradients_under_autocast_are_those_of_a_cast(built):
    x, y = (heads(seed=3).requires_grad_() for _ in range(2))
    loss = sdpa(*(y.bfloat16() for _ in range(3))).float().square().sum()
    (want,) = torch.autograd.grad(loss, y)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sdpa(x, x, x).float().square().sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], want)
    assert len(built) == 1


@pytest.mark.parametrize(
    "option",
    [
        lambda x: {"bias": x},
        lambda x: {"attn_mask": x},
        lambda x: {"sink": x[0, 0, 0]},
        lambda x: {"bias": fastattn.ALiBi(x[0, 0, 0])},
    ],
    ids=["bias", "attn_mask", "sink", "alibi"],
)
def test_what_autocast_alone_takes_is_not_kept(option):
    q, options = heads(1, 2, 2, 8), option(heads(1, 1, 2, 2, dtype=torch.float16))
    with torch.autocast("cpu", torch.bfloat16):
        first, *others = (sdpa(q, q, q, **options) for _ in range(3))
    assert all(torch.equal(first, x) for x in others)
    half = q.bfloat16()
    with pytest.raises(TypeError, match="expected dtype"):
        sdpa(half, half, half, **options)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and shape checks are traced
def test_traced_calls_are_not_kept(table):
    q = heads()
    torch.jit.trace(lambda x: sdpa(x, x, x), (q,), check_trace=False)
    assert not table  # their sizes are tensors


def test_gradients_of_a_call_first_seen_without(table):
    x = heads().requires_grad_()
    (want,) = torch.autograd.grad(sdpa(x, x, x).square().sum(), x)
    table.clear()
    with torch.no_grad():
        sdpa(x, x, x)
    (got,) = torch.autograd.grad(sdpa(x, x, x).square().sum(), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2, 1)])
def test_calls_of_other_dims_are_kept(built, batch):
    shape = (*batch, 4, 8) if not batch else (*batch, 2, 4, 8)
    q, bandwidth = heads(*shape), heads(*shape[:-2], 1, 1).exp()
    keep = torch.rand(*shape[:-1], 4) < 0.7
    ways = [
        lambda: sdpa(q, q, q, keep, return_lse=True, return_weights="mean"),
        lambda: sdpa(q, q, q, return_lse=True, mask=fastattn.Mask(causal="bottom_right")),
        lambda: fastattn.attention(q, q, q, score="gaussian", bandwidth=bandwidth, return_lse=True),
    ]
    for way in ways:
        want = way()
        count = len(built)
        for x, y in zip(way(), want, strict=True):
            assert torch.equal(x, y)
            assert x.shape == y.shape
        assert len(built) == count


def test_calls_that_broadcast_are_not_kept(table):
    q = heads(2, 2, 4, 8)
    for k in (q[:1], q[0], q[None, :1]):
        sdpa(q, k, k, return_lse=True)
    assert not table


def test_few_calls_are_kept(monkeypatch, table):
    monkeypatch.setattr(call_cache, "_MOST_KNOWN", 3)
    for n in range(1, 9):
        q = heads(1, 1, n, 8)
        assert sdpa(q, q, q).shape == q.shape
        assert 0 < len(table) <= 3


def test_what_is_kept_is_the_choice_of_the_registry(table):
    q = heads()
    sdpa(q, q, q)
    known = [x for x in table.values() if type(x) is call_cache.Known]  # beside a plan
    ((p, name, has_head_dim, batch, masks, forward, waits),) = known
    assert batch == (1,)
    assert masks is forward is None
    assert not waits
    assert name == registry.select(p)
    assert (p.B, p.H, p.M, p.N, p.D) == (1, 2, 4, 4, 8)
    assert has_head_dim


# ---- the additive score ----


@pytest.mark.parametrize(
    ("shape", "weight"), [((2, 4, 8), (8,)), ((2, 1, 4, 8), (1, 8)), ((2, 3, 4, 8), (3, 8))]
)
def test_an_additive_call_seen_before(built, table, shape, weight):
    """With or without a head dim, and with a mask that says nothing: the same as the first time."""
    q, k, v = (heads(*shape[:-2], n, 8, seed=n) for n in (4, 6, 7))
    v, w = v[..., :6, :5], torch.nn.Parameter(heads(*weight))
    options = dict(return_weights="full", return_lse=True)
    want = fastattn.additive_attention(q, k, v, w, **options)
    got = fastattn.additive_attention(q, k, v, w, mask=fastattn.Mask(), **options)
    assert len(built) == len(table) == 1
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    (grad,) = torch.autograd.grad(got[0].sum(), w)
    assert grad.shape == w.shape
    with pytest.raises(ValueError, match="weight"):
        fastattn.additive_attention(q, k, v, torch.randn(9), **options)
    with pytest.raises(ValueError, match="query and key"):
        fastattn.additive_attention(q, k[..., :7], v, w, **options)


BANDWIDTHS = {
    "none": lambda: None, "number": lambda: 0.3, "one": lambda: torch.tensor(0.3),
    "half": lambda: torch.rand(8).half() + 0.5, "heads": lambda: torch.rand(3, 1, 8) + 0.5,
    "samples": lambda: torch.nn.Parameter(torch.rand(2, 1, 1, 8) + 0.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", BANDWIDTHS)
@pytest.mark.parametrize("shape", [(3, 4, 8), (2, 3, 4, 8)])
def test_a_gaussian_call_seen_before(built, table, kind, shape):
    """The bandwidth is that of each call, and so is its gradient."""
    if kind == "samples" and len(shape) == 3:
        pytest.skip("there are none")

    def attend(bandwidth):
        options = dict(score="gaussian", softcap=2.0, return_weights="full", return_lse=True)
        q, k, v = (heads(*shape[:-2], n, 8, seed=n) for n in (4, 6, 6))
        found = fastattn.attention(q, k, v, bandwidth=bandwidth, **options)
        own = isinstance(bandwidth, torch.Tensor) and bandwidth.requires_grad
        return [*found, *(torch.autograd.grad(found[0].sum(), bandwidth) if own else ())]

    first, second = BANDWIDTHS[kind](), BANDWIDTHS[kind]()
    want = attend(second)
    table.clear()
    attend(first)
    assert len(built) == 2
    assert all(torch.equal(x, y) for x, y in zip(attend(second), want, strict=True))
    assert len(built) == 2


def test_another_bandwidth_makes_another_call(built):
    q = heads()
    outputs = [fastattn.attention(q, q, q, score="gaussian", bandwidth=b) for b in (1.0, 0.5, None)]
    assert len(built) == 3
    assert (outputs[0] != outputs[1]).any()
    assert torch.equal(outputs[0], outputs[2])
    for _ in range(2):
        with pytest.raises(TypeError, match="bandwidth"):
            fastattn.attention(q, q, q, score="gaussian", bandwidth=True)
        with pytest.raises(ValueError, match="bandwidth"):
            fastattn.attention(q, q, q, score="gaussian", bandwidth=torch.ones(9))


def test_a_score_without_its_weight_is_no_dot_product():
    q = heads()
    sdpa(q, q, q)
    for _ in range(2):
        with pytest.raises(TypeError, match="weight: expected a Tensor, got NoneType"):
            fastattn.additive_attention(q, q, q, None)


def test_masks_are_not_forgotten(built):
    q, w = heads(2, 4, 8), torch.randn(8)
    plain = fastattn.additive_attention(q, q, q, w)
    masked = fastattn.additive_attention(q, q, q, w, mask=fastattn.Mask(causal="top_left"))
    assert len(built) == 2
    assert (plain != masked).any()
    with pytest.raises(ValueError, match="causal"):
        fastattn.additive_attention(q, q, q, w, mask=fastattn.Mask(causal=""))
    with pytest.raises(TypeError, match="mask"):
        fastattn.additive_attention(q, q, q, w, mask=torch.ones(4, 4, dtype=torch.bool))


# ---- masks ----

MASKED = {
    "bool": lambda: dict(attn_mask=torch.rand(4, 4) < 0.7),
    "float": lambda: dict(attn_mask=torch.randn(1, 4)),
    "bias": lambda: dict(bias=torch.randn(2, 4, 4)),
    "alibi": lambda: dict(bias=fastattn.ALiBi(torch.randn(2)), attn_mask=torch.rand(4, 4) < 0.7),
    "relative": lambda: dict(bias=fastattn.RelativeBias(torch.randn(5, 2), torch.randperm(5))),
    "lengths": lambda: dict(mask=fastattn.Mask(kv_len=torch.randint(0, 5, (1,)))),
    "rows": lambda: dict(mask=fastattn.Mask(kv_begin=torch.randint(0, 5, (1, 4)))),
    "keep": lambda: dict(mask=fastattn.Mask(keep=torch.rand(1, 1, 4, 4) < 0.7, window=(1, 1))),
    "all": lambda: dict(
        attn_mask=torch.randn(4, 4), is_causal=True,
        mask=fastattn.Mask(kv_len=torch.randint(0, 5, (1,)), keep=torch.rand(4, 1) < 0.7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKED)
def test_masks_are_those_of_each_call(built, table, kind):
    q = heads()
    first, second = MASKED[kind](), MASKED[kind]()
    want = sdpa(q, q, q, **second)
    table.clear()
    sdpa(q, q, q, **first)
    (known,) = [x for x in table.values() if type(x) is call_cache.Known]  # beside a plan
    assert not any(x is not None for x in known.p.tensors())  # the caller's memory is not kept
    assert len(built) == 2
    assert torch.equal(sdpa(q, q, q, **second), want)
    assert len(built) == 2


def test_gradients_of_masked_calls_seen_before(built):
    q, bias = heads(), heads(1, 2, 4, 4).requires_grad_()
    loss = [sdpa(q, q, q, bias=bias * n, is_causal=True).square().sum() for n in (1, 2)]
    grads = [torch.autograd.grad(x, bias)[0] for x in loss]
    assert len(built) == 1
    (want,) = torch.autograd.grad(
        sdpa(q, q, q, bias=bias * 2, is_causal=True, backend="cpu").square().sum(), bias
    )
    assert torch.equal(grads[1], want)
    assert (grads[0] != grads[1]).any()


def test_gradients_of_lines_seen_before(built):
    q, slopes = heads(), heads(2).requires_grad_()
    grads = []
    for n in (1, 2):
        out = sdpa(q, q, q, bias=fastattn.ALiBi(slopes * n))
        grads += torch.autograd.grad(out.square().sum(), slopes)
    assert len(built) == 1
    out = sdpa(q, q, q, bias=fastattn.ALiBi(slopes * 2).to_dense(4, 4))
    (want,) = torch.autograd.grad(out.square().sum(), slopes)
    torch.testing.assert_close(grads[1], want)
    assert (grads[0] != grads[1]).any()


def test_lines_are_checked_at_every_call(built):
    q, slopes = heads(), heads(2)
    relative = fastattn.RelativeBias(heads(3, 2), torch.arange(3))
    for bias in (fastattn.ALiBi(slopes, 1), relative):
        sdpa(q, q, q, bias=bias)
    known = len(built)
    for _ in range(2):
        with pytest.raises(TypeError, match="offset"):
            sdpa(q, q, q, bias=fastattn.ALiBi(slopes, True))
        with pytest.raises(ValueError, match="expected rows of a table of 3"):
            sdpa(q, q, q, bias=fastattn.RelativeBias(heads(3, 2), torch.arange(3) + 1))
    assert len(built) == known
    for wrong in (fastattn.ALiBi(heads(3)), fastattn.ALiBi(slopes.double()), relative.table):
        with pytest.raises((TypeError, ValueError), match="bias"):
            sdpa(q, q, q, bias=wrong)


def test_calls_with_lines_of_a_subclass_are_not_kept(table):
    slopes = heads(2).as_subclass(type("Named", (torch.Tensor,), {}))
    sdpa(*[heads()] * 3, bias=fastattn.ALiBi(slopes))
    assert not table


def test_values_are_checked_at_every_call(built):
    q = heads()
    for length in (4, 0, 5, 4, -1):
        mask = fastattn.Mask(kv_len=torch.tensor([length], dtype=torch.int8))
        if 0 <= length <= 4:
            sdpa(q, q, q, mask=mask)
        else:
            with pytest.raises(ValueError, match=r"mask.kv_len: expected values in \[0, 4\]"):
                sdpa(q, q, q, mask=mask)
    assert len(built) == 1


@pytest.mark.parametrize("shape", [(1, 1), (validate._FEW_LIMITS + 1, 1), (8, 5)])
@pytest.mark.parametrize(("wrong", "found"), [(-1, "-1 to 4"), (6, "4 to 6")])
def test_few_and_many_limits_are_checked_alike(shape, wrong, found):
    limits = torch.full(shape, 4)
    limits[-1, -1] = wrong
    found = found if limits.numel() > 1 else f"{wrong} to {wrong}"
    with pytest.raises(ValueError, match=rf"n: expected values in \[0, 5\], got {found}"):
        validate.within("n", limits, 5)
    right = validate.within("n", limits.clamp(0, 5), 5)
    assert right.dtype is torch.int32
    assert right.tolist() == limits.clamp(0, 5).tolist()


def test_masks_that_look_alike_are_apart():
    q = heads()
    sdpa(q, q, q, mask=fastattn.Mask(window=(1, 1)))
    with pytest.raises(TypeError, match="window"):
        sdpa(q, q, q, mask=fastattn.Mask(window=(True, 1)))
    sdpa(q, q, q, attn_mask=torch.zeros(4, 4))
    with pytest.raises(TypeError, match="attn_mask"):
        sdpa(q, q, q, attn_mask=torch.zeros(4, 4, dtype=torch.int32))
    keep = torch.ones(4, 4, dtype=torch.bool)
    sdpa(q, q, q, attn_mask=keep)
    with pytest.raises(ValueError, match="broadcast"):
        sdpa(q, q, q, attn_mask=keep[:3])


def test_two_masks_of_one_kind_are_not_kept(table):
    q, keep = heads(), torch.rand(4, 4) < 0.7
    both = dict(attn_mask=keep, mask=fastattn.Mask(keep=keep.mT))
    assert torch.equal(sdpa(q, q, q, **both), sdpa(q, q, q, attn_mask=keep & keep.mT))
    assert sum(type(x) is call_cache.Known for x in table.values()) == 1


def test_a_mask_on_another_device_is_refused_by_a_repeated_call():
    q, keep = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    for _ in range(3):
        fastattn.scaled_dot_product_attention(q, q, q, attn_mask=keep)
    with pytest.raises(ValueError, match="expected the device of query"):
        fastattn.scaled_dot_product_attention(q, q, q, attn_mask=keep.to("meta"))
