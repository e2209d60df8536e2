"""explain(module, ...): which of a module's attention is computed here, and what goes to torch."""

import contextlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fastattn
from fastattn import MultiheadAttention
from fastattn.backends import watch
from fastattn.problem import call_cache

SELF = "encoder.layers.0.self_attn"
CROSS = "decoder.layers.0.multihead_attn"


@pytest.fixture
def x():
    return torch.randn(2, 5, 8)


@pytest.fixture
def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


def test_calls_are_told_in_order_by_the_names_of_their_modules(transformer, x):
    fastattn.replace_attention(transformer)
    found = fastattn.explain(transformer, x, x[:, :3])
    assert [name for name, _ in found.calls] == [SELF, "decoder.layers.0.self_attn", CROSS]
    assert "M=3 N=5" in found.calls[2][1].title
    assert found.torch == {}
    assert str(found).startswith(f"Transformer: 3 by fastattn, 0 by torch\n  {SELF}  ")


def test_what_torch_computes_is_told_with_the_reason(transformer, x):
    found = fastattn.explain(transformer, x, x)
    assert found.calls == ()
    assert all("replace_attention" in reason for reason in found.torch.values())
    assert f"\n  {CROSS}  torch: " in str(found)
    assert set(found.torch) == {SELF, "decoder.layers.0.self_attn", CROSS}


def test_a_module_that_an_encoder_layer_bypasses_is_told(transformer, x):
    with torch.no_grad():
        found = fastattn.explain(transformer.eval(), x, x)
        fastattn.replace_attention(transformer)
        replaced = fastattn.explain(transformer, x, x)
    assert "was not called" in found.torch[SELF]
    assert "was not called" not in found.torch[CROSS]
    assert replaced.torch == {}
    assert replaced.calls[0][0] == SELF


@pytest.mark.parametrize("training", [True, False])
def test_a_single_call_is_told_in_full(x, training):
    module = MultiheadAttention(8, 2, batch_first=True).train(training)
    with torch.set_grad_enabled(training):
        found = fastattn.explain(module, x, x, x, need_weights=False)
    [(name, call)] = found.calls
    assert (name, call.backend) == ("", fastattn.explain(torch.zeros(2, 2, 5, 4)).backend)
    assert str(call) in str(found)


def test_a_structured_mask_is_in_the_title(x):
    module = MultiheadAttention(8, 2, batch_first=True)
    [(_, call)] = fastattn.explain(module, x, x, x, mask=fastattn.Mask(causal="top_left")).calls
    assert "mask top_left" in call.title


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def nested(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.as_nested_tensor(list(x))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda x: x.as_subclass(Subclass), "overrides torch functions"),
        (lambda x: TwoTensor(x, x), "wraps other tensors"),
        (nested, "nested tensors"),
    ],
)
def test_inputs_that_send_a_call_to_torch(x, made, reason):
    module, x = MultiheadAttention(8, 2, batch_first=True).eval(), made(x)
    with torch.no_grad():
        found = fastattn.explain(module, x, x, x, average_attn_weights=False)
    assert found.calls == ()
    assert reason in found.torch[""]


def test_subclasses_of_torchs_class_are_told(x):
    class Own(nn.MultiheadAttention):
        pass

    assert "a subclass" in fastattn.explain(Own(8, 2), x, x, x).torch[""]


def test_why_eager_computes_is_told(x):
    model = nn.Sequential(*(fastattn.SelfAttention(8, 2).double() for _ in range(2)))
    for layer in model:
        layer.register_forward_hook(lambda module, args, results: results[1])
    said = str(fastattn.explain(model, x.double()))
    assert said.count("float64 is left to eager") == 3  # once for cpu, triton, cuda


@pytest.mark.parametrize("module", [
    fastattn.AdditiveAttention(8, 8, 4), fastattn.LuongAttention(8), fastattn.CosineAttention(),
])  # fmt: skip
def test_every_module_is_explained(module, x):
    assert [name for name, _ in fastattn.explain(module, x, x, x).calls] == [""]


def test_calls_that_were_seen_before_are_told_again(x):
    module = MultiheadAttention(8, 2).eval()
    with torch.no_grad():
        module(x, x, x)
        for _ in range(2):
            assert len(fastattn.explain(module, x, x, x).calls) == 1


class Decoder(nn.Module):
    """Decodes as often as there are caches."""

    def __init__(self):
        super().__init__()
        self.attention = MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, *caches, more=()):
        for cache in (*caches, *more):
            x, _ = self.attention(x, x, x, cache=cache)
        return x


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("length", [0, 5])
def test_a_cache_stays_as_it_is(x, grad, length):
    model, cache = Decoder(), fastattn.KVCache()
    with torch.set_grad_enabled(grad):
        if length:
            model(x, cache)
        found = fastattn.explain(model, x, cache, more=[cache, fastattn.KVCache()])
        alone = fastattn.explain(model.attention, x, x, x, cache=cache)
    assert cache.length == length
    titles = [call.title for _, call in (*found.calls, *alone.calls)]
    keys = length + 5, length + 10, 5, length + 5  # one cache in two places stays one
    assert all(f"M=5 N={n} " in title for n, title in zip(keys, titles, strict=True))


class Then(nn.Module):
    """Does something first, then computes attention."""

    def __init__(self, first):
        super().__init__()
        self.first, self.attention = first, MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        self.first()
        return self.attention(x, x, x)[0]


def test_modules_of_another_thread_are_not_told_and_run_on(x):
    """One that runs as explain begins, and one that runs from start to end meanwhile."""
    begun, go_on = threading.Event(), threading.Event()
    halfway = Then(lambda: begun.set() or go_on.wait(10))
    halfway.register_forward_hook(lambda *_: None)  # with one, torch calls the global ones too

    def both():
        halfway(x)
        return nn.MultiheadAttention(8, 2)(x, x, x)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(both)
        assert begun.wait(10)
        found = fastattn.explain(Then(lambda: go_on.set() or other.exception()), x)
    assert other.exception() is None
    assert [name for name, _ in found.calls] == ["attention"]
    assert found.torch == {}


def test_calls_after_another_explanation_are_told(x):
    inner = MultiheadAttention(8, 2, batch_first=True)
    model = nn.Sequential(Then(lambda: fastattn.explain(inner, x, x, x)), Then(lambda: None))
    names = [name for name, _ in fastattn.explain(model, x).calls]
    assert names == ["0.attention", "1.attention"]


def test_a_module_that_raises_is_left(x):
    """What its parent computes afterwards is the parent's."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(1, 1)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.child(x)
            return fastattn.scaled_dot_product_attention(x, x, x)

    assert [name for name, _ in fastattn.explain(Parent(), x).calls] == [""]


def test_attention_in_another_thread_was_called(x):
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.attention, x, x, x).result()[0]

    assert fastattn.explain(Threaded(), x).torch == {}


@pytest.mark.slow
def test_a_compiled_module_is_explained(x):
    module = MultiheadAttention(8, 2)
    compiled = torch.compile(nn.Sequential(module), backend="eager")
    module.forward = lambda y: MultiheadAttention.forward(module, y, y, y)[0]
    compiled(x)
    assert [name for name, _ in fastattn.explain(compiled, x).calls] == ["0"]


def test_nobody_watches_afterwards(x):
    with pytest.raises(RuntimeError):
        fastattn.explain(nn.Linear(3, 4), x)
    q = torch.zeros(1, 2, 3, 4)
    fastattn.scaled_dot_product_attention(q, q, q)
    assert watch._NOTES is None
    assert call_cache._KNOWN  # calls are remembered again
    assert not torch.nn.modules.module._has_any_global_hook()
