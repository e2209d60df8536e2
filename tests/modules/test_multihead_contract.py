"""Other uses of nn.MultiheadAttention: nested tensors, compile, export, tracing, torch.ao."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fastattn import MultiheadAttention, testing
from fastattn.modules.multihead import inputs


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


@pytest.mark.parametrize("separate", [False, True])
def test_inputs_from_inference_mode_train_the_module(separate):
    """A frozen model in front of it, for instance."""
    with torch.inference_mode():
        x = torch.randn(2, 5, 8)
    y = torch.randn(2, 3, 8, requires_grad=True) if separate else x
    ours = MultiheadAttention(8, 2, batch_first=True)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    weights = []
    for module in (ours, theirs):
        module(y, x, x)[0].square().sum().backward()
        weights.append(module.in_proj_weight.grad)
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("places", ["xxx", "xyy", "xxy", "xyx", "xyz"])
def test_identical_inputs_stay_one_tensor(places):
    tensors = {name: torch.zeros(1) for name in "xyz"}
    made = inputs.of_each(torch.clone, *(tensors[name] for name in places))
    same = [a is b for a, b in itertools.combinations(made, 2)]
    assert same == [a == b for a, b in itertools.combinations(places, 2)]


def test_public_names_are_those_of_torch(x):
    """Others are free for subclasses."""
    names, of_torch = (
        {name for name in dir(cls) if name[0] != "_"}
        for cls in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert names == of_torch

    class Mine(MultiheadAttention):
        def __init__(self):
            super().__init__(8, 2)
            self.shared = nn.Linear(8, 8)

    module = Mine()
    assert isinstance(module.shared, nn.Linear)
    assert module(x, x, x)[0].shape == x.shape


class TestDelegation:
    """Calls that our operators do not support run in torch's own forward."""

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

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize(("training", "grad"), [(True, True), (True, False), (False, True)])
    def test_nested_input_in_training(self, module, x, training, grad):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(AssertionError, match="does not support NestedTensor"),
        ):
            module.train(training)(nested, nested, nested, need_weights=False)

    @pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
    def test_nested_input_beside_a_mask(self, module, x, name):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        masks = {name: torch.zeros(2 if name == "key_padding_mask" else 5, 5).bool()}
        with torch.no_grad(), pytest.raises(AssertionError, match="does not support NestedTensor"):
            module.eval()(nested, nested, nested, need_weights=False, **masks)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_nested_input_with_weights_or_the_causal_hint(self, module, x, calls, is_causal):
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        options = dict(need_weights=not is_causal, is_causal=is_causal)
        with torch.no_grad():
            _, weights = module.eval()(nested, nested, nested, **options)
        assert is_causal or weights.shape == (2, 5, 5)
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
@pytest.mark.slow
def test_compile_fullgraph(module, x, kind, need_weights):
    torch._dynamo.reset()  # made by other tests
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
@pytest.mark.slow
def test_export(module, x, strict):
    padding = torch.zeros(2, 5).index_fill(1, torch.tensor([4]), -torch.inf)
    program = torch.export.export(module.eval(), (x, x, x, padding), strict=strict)
    torch.testing.assert_close(program.module()(x, x, x, padding), module(x, x, x, padding))
    other = torch.zeros(2, 5)  # the example's mask is not a constant of the program
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
    """torch.ao observes our class like its base."""
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
