"""Packages that change modules from outside: adapters, offloaded and quantised weights."""

import copy

import pytest
import torch
from torch import nn

import fastattn


def draw(*shape):
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng)


def encoders():
    """An encoder in eval mode, and the same after replace_attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ours = copy.deepcopy(plain)
    fastattn.replace_attention(ours)
    return plain, ours


@pytest.fixture
def adapted():
    """A function that gives a model adapters of peft with random numbers."""
    peft = pytest.importorskip("peft")

    def adapt(model, *names):
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(names), r=4))
        for name, x in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(x, std=0.2, generator=torch.Generator().manual_seed(len(name)))
        return model

    return adapt


def test_adapters_of_attention_learn_the_same(adapted):
    x, found = draw(2, 5, 32), []
    for model in encoders():
        model = adapted(model, "self_attn").train()
        out = model(x)
        out.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        found[-1]["out"] = out.detach()
    assert all(grad.any() for grad in found[1].values())
    torch.testing.assert_close(*reversed(found))


@pytest.mark.parametrize("name", ["self_attn", "out_proj"])
def test_adapters_take_part_at_inference(adapted, name):
    """torch's encoder layer reads the weights below the adapter, and its attention out_proj's."""
    x, (plain, ours) = draw(2, 5, 32), encoders()
    with torch.no_grad():
        before = plain(x)
        model = adapted(ours, name)
        model.eval()
        after = model(x)
        assert not torch.allclose(after, before, atol=1e-2)
        merged = model.merge_and_unload()(x)
    torch.testing.assert_close(after, merged, atol=1e-5, rtol=1e-4)


def test_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    x, (plain, ours) = draw(2, 5, 32), encoders()
    with torch.no_grad():
        want = plain(x)
        accelerate.cpu_offload(ours, execution_device="cpu")
        assert ours.layers[0].self_attn.out_proj.weight.is_meta
        for _ in range(2):
            torch.testing.assert_close(ours(x), want, atol=1e-5, rtol=1e-4)


def test_quantised_weights():
    quantization = pytest.importorskip("torchao.quantization")
    x, (plain, ours) = draw(2, 5, 32), encoders()
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(ours, config, lambda module, _: isinstance(module, nn.Linear))
    for one, other in zip(plain.modules(), ours.modules(), strict=True):
        if isinstance(one, nn.Linear):
            one.weight = nn.Parameter(other.weight.dequantize().detach(), requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x), atol=1e-4, rtol=1e-3)
    assert not fastattn.explain(ours, x).torch


def test_a_subclass_sees_multi_head_attention():
    seen, module = [], nn.MultiheadAttention(8, 2)

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    x = draw(3, 1, 8).as_subclass(Seeing)
    with fastattn.use_for_sdpa():
        module(x, x, x)
    assert nn.functional.multi_head_attention_forward in seen
