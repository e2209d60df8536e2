"""Linear layers by the fastest product: the same numbers as F.linear, where nobody could tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import testing
from fastattn.modules import linear

pytestmark = [
    pytest.mark.usefixtures("extension"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN"),
]
T, E, FEATURES = 65, 48, 80
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


@pytest.fixture
def calls(monkeypatch):
    """The operator takes every product, on any CPU. Returns the list of its calls."""
    made = []

    def multiply(*arguments, original=linear._multiply):
        made.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(linear, "_FROM", dict.fromkeys(DTYPES, (1, 0)))
    monkeypatch.setattr(linear, "_multiply", multiply)
    return made


def drawn(shape=(5, 13), bias=True, dtype=torch.float32, requires_grad=False):
    torch.manual_seed(0)
    made = [torch.randn(*shape, E), torch.randn(FEATURES, E), torch.randn(FEATURES)]
    return [x.to(dtype).requires_grad_(requires_grad) for x in made[: 2 + bias]]


def gradients(function, tensors, twice=False):
    """The results of a function of tensors, its gradients, and those of a square of theirs."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape).to(out.dtype).requires_grad_(twice)
    grads = torch.autograd.grad(out, tensors, upstream, create_graph=twice)
    if not twice:
        return out, *grads
    square = sum(g.square().sum() for g in grads[:2])
    return out, *grads, *torch.autograd.grad(square, [*tensors[:2], upstream])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(T,), (5, 13), (2, 3, 7), (1, 1)])
def test_results_and_gradients(calls, shape, bias, dtype):
    tensors = drawn(shape, bias, dtype)
    double = [x.double() for x in tensors]
    found = gradients(linear.forward, tensors)
    assert len(calls) == 3
    peer, truth = gradients(F.linear, tensors), gradients(F.linear, double)
    for ours, theirs, right in zip(found, peer, truth, strict=True):
        assert ours.shape == theirs.shape
        testing.assert_within_budget(ours, theirs, right)
    assert torch.equal(linear.forward(*tensors), found[0])


def columns_first(x):
    return x.T.contiguous().T


def with_gaps(x):
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]


def every_other(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


LAYOUTS = (torch.clone, columns_first, with_gaps, every_other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [256, 1024, 1025, 2050])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_long_sums(layout, depth, dtype):
    """The operator, in sums that it cuts and others, of sizes that oneDNN gets where it is used."""
    torch.manual_seed(0)
    shapes = (140, depth), (130, depth), (260,)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    bias = bias[::2]
    truth, peer = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
    for first, second in ((layout(x), weight), (x, layout(weight)), (layout(x), layout(weight))):
        found = torch.ops.fastattn.linear(first, second, bias)
        testing.assert_within_budget(found, peer, truth)
        assert found.is_contiguous()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1024, 2050])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_tokens_and_large_weights(two_threads, layout, tokens, depth, dtype):
    """Sizes that oneDNN gets on Zen 4, by layout and depth, and that MKL gets elsewhere."""
    torch.manual_seed(0)
    shapes = (tokens, depth), (768, depth), (768,)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    weight = layout(weight)
    found = torch.ops.fastattn.linear(x, weight, bias)
    truth, peer = F.linear(x.double(), weight.double(), bias.double()), F.linear(x, weight, bias)
    testing.assert_within_budget(found, peer, truth)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_the_number_of_threads_changes_no_bit(two_threads, tokens):
    """But that of MKL's own products does: of 9 tokens on AMD, of gradients of 2 on Intel."""
    x = torch.randn(1, tokens, 1024)

    def is_same(module):
        def everything():
            own = x.clone().requires_grad_()
            out, _ = module(own, own, own, need_weights=False)
            with torch.no_grad():
                alone, _ = module(x, x, x, need_weights=False)
            return out, alone, *torch.autograd.grad(out.sum(), (own, *module.parameters()))

        torch.set_num_threads(2)
        found = everything()
        torch.set_num_threads(1)
        return all(map(torch.equal, found, everything()))

    by_mkl = linear._FROM[torch.float32] >= linear._NEVER
    if by_mkl and not is_same(nn.MultiheadAttention(1024, 16, batch_first=True)):
        pytest.skip("here a product of MKL's depends on the number of threads")
    assert is_same(fastattn.MultiheadAttention(1024, 16, batch_first=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1)])
def test_small_sizes(sizes, dtype):
    tokens, depth, features = sizes
    shapes = (tokens, depth), (features, depth), (features,)
    x, weight, bias = (torch.ones(shape, dtype=dtype) for shape in shapes)
    found = torch.ops.fastattn.linear(x, weight, bias)
    assert torch.equal(found, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", HALVES)
def test_under_autocast(calls, dtype):
    """The tensors become what autocast makes of them, and their gradients float32 again."""
    tensors = drawn()

    def cast(function):
        def call(*tensors):
            with torch.autocast("cpu", dtype):
                return function(*tensors)

        return call

    found, peer = gradients(cast(linear.forward), tensors), gradients(cast(F.linear), tensors)
    assert len(calls) == 3
    truth = gradients(F.linear, [x.double() for x in tensors])
    for ours, theirs, right in zip(found, peer, truth, strict=True):
        assert ours.dtype is theirs.dtype
        testing.assert_within_budget(ours, theirs, right)


def test_autocast_keeps_no_weight(calls):
    """A layer that is used often in one region would else keep a copy each time."""
    x, weight, bias = drawn()
    weight.requires_grad_()
    x.requires_grad_()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x),
        torch.autocast("cpu", torch.bfloat16),
    ):
        linear.forward(x, weight, bias)
    assert len(calls) == 1
    assert [t.dtype for t in kept if t.shape == weight.shape] == [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_derivatives(calls, dtype):
    tensors = drawn(dtype=dtype)
    found = gradients(linear.forward, tensors, twice=True)
    assert len(calls) == 7
    truth = gradients(F.linear, [x.double() for x in tensors], twice=True)
    for ours, theirs, right in zip(
        found, gradients(F.linear, tensors, twice=True), truth, strict=True
    ):
        testing.assert_within_budget(ours, theirs, right)


def test_strided_inputs(calls):
    x, weight, bias = drawn()
    found = linear.forward(x.transpose(0, 1), weight.T.contiguous().T, bias)
    assert len(calls) == 1
    assert found.is_contiguous()
    torch.testing.assert_close(found, linear.forward(x, weight, bias).transpose(0, 1))


@pytest.mark.parametrize("n", range(3))
def test_only_the_wanted_gradients(calls, n):
    """And only what these need is kept: the rest may change in place before."""
    tensors = drawn()
    tensors[n].requires_grad_()
    out = linear.forward(*tensors)
    with torch.no_grad():
        tensors[n].zero_()
        tensors[2].zero_()
    out.sum().backward()
    assert [x.grad is None for x in tensors] == [m != n for m in range(3)]
    assert len(calls) == (1 if n == 2 else 2)
    expected = drawn()[1 - n].reshape(-1, E).sum(0) if n < 2 else torch.full((1,), float(T))
    torch.testing.assert_close(tensors[n].grad, expected.expand_as(tensors[n]))


def test_a_tensor_of_inference_mode(calls):
    """A frozen layer behind a frozen model, whose bias trains."""
    x, weight, bias = drawn()
    with torch.inference_mode():
        x = x * 1
    linear.forward(x, weight, bias.requires_grad_()).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(bias.grad, torch.full((FEATURES,), float(T)))


def test_derivatives_in_batches(calls):
    """is_grads_batched, whose tensors an operator without a rule for them cannot take."""
    tensors = drawn((3, 1))
    found = torch.autograd.functional.jacobian(
        lambda x: linear.forward(x, *tensors[1:]), tensors[0], vectorize=True
    )
    expected = torch.zeros(3, 1, FEATURES, 3, 1, E)
    for n in range(3):
        expected[n, 0, :, n, 0] = tensors[1]
    assert calls
    torch.testing.assert_close(found, expected)


def test_a_result_without_gradient_may_be_changed_in_place(calls):
    with torch.no_grad():
        out = linear.forward(*drawn())
    out += torch.ones((), requires_grad=True)
    assert out.requires_grad
    assert len(calls) == 1


def test_a_result_may_be_changed_in_place(calls):
    x, weight, bias = drawn(requires_grad=True)
    out = linear.forward(x, weight, bias)
    out *= 2
    out.view(-1).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((FEATURES,), 2.0 * T))


class TestWhoCouldTell:
    """Such calls go to F.linear, with its errors too."""

    @pytest.fixture(autouse=True)
    def none_by_onednn(self, calls):
        yield
        assert not calls

    def test_small_products(self, monkeypatch):
        monkeypatch.setitem(linear._FROM, torch.float32, (T * E * FEATURES + 1, 0))
        linear.forward(*drawn())

    def test_another_dtype(self):
        linear.forward(*drawn(dtype=torch.float64))

    def test_one_token(self):
        linear.forward(*drawn(()))

    def test_nobody(self):
        assert linear.forward(*drawn((0,))).shape == (0, FEATURES)

    def test_modes(self):
        with FlopCounterMode(display=False) as counter:
            linear.forward(*drawn())
        assert counter.get_total_flops() == 2 * T * E * FEATURES

    def test_without_onednn(self):
        with torch.backends.mkldnn.flags(enabled=False):
            linear.forward(*drawn())

    def test_one_token_of_a_half_type(self):
        with torch.no_grad():
            linear.forward(*drawn((1, 1), dtype=torch.bfloat16))

    def test_layouts_under_autocast(self):
        x, weight, bias = drawn((T,))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            linear.forward(x.to_mkldnn(), weight.to_mkldnn(), bias.to_mkldnn())

    def test_symbolic_trace_under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            torch.fx.symbolic_trace(linear.forward)

    def test_autocast_to_a_type_that_torch_multiplies_fast(self, monkeypatch):
        monkeypatch.setitem(linear._FROM, torch.bfloat16, (T * E * FEATURES + 1, 0))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear.forward(*drawn()).dtype is torch.bfloat16

    def test_transforms(self):
        x, weight, bias = drawn()
        torch.func.vmap(linear.forward, (0, None, None))(x, weight, bias)
        torch.func.grad(lambda x: linear.forward(x, weight, bias).sum())(x)
        torch.func.jvp(lambda x: linear.forward(x, weight, bias), (x,), (x,))

    def test_compiled(self):
        tensors = drawn()
        compiled = torch.compile(linear.forward, backend="eager", fullgraph=True)
        assert torch.equal(compiled(*tensors), F.linear(*tensors))

    def test_traced(self):
        torch.jit.trace(linear.forward, tuple(drawn()), check_trace=False)

    @pytest.mark.parametrize("n", range(3))
    def test_subclasses(self, n):
        class Other(torch.Tensor):
            pass

        tensors = drawn()
        tensors[n] = tensors[n].as_subclass(Other)
        assert type(linear.forward(*tensors)) is Other

    @pytest.mark.parametrize("n", range(3))
    def test_errors_of_shapes(self, n):
        tensors = drawn()
        tensors[n] = tensors[n][..., :-1]
        with pytest.raises(RuntimeError):
            linear.forward(*tensors)


class TestLayers:
    def test_plain_ones(self, calls):
        layer = nn.Linear(E, FEATURES)
        x = drawn()[0]
        testing.assert_within_budget(linear.call(layer, x), layer(x), layer.double()(x.double()))
        assert len(calls) == 1

    def test_others_are_called(self, calls):
        hooked, plain = nn.Linear(E, FEATURES), nn.Linear(E, FEATURES)
        hooked.register_forward_hook(lambda layer, inputs, output: 3 * output)
        del plain.bias
        plain.bias = torch.randn(FEATURES)  # no parameter
        x = drawn()[0]
        for layer in (hooked, plain):
            assert torch.equal(linear.call(layer, x), layer(x))
        assert not calls

    @pytest.mark.parametrize("cls", [fastattn.MultiheadAttention, nn.MultiheadAttention])
    def test_modules_train_by_it(self, calls, cls):
        """Six products for two projections, where they are ours."""
        torch.manual_seed(0)
        module, x = cls(16, 2, batch_first=True), torch.randn(2, 9, 16, requires_grad=True)
        module(x, x, x)[0].sum().backward()
        assert len(calls) == (6 if cls is fastattn.MultiheadAttention else 0)
