"""DTensors at the public functions: sharded by samples, heads or rows, on a mesh of any dims.

    Shard(0), Shard(1)   each rank computes its samples or heads, with an origin for dropout's bits
    Shard(2)             the mesh dim shares the sequence: context.py, in contiguous shares
    Replicate            every rank computes the same

Keys and values come to the placements of query. A mask, bias or parameter is sharded where it has
the dim, and replicated where it broadcasts: its gradient is then a sum over that mesh dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fastattn import functional
from fastattn.distributed import comm, context
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.problem import Mask, Origin, Score, arguments, relative

Dims = tuple[int | None, int | None, int | None]  # where B, H and M stand in an operand


def take(
    score: Score, tensors: tuple, return_lse: bool, backend: str, options: dict[str, Any]
) -> Any:
    """The results of a call of DTensors, as DTensors; NotImplemented if there are none."""
    points, parameter = tensors[:3], tensors[3]
    if not any(isinstance(x, DTensor) for x in points):
        return NotImplemented
    call = _Call(points)
    if options.get("return_weights") == "mean" and Shard(1) in call.placements:
        raise ValueError(
            "return_weights='mean': heads are on several ranks, and so is their mean: write "
            "return_weights='full'"
        )
    if isinstance(options.get("bias"), relative.Relative):
        raise ValueError(
            "bias: expected a tensor beside DTensors: write bias.to_dense(M, N), which is sharded"
        )
    q, k, v = (call.local(x, (0, 1, 2), broadcasts=(1,) if x.shape[1] == 1 else ()) for x in points)
    if parameter is not None:
        if score == "gaussian":
            raise ValueError("bandwidth: no DTensors here: write method-local tensors, to_local()")
        if score == "additive" and isinstance(parameter, Tensor) and parameter.dim() == 1:
            raise ValueError(
                "weight: expected [H, D] beside DTensors [B, H, M, D], got [D]: write weight[None]"
            )
        parameter = call.local(parameter, (None, 0 if parameter.dim() == 2 else None, None))
    sink = options.pop("sink", None)
    own = call.options(dict(options))
    results = call.run(
        score, (q, k, v, parameter), call.local(sink, (None, 0, None)), return_lse, backend, own
    )
    kinds = ["out", *(["weights"] if options.get("return_weights") else []),
             *(["lse"] if return_lse else [])]  # fmt: skip
    every = results if isinstance(results, tuple) else (results,)
    mean = options.get("return_weights") == "mean"
    made = [
        call.result(x, mean and kind == "weights") for kind, x in zip(kinds, every, strict=True)
    ]
    return made[0] if len(made) == 1 else tuple(made)


class _Call:
    """The placements of a call: those of query, one for each mesh dim."""

    def __init__(self, points: tuple) -> None:
        for name, x in zip(("query", "key", "value"), points, strict=True):
            if not isinstance(x, DTensor):
                raise TypeError(f"{name}: expected a DTensor beside others, got {type(x).__name__}")
            if x.dim() != 4:
                raise ValueError(f"{name}: DTensors have 4 dims [B, H, M, D], got {list(x.shape)}")
            if x.device_mesh != points[0].device_mesh:
                raise ValueError(f"{name}: expected the mesh of query")
            if x.shape[0] != points[0].shape[0]:
                raise ValueError(f"{name}: expected as many samples as query: write x.expand(...)")
        query, key, _ = points
        if query.shape[1] == 1 != max(x.shape[1] for x in points):
            raise ValueError("query: expected the heads of key: write query.expand(-1, H, -1, -1)")
        self.mesh = query.device_mesh
        self.sizes = (query.shape[0], query.shape[1], query.shape[2])
        self.N = key.shape[2]
        self.placements = [self._wanted(x) for x in query.placements]
        self._check_heads(query, key)
        shared = [d for d, x in enumerate(self.placements) if x == Shard(2)]
        if len(shared) > 1:
            raise ValueError(
                "query: expected rows on one mesh dim at most: write Shard(1) on the other"
            )
        self.context = shared[0] if shared else None

    @staticmethod
    def _wanted(placement: Any) -> Any:
        if isinstance(placement, Shard) and placement.dim % 4 < 3 and type(placement) is Shard:
            return Shard(placement.dim % 4)
        return Replicate()

    def _check_heads(self, query: Tensor, key: Tensor) -> None:
        """Heads go to ranks in whole groups, equally many to each."""
        over = 1
        for dim, placement in enumerate(self.placements):
            over *= self.mesh.size(dim) if placement == Shard(1) else 1
        H, Hkv = query.shape[1], key.shape[1]
        if over > 1 and (H % over or (Hkv % over and Hkv != 1)):
            raise ValueError(
                f"heads: expected a multiple of {over} ranks, got {H} of query and {Hkv} of key: "
                "write query.redistribute(placements=[Shard(2)])"
            )

    # ---- operands ----

    def local(self, x: Any, dims: Dims, broadcasts: tuple[int, ...] = (0, 1, 2)) -> Any:
        """The rank's part of an operand; where it broadcasts, it is the same on all ranks.

        ``broadcasts``: the dims of B, H and M in which one entry stands for all.
        """
        if not isinstance(x, Tensor):
            return x
        want, grad = [], []
        for placement in self.placements:
            at = dims[placement.dim] if isinstance(placement, Shard) else None
            sharded = at is not None and (x.shape[at] != 1 or placement.dim not in broadcasts)
            want.append(Shard(at) if sharded else Replicate())
            # Over the context's mesh dim, context.py has summed already.
            alone = sharded or placement in (Replicate(), Shard(2))
            grad.append(want[-1] if alone else Partial())
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return x.redistribute(self.mesh, want).to_local(grad_placements=grad)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with local masks and biases."""
        for name in ("attn_mask", "bias"):
            options[name] = self._broadcast(options.get(name))
        mask = options.get("mask")
        if isinstance(mask, Mask):
            limits = {n: self._limit(n, getattr(mask, n)) for n in ("kv_len", "kv_begin")}
            options["mask"] = dataclasses.replace(mask, keep=self._broadcast(mask.keep), **limits)
        return options

    def _broadcast(self, x: Any) -> Any:
        """Of a mask or bias, broadcastable to [B, H, M, N] from the right."""
        if not isinstance(x, Tensor) or arguments.is_causal_bias(x):
            return x
        missing = 4 - x.dim()
        b, h, m = (d - missing if d >= missing else None for d in range(3))
        return self.local(x, (b, h, m))

    def _limit(self, name: str, x: Any) -> Any:
        """Of [B], which does not broadcast, or of [B, M] or [1, M]."""
        if isinstance(x, (list, tuple)):
            x = torch.tensor(x, device=self.mesh.device_type)
        if not isinstance(x, Tensor):
            return x
        (B, _, M), shape = self.sizes, x.shape
        of_samples = x.dim() == 1 and shape[0] == B
        of_rows = x.dim() == 2 and (shape[0] == B or shape[0] == 1) and shape[1] == M
        if not (of_samples or of_rows):  # of which a rank might find its part right
            raise ValueError(f"mask.{name}: expected [{B}] or [{B}, {M}], got {list(shape)}")
        if of_samples:
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
        if options.get("dropout_p") and options.get("seed") is None:
            groups = [Group(self.mesh.get_group(dim)) for dim in range(self.mesh.ndim)]
            options["seed"] = comm.seed(tensors[0].device, groups)
        if self.context is not None:
            group = Group(self.mesh.get_group(self.context))
            rows, keys = (Layout.contiguous(n, group.size) for n in (self.sizes[2], self.N))
            return context.attend(
                score, tensors, group, self.origin(), (None, rows, keys, None), sink, return_lse,
                backend, options,
            )  # fmt: skip
        return context.alone(score, tensors, self.origin(), sink, return_lse, backend, options)

    def result(self, x: Tensor, mean: bool) -> DTensor:
        """A local result as a part of the whole. ``mean``: it has no head dim."""
        placements = [
            Shard(1) if mean and placement == Shard(2) else placement
            for placement in self.placements
        ]
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


functional.takers.append(take)
