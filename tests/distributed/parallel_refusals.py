"""What parallelize refuses, on every rank alike; each function runs on every rank."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from parallel_cases import drawn, module_of
from parallel_promises import PLAIN, by_heads, one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import prune

import fastattn
from fastattn import KVCache, MultiheadAttention
from fastattn.distributed import Layout, parallelize


def wrong_arguments():
    size = dist.get_world_size()
    attention = MultiheadAttention(32, 4)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh, got ProcessGroup"):
        parallelize(attention, dist.group.WORLD, heads="tp")
    with pytest.raises(ValueError, match="context, heads: expected a mesh dim for one of them"):
        parallelize(attention, one())
    with pytest.raises(ValueError, match="expected two mesh dims, got 'tp' twice"):
        parallelize(attention, one(), heads="tp", context="tp")
    with pytest.raises(ValueError, match=r"heads: expected one of the mesh dims \('cp',\)"):
        parallelize(attention, one("cp"), heads="tp")
    with pytest.raises(ValueError, match=r"write init_device_mesh\(\.\.\., mesh_dim_names"):
        parallelize(attention, init_device_mesh("cpu", (size,)), heads="tp")
    with pytest.raises(TypeError, match="context: expected the name of a mesh dim, got bool"):
        parallelize(attention, one(), context=True)
    with pytest.raises(TypeError, match="layout: expected a Layout, or a function"):
        parallelize(attention, one(), context="tp", layout=3)
    with pytest.raises(ValueError, match="method: expected"):
        parallelize(attention, one(), context="tp", method="star")


def modules_that_cannot_be_shared():
    size = dist.get_world_size()
    for model, match in (
        (nn.Linear(2, 2), "expected a MultiheadAttention in it, got none"),
        (nn.TransformerEncoderLayer(32, 4), r"self_attn: .* write fastattn.replace_attention"),
        (MultiheadAttention(32 * size, size + 1 if size % 2 else 1), "size divides"),
        (type("Mine", (MultiheadAttention,), {})(32, 4), "in the forward of a subclass"),
    ):
        with pytest.raises(ValueError, match=match):
            parallelize(model, one(), heads="tp")
        assert not any(isinstance(x, DTensor) for x in model.parameters())
    for model, match in (
        (nn.Sequential(fastattn.SelfAttention(8)), "0: SelfAttention cannot share a sequence"),
        (nn.Sequential(Own(8)), "0: Own cannot share a sequence"),
        (MultiheadAttention(32, 4, add_zero_attn=True), "write heads= alone"),
    ):
        with pytest.raises(ValueError, match=match):
            parallelize(model, one("cp"), context="cp")
    with pytest.raises(ValueError, match="name both mesh dims in one call"):
        parallelize(by_heads(), one(), heads="tp")


class Own(fastattn.SelfAttention):
    """A user's, in another package."""


def parameters_that_cannot_be_cut():
    """Nothing is, in modules before these either."""

    def prune_weight(model):
        prune.identity(model[1], "in_proj_weight")

    def tie_outside(model):
        model[2].weight = model[1].out_proj.weight

    def tie_otherwise(model):
        model[0].q_proj_weight = model[1].out_proj.weight

    for change, match in (
        (lambda model: model[1].out_proj.register_forward_hook(lambda *_: None), "got hooks"),
        (lambda model: setattr(model[1], "out_proj", nn.Identity()), "or Identity"),
        (prune_weight, "in_proj_weight: expected a parameter"),
        (tie_outside, r"2\.weight: is tied to a parameter of attention"),
        (tie_otherwise, "is tied to a parameter of attention"),
    ):
        model = nn.Sequential(
            MultiheadAttention(32, 4, kdim=32, vdim=20), module_of(PLAIN), nn.Linear(32, 32)
        )
        change(model)
        with pytest.raises(ValueError, match=match):
            parallelize(model, one(), heads="tp")
        assert not any(isinstance(x, DTensor) for x in model.parameters())


def ranks_raise_together():
    """Rows of the last alone do not fit; the others would wait for it."""

    def one_more(length, ranks):
        pieces = Layout.contiguous(length, ranks).pieces
        return Layout(length + 1, (*pieces[:-1], ((pieces[-1][0][0], length + 1),)))

    x = drawn(2, 8, 32)
    module = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=one_more)
    with pytest.raises(ValueError, match=r"query: got .* rows on the ranks"):
        module(x, x, x)
    for wrong in (None, (), 8):
        module = parallelize(
            module_of(PLAIN), one("cp"), context="cp", layout=lambda *_, x=wrong: x
        )
        with pytest.raises(TypeError, match=f"returns a Layout, got {type(wrong).__name__}"):
            module(x, x, x)


def what_one_rank_refuses_all_refuse():
    """Without a Layout: the last rank says why, and no other waits for it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, at_last = drawn(2, 8, 32), rank == size - 1
    says, mask = "refuses its arguments, and says why", torch.zeros(8, 8 * size)
    nested = torch.nested.nested_tensor([x[0], x[1]])
    cases = [
        ((x[..., :8],) * 3, {}, AssertionError, "embedding dimension of 32"),
        ((nested,) * 3, {}, TypeError, "one is nested"),
        ((x.numpy(),) * 3, {}, TypeError, "query: expected a Tensor, got ndarray"),
        ((x, x, x), dict(attn_mask=mask[:, 1:]), RuntimeError, "shape of the 2D attn_mask"),
        ((x, x, x), dict(attn_mask=mask[:, :8]), ValueError, "attn_mask: expected all"),
        ((x, x, x), dict(attn_mask=mask, cache=KVCache()), ValueError, "cache: keys of a shared"),
    ]
    alike = [
        ((x[:1],) * 3, dict(attn_mask=mask), "samples: expected the same on every rank"),
        ((x, x, x), {}, "attn_mask is given: expected the same on every rank"),
        ((x.double(),) * 3, dict(attn_mask=mask), "dtype: expected the same on every rank"),
    ]
    for layout in (None, Layout.contiguous):
        module = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=layout)
        for points, options, error, match in cases:
            given = (points, options) if at_last else ((x, x, x), dict(attn_mask=mask))
            wanted = (error, match) if at_last else (ValueError, says)
            with pytest.raises(wanted[0], match=wanted[1]):
                module(*given[0], need_weights=False, **given[1])
        for points, options, match in alike:
            given = (points, options) if at_last else ((x, x, x), dict(attn_mask=mask))
            with pytest.raises(ValueError, match=match):
                module(*given[0], **given[1])


def scripts():
    with pytest.raises(NotImplementedError, match="a shared module cannot be scripted"):
        torch.jit.script(by_heads())


def pickles():
    for module in (by_heads(), parallelize(module_of(PLAIN), one("cp"), context="cp")):
        with pytest.raises(TypeError, match=r"cannot be pickled: save module\.state_dict\(\)"):
            pickle.dumps(nn.Sequential(module))


def calls_that_cannot_be_shared():
    x, size = drawn(2, 8, 32), dist.get_world_size()
    module = by_heads()
    shared = distribute_tensor(x, one(), [Replicate()])
    with pytest.raises(TypeError, match=r"write x\.full_tensor\(\) of a DTensor"):
        module(shared, shared, shared)
    with pytest.raises(RuntimeError, match=r"attn_mask: expected \(B \* 4, M, N\)"):
        module(x, x, x, attn_mask=torch.zeros(3, 8, 8))
    module.out_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="out_proj: expected a plain linear layer"):
        module(x, x, x)
    layout = Layout.contiguous(8 * size, size)
    module = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=layout)
    with pytest.raises(ValueError, match="one Layout serves one length"):
        module(x, x[:, :4], x[:, :4])
    more = Layout.contiguous(8 * size + 8, size + 1)
    many = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=more)
    with pytest.raises(ValueError, match="one Layout serves one length"):
        many(x, x, x)
    ring = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=layout, method="ring")
    with pytest.raises(ValueError, match="'ring' cannot rescale a mean"):
        ring(x, x, x)
    with pytest.raises(ValueError, match=r"key_padding_mask: expected all \d+ keys"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="cache: keys of a shared sequence"):
        module(x, x, x, cache=KVCache())


def plain_parameters_of_shared_heads():
    """The whole of one would be taken for a rank's part."""
    module, x = by_heads(), drawn(2, 5, 32)
    plain = dict(module_of(PLAIN).named_parameters())
    with pytest.raises(TypeError, match=r"in_proj_weight: expected a DTensor.*distribute_tensor"):
        torch.func.functional_call(module, plain, (x, x, x))


REFUSALS = [
    wrong_arguments,
    modules_that_cannot_be_shared,
    parameters_that_cannot_be_cut,
    ranks_raise_together,
    what_one_rank_refuses_all_refuse,
    scripts,
    pickles,
    calls_that_cannot_be_shared,
    plain_parameters_of_shared_heads,
]
