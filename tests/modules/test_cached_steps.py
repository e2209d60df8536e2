"""Steps with a KVCache at inference: one operator from the input to the output."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import KVCache, MultiheadAttention, testing
from fastattn.backends import operators
from fastattn.modules.multihead import inference, inputs

pytestmark = pytest.mark.usefixtures("extension")
B, E, H = 3, 8, 2
SIZES = [4, 1, 1, 3, 0, 20, 1]  # positions of each step; memory grows twice


def in_every_way(test):
    """``test`` with every kind of mask, layout, bias and returned weights."""
    options = [dict(need_weights=False), {}, dict(average_attn_weights=False)]
    test = pytest.mark.parametrize("options", options)(test)
    test = pytest.mark.parametrize("bias", [True, False])(test)
    test = pytest.mark.parametrize("batch_first", [True, False])(test)
    return pytest.mark.parametrize("kind", [None, "ignored", "added"])(test)


class Override(torch.Tensor):
    """Whose functions may do more."""


def drawn(batch_first=True, **options):
    """A module, none of whose parameters is 0."""
    module = MultiheadAttention(E, H, batch_first=batch_first, **options).eval()
    for p in module.parameters():
        nn.init.normal_(p)
    return module


def decode(module, x, cache, sizes=SIZES, kind=None, **options):
    """Step by step; ``kind`` says which mask of all keys so far each step has."""
    found = []
    for t in x.split(sizes, 1 if module.batch_first else 0):
        keys = cache.length + t.shape[1 if module.batch_first else 0]
        found.append(module(t, t, t, padding(kind, keys), cache=cache, **options))
    return found


def padding(kind, keys):
    """A mask of so many keys [B, keys], with strides. One sample has no key left."""
    ignored = (torch.arange(keys * 2 * B).view(keys, 2 * B)[:, ::2].T % 5 > 2).clone()
    ignored[1] = True
    added = torch.linspace(-1, 1, keys).masked_fill(ignored, -torch.inf)
    return {"ignored": ignored, "added": added, None: None}[kind]


def sequence(batch_first=True):
    shape = (B, sum(SIZES), E) if batch_first else (sum(SIZES), B, E)
    return torch.randn(shape)


@in_every_way
@torch.no_grad()
def test_the_same_bits(monkeypatch, checked, operator_calls, kind, batch_first, bias, options):
    module, x = drawn(batch_first, bias=bias, dropout=0.5), sequence(batch_first)
    found, caches = [], []
    for attend in (inference.attend, lambda *args: None):
        monkeypatch.setattr(inference, "attend", attend)
        caches.append(KVCache())
        steps = decode(module, x, caches[-1], kind=kind, **options)
        found.append([y for step in steps for y in step])
        if len(caches) == 1:
            assert not checked
    assert len(operator_calls) == len(SIZES)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert torch.equal(caches[0].key, caches[1].key)
    assert torch.equal(caches[0].value, caches[1].value)
    assert caches[0].key.stride() == caches[1].key.stride()  # with the same room


def memory_of(module, keys, batch=B):
    """A static cache of so many keys."""
    x = torch.randn(batch, keys, E, dtype=module.out_proj.weight.dtype)
    x = x if module.batch_first else x.transpose(0, 1)
    cache = KVCache(static=True)
    module(x, x, x, cache=cache)
    return cache


@in_every_way
@torch.no_grad()
def test_the_same_bits_of_a_static_cache(
    monkeypatch, checked, operator_calls, kind, batch_first, bias, options
):
    module, x = drawn(batch_first, bias=bias, dropout=0.5), sequence(batch_first)
    cache = memory_of(module, 11)
    found, held, before = [], (cache.key, cache.value), (cache.key.clone(), cache.value.clone())
    for attend in (inference.attend, lambda *args: None):
        monkeypatch.setattr(inference, "attend", attend)
        checked.clear()
        found.append([])
        for length in (11, 7, 0):
            cache.crop(length)
            mask = padding(kind, length)
            for t in x.split(SIZES, 1 if batch_first else 0):
                others = (t, t) if length == 7 else (None, None)
                found[-1] += module(t, *others, mask, cache=cache, **options)
        cache.length = 11
        assert bool(checked) == (len(found) == 2)
    assert len(operator_calls) == 3 * len(SIZES)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert all(map(torch.equal, held, before))


@pytest.mark.parametrize("kind", ["ignored", "added"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_the_same_bits_of_padded_sequences(
    monkeypatch, checked, operator_calls, batch_first, need_weights, kind
):
    """Without a cache, as an encoder."""
    module, x = drawn(batch_first), sequence(batch_first)
    found = []
    for attend in (inference.attend, lambda *args: None):
        monkeypatch.setattr(inference, "attend", attend)
        found.append(module(x, x, x, padding(kind, sum(SIZES)), need_weights=need_weights))
    assert len(operator_calls) == len(checked) == 1
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_mask_that_wants_a_gradient(operator_calls):
    module, x = drawn().requires_grad_(False), sequence()
    mask = padding("added", sum(SIZES)).requires_grad_()
    assert module(x, x, x, mask)[0].requires_grad
    assert not operator_calls
    module(x, x, x, mask.detach())
    assert len(operator_calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_is_right_with_a_static_cache_and_padding(operator_calls, dtype):
    module, x = drawn().to(dtype), sequence().to(dtype)
    memory = torch.randn(B, 9, E, dtype=dtype)
    ignored, cache = padding("ignored", 9), KVCache(static=True)
    ignored[1, 2] = False  # torch gives NaN without a key
    module(x[:, :1], memory, memory, cache=cache)
    found = module(x, None, None, ignored, need_weights=False, cache=cache)[0]
    whole = []
    for y in (x, x.double()):
        plain = nn.MultiheadAttention(E, H, batch_first=True, dtype=y.dtype).eval()
        plain.load_state_dict(module.state_dict())
        whole.append(plain(y, *[memory.to(y.dtype)] * 2, ignored, need_weights=False)[0])
    testing.assert_within_budget(found, *whole)
    assert len(operator_calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_is_right(operator_calls, dtype):
    """In half types another product than torch's adds the bias."""
    module, x = drawn().to(dtype), sequence().to(dtype)
    found = torch.cat([out for out, _ in decode(module, x, KVCache())], 1)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    whole = []
    for y in (x, x.double()):
        plain = nn.MultiheadAttention(E, H, batch_first=True, dtype=y.dtype).eval()
        plain.load_state_dict(module.state_dict())
        whole.append(plain(y, y, y, attn_mask=causal, need_weights=False)[0])
    testing.assert_within_budget(found, *whole)
    assert len(operator_calls) == len(SIZES)


def test_a_step_is_one_operator_in_inference_mode_too(operator_calls):
    module, x, cache = drawn(), sequence(), KVCache(capacity=64)
    with torch.inference_mode():
        decode(module, x, cache)
    assert len(operator_calls) == len(SIZES)
    assert cache.length == sum(SIZES)


@torch.no_grad()
def test_what_goes_the_ordinary_way(checked, operator_calls):
    """Whatever has a mask, another cache or module, or could tell. Results are the same."""

    class Own(KVCache):
        """Whose update may do more."""

    module, x = drawn(), torch.randn(B, 1, E)
    odd, additive = drawn(), fastattn.MultiheadAdditiveAttention(E, H, batch_first=True).eval()
    prune.identity(odd.out_proj, "bias")
    mask, static, own = torch.zeros(1, 1, dtype=torch.bool), memory_of(module, 5), KVCache(True)
    own.update(static.key.as_subclass(Override), static.value.as_subclass(Override))

    def under(context):
        with context:
            return module(x, x, x, cache=KVCache())

    calls = [
        lambda: module(x, x.clone(), x, cache=KVCache()),
        lambda: module(x, x, x, attn_mask=mask, cache=KVCache()),
        lambda: module(x, None, None, attn_mask=mask.expand(1, 5), cache=static),
        lambda: module(x, None, None, mask=fastattn.Mask(), cache=static),
        lambda: module(x[0], None, None, cache=memory_of(module, 5, 1)),
        lambda: module(x, None, None, cache=own),
        lambda: additive(x, None, None, cache=static),
        lambda: odd(x, None, None, cache=static),
        lambda: module(x, x, x, mask=fastattn.Mask(), cache=KVCache()),
        lambda: module(x, x, x, bias=torch.zeros(1), cache=KVCache()),
        lambda: module(x, x, x, cache=Own()),
        lambda: module(x, x, x, cache=KVCache(static=True)),
        lambda: module(x[0], x[0], x[0], cache=KVCache()),
        lambda: drawn(dropout=0.5).train()(x, x, x, cache=KVCache()),
        lambda: odd(x, x, x, cache=KVCache()),
        lambda: additive(x, x, x, cache=KVCache()),
        lambda: under(torch.enable_grad()),
        lambda: module.requires_grad_(False) and under(torch.enable_grad()),
        lambda: under(FlopCounterMode(display=False)),
        lambda: under(torch.autocast("cpu", torch.bfloat16)),
    ]
    for call in calls:
        before = len(checked)
        call()
        assert len(checked) > before
    assert not operator_calls
    module(x, x, x, cache=KVCache(), is_causal=True)  # which is not read
    assert len(operator_calls) == 1


@pytest.mark.parametrize("kind", ["graph", "inference"])
def test_memory_of_others_is_read(operator_calls, kind):
    module, x = drawn(), torch.randn(B, 2, E)
    with torch.inference_mode(kind == "inference"):
        cache = memory_of(module, 5)
        loss = cache.key.square().sum()
    with torch.no_grad():
        module(x, None, None, cache=cache)
    assert len(operator_calls) == 1
    if kind == "graph":
        loss.backward()  # which needs the keys as they were
        assert module(x, None, None, cache=cache)[0].requires_grad
        assert len(operator_calls) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_errors_of_padding_and_static_caches(operator_calls):
    """Raised by the ordinary way, before anything is computed or changed."""

    module, x, cache = drawn(), torch.randn(B, 2, E), KVCache()
    module(x, x, x, cache=cache)
    static, good = memory_of(module, 5), torch.zeros(B, 4, dtype=torch.bool)
    before = [vars(y).copy() for y in (cache, static)]
    nested, own = torch.nested.nested_tensor([*x]), x.as_subclass(Override)
    wrong = [
        ((x, x, x, good[:, :3]), cache, AssertionError, "shape.1. to be 4, but got 3"),
        ((x, x, x, good[:2]), cache, AssertionError, "shape.0. to be 3, but got 2"),
        ((x, x, x, good[0]), cache, AssertionError, "2-D"),
        ((x, x, x, good.int()), cache, AssertionError, "bool and floating"),
        ((x, x, x, good.double()), cache, RuntimeError, "dtype"),
        ((x, x, x, 3), cache, TypeError, "key_padding_mask"),
        ((x, x, x, torch.nested.nested_tensor([*good.float()])), cache, TypeError, "nested"),
        ((x, x, x, good), None, AssertionError, "shape.1. to be 2, but got 4"),
        ((x, None, None, good), static, AssertionError, "shape.1. to be 5, but got 4"),
        ((x[:2], None, None), static, ValueError, "holds batch 3.* batch 2"),
        ((x, 3, None), static, TypeError, "key"),
        ((x, None, nested), static, TypeError, "nested"),
        ((x, own, None), static, TypeError, "subclasses"),
        ((x[..., :7], None, None), static, AssertionError, "embedding dimension"),
    ]
    for args, into, error, message in wrong:
        with pytest.raises(error, match=message):
            module(*args, cache=into)
    assert [vars(y) for y in (cache, static)] == before
    assert len(operator_calls) == 1


@torch.no_grad()
def test_errors_are_those_of_the_ordinary_way(operator_calls):
    module, x, cache = drawn(), torch.randn(B, 2, E), KVCache()
    module(x, x, x, cache=cache)
    before = vars(cache).copy()
    others = MultiheadAttention(E, 4, batch_first=True).eval()
    wrong = [
        (others, x, ValueError, "holds batch 3, 2 heads of 4"),
        (module, x[:2], ValueError, "holds batch 3.* batch 2"),
        (drawn().double(), x.double(), ValueError, "float64"),
        (module, x.double(), RuntimeError, "dtype"),
        (module, x[..., :7], AssertionError, "embedding dimension of 8, but got 7"),
        (MultiheadAttention(E, H, add_bias_kv=True), x, ValueError, "add_bias_kv"),
        (module, x.int(), TypeError, "plain"),
    ]
    for own, y, error, message in wrong:
        with pytest.raises(error, match=message):
            own(y, y, y, cache=cache)
    static, y = memory_of(module, 5), torch.randn(B, 2, 4)
    wrong = [
        (drawn().double(), x.double(), "float32 on cpu, but the new queries are .*float64"),
        (others, x, "2 heads of 4, .*, but the new queries are batch 3, 4 heads of 2"),
        (MultiheadAttention(4, 1, batch_first=True), y, "but the new queries are .* 1 heads of 4"),
    ]
    for own, y, message in wrong:
        with pytest.raises(ValueError, match=message):
            own(y, None, None, cache=static)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, None, None, cache=static)[0].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="KVCache"):
        module(x, x, x, cache={})
    assert vars(cache) == before
    assert len(operator_calls) == 1


@torch.no_grad()
def test_a_step_that_raises_leaves_the_cache_as_it_was(monkeypatch):
    module, x, cache = drawn(), torch.randn(B, 20, E), KVCache()
    decode(module, x, cache, [4, 16])
    before, keys = vars(cache).copy(), cache.key.clone()

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(operators, "multi_head_attention", fail)
    fastattn.problem.call_cache.forget()
    with pytest.raises(MemoryError):
        module(x, x, x, cache=cache)
    assert vars(cache) == before
    assert torch.equal(cache.key, keys)


@pytest.mark.parametrize("kind", ["given", "graph", "copy", "inference"])
def test_memory_of_others_is_never_written(operator_calls, kind):
    module, x, cache = drawn(), torch.randn(B, 9, E), KVCache()
    given = torch.randn(2, B, H, 5, E // H, requires_grad=kind == "graph")
    if kind == "given":
        cache.update(*given)  # with gradients: without a copy
        cache.crop(3)
    elif kind == "graph":
        cache.update(*(2 * given))
        cache.crop(3)
    else:
        with torch.inference_mode(kind == "inference"), torch.no_grad():
            decode(module, x, cache, [9])
        cache.crop(5)
    other = copy.copy(cache) if kind == "copy" else cache
    held = other._key, other._value
    # As bits: the memory beyond the length was never written, and may read as NaN.
    before = [y.detach().clone().view(torch.int32) for y in held]
    with torch.no_grad():
        want = cache.key.clone()
        decode(module, x, cache, [1, 1, 7])
    assert all(torch.equal(y.view(torch.int32), z) for y, z in zip(held, before, strict=True))
    assert torch.equal(cache.key[:, :, : want.shape[2]], want)
    assert len(operator_calls) == (4 if kind in ("copy", "inference") else 3)


@torch.no_grad()
def test_reorder_and_crop_between_steps(operator_calls):
    module, x = drawn(), torch.randn(B, 9, E)
    order = torch.tensor([2, 0, 0])
    cache, whole = KVCache(), KVCache()
    decode(module, x, cache, [6, 3])
    cache.crop(6)
    cache.reorder(order)
    ((found, _),) = decode(module, x[:, :3], cache, [3])
    mixed = torch.cat([x[order, :6], x[:, :3]], 1)
    (_, _), (want, _) = decode(module, mixed, whole, [6, 3])
    torch.testing.assert_close(found, want)
    assert len(operator_calls) == 5


@torch.no_grad()
def test_one_step_tells_the_choice_for_all_lengths(monkeypatch):
    """The record of a step is remembered: another length asks nothing again."""
    module, x, cache = drawn(), torch.randn(B, 1, E), KVCache()
    module(x, x, x, cache=cache)
    monkeypatch.setattr(inference.validate, "build", None)
    for _ in range(40):
        module(x, x, x, cache=cache)
    assert cache.length == 41


@torch.no_grad()
def test_explanations_tell_all_keys():
    module, x, cache = drawn(), torch.randn(B, 2, E), KVCache()
    decode(module, torch.randn(B, 30, E), cache, [30])
    text = str(fastattn.explain(module, x, x, x, cache=cache))
    assert "M=2 N=32" in text
    assert "bottom_right" in text
    assert cache.length == 30


class Comparisons(TorchFunctionMode):
    """Forbids to compare tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.Tensor.__eq__, torch.Tensor.__ne__, torch.eq, torch.ne)
        return function(*args, **kwargs or {})


@torch.no_grad()
def test_masks_of_a_step_are_not_compared(monkeypatch):
    """With None: a tensor takes 20 us to refuse that."""
    module, x = drawn(), torch.randn(B, 1, E)
    monkeypatch.setattr(inference, "attend", lambda *args: None)
    for static in (True, False):
        cache, ignored = KVCache(static=static), torch.zeros(B, 1, dtype=torch.bool)
        with Comparisons():
            module(x, x, x, ignored, cache=cache)
            if not static:
                ignored = torch.zeros(B, 2, dtype=torch.bool)
            module(x, x, x, ignored, cache=cache)


@torch.no_grad()
def test_a_static_step_without_masks_makes_no_placeholders(monkeypatch):
    module, x, cache = drawn(), torch.randn(B, 2, E), KVCache(static=True)
    want, _ = module(x, x, x, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "keys_like", None)
        patch.setattr(inference, "attend", lambda *args: None)
        found, _ = module(x, None, None, cache=cache)
    torch.testing.assert_close(found, want)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    for options in (dict(attn_mask=mask), dict(mask=fastattn.Mask()), dict(bias=torch.zeros(2, 2))):
        torch.testing.assert_close(module(x, None, None, cache=cache, **options)[0], want)
