"""replace_attention: same objects, same numbers, and our forward also runs at inference."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fastattn import MultiheadAttention, explain, replace_attention

TOLERANCE = {"rtol": 0, "atol": 1e-5}


def encoder(layers=2, **kwargs) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"dim_feedforward": 32, "batch_first": True, "dropout": 0.0} | kwargs
    nested = options.pop("enable_nested_tensor", True)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, **options), layers, enable_nested_tensor=nested
    )


def outputs_and_gradients(model, *inputs, **kwargs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = model(*inputs, **kwargs)
    out.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {"out": out.detach(), **grads, **{f"input {i}": x.grad for i, x in enumerate(inputs)}}


def assert_same(ours: dict, theirs: dict):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


MASKS = {
    "none": {},
    "causal": {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
        "tgt_is_causal": True,
    },
    "causal, found out": {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(7)},
    "padding": {
        "src_key_padding_mask": torch.arange(9) >= torch.tensor([9, 5, 7])[:, None],
        "memory_key_padding_mask": torch.arange(9) >= torch.tensor([9, 5, 7])[:, None],
        "tgt_key_padding_mask": torch.arange(7) >= torch.tensor([4, 7, 1])[:, None],
    },
    "all": {
        "src_mask": torch.ones(9, 9, dtype=torch.bool).triu(3),
        "tgt_mask": torch.ones(7, 7, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.arange(9) >= torch.tensor([9, 5, 7])[:, None],
    },
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", MASKS)
def test_transformer(masks, batch_first, norm_first, calls):
    torch.manual_seed(0)
    model = nn.Transformer(
        32, 4, 2, 2, 64, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    src, tgt = torch.randn(3, 9, 32), torch.randn(3, 7, 32)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    theirs = outputs_and_gradients(model, src, tgt, **MASKS[masks])
    assert not calls
    assert replace_attention(model) == 6
    assert_same(outputs_and_gradients(model, src, tgt, **MASKS[masks]), theirs)
    assert len(calls) == 6


@pytest.mark.parametrize("layer_class", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_alone(layer_class):
    torch.manual_seed(0)
    layer = layer_class(16, 4, 32, dropout=0.0, batch_first=True)
    inputs = [torch.randn(2, 5, 16) for _ in range(1 + (layer_class is nn.TransformerDecoderLayer))]
    theirs = outputs_and_gradients(layer, *inputs)
    replace_attention(layer)
    assert_same(outputs_and_gradients(layer, *inputs), theirs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestInference:
    """In eval mode without gradients, torch would run its fused layer instead of the module."""

    @pytest.mark.parametrize("masked", ["none", "padding", "mask", "both", "causal"])
    @pytest.mark.parametrize("nested", [False, True])
    def test_encoder(self, nested, masked, calls):
        model = encoder(enable_nested_tensor=nested).eval()
        x = torch.randn(3, 6, 16)
        padding = torch.arange(6) >= torch.tensor([6, 3, 1])[:, None]
        mask = torch.ones(6, 6, dtype=torch.bool).triu(2)
        causal = nn.Transformer.generate_square_subsequent_mask(6)
        kwargs = {
            "none": {},
            "padding": {"src_key_padding_mask": padding},
            "mask": {"mask": mask},
            "both": {"mask": mask, "src_key_padding_mask": padding},
            "causal": {"mask": causal, "is_causal": True},
        }[masked]
        with torch.no_grad():
            expected = model(x, **kwargs)
            assert not calls
            replace_attention(model)
            found = model(x, **kwargs)
        assert len(calls) == 2
        if nested and masked == "padding":
            assert calls[0]["mask"].kv_len.tolist() == [6, 3, 1]
        torch.testing.assert_close(found, expected, **TOLERANCE)

    def test_layer_with_nested_input(self, calls):
        layer = encoder(1).layers[0].eval()
        nested = torch.nested.nested_tensor([torch.randn(n, 16) for n in (4, 1, 6)])
        with torch.inference_mode():
            expected = layer(nested)
            replace_attention(layer)
            found = layer(nested)
        assert len(calls) == 1
        for ours, theirs in zip(found.unbind(), expected.unbind(), strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_empty_rows_are_not_nan(self):
        model = encoder(enable_nested_tensor=False).eval()
        padding = torch.tensor([[False] * 6, [True] * 6])
        with torch.no_grad():
            replace_attention(model)
            assert model(torch.randn(2, 6, 16), src_key_padding_mask=padding).isfinite().all()

    def test_module_built_by_hand(self, calls):
        """A module of our class is also bypassed until replace_attention gets it."""
        layer = encoder(1).layers[0]
        layer.self_attn = MultiheadAttention(16, 4, batch_first=True)
        layer.eval()
        x = torch.randn(2, 5, 16)
        with torch.no_grad():
            expected = layer(x)
            assert not calls
            assert replace_attention(layer) == 0
            torch.testing.assert_close(layer(x), expected, **TOLERANCE)
        assert len(calls) == 1

    def test_copies_stay_off_the_fast_path(self, calls):
        model = encoder(1).eval()
        replace_attention(model)
        with torch.no_grad():
            copy.deepcopy(model)(torch.randn(2, 5, 16))
        assert len(calls) == 1


class TestWhatIsKept:
    def test_identity_parameters_mode_and_names(self):
        model = encoder().double().eval()
        attention = model.layers[0].self_attn
        attention.train()
        before = dict(model.named_parameters()), dict(model.named_modules())
        assert replace_attention(model) == 2
        after = dict(model.named_parameters()), dict(model.named_modules())
        for old, new in zip(before, after, strict=True):
            assert list(old) == list(new)
            assert all(old[name] is new[name] for name in old)
        assert model.layers[0].self_attn is attention
        assert type(attention) is MultiheadAttention
        assert attention.training
        assert not model.layers[1].self_attn.training

    def test_the_model_itself(self):
        model = nn.MultiheadAttention(8, 2)
        assert replace_attention(model) == 1
        assert type(model) is MultiheadAttention

    def test_shared_modules_stay_shared(self):
        shared = nn.MultiheadAttention(8, 2)
        model = nn.ModuleList([shared, nn.ModuleDict({"again": shared})])
        assert replace_attention(model) == 1
        assert model[0] is model[1]["again"] is shared

    def test_again_changes_nothing(self):
        model = encoder()
        replace_attention(model)
        assert replace_attention(model) == 0
        assert len(model.layers[0].self_attn._forward_pre_hooks) == 1

    def test_hooks(self):
        model = nn.MultiheadAttention(8, 2)
        seen = []
        model.register_forward_hook(lambda *_: seen.append("forward"))
        model.register_forward_pre_hook(lambda *_: seen.append("pre"))
        model.register_full_backward_hook(lambda *_: seen.append("backward"))
        replace_attention(model)
        x = torch.randn(3, 2, 8, requires_grad=True)
        model(x, x, x)[0].sum().backward()
        assert seen == ["pre", "forward", "backward"]

    def test_parametrizations(self):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2)
        nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
        nn.utils.parametrizations.weight_norm(model.out_proj, "weight")
        twin = copy.deepcopy(model)  # shares the class made by the parametrization
        x = torch.randn(3, 2, 8)
        expected = model(x, x, x)[0]
        assert replace_attention(model) == 1
        assert isinstance(model, MultiheadAttention)
        assert not isinstance(twin, MultiheadAttention)
        torch.testing.assert_close(model(x, x, x)[0], expected)
        torch.testing.assert_close(copy.deepcopy(model)(x, x, x)[0], expected)
        parametrize.remove_parametrizations(model, "in_proj_weight")
        assert type(model) is MultiheadAttention
        torch.testing.assert_close(model(x, x, x)[0], expected)


class TestWhatIsLeftAlone:
    def test_subclasses_are_reported_once(self):
        class Special(nn.MultiheadAttention):
            pass

        model = nn.ModuleDict(
            {"a": Special(8, 2), "b": nn.MultiheadAttention(8, 2), "c": Special(8, 2)}
        )
        with pytest.warns(UserWarning, match="a: Special, c: Special") as caught:
            assert replace_attention(model) == 1
        assert len(caught) == 1
        assert type(model["a"]) is Special
        assert not model["a"]._forward_pre_hooks

    def test_patched_forward(self):
        model = nn.MultiheadAttention(8, 2)
        model.forward = lambda *args: "patched"
        with pytest.warns(UserWarning, match="the model"):
            assert replace_attention(model) == 0
        assert model(1) == "patched"

    def test_nothing_to_do(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert replace_attention(nn.Linear(2, 2)) == 0

    def test_what_is_no_module(self):
        with pytest.raises(TypeError, match=r"model: expected an nn.Module, got NoneType"):
            replace_attention(None)


@pytest.mark.slow
def test_compiled_after_replacement(calls):
    model = encoder(1)
    x = torch.randn(2, 5, 16)
    theirs = outputs_and_gradients(model, x)
    replace_attention(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs["out"], **TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_after_replacement():
    model = encoder(1).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(x)
        replace_attention(model)
        torch.jit.script(model.layers[0].self_attn)
        assert explain(model, x).torch == {}  # the module itself is as it was
        torch.testing.assert_close(torch.jit.script(model)(x), expected, **TOLERANCE)
