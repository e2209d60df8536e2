"""A tiny Llama under tensor parallelism; each function runs on every rank, for test_ranks.py."""

from __future__ import annotations

import copy

import tiny_models
import torch
import torch.distributed as dist
import torchvision_stub
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastattn.integrations.transformers import register
from fastattn.testing import assert_within_budget, largest

torchvision_stub.define_missing_operators()  # in the processes of ranks too
CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
JOINED = ("o_proj", "down_proj")


def plan():
    """Heads and hidden units by columns, and back by rows."""
    layers = "model.layers.*"
    parts = {n: "self_attn" if n[1:] == "_proj" else "mlp" for n in (*CUT, *JOINED)}
    return {
        f"{layers}.{part}.{n}": ColwiseParallel() if n in CUT else RowwiseParallel()
        for n, part in parts.items()
    }


def results(model, inputs):
    """Logits of real tokens, and the gradient of every parameter."""
    out = model(**inputs).logits[inputs["attention_mask"].bool()]
    rng = torch.Generator().manual_seed(3)
    (out * torch.randn(out.shape, generator=rng).to(out.dtype)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return out.detach(), whole


def compare(ours, peer, inputs):
    truth = copy.deepcopy(peer).double()
    truth.set_attn_implementation("sdpa")
    got = [results(model, inputs) for model in (ours, peer, truth)]
    outs, grads = zip(*got, strict=True)
    assert_within_budget(*outs, name="logits")
    scale = max(map(largest, grads[2].values()))
    for name in grads[2]:
        assert_within_budget(*(g[name] for g in grads), name=name, scale=scale)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def twins():
    register()
    peer = tiny_models.build("llama")
    ours = copy.deepcopy(peer)
    ours.set_attn_implementation("fastattn")
    return ours, peer


def check(ours, peer):
    """Each rank has its key heads, logits and gradients; what is generated, with a cache, too."""
    held = ours.model.layers[0].self_attn.k_proj.weight.to_local()
    assert held.shape[0] == 16 // dist.get_world_size()
    for left in (False, True):
        ours.zero_grad()
        peer.zero_grad()
        inputs = tiny_models.inputs("llama", left=left)
        compare(ours, peer, inputs)
    found = [m.generate(**inputs, max_new_tokens=8, do_sample=False) for m in (ours, peer)]
    assert torch.equal(*found)


def planned_by_torch():
    ours, peer = twins()
    parallelize_module(ours, mesh(), plan())
    check(ours, peer)


def planned_by_transformers():
    """By the model's own plan, as ``from_pretrained(..., distributed_config=)`` applies it."""
    from transformers.distributed import DistributedConfig, tensor_parallel

    ours, peer = twins()
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    own, *_ = ours._resolve_parallel_plans(config)
    tensor_parallel.apply_tensor_parallelism(ours, mesh(), own)
    check(ours, peer)


CASES = [planned_by_torch, planned_by_transformers]
