"""use_for_sdpa where gradients are checkpointed: what is computed again is ours too."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastattn


class Attention(nn.Module):
    """Without modules of its own, if ``bare``."""

    def __init__(self, bare):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(24, 8))
        self.project = (lambda x: x) if bare else nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = F.linear(self.project(x), self.weight).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


class Model(nn.Module):
    def __init__(self, bare, checkpointed):
        super().__init__()
        self.attention, self.checkpointed = Attention(bare), checkpointed

    def forward(self, x):
        return x + self.checkpointed(self.attention, x)


def plain(function, x):
    return function(x)


def checkpoints(reentrant):
    return lambda function, x: checkpoint(function, x, use_reentrant=reentrant)


def of_a_method(reentrant):
    return lambda module, x: checkpoint(module.forward.__wrapped__, x, use_reentrant=reentrant)


def gradient(out, x, how):
    total = out.square().sum()
    if how == "grad":
        return torch.autograd.grad(total, x)[0]
    total.backward() if how == "method" else torch.autograd.backward([total])
    return x.grad


# torch.autograd.grad does not work with reentrant ones.
WAYS = [(False, "grad"), *((r, how) for r in (False, True) for how in ("method", "backward"))]


@pytest.mark.parametrize(("reentrant", "how"), WAYS)
def test_in_the_context(reentrant, how):
    found, model = [], Attention(bare=True)
    for checkpointed in (plain, checkpoints(reentrant)):
        x = torch.ones(2, 5, 8).cumsum(1).requires_grad_()
        torch.manual_seed(1)
        with fastattn.use_for_sdpa() as calls:
            found.append(gradient(checkpointed(model.forward, x), x, how))
    assert calls.fastattn == 2
    assert torch.equal(*found)
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_of_the_modules_of_a_wrapped_model(reentrant, bare):
    found = []
    for checkpointed in (plain, checkpoints(reentrant)):
        model = Model(bare, checkpointed)
        calls = fastattn.use_for_sdpa(model)
        x = torch.ones(2, 5, 8).cumsum(1).requires_grad_()
        torch.manual_seed(1)
        found.append([gradient(model(x), x, "method"), *(p.grad for p in model.parameters())])
    assert calls.fastattn == 2
    assert len(found[0]) == (2 if bare else 4)
    for one, again in zip(*found, strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_method_of_a_wrapped_model_in_the_context(reentrant):
    found = []
    for checkpointed in (plain, of_a_method(reentrant)):
        model = Model(True, checkpointed)
        fastattn.use_for_sdpa(model)
        x = torch.ones(2, 5, 8).cumsum(1).requires_grad_()
        torch.manual_seed(1)
        with fastattn.use_for_sdpa() as calls:
            found.append(gradient(model(x), x, "method"))
    assert calls.fastattn == 2
    assert torch.equal(*found)


SEEN = []


class Loss(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    """With torch's own rule: results of a function are of the type of its arguments."""


@pytest.mark.parametrize("how", ["method", "backward", "grad"])
def test_a_gradient_has_the_type_that_it_has_outside(how):
    def found():
        x = torch.ones(3).as_subclass(Plain).requires_grad_()
        return type(gradient(x * 2, x, how))

    outside = found()
    with fastattn.use_for_sdpa():
        assert found() is outside


PATCHED = """
import functools, torch
def patch(owner, name):
    own = getattr(owner, name)
    @functools.wraps(own)
    def patched(*args, **kwargs):
        return own(*args, **kwargs)
    setattr(owner, name, patched)
patch(torch.autograd, "backward")
patch(torch.autograd, "grad")
torch.Tensor.backward = functools.partialmethod(torch.Tensor.backward)
import fastattn
x = torch.ones(2, 5, 8, requires_grad=True)
with fastattn.use_for_sdpa() as calls:
    out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.autograd.backward([out.sum()], retain_graph=True)
    out.sum().backward()
assert calls.fastattn == 1
"""


def test_functions_that_were_replaced_before_the_import():
    subprocess.run([sys.executable, "-c", PATCHED], check=True)


@pytest.mark.parametrize("how", ["method", "backward", "grad"])
def test_a_subclass_sees_its_backward_pass_in_the_context(how):
    x = torch.ones(3).as_subclass(Loss).requires_grad_()
    SEEN.clear()
    with fastattn.use_for_sdpa():
        found = gradient(x * 2, x, how)
    assert torch.equal(found.as_subclass(Tensor), torch.full((3,), 8.0))
    assert {Tensor.backward, torch.autograd.backward, torch.autograd.grad} & set(SEEN)
