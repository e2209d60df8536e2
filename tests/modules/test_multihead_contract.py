"""What else an nn.MultiheadAttention is: state, errors, and the tools of torch that take one."""

import copy
import inspect
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import MultiheadAttention, functional, testing
from fastattn.backends import cpu
from fastattn.modules.multihead import inference, inputs

VARIANTS = [
    {},
    {"bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 5, "vdim": 6, "batch_first": True, "dropout": 0.1},
]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return MultiheadAttention(8, 2, batch_first=True)


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class TestState:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_same_seed_same_state(self, variant):
        states = []
        for cls in (nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(3)
            module = cls(8, 2, **variant)
            states.append((module.state_dict(), torch.rand(1)))  # as many draws, too
        assert list(states[0][0]) == list(states[1][0])
        assert all(map(torch.equal, states[0][0].values(), states[1][0].values()))
        assert torch.equal(states[0][1], states[1][1])

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_loads_both_ways(self, variant):
        ours, theirs = MultiheadAttention(8, 2, **variant), nn.MultiheadAttention(8, 2, **variant)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())

    def test_interface(self):
        assert issubclass(MultiheadAttention, nn.MultiheadAttention)
        assert MultiheadAttention.__init__ is nn.MultiheadAttention.__init__
        ours, theirs = (
            inspect.signature(c.forward) for c in (MultiheadAttention, nn.MultiheadAttention)
        )
        assert list(ours.parameters) == [*theirs.parameters, "cache"]
        assert ours.parameters["cache"].kind is inspect.Parameter.KEYWORD_ONLY
        for name, parameter in theirs.parameters.items():
            assert parameter.default == ours.parameters[name].default

    def test_copies(self, module, x):
        expected = module(x, x, x)[0]
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(copied) is MultiheadAttention
            assert torch.equal(copied(x, x, x)[0], expected)
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(x, x, x)[0], expected)


class TestParametersAreReadAtEveryCall:
    def check(self, ours, x):
        plain = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            for name in ("in_proj_weight", "in_proj_bias"):
                getattr(inference, name).copy_(getattr(ours, name))
            inference.out_proj.weight.copy_(ours.out_proj.weight)
            inference.out_proj.bias.copy_(ours.out_proj.bias)
        torch.testing.assert_close(ours(x, x, x)[0], plain(x, x, x)[0])

    def test_changed_in_place_and_replaced(self, module, x):
        module(x, x, x)
        with torch.no_grad():
            module.in_proj_weight.mul_(2)
        self.check(module, x)
        module.out_proj.weight = nn.Parameter(torch.randn(8, 8))
        self.check(module, x)

    def test_pruned(self, module, x):
        prune.random_unstructured(module, "in_proj_weight", amount=0.5)
        prune.random_unstructured(module.out_proj, "weight", amount=0.5)
        self.check(module, x)

    def test_parametrized(self, module, x):
        class Double(nn.Module):
            def forward(self, w):
                return 2 * w

        parametrize.register_parametrization(module, "in_proj_weight", Double())
        parametrize.register_parametrization(module.out_proj, "weight", Double())
        self.check(module, x)
        module(x, x, x)[0].sum().backward()
        assert module.parametrizations.in_proj_weight.original.grad.any()

    def test_parametrizations_run_once_a_call(self, module, x):
        """Spectral norm, for one, moves at every evaluation."""
        runs = []

        class Count(nn.Module):
            def forward(self, w):
                runs.append(1)
                return w

        parametrize.register_parametrization(module, "in_proj_weight", Count())
        runs.clear()
        module(x, x, x)
        assert len(runs) == 1

    def test_functional_call(self, module, x):
        other = {k: torch.randn_like(v) for k, v in module.state_dict().items()}
        out, _ = torch.func.functional_call(module, other, (x, x, x))
        module.load_state_dict(other)
        assert torch.equal(out, module(x, x, x)[0])


class TestTheShortWay:
    """Self-attention that needs no checking has a way of its own: ``plain.py``."""

    @pytest.fixture
    def checked(self, monkeypatch):
        """Counts the calls that went the long way."""
        seen, canonical = [], inputs.canonical

        def spy(*args):
            seen.append(args)
            return canonical(*args)

        monkeypatch.setattr(inputs, "canonical", spy)
        return seen

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("tokens", [5, 40])  # the second with the weight on the left
    def test_gives_the_same_bits(self, monkeypatch, checked, grad, batch_first, bias, tokens):
        module = MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first, bias=bias)
        for p in module.parameters():
            nn.init.normal_(p)
        x = torch.randn(1, tokens, 8, requires_grad=grad)
        found = []
        for attend in (inference.attend, lambda *args: None):
            monkeypatch.setattr(inference, "attend", attend)
            for training, need_weights in ((False, False), (False, True), (True, True)):
                torch.manual_seed(0)
                with torch.set_grad_enabled(grad):
                    out, weights = module.train(training)(x, x, x, need_weights=need_weights)
                found.append([out, *([weights] if need_weights else [])])
                if grad:
                    found[-1] += torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
                assert out.is_contiguous()
            assert len(checked) == (3 if len(found) == 6 else 0)
        for got, want in zip(found[:3], found[3:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))

    def test_is_for_plain_calls_only(self, module, x, checked):
        mask = torch.zeros(5, 5, dtype=torch.bool)
        calls = [
            lambda: module(x[0], x[0], x[0]),
            lambda: module(x, x.clone(), x),
            lambda: module(x, x, x, attn_mask=mask),
            lambda: module(x, x, x, key_padding_mask=mask[:2]),
            lambda: module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False),
            lambda: MultiheadAttention(8, 2, add_zero_attn=True)(x, x, x),
            lambda: MultiheadAttention(8, 2, add_bias_kv=True)(x, x, x),
            lambda: prune.identity(module.out_proj, "bias") and module(x, x, x),
        ]
        module(x, x, x)
        assert not checked
        for n, call in enumerate(calls, start=1):
            call()
            assert len(checked) == n


@pytest.mark.usefixtures("extension")
class TestOneOperator:
    """At inference the short way is one operator; where that would be seen, it is not."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("weights", ["none", "mean", "full"])
    def test_is_right(self, operator_calls, dtype, bias, weights):
        sizes = dict(bias=bias, batch_first=True)
        exact, peer = (nn.MultiheadAttention(8, 2, **sizes).eval() for _ in range(2))
        ours = MultiheadAttention(8, 2, **sizes).eval()
        for p in exact.parameters():
            nn.init.normal_(p)
        for module in (peer, ours):
            module.load_state_dict(exact.state_dict())
            module.to(dtype)
        exact.load_state_dict(ours.state_dict())
        exact.double()
        x = torch.randn(3, 7, 8).to(dtype)
        results = []
        with torch.no_grad():
            for module, y in ((ours, x), (peer, x), (exact, x.double())):
                asked = dict(need_weights=weights != "none", average_attn_weights=weights == "mean")
                results.append([t for t in module(y, y, y, **asked) if t is not None])
        for found in zip(*results, strict=True):
            testing.assert_within_budget(*found)
        assert len(operator_calls) == 1

    def test_when_nothing_wants_a_gradient(self, module, x, operator_calls):
        with torch.inference_mode():
            module(x, x, x)
        module.requires_grad_(False)(x, x, x)
        assert len(operator_calls) == 2
        leaf = x.clone().requires_grad_()
        assert module(leaf, leaf, leaf)[0].requires_grad
        module.out_proj.bias.requires_grad_()
        assert module(x, x, x)[0].requires_grad
        assert len(operator_calls) == 2

    def test_takes_any_strides(self, module, operator_calls):
        x = torch.randn(5, 4, 8).transpose(0, 1)
        with torch.no_grad():
            for same in (x, x[1:3], x[1:3].contiguous(), x[:, :3]):
                torch.testing.assert_close(
                    module(same, same, same),
                    nn.MultiheadAttention.forward(module, same, same, same),
                )
        assert len(operator_calls) == 4

    def test_where_torch_would_see_it(self, module, x, operator_calls):
        """Modes, transforms and traces find the operators of torch; all results are the same."""

        torch._dynamo.reset()  # of what other tests compiled

        def attend(y, call=module):
            return call(y, y, y)[0]

        def under(context):
            with context:
                return attend(x)

        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        counter = FlopCounterMode(display=False)
        with torch.no_grad():
            want, _ = nn.MultiheadAttention.forward(module, x, x, x)
            found = [
                attend(x, compiled),
                under(counter),
                under(forward_ad.dual_level()),
                torch.func.vmap(attend, in_dims=1, out_dims=1)(x[:, None]).squeeze(1),
            ]
            half = under(torch.autocast("cpu", torch.bfloat16))
        assert counter.get_total_flops() > 0
        for out in found:
            torch.testing.assert_close(out, want)
        torch.testing.assert_close(half.float(), want, rtol=0.05, atol=0.05)
        assert not operator_calls

    def test_where_it_does_not_apply(self, module, x, operator_calls):
        dropout = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        other = MultiheadAttention(8, 2, batch_first=True)
        other._attend = lambda q, k, v, **_: functional.scaled_dot_product_attention(q, k, v)
        additive = fastattn.MultiheadAdditiveAttention(8, 2, batch_first=True)
        with torch.no_grad():
            for attention in (dropout, other, additive, module.double()):
                y = x.double() if attention is module else x
                attention(y, y, y, need_weights=False)
            assert not operator_calls
            dropout.eval()(x, x, x)
        assert len(operator_calls) == 1

    def test_modules_are_told_apart(self, operator_calls):
        """By all that they differ in on an input of one shape."""
        x = torch.randn(4, 4, 8)
        for heads, batch_first in itertools.product((2, 4), (True, False)):
            module = MultiheadAttention(8, heads, batch_first=batch_first)
            for dtype in (torch.float32, torch.float64):
                y = x.to(dtype)
                want = nn.MultiheadAttention.forward(module.to(dtype), y, y, y)
                with torch.no_grad():
                    torch.testing.assert_close(module(y, y, y), want)
        assert len(operator_calls) == 4  # those in float32

    def test_the_registry_decides(self, module, x, operator_calls, monkeypatch):
        monkeypatch.setattr(cpu, "unsupported", lambda p: ["not today"])
        with torch.no_grad():
            want = nn.MultiheadAttention.forward(module, x, x, x)
            for _ in range(2):
                torch.testing.assert_close(module(x, x, x), want)
        assert not operator_calls

    def test_errors_are_those_of_torch(self, module, x, operator_calls):
        module.out_proj.bias = nn.Parameter(torch.zeros(8).double())
        for y in (x, x.double(), x.to("meta")):
            with torch.no_grad(), pytest.raises(RuntimeError) as caught:
                module(y, y, y)
            assert "fastattn" not in str(caught.value)
        assert not operator_calls


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_output_can_be_viewed_and_written(batched, batch_first):
    module = MultiheadAttention(8, 2, batch_first=batch_first)
    x = torch.randn(2, 5, 8, requires_grad=True)
    x_ = x if batched else x[0]
    out, _ = module(x_, x_, x_)
    out.view(-1)
    out.add_(1.0).mul_(2.0)
    out.sum().backward()
    expected = torch.autograd.grad(2 * module(x_, x_, x_)[0].sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def one_sample(module, x):
    return x[:1] if module.batch_first else x[:, :1]


def bool_mask(*shape):
    return torch.zeros(shape, dtype=torch.bool)


BAD_CALLS = {  # for embed_dim 8, 2 heads; x is (5, 3, 8)
    "1d query": lambda m, x: m(x[0, 0], x, x),
    "2d key": lambda m, x: m(x, x[0], x),
    "unbatched and batched": lambda m, x: m(x[0], x, x),
    "embedding dim": lambda m, x: m(x[..., :4], x, x),
    "key and value lengths": lambda m, x: m(x, x, x[:4]),
    "key features": lambda m, x: m(x, x[..., :4], x[..., :4]),
    "batch sizes": lambda m, x: m(x, one_sample(m, x), one_sample(m, x)),
    "query dtype": lambda m, x: m(x.double(), x.double(), x.double()),
    "integer query": lambda m, x: m(x.long(), x.long(), x.long()),
    "key dtype": lambda m, x: m(x, x.double(), x.double()),
    "integer attn_mask": lambda m, x: m(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int32)),
    "integer padding": lambda m, x: m(x, x, x, torch.ones(3, 5, dtype=torch.uint8)),
    "2d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(5, 4)),
    "3d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(3, 5, 5)),
    "4d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(3, 2, 5, 5)),
    "unbatched 3d attn_mask": lambda m, x: m(x[0], x[0], x[0], attn_mask=bool_mask(1, 3, 3)),
    "padding length": lambda m, x: m(x, x, x, bool_mask(3, 4)),
    "padding batch": lambda m, x: m(x, x, x, bool_mask(2, 5)),
    "1d padding": lambda m, x: m(x, x, x, bool_mask(5)),
    "hint without mask": lambda m, x: m(x, x, x, is_causal=True),
    "hint, mask shape": lambda m, x: m(x, x, x, attn_mask=bool_mask(4), is_causal=True),
}


# Here torch's text depends on strides, or is what the next operation happened to say.
ONLY_THE_TYPE = ("query dtype", "key dtype", "integer query", "batch sizes")


@pytest.mark.parametrize("variant", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_those_of_torch(name, batch_first, variant):
    x = torch.randn(5, 3, 8)
    errors = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            BAD_CALLS[name](cls(8, 2, batch_first=batch_first, **variant), x)
        errors.append((caught.type, str(caught.value)))
    assert errors[0][0] is errors[1][0]
    if name not in ONLY_THE_TYPE:
        assert errors[0][1] == errors[1][1]


@pytest.mark.parametrize(
    "shapes", [((4, 2, 7), (4, 2, 6)), ((4, 2, 5), (4, 2, 7)), ((4, 2, 5), (3, 2, 6))]
)
def test_errors_of_separate_projections(shapes):
    query, key, value = torch.randn(5, 2, 8), *(torch.randn(s) for s in shapes)
    errors = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises(AssertionError) as caught:
            cls(8, 2, kdim=5, vdim=6)(query, key, value)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("arguments", [(0, 1), (8, 0), (-8, 2), (8, 3)])
def test_constructor_errors(arguments):
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(*arguments)
    with pytest.raises(theirs.type) as ours:
        MultiheadAttention(*arguments)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_float_mask_of_another_dtype(module, x, mask_dtype, need_weights):
    for cls in (module, nn.MultiheadAttention(8, 2, batch_first=True)):
        with pytest.raises(RuntimeError, match=r"dtype"):
            cls(x, x, x, attn_mask=torch.zeros(5, 5, dtype=mask_dtype), need_weights=need_weights)


def test_mismatched_mask_kinds_warn(module, x):
    for m in (module, nn.MultiheadAttention(8, 2, batch_first=True)):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
            m(x, x, x, bool_mask(2, 5), attn_mask=torch.zeros(5, 5))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m(x, x, x, bool_mask(2, 5), attn_mask=bool_mask(5, 5))


class TestDelegation:
    """What our operators do not take runs in torch's own forward."""

    def test_torch_function(self, module, x, calls):
        names = []

        class Logged(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                names.append(getattr(func, "__name__", ""))
                return super().__torch_function__(func, types, args, kwargs or {})

        y = x.as_subclass(Logged)
        out, _ = module(y, y, y)
        assert isinstance(out, Logged)
        assert "multi_head_attention_forward" in names
        torch.testing.assert_close(out.as_subclass(torch.Tensor), module(x, x, x)[0])

    def test_jagged_input(self, module, x, calls):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        with pytest.raises((AssertionError, RuntimeError)) as ours:
            module(nested, nested, nested)
        with pytest.raises(ours.type):
            nn.MultiheadAttention.forward(module, nested, nested, nested)
        assert not calls

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_input_in_training(self, module, x):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        with pytest.raises(AssertionError, match="does not support NestedTensor"):
            module(nested, nested, nested)

    def test_nested_input_with_weights(self, module, x, calls):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        with torch.no_grad():
            _, weights = module.eval()(nested, nested, nested)
        assert weights.shape == (2, 5, 5)
        assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_self_attention_is_ours(module, x, calls, dtype):
    module = module.eval().to(dtype)
    exact = copy.deepcopy(module).double()
    x = x.to(dtype)
    lengths = [5, 3]
    nested = torch.nested.nested_tensor([s[:n] for s, n in zip(x, lengths, strict=True)])
    with torch.no_grad():
        out, weights = module(nested, nested, nested, need_weights=False)
        assert len(calls) == 1
        assert weights is None
        assert out.is_nested
        for sample, n, got in zip(x, lengths, out.unbind(), strict=True):
            alone, truth = (
                model(x, x, x, need_weights=False)[0]
                for model, x in ((module, sample[:n]), (exact, sample[:n].double()))
            )
            testing.assert_within_budget(got, alone, truth)


@pytest.mark.parametrize(
    ("kind", "need_weights"), [("bool", True), ("float", False), ("causal", False), ("none", True)]
)
def test_compile_fullgraph(module, x, kind, need_weights):
    torch._dynamo.reset()  # of what other tests compiled
    kwargs = {"need_weights": need_weights}
    if kind == "bool":
        kwargs["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
        kwargs["key_padding_mask"] = torch.arange(5)[None] >= torch.tensor([[5], [3]])
    elif kind == "float":
        kwargs["attn_mask"] = torch.randn(5, 5)
        kwargs["key_padding_mask"] = torch.zeros(2, 5).index_fill(1, torch.tensor([4]), -torch.inf)
    elif kind == "causal":
        kwargs |= {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = (f(x, x, x, **kwargs) for f in (compiled, module))
    torch.testing.assert_close(found, expected)
    grads = []
    for out, weights in (found, expected):
        loss = out.square().sum() + (weights.square().sum() if need_weights else 0)
        grads.append(torch.autograd.grad(loss, tuple(module.parameters())))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("mode", [torch.device("cpu"), torch.overrides.BaseTorchFunctionMode()])
def test_ours_under_function_modes(module, x, calls, mode):
    """torch.set_default_device is such a mode: it must not look like a tensor subclass."""
    with mode:
        module(x, x, x)
    assert len(calls) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_export(module, x, strict):
    padding = torch.zeros(2, 5).index_fill(1, torch.tensor([4]), -torch.inf)
    program = torch.export.export(module.eval(), (x, x, x, padding), strict=strict)
    torch.testing.assert_close(program.module()(x, x, x, padding), module(x, x, x, padding))
    other = torch.zeros(2, 5)  # the values of the example's mask are not baked in
    torch.testing.assert_close(program.module()(x, x, x, other), module(x, x, x, other))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(module, x):
    traced = torch.jit.trace(module.eval(), (x, x, x), check_trace=False)
    y = torch.randn(2, 5, 8)
    torch.testing.assert_close(traced(y, y, y)[0], module(y, y, y)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_shares_parameters(module, x):
    expected = module(x, x, x)
    scripted = torch.jit.script(module)
    torch.testing.assert_close(scripted(x, x, x), expected)
    with torch.no_grad():
        module.out_proj.bias.add_(1.0)
    torch.testing.assert_close(scripted(x, x, x)[0], expected[0] + 1.0)
    assert type(module) is MultiheadAttention


def test_fx_leaf(module, x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            out, _ = self.attention(x, x, x, need_weights=False)
            return out + x

    traced = torch.fx.symbolic_trace(Model())
    targets = [n.target for n in traced.graph.nodes if n.op == "call_module"]
    assert targets == ["attention"]
    torch.testing.assert_close(traced(x), module(x, x, x)[0] + x)


@pytest.mark.filterwarnings("ignore")  # torch.ao announces its own removal
def test_torch_ao_static_quantization(x):
    """torch.ao observes our class as it observes its base."""
    quantization = pytest.importorskip("torch.ao.quantization")
    outputs = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(0)
        model = nn.Sequential(cls(8, 2, batch_first=True)).eval()
        model.qconfig = quantization.get_default_qconfig("fbgemm")
        prepared = quantization.prepare(model)
        assert type(prepared[0]) is torch.ao.nn.quantizable.MultiheadAttention
        outputs.append(prepared[0](x, x, x))
    torch.testing.assert_close(*outputs)
