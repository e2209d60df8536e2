"""DTensors at the public functions: sharded by samples, heads or rows, on a mesh of any dims.

    Shard(0), Shard(1)   each rank computes its samples or heads, with an origin for dropout's bits
    Shard(2)             the mesh dim shares the sequence: context.py, in contiguous shares
    Replicate            every rank computes the same

Keys and values are moved to the placements of query. A mask, bias or parameter is sharded where it
has the dim. Where it broadcasts it is replicated, and its gradient is a sum over that mesh dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastattn import functional, sinks
from fastattn.distributed import agree, comm, context, heads, sharding
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.problem import Mask, Origin, Score, arguments, parameter, relative, validate
from fastattn.problem.mask import LIMITS

Dims = tuple[int | None, int | None, int | None]  # where B, H and M stand in an operand


def take(
    score: Score, tensors: tuple, return_lse: bool, backend: str, options: dict[str, Any]
) -> Any:
    """The results of a call of DTensors, as DTensors; NotImplemented if there are none."""
    points, w = tensors[:3], tensors[3]
    if not any(isinstance(x, DTensor) for x in points):
        _check_plain(w, options)
        return NotImplemented
    call = _Call(points, options.get("enable_gqa", False) or score == "additive")
    if options.get("return_weights") == "mean" and call.shares_heads:
        raise ValueError(
            "return_weights='mean': heads are on several ranks, and so is their mean: write "
            "return_weights='full'"
        )
    if isinstance(options.get("bias"), relative.Relative):
        raise ValueError(
            "bias: expected a tensor beside DTensors: write bias.to_dense(M, N), which is sharded"
        )
    if isinstance(w, Tensor):
        if score == "gaussian":
            raise ValueError(
                "bandwidth: expected a number beside DTensors, got a tensor: write x.to_local()"
            )
        w = call.weight(w)
    q, k, v = (call.local(x, (0, 1, 2), broadcasts=(1,) if x.shape[1] == 1 else ()) for x in points)
    sink = options.pop("sink", None)
    own = call.options(dict(options))
    results = call.run(score, (q, k, v, w), call.sink(sink), return_lse, backend, own)
    kinds = ["out", *(["weights"] if options.get("return_weights") else []),
             *(["lse"] if return_lse else [])]  # fmt: skip
    every = results if isinstance(results, tuple) else (results,)
    mean = options.get("return_weights") == "mean"
    made = [
        call.result(x, mean and kind == "weights") for kind, x in zip(kinds, every, strict=True)
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _check_plain(weight: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for a DTensor beside plain query, key and value."""
    if (name := agree.dtensor_of(agree.by_name(options, weight=weight))) is not None:
        raise ValueError(
            f"{name}: expected a plain tensor, as query is, got a DTensor: write "
            "x.full_tensor(), or make DTensors of query, key and value"
        )


class _Call:
    """The placements of a call: those of query, one for each mesh dim."""

    def __init__(self, points: tuple, grouped: bool) -> None:
        for name, x in zip(("query", "key", "value"), points, strict=True):
            if not isinstance(x, DTensor):
                raise TypeError(f"{name}: expected a DTensor beside others, got {type(x).__name__}")
            if x.dim() != 4:
                raise ValueError(f"{name}: DTensors have 4 dims [B, H, M, D], got {list(x.shape)}")
            if x.device_mesh != points[0].device_mesh:
                raise ValueError(f"{name}: expected the mesh of query")
            if x.shape[0] != points[0].shape[0]:
                raise ValueError(f"{name}: expected as many samples as query: write x.expand(...)")
        query, key, value = points
        validate.check_lengths(key, value)
        if query.shape[1] == 1 != max(x.shape[1] for x in points):
            raise ValueError("query: expected the heads of key: write query.expand(-1, H, -1, -1)")
        self.mesh = query.device_mesh
        # Stand for the whole in checks: a rank might find its part right.
        self.query, k, v = (_blank(x) for x in points)
        validate.match_heads(self.query, k, v, grouped)
        self.sizes = (query.shape[0], query.shape[1], query.shape[2])
        self.lead = validate.Lead((query.shape[0],), True, (*query.shape[1:3], key.shape[2]))
        self.placements = [self._wanted(x) for x in query.placements]
        ranks = map(self.mesh.size, range(self.mesh.ndim))  # its shape torch 2.11 cannot compile
        sizes = zip(ranks, self.placements, strict=True)
        over = math.prod([n for n, x in sizes if x == Shard(1)])  # ranks
        self.shares_heads = over > 1
        self._check_heads(over, query.shape[1], key.shape[1], value.shape[1])
        shared = [d for d, x in enumerate(self.placements) if x == Shard(2)]
        if len(shared) > 1:
            raise ValueError(
                "query: expected rows on one mesh dim at most: write Shard(1) on the other"
            )
        self.context = shared[0] if shared else None

    @staticmethod
    def _wanted(placement: Any) -> Any:
        return placement if type(placement) is Shard and placement.dim < 3 else Replicate()

    def _check_heads(self, over: int, H: int, Hkv: int, Hv: int) -> None:
        """Heads go to ranks in whole groups, equally many to each."""
        if H % over or any(n % over and n != 1 for n in (Hkv, Hv)):
            raise ValueError(
                f"heads: expected a multiple of {over} ranks, got {H} of query, {Hkv} of key and "
                f"{Hv} of value: write query.redistribute(placements=[Shard(2)])"
            )

    # ---- operands ----

    def local(self, x: Any, dims: Dims, broadcasts: tuple[int, ...] = (0, 1, 2)) -> Any:
        """The rank's part of an operand; where it broadcasts, it is the same on all ranks.

        ``broadcasts``: the dims of B, H and M in which one entry stands for all.
        """
        if not isinstance(x, Tensor):
            return x
        want, sums = [], []
        for d, placement in enumerate(self.placements):
            at = dims[placement.dim] if isinstance(placement, Shard) else None
            sharded = at is not None and (x.shape[at] != 1 or placement.dim not in broadcasts)
            want.append(Shard(at) if sharded else Replicate())
            # Over the context's mesh dim, context.py makes the sum.
            if not sharded and placement not in (Replicate(), Shard(2)):
                sums.append(Group(self.mesh.get_group(d)))
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        own = x.redistribute(self.mesh, want).to_local(grad_placements=want)
        return heads.replicated(own, *sums)

    def weight(self, x: Tensor) -> Any:
        """The rank's part of the additive score's weight."""
        if x.dim() == 1:
            raise ValueError(
                "weight: expected [H, D] beside DTensors [B, H, M, D], got [D]: write weight[None]"
            )
        parameter.has_head_dim("additive", self.query, x)
        parameter.match_weight(_blank(x), self.sizes[1], self.query.shape[-1])
        return self.local(x, (None, 0, None))

    def sink(self, x: Any) -> Any:
        """The rank's part of the sinks."""
        if isinstance(x, Tensor):
            sinks.check(_blank(x), self.query)
        return self.local(x, (None, 0, None))

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with local masks and biases."""
        self.rows = agree.rows_of(options)
        options["seed"] = self.local(options.get("seed"), (None, None, None))
        for name in ("attn_mask", "bias"):
            options[name] = self._broadcast(name, options.get(name))
        mask = options.get("mask")
        if isinstance(mask, Mask):
            limits = {n: self._limit(n, getattr(mask, n)) for n in LIMITS}
            keep = self._broadcast("mask.keep", mask.keep)
            options["mask"] = dataclasses.replace(mask, keep=keep, **limits)
        return options

    def _broadcast(self, name: str, x: Any) -> Any:
        """Of a mask or bias, broadcastable to [B, H, M, N] from the right."""
        if not isinstance(x, Tensor) or arguments.is_causal_bias(x):
            return x
        self.lead.to_4d(name, _blank(x))
        missing = 4 - x.dim()
        b, h, m = (d - missing if d >= missing else None for d in range(3))
        return self.local(x, (b, h, m))

    def _limit(self, name: str, x: Any) -> Any:
        """Of [B], which does not broadcast, or of [B, M] or [1, M]."""
        name = f"mask.{name}"
        whole = _blank(x) if isinstance(x, DTensor) else x
        if validate.check_limit(name, self.lead, self.query, whole) is None:
            return None
        x = arguments.integers(name, x, self.query.device)
        if x.dim() == 1:
            return self.local(x, (0, None, None), broadcasts=())
        return self.local(x, (0, None, 1))

    # ---- the call ----

    def origin(self) -> Origin:
        """Where this rank's samples and heads begin."""
        first = [0, 0]
        sizes = list(self.sizes)
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and placement.dim < 2:
                rank, d = self.mesh.get_local_rank(dim), placement.dim
                pieces = Layout.contiguous(sizes[d], self.mesh.size(dim)).pieces
                begin, end = pieces[rank][0]
                first[d] += begin
                sizes[d] = end - begin
        return Origin(*first)

    def run(
        self, score: Score, tensors: tuple, sink: Any, return_lse: bool, backend: str, options: dict
    ) -> Any:
        """The local results."""
        origin = self.origin() if options.get("dropout_p") else Origin()  # of its bits alone
        if options.get("dropout_p") and options.get("seed") is None:
            groups = [Group(self.mesh.get_group(dim)) for dim in range(self.mesh.ndim)]
            options["seed"] = comm.seed(tensors[0].device, groups)
        if self.context is not None:
            group = Group(self.mesh.get_group(self.context))
            rows, keys = (Layout.contiguous(n, group.size) for n in self.lead.hmn[1:])
            return context.attend(
                score, tensors, group, origin, (None, rows, keys, None), sink, return_lse,
                backend, options, self.rows,
            )  # fmt: skip
        return context.alone(score, tensors, origin, sink, return_lse, backend, options)

    def result(self, x: Tensor, mean: bool) -> DTensor:
        """A local result as a part of the whole. ``mean``: it has no head dim."""
        of_mean = {Shard(1): Replicate(), Shard(2): Shard(1)} if mean else {}
        placements = [of_mean.get(x, x) for x in self.placements]
        whole = list(x.shape)
        whole[0] = self.sizes[0]
        whole[1] = self.sizes[2] if mean else self.sizes[1]
        if not mean:
            whole[2] = self.sizes[2]
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(whole),
            stride=stride,
        )  # fmt: skip


def _blank(x: Tensor) -> Tensor:
    """A plain tensor of the shape and dtype of the whole, of one number."""
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


functional.takers.append(take)
sharding.register()
