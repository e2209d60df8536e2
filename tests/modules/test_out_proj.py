"""Replacements of out_proj, and additions to it, take part. torch only reads its weights."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize, prune

import fastattn


class Lora(nn.Module):
    """A frozen linear layer, and the product of two narrow layers added to it."""

    def __init__(self, base: nn.Linear, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    weight = property(lambda self: self.base.weight)  # other code reads these
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class LoraLinear(nn.Linear):
    """The same as a subclass of nn.Linear."""

    def __init__(self, base: nn.Linear, rank=2):
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict())
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.a.mT @ self.b.mT


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Quantised(torch.Tensor):
    """A weight that F.linear reads in its own way, and no other function does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = args
            args = x, 2 * weight.as_subclass(torch.Tensor), bias
        return super().__torch_function__(func, types, args, kwargs)


def quantised(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Quantised))
    return linear


def hooked(linear):
    linear.register_forward_hook(lambda layer, inputs, output: 3 * output)
    return linear


def patched(linear):
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) - 1
    return linear


LAYERS = {
    "lora": Lora,
    "lora-subclass": LoraLinear,
    "quantised": quantised,
    "hook": hooked,
    "forward": patched,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5),
    "parametrized": lambda linear: parametrize.register_parametrization(linear, "weight", Double()),
    "sequence": lambda linear: nn.Sequential(linear, nn.Tanh()),
}
CALLS = {
    "self": lambda module, x: module(x, x, x)[0],
    "self-no-weights": lambda module, x: module(x, x, x, need_weights=False)[0],
    "cross": lambda module, x: module(x, x.flip(1), x)[0],
    "masked": lambda module, x: module(x, x, x, key_padding_mask=torch.rand(2, 5) < 0.5)[0],
    "one": lambda module, x: module(x[0], x[0], x[0])[0],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layer", LAYERS)
def test_out_proj_is_called(layer, call, grad):
    module = fastattn.MultiheadAttention(8, 2, batch_first=True)
    heads = copy.deepcopy(module)
    module.out_proj = LAYERS[layer](module.out_proj)
    heads.out_proj = nn.Identity()
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        torch.manual_seed(1)
        out = CALLS[call](module, x)
        torch.manual_seed(1)
        assert torch.equal(out, module.out_proj(CALLS[call](heads, x)))


@pytest.mark.parametrize("grad", [False, True])
def test_hooks_of_all_modules_take_part(grad):
    module, x = fastattn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)

    def triple(layer, inputs, output):
        return 3 * output if layer is module.out_proj else None

    with torch.set_grad_enabled(grad):
        plain = module(x, x, x)[0]
        handle = nn.modules.module.register_module_forward_hook(triple)
        try:
            hooked = module(x, x, x)[0]
        finally:
            handle.remove()
        assert torch.equal(module(x, x, x)[0], plain)
    torch.testing.assert_close(hooked, 3 * plain)


@pytest.mark.parametrize("layer", [Lora, LoraLinear])
def test_adapters_learn(layer):
    module = fastattn.MultiheadAttention(8, 2)
    module.out_proj = layer(module.out_proj)
    x = torch.randn(5, 2, 8)
    module(x, x, x)[0].square().sum().backward()
    grads = [p.grad for p in module.out_proj.parameters() if p.requires_grad]
    assert len(grads) >= 2
    assert all(grad is not None and grad.any() for grad in grads)


def test_sharded_by_itself():
    """Its weight is a DTensor until it is called."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        module, x = fastattn.MultiheadAttention(8, 2), torch.randn(5, 2, 8)
        want = module(x, x, x)[0].detach()
        fully_shard(module.out_proj, mesh=mesh)
        out = module(x, x, x)[0]
        out.sum().backward()
        assert torch.equal(out, want)
        assert module.out_proj.weight.grad.full_tensor().any()
    finally:
        torch.distributed.destroy_process_group()


def test_over_a_nested_batch():
    """An encoder makes such a batch from padded input, at inference."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    fastattn.replace_attention(model)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    attention = model.layers[0].self_attn
    with torch.inference_mode():
        before = model(x, src_key_padding_mask=padding)
        attention.out_proj = Lora(attention.out_proj)
        after = model(x, src_key_padding_mask=padding)
    assert before.shape == after.shape
    assert not torch.allclose(before, after)


def test_a_plain_one_stays_one_operator(operator_calls, extension):
    module = fastattn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        module(x, x, x)
        assert len(operator_calls) == 1
        module.out_proj = Lora(module.out_proj)
        module(x, x, x)
        assert len(operator_calls) == 1
