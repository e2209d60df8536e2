"""Cases of attention over ranks, each compared with the whole within the one budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import equality
import torch
import torch.distributed as dist

from fastattn import testing
from fastattn.distributed import Layout, context_parallel_attention, count_bytes
from fastattn.testing import DROPOUT_SEED, Case, Tensors


@dataclass(frozen=True)
class Shared:
    """A case, by a method, in a layout."""

    method: str
    case: Case
    layout: str = "zigzag"

    def __str__(self) -> str:
        return f"{self.method}-{self.case.score}-{self.case.name}-{self.layout}"


def _case(name: str, **fields: Any) -> Case:
    fields = dict(H=4, Hkv=4, M=50, N=50, D=16, E=24, lse=True) | fields
    return Case(name, **fields)


def layouts_of(kind: str, M: int, N: int, ranks: int) -> tuple[Layout, Layout]:
    """Of queries and of keys."""
    if kind == "balanced":
        return tuple(
            Layout.balanced([n % 17 + 1 for n in range(size)], ranks, 3, unit=4) for size in (M, N)
        )
    make = {"contiguous": Layout.contiguous}.get(
        kind, lambda n, ranks: Layout.zigzag(n, ranks, unit=4)
    )
    return make(M, ranks), make(N, ranks)


def take(x: Any, layout: Layout, dim: int, rank: int) -> Any:
    """The rank's part; all of it where the dim broadcasts."""
    return x if x is None or x.shape[dim] != layout.length else layout.take(x, dim, rank)


def local_mask(t: Tensors, layout: Layout, rank: int) -> Any:
    """The mask with this rank's rows."""
    own = {"keep": take(t.mask.keep, layout, 2, rank)}
    for name in ("kv_len", "kv_begin"):
        x = getattr(t.mask, name)
        alike = x is None or x.dim() == 1 or layout.length == 1
        own[name] = x if alike else layout.take(x, 1, rank)
    return dataclasses.replace(t.mask, **own)


def run_shared(shared: Shared) -> dict[str, torch.Tensor]:
    """Results and gradients of this rank: parts by position, and what is the same everywhere."""
    case, group = shared.case, dist.group.WORLD
    rank, t = dist.get_rank(), testing.make(case)
    rows, keys = layouts_of(shared.layout, case.M, case.N, dist.get_world_size())
    leaves: dict[str, Any] = {
        "q": rows.take(t.q, 2, rank), "k": keys.take(t.k, 2, rank), "v": keys.take(t.v, 2, rank),
        "w": t.w, "sink": t.sink, "bias": take(t.bias, rows, 2, rank),
    }  # fmt: skip
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items() if x is not None}
    options: dict[str, Any] = dict(
        mask=local_mask(t, rows, rank), bias=leaves.get("bias"), weight=leaves.get("w"),
        sink=leaves.get("sink"),
        return_weights=case.weights, return_lse=case.lse, layout=rows, key_layout=keys,
        method=shared.method,
    )  # fmt: skip
    options |= dict(enable_gqa=True) if case.score == "dot" else {}
    options |= dict(softcap=case.softcap) if case.softcap else {}
    if case.dropout_p:
        options |= dict(dropout_p=case.dropout_p, seed=DROPOUT_SEED)
    found = context_parallel_attention(leaves["q"], leaves["k"], leaves["v"], group, **options)
    found = found if isinstance(found, tuple) else (found,)
    names = ["out", *(["weights"] if case.weights else []), *(["lse"] if case.lse else [])]
    results = dict(zip(names, found, strict=True))
    upstream: dict[str, Any] = {"out": t.grad_out, "weights": t.grad_weights, "lse": t.grad_lse}
    dims = {"out": 2, "weights": 1 if case.weights == "mean" else 2, "lse": 2}
    grads = [rows.take(upstream[n], dims[n], rank).to(x.dtype) for n, x in results.items()]
    pulled = torch.autograd.grad(list(results.values()), list(leaves.values()), grads)
    results |= {f"grad_{n}": g for n, g in zip(leaves, pulled, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def joined(shared: Shared, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The results of all ranks as those of one device."""
    case = shared.case
    rows, keys = layouts_of(shared.layout, case.M, case.N, len(parts))
    whole = {}
    for name in parts[0]:
        own = [part[name] for part in parts]
        replicated = name in ("grad_w", "grad_sink") or (
            name == "grad_bias" and "m" not in case.bias
        )
        if replicated:
            for x in own[1:]:
                assert torch.equal(x, own[0]), f"{name} differs by rank"
            whole[name] = own[0]
            continue
        dim = 1 if name == "weights" and case.weights == "mean" else 2
        whole[name] = (keys if name in ("grad_k", "grad_v") else rows).join(own, dim)
    return whole


def check(shared: Shared) -> None:
    """Raises on the first rank unless the ranks compute what one device computes."""
    with count_bytes():
        mine = run_shared(shared)
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    if dist.get_rank() == 0:
        compare(shared, joined(shared, parts))


def compare(shared: Shared, whole: dict[str, torch.Tensor]) -> None:
    """Within the budget, with the invariants of any result, and exact where that is promised."""
    case = shared.case
    t = testing.make(case)
    testing.oracle(case, t).check(case, whole)
    testing.assert_invariants(case, t, whole)
    alone = testing.run(case, t)
    equality.note((shared.method, case.score, case.dtype), whole, alone)
    if shared.method == "heads" and case.weights != "mean":  # whole heads, as one device has them
        names = [n for n in ("out", "lse", "weights") if n in whole]
        testing.assert_same_bits({n: whole[n] for n in names}, {n: alone[n] for n in names})


def _cases() -> list[Shared]:
    additive = dict(score="additive", D=8, E=8)
    every = [
        ("zigzag", _case("causal", causal="top_left")),
        ("zigzag", _case("additive", causal="top_left", Hkv=2, **additive)),
        ("balanced", _case("masks", **MASKS)),
        ("balanced", _case("additive-masks", **MASKS, **additive)),
        ("contiguous", _case("cross", M=37, N=91, causal="bottom_right", bias="n", Hkv=2)),
        ("zigzag", _case("dropout", dropout_p=0.3, weights="full", M=52, N=52, **additive)),
        ("zigzag", _case("half", dtype=torch.bfloat16, weights="full", causal="top_left")),
        ("zigzag", _case("half", dtype=torch.bfloat16, causal="top_left", **additive)),
        ("balanced", _case("documents", kv_begin="sorted", kv_len="sorted", M=70, N=70)),
        ("contiguous", _case("few", M=5, N=2, B=1)),
        ("zigzag", _case("one-key-head", Hkv=1, bias="mn", causal="top_left")),
        ("contiguous", _case("few-keys", M=60, N=9, causal="bottom_right", sink=0.5)),
        ("balanced", _case("mean-sink", weights="mean", M=60, N=9, kv_len="batch", sink=0.5)),
        ("balanced", _case("double", dtype=torch.float64, bias="mn")),
        ("contiguous", _case("one-query", M=1, N=6, kv_len="rows", kv_begin="rows")),
        ("zigzag", _case("mean", weights="mean", dropout_p=0.2, keep="bn", bias="bhm", H=5, Hkv=5)),
    ]
    methods = ("heads", "gather", "ring")
    pairs = [(m, layout, case) for layout, case in every for m in methods]
    return [Shared(m, case, x) for m, x, case in pairs if (m, case.weights) != ("ring", "mean")]


MASKS = dict(
    causal="bottom_right", window=(30, -1), kv_len="rows", kv_begin="batch", keep="bhmn", bias="hmn"
)
CASES = _cases()
