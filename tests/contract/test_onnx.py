"""torch.onnx.export: ONNX only knows PyTorch's operators, so a model is exported with those.

`make test-integrations` installs ONNX Runtime and runs this file too; `make test` does without.
"""

import copy

import pytest
import torch
from helpers import SCORES, assert_close, attend, inputs
from torch import nn

import fastattn
from fastattn import Mask
from fastattn.scores import SCORES as NAMES

pytestmark = pytest.mark.slow


class Attend(nn.Module):
    """A function as a model that returns all of the function's results."""

    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *tensors):
        return self.function(*tensors, **self.options)


class Padded(nn.Module):
    """A multi-head module with a padding mask, as in most models."""

    def __init__(self, kind, **options):
        super().__init__()
        self.attention = kind(16, 2, batch_first=True, **options)

    def forward(self, x, padding):
        return self.attention(x, x, x, key_padding_mask=padding)


class Decoder(nn.Module):
    """A decoder with lengths and its own score."""

    def __init__(self):
        super().__init__()
        self.attention = fastattn.AdditiveAttention(16, 16, 8)

    def forward(self, x, lengths):
        return self.attention(x, x, x, lengths, need_weights=True)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fastattn.replace_attention(model)
    return model


def by_name(query, key, value, weight=None, **options):
    return fastattn.attention(query, key, value, weight=weight, **options)


def cases():
    """Name, model and inputs."""
    x, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[7], [4], [1]])
    options = dict(is_causal=True, bias=torch.randn(2, 5, 7), return_weights="full")
    options |= dict(mask=Mask(kv_len=torch.tensor([7, 0])), return_lse=True)
    for score in SCORES:
        tensors = tuple(inputs(score).values())
        yield score, Attend(attend), tensors
        yield f"{score}-masks", Attend(attend, **options), tensors
    for score in NAMES:
        model = Attend(by_name, score=score, return_weights="mean")
        yield f"by-name-{score}", model, tuple(inputs(score).values())
    yield "heads-shared", Attend(attend), tuple(inputs(H=4, Hkv=2).values())
    yield "multihead", Padded(fastattn.MultiheadAttention), (x, padding)
    yield "multihead-extra", Padded(fastattn.MultiheadAttention, add_bias_kv=True), (x, padding)
    yield "multihead-additive", Padded(fastattn.MultiheadAdditiveAttention), (x, padding)
    yield "additive-module", Decoder(), (x, torch.tensor([7, 4, 0]))
    yield "self-attention", fastattn.SelfAttention(16, 2), (x,)
    yield "encoder", encoder(), (x,)


CASES = {name: (model.eval(), tensors) for name, model, tensors in cases()}
# The graphs of these are inspected; ONNX Runtime computes all.
SOME = ("dot-masks", "additive-masks", "by-name-gaussian", "multihead", "multihead-additive")


def assert_right(exported, model, tensors):
    """An exported model's results are as close to the truth as those of the kernels."""
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    truth = copy.deepcopy(model).double()(*wide)
    results = (exported, model(*tensors), truth)
    assert_close(*([x] if isinstance(x, torch.Tensor) else list(x) for x in results))


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_no_operator_of_ours_is_in_the_graph(monkeypatch, name):
    model, tensors = CASES[name]
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(model, tensors)
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not {t for t in targets if "fastattn" in t}
    monkeypatch.undo()
    assert_right(program.module()(*tensors), model, tensors)


def test_a_named_backend_says_that_it_cannot(monkeypatch, extension):
    q = torch.randn(1, 2, 3, 4)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ValueError, match="'cpu' cannot do this problem: ONNX has PyTorch's"):
        fastattn.scaled_dot_product_attention(q, q, q, backend="cpu")
    assert "eager   chosen" in str(fastattn.explain(q))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_onnx_runtime_computes_the_same(name):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnx and onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, tensors = CASES[name]
    program = torch.onnx.export(model, tensors, dynamo=True, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    given = {i.name: x.numpy() for i, x in zip(session.get_inputs(), tensors, strict=True)}
    results = [torch.from_numpy(x) for x in session.run(None, given)]
    assert_right(results, model, tensors)
