"""Sharding rules of the operators: samples and heads, without dropout. All else is replicated.

These rules are for direct calls of operators. The functions handle DTensors before operators see
them, and do more: dtensor.py. Heads are sharded if the key heads are a multiple of the mesh's
ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fastattn.backends import flops
from fastattn.problem import schemas
from fastattn.problem.mask import LIMITS
from fastattn.problem.record import weights_of
from fastattn.problem.schemas import Call, Saved

Rule = tuple[list[Any], list[Any]]  # placements of results, of arguments

# ---- where samples (0) and heads (1) stand in an argument ----


def _pairs(x: Any, dim: int) -> Any:
    """Of a mask or bias, or where its gradient is a sum."""
    return Replicate() if x.shape[dim] == 1 else Shard(dim)


def _weight(x: Any, dim: int, most: int = 3) -> Any:
    at = dim - (most - len(x.shape))
    return Replicate() if at < 0 else Shard(at)


def _sink(x: Any, dim: int) -> Any:
    return _weight(x, dim, 2)


def _limit(x: Any, dim: int) -> Any:
    return Replicate() if dim == 1 or x.shape[0] == 1 else Shard(0)


_OTHERS = {
    "w": _weight, "bias": _pairs, "keep": _pairs, **dict.fromkeys(LIMITS, _limit),
    "seed": lambda _x, _dim: Replicate(), "sink": _sink,
}  # fmt: skip


def _placed(arguments: dict[str, Any], dim: int | None) -> list[Any]:
    """Of each argument that is a tensor; None of others."""
    placed: list[Any] = []
    for name, x in arguments.items():
        if not hasattr(x, "placements"):
            placed.append(None)
        elif dim is None:
            placed.append(Replicate())
        else:
            placed.append(_OTHERS.get(name, lambda _x, dim: Shard(dim))(x, dim))
    return placed


def _dims(call: Call) -> list[int]:
    """The dims that may be sharded."""
    if call.dropout_p:
        return []
    k: Any = call.k
    whole = k.shape[1] > 0 and k.shape[1] % k.mesh.size() == 0
    return [0, 1] if whole and weights_of(call.weights) != "mean" else [0]


# ---- the rules ----


def _forward(*args: Any) -> list[Rule]:
    call, _ = schemas.split_forward(args)
    given = dict(zip((*Call._fields, "sink"), args, strict=False))
    rules: list[Rule] = [([Replicate()] * 4, _placed(given, None))]
    for dim in _dims(call):
        own = Shard(dim)
        weights = Replicate() if weights_of(call.weights) == "none" else own
        rules.append(([own, own, weights, own], _placed(given, dim)))
    return rules


def _backward(*args: Any) -> list[Rule]:
    call, saved = schemas.split_backward(args)
    given = dict(zip((*Call._fields, *Saved._fields), args, strict=False))
    rules: list[Rule] = [([Replicate()] * 6, _placed(given, None))]
    for dim in _dims(call):
        own = Shard(dim)
        grad_w = Replicate() if call.w is None else own  # [B, H, D]
        grad_bias: Any = Replicate()
        if call.bias is not None and saved.bias_needs_grad:
            grad_bias = own if call.bias.shape[dim] != 1 else Partial()
        grad_sink = Replicate() if saved.sink is None else own  # [B, H]
        rules.append(([own, own, own, grad_w, grad_bias, grad_sink], _placed(given, dim)))
    return rules


def register() -> None:
    """Gives the rules to torch."""
    for prefix in flops.PREFIXES:
        for name, rule in (("forward", _forward), ("backward", _backward)):
            register_sharding(getattr(torch.ops.fastattn, prefix + name).default)(rule)
