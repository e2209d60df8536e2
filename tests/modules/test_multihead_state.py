"""The state of an nn.MultiheadAttention: made, saved, loaded, copied, and read at every call."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fastattn import MultiheadAttention

VARIANTS = [
    {},
    {"bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 5, "vdim": 6, "batch_first": True, "dropout": 0.1},
]


class TestState:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_same_seed_same_state(self, variant):
        states = []
        for cls in (nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(3)
            module = cls(8, 2, **variant)
            states.append((module.state_dict(), torch.rand(1)))  # and the same number of draws
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
        assert list(ours.parameters) == [*theirs.parameters, "cache", "mask", "bias"]
        for name in ("cache", "mask", "bias"):
            assert ours.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
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
                getattr(plain, name).copy_(getattr(ours, name))
            plain.out_proj.weight.copy_(ours.out_proj.weight)
            plain.out_proj.bias.copy_(ours.out_proj.bias)
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
        """Spectral norm, for example, changes at every evaluation."""
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
