"""Modules on a mesh, each compared with the same module in one process, within the one budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fastattn import MultiheadAdditiveAttention, MultiheadAttention
from fastattn.distributed import Layout, parallelize, shard, unshard
from fastattn.testing import assert_within_budget

B, E, H, N, KEYS = 3, 32, 4, 20, 28


@dataclass(frozen=True)
class Called:
    """A module and a call of it."""

    name: str
    cls: type = MultiheadAttention
    options: dict = field(default_factory=dict)  # of the module
    cross: bool = False
    attn_mask: str = ""  # "bool" | "float" | "heads", of every head
    padding: str = ""  # "bool" | "float"
    call: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    batched: bool = True

    def __str__(self) -> str:
        return self.name


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on every rank, exact in bfloat16."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.bfloat16().to(dtype)


def module_of(case: Called) -> nn.Module:
    torch.manual_seed(3)
    module = case.cls(E, H, **{"batch_first": True} | case.options)
    for p in module.parameters():  # biases too
        p.data = (p.data + 0.1 * drawn(*p.shape, seed=5)).bfloat16().float()
    return module.to(case.dtype)


def inputs_of(case: Called, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Leaves, whole: query, key, value, masks."""
    own, M = case.options, N
    keys = KEYS if case.cross else N
    first = case.options.get("batch_first", True) or not case.batched

    def points(n: int, width: int, seed: int) -> torch.Tensor:
        shape = ((B, n, width) if first else (n, B, width)) if case.batched else (n, width)
        return drawn(*shape, seed=seed, dtype=dtype)

    made = {"query": points(M, E, 1)}
    if case.cross:
        made["key"] = points(keys, own.get("kdim", E), 2)
        made["value"] = points(keys, own.get("vdim", E), 3)
    masks = {"attn_mask": (M, keys), "key_padding_mask": (B, keys)}
    if case.attn_mask == "heads":
        masks["attn_mask"] = (H * (B if case.batched else 1), M, keys)
    for name, kind in (("attn_mask", case.attn_mask), ("key_padding_mask", case.padding)):
        if kind:
            x = drawn(*masks[name], seed=7, dtype=dtype)
            made[name] = x > 0.5 if kind == "bool" else x
    return {n: x.requires_grad_(x.is_floating_point()) for n, x in made.items()}


@dataclass(frozen=True)
class Way:
    """How ranks share a module."""

    context: bool
    heads: bool
    layout: Callable[[int, int], Layout] | None = None

    def mesh(self) -> DeviceMesh:
        size = dist.get_world_size()
        two = (2, size // 2) if size % 4 == 0 else (size, 1)
        shape = two if self.context and self.heads else (size, 1) if self.context else (1, size)
        return init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp"))

    def layout_of(self, n: int, ranks: int) -> Layout:
        return (self.layout or Layout.contiguous)(n, ranks)

    def __str__(self) -> str:
        names = [n for n in ("context", "heads") if getattr(self, n)]
        return "-".join([*names, *(["zigzag"] if self.layout else [])])


def zigzag(n: int, ranks: int) -> Layout:
    return Layout.zigzag(n, ranks, unit=4)


def outcome(
    case: Called, module: nn.Module, leaves: dict, own: Callable, whole: Callable, seed: int = 11
) -> dict[str, torch.Tensor]:
    """Output, weights, and the gradient of every leaf and parameter."""
    given = {name: own(name, x) for name, x in leaves.items()}
    given.setdefault("key", given["query"])
    given.setdefault("value", given["key"])
    torch.manual_seed(seed)
    found = module(**given, **case.call)
    results = {
        n: whole(n, x) for n, x in zip(("out", "weights"), found, strict=True) if x is not None
    }
    loss = sum((x * drawn(*x.shape, seed=9, dtype=x.dtype)).sum() for x in results.values())
    loss.backward()
    grads = {n: x.grad for n, x in [*leaves.items(), *module.named_parameters()]}
    return {n: x.detach() for n, x in results.items()} | {
        f"grad of {n}": x for n, x in grads.items() if x is not None
    }


def unchanged(module: nn.Module, _mesh: Any) -> nn.Module:
    return module


def alone(
    case: Called, dtype: torch.dtype, change: Callable = unchanged
) -> dict[str, torch.Tensor]:
    """In one process."""
    module = change(module_of(case).to(dtype), None)
    return outcome(case, module, inputs_of(case, dtype), lambda _, x: x, lambda _, x: x)


def shared(case: Called, way: Way, change: Callable = unchanged) -> dict[str, torch.Tensor]:
    """On the ranks of a mesh; everything whole. ``change``: wraps the module, given the mesh."""
    mesh = way.mesh()
    dim_of = {"context": "cp", "heads": "tp"}
    names = {n: dim for n, dim in dim_of.items() if getattr(way, n)}
    module = parallelize(module_of(case), mesh, layout=way.layout, **names)
    leaves, cp = inputs_of(case, case.dtype), mesh["cp"]
    first = case.options.get("batch_first", True) or not case.batched
    dims = dict.fromkeys(("query", "key", "value", "out"), -2 if first else 0)
    dims |= {"attn_mask": -2, "weights": -2}
    if not way.context:
        dims = {}

    def own(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in dims:
            return x
        dim = dims[name]
        return shard(x, dim, way.layout_of(x.shape[dim], cp.size()), cp)

    def whole(name: str, x: torch.Tensor) -> torch.Tensor:
        return unshard(x, dims[name], way.layout_of(N, cp.size()), cp) if name in dims else x

    seed = 11 + dist.get_rank()  # the first rank's counts
    found = outcome(case, change(module, mesh), leaves, own, whole, seed)
    for name, x in found.items():
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if way.context and name.removeprefix("grad of ") not in leaves and name[:4] == "grad":
            dist.all_reduce(x, group=cp.get_group())  # each rank has a part
        found[name] = x
    return found


def compare(
    case: Called, way: Way, change: Callable = unchanged, peer_change: Callable = unchanged,
    peer_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Raises unless ranks compute what one process computes."""
    ours, truth = shared(case, way, change), alone(case, torch.float64)
    ours = {name.replace("module.", ""): x for name, x in ours.items()}
    peer = alone(case, peer_dtype or case.dtype, peer_change)
    assert ours.keys() == truth.keys() == peer.keys(), (ours.keys(), truth.keys())
    for name, x in ours.items():
        assert_within_budget(x, peer[name], truth[name], name)
    if case.options.get("dropout"):
        assert (peer["weights"] == 0).any()
        assert torch.equal(ours["weights"] == 0, peer["weights"] == 0)


ADDITIVE = dict(cls=MultiheadAdditiveAttention)
ONE_HEAD = dict(call=dict(average_attn_weights=False))
WITHOUT = dict(call=dict(need_weights=False))
ANYWHERE = [
    Called("plain"),
    Called("additive", **ADDITIVE, attn_mask="float", padding="float"),
    Called("masks", attn_mask="heads", padding="bool", **ONE_HEAD),
    Called("sequence first", options=dict(batch_first=False), attn_mask="bool"),
    Called("unbatched", attn_mask="heads", batched=False, **ONE_HEAD),
    Called("cross", options=dict(kdim=12, vdim=20), cross=True, padding="bool", **WITHOUT),
    Called("cross of one size", cross=True, attn_mask="bool"),
    Called("without biases", options=dict(bias=False), **WITHOUT),
    Called("causal", attn_mask="bool", call=dict(need_weights=False, is_causal=True)),
    Called("float padding", padding="float"),
    Called("dropout", options=dict(dropout=0.4), **ONE_HEAD),
    Called("additive dropout", **ADDITIVE, options=dict(dropout=0.4)),
    Called("half", dtype=torch.bfloat16),
    Called("additive half", **ADDITIVE, dtype=torch.bfloat16, **WITHOUT),
    Called("double", dtype=torch.float64, **WITHOUT),
]
APPENDED = [
    Called("appended", options=dict(add_bias_kv=True, add_zero_attn=True), padding="bool"),
    Called("appended additive", **ADDITIVE, options=dict(add_bias_kv=True), **ONE_HEAD),
]
HEADS, ROWS = Way(False, True), Way(True, False, zigzag)
BOTH, ANY_ROWS = Way(True, True, zigzag), Way(True, True)
CASES = [
    *((case, HEADS) for case in (*ANYWHERE, *APPENDED)),
    *((case, ROWS) for case in ANYWHERE),
    *((case, BOTH) for case in ANYWHERE),
    (ANYWHERE[0], ANY_ROWS),
    (ANYWHERE[5], ANY_ROWS),
]
