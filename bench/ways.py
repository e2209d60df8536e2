"""One call in several ways: by one process alone, or by ranks that share its sequence.

:func:`measured` runs on every rank of a group. While one process computes alone, the others wait;
ways take turns. Results are checked first, and bytes are compared with the formulas of
``context.py``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastattn
from bench import cases, check, context, measure, memory, report
from bench.cases import DIRECTIONS, FORWARD, Case
from bench.measure import Timing
from bench.peers import Implementation, Workload
from fastattn import Mask, testing
from fastattn.backends import registry
from fastattn.distributed import Layout, context_parallel_attention, count_bytes, unshard
from fastattn.problem.record import MASK_TENSORS

METHODS = ("heads", "gather", "ring")
RANKS_OF_BALANCE = (2, 4, 8)

_16K = dict(B=1, H=4, Hkv=4, M=16384, N=16384, D=64, E=64)
CASES = [
    Case("causal", "fp32, one text", testing.Case("causal", causal="top_left", **_16K)),
    Case("documents", "fp32, packed causal texts of 1024 tokens on average",
         testing.Case("documents", **_16K), "packed", mean=1024),
]  # fmt: skip


@dataclass
class SharedRow:
    """One case in one direction. Timings, memory and bytes are by way."""

    case: str
    about: str
    shape: str
    direction: str
    ranks: int
    threads: dict[str, int]  # of each process
    timings: dict[str, Timing] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)  # bytes that a process is given
    memory: dict[str, int] = field(default_factory=dict)  # peak extra bytes of a process
    sent: dict[str, int] = field(default_factory=dict)  # bytes of a rank
    expected: dict[str, int] = field(default_factory=dict)  # of these, by context.Shape
    error_ratios: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        """Whether a way has another result than one device, or sends other bytes than said."""
        errors = [not ratio <= 1 for ratio in self.error_ratios.values()]
        return any(errors) or self.sent != self.expected

    def as_json(self) -> dict:
        """Everything measured; without times and memory if something is wrong."""
        entry = {n: getattr(self, n) for n in "case about shape direction ranks threads".split()}
        entry |= {"wrong": self.wrong, "sent_bytes": self.sent, "by_table": self.expected}
        entry["error_ratios"] = {n: float(f"{r:.3g}") for n, r in self.error_ratios.items()}
        if self.wrong:
            return entry
        entry["times_ms"] = {name: report.timing_json(t) for name, t in self.timings.items()}
        return entry | {"input_bytes": self.inputs, "peak_extra_bytes": self.memory}

    def mib(self, name: str) -> float:
        """What a process takes for a call: inputs, results and all between."""
        return (self.inputs[name] + self.memory[name]) / 2**20


# ---- a case, and the ways to compute it ----


def cost(case: Case, mask: Mask) -> Tensor:
    """How many keys each query keeps, [N]."""
    if isinstance(mask.kv_len, Tensor):
        return (mask.kv_len - mask.kv_begin)[0]
    return torch.arange(1, case.problem.N + 1)


def layouts(case: Case, mask: Mask, ranks: int) -> dict[str, Layout]:
    """The layouts by name. Causal texts are timed in "zigzag", documents in "balanced"."""
    N, each = case.problem.N, cost(case, mask)

    def unit(pieces: int) -> int:
        return max(1, min(128, N // (pieces * ranks)))

    return {
        "contiguous": Layout.contiguous(N, ranks),
        "zigzag": Layout.zigzag(N, ranks, unit(2)),
        "balanced": Layout.balanced(each, ranks, 4, unit(4)),
        "balanced, blocks=16": Layout.balanced(each, ranks, 16, unit(16)),
    }


def balance(case: Case) -> dict[str, list[float]]:
    """Kept pairs of the dearest rank over the mean, for each of ``RANKS_OF_BALANCE``."""
    mask = cases.draw(case).mask
    each = cost(case, mask)
    found: dict[str, list[float]] = {}
    for ranks in RANKS_OF_BALANCE:
        for name, layout in layouts(case, mask, ranks).items():
            found.setdefault(name, []).append(round(context.imbalance(layout, each), 3))
    return found


@dataclass
class Shares:
    """A rank's rows of a whole tensor [B, H, N, D], and back: see ``Implementation.padding``."""

    layout: Layout

    def pad(self, x: Tensor) -> Tensor:
        """This rank's rows."""
        return self.layout.take(x, 2, dist.get_rank())

    def pack(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        return unshard(x, 2, self.layout, dist.group.WORLD)


def alone(threads: int) -> str:
    """The name of one process with so many threads."""
    return f"alone, {threads} thread" + ("s" if threads > 1 else "")


def threads_of_ways(threads: int, ranks: int) -> dict[str, int]:
    """The ways by name, with the threads of a process."""
    return {alone(n): n for n in (1, threads)} | dict.fromkeys(METHODS, max(1, threads // ranks))


def workload(case: Case, device: torch.device, threads: int) -> Workload:
    """The ways as implementations of a case. Every rank draws the whole inputs."""
    t, p = cases.draw(case, device.type), case.problem
    options: dict[str, Any] = {"mask": t.mask, "enable_gqa": p.H != p.Hkv}
    whole = {n: x.detach().requires_grad_() for n, x in {"q": t.q, "k": t.k, "v": t.v}.items()}

    def one() -> Tensor:
        return fastattn.scaled_dot_product_attention(**_named(whole), **options)

    ranks = dist.get_world_size()
    layout = layouts(case, t.mask, ranks)["balanced" if case.keys == "packed" else "zigzag"]
    shares = Shares(layout)
    own = {n: shares.pad(x.detach()).requires_grad_() for n, x in whole.items()}

    def shared(method: str) -> Callable[[], Tensor]:
        of_rows = options | {"mask": own_mask(t.mask, layout)}
        return lambda: context_parallel_attention(
            **_named(own), mesh=dist.group.WORLD, layout=layout, method=method, **of_rows
        )

    ways = {n: Implementation(one, whole) for n in threads_of_ways(threads, ranks)}
    ways |= {m: Implementation(shared(m), own, padding=shares) for m in METHODS}
    return Workload(case, t, t.grad_out, registry.select(cases.problem(case, t), "auto"), ways)


def _named(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"query": leaves["q"], "key": leaves["k"], "value": leaves["v"]}


def own_mask(mask: Mask, layout: Layout) -> Mask:
    """The mask with this rank's rows: limits are [1, N] here, and broadcast over heads."""
    limits = {n: getattr(mask, n) for n in MASK_TENSORS}
    own = {n: layout.take(x, 1, dist.get_rank()) for n, x in limits.items() if x is not None}
    return dataclasses.replace(mask, **own)


def step(work: Workload, name: str, direction: str, threads: int) -> Callable[[], object]:
    """The call on this rank. What one process computes alone, the first of them does."""
    call = work.step(name, direction)
    idle = name not in METHODS and dist.get_rank() > 0

    def run() -> None:
        torch.set_num_threads(threads)
        if not idle:
            call()

    return run


# ---- on every rank ----


def together(device: torch.device) -> Callable[[Callable], float]:
    """A timer: ms until the last rank has finished, the same number on every rank."""

    def timer(call: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        worst = torch.tensor(1e3 * (time.perf_counter() - start), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    return timer


def bytes_of(work: Workload, direction: str) -> dict[str, tuple[int, int]]:
    """(sent by this rank, by the formulas), by method."""
    p, found = work.case.problem, {}
    limits = sum(isinstance(getattr(work.t.mask, n), Tensor) for n in MASK_TENSORS)
    size = work.t.q.element_size()
    shape = context.Shape(p.B, p.H, p.Hkv, p.N, p.D, p.E, size=size, limits=limits)
    for method in METHODS:
        shares: Any = work.implementations[method].padding
        forward, backward = shape.bytes_sent(method, shares.layout.sizes, dist.get_rank())
        with count_bytes() as sent:
            work.step(method, direction)()
        found[method] = sent.bytes, forward + (0 if direction == FORWARD else backward)
    return found


def timed(
    device: torch.device, chosen: list[Case], ways: dict[str, int], seconds: float
) -> list[SharedRow]:
    """The rows of these cases, without memory."""
    rows = []
    for case in chosen:
        work = workload(case, device, max(ways.values()))
        checker = check.Checker(work)
        ratios = {method: checker.error_ratios(method) for method in METHODS}
        for direction in DIRECTIONS:
            calls = {name: step(work, name, direction, n) for name, n in ways.items()}
            timer = together(device)
            for call in calls.values():
                timer(call)
            times = {name: Timing() for name in calls}
            measure.take_turns(timer, calls, times, seconds)
            sent = bytes_of(work, direction)
            rows.append(
                SharedRow(
                    case.name, case.about, case.shape, direction,
                    dist.get_world_size(), ways, times,
                    sent={method: x for method, (x, _) in sent.items()},
                    expected={method: x for method, (_, x) in sent.items()},
                    error_ratios={m: check.worst(x[direction]) for m, x in ratios.items()},
                )
            )  # fmt: skip
    return rows


def memory_of(
    device: torch.device, case: Case, direction: str, ways: dict[str, int]
) -> dict[str, tuple[int, int]]:
    """(inputs, peak extra bytes) by way, of the rank that takes most."""
    peak = memory.cpu_bytes if device.type == "cpu" else memory.cuda_bytes
    found, threads, tiny = {}, max(ways.values()), case.tiny()
    heads = dataclasses.replace(tiny.problem, H=case.problem.H, Hkv=case.problem.Hkv)
    tiny = dataclasses.replace(tiny, problem=heads)  # which ranks can share
    for name, n in ways.items():
        step(workload(tiny, device, threads), name, direction, n)()  # for what happens once
        work = workload(case, device, threads)
        call = step(work, name, direction, n)
        own = torch.tensor([inputs_of(work, name, direction), peak(call)], device=device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        found[name] = tuple(own.tolist())
    return found


def inputs_of(work: Workload, name: str, direction: str) -> int:
    """Bytes of this rank's query, key and value, and of the output's gradient."""
    way = work.implementations[name]
    upstream = way.padding.pad(work.upstream) if way.padding else work.upstream
    held = [*way.leaves.values(), *([] if direction == FORWARD else [upstream])]
    return sum(x.numel() * x.element_size() for x in held)


def measured(
    device: torch.device, chosen: list[Case], threads: int, seconds: float
) -> list[SharedRow]:
    """The rows of these cases. Memory comes first, while the process has freed nothing large."""
    ways = threads_of_ways(threads, dist.get_world_size())
    with memory.counting():
        found = [memory_of(device, c, direction, ways) for c in chosen for direction in DIRECTIONS]
    rows = timed(device, chosen, ways, seconds)
    for row, of_ways in zip(rows, found, strict=True):
        row.inputs, row.memory = ({name: x[n] for name, x in of_ways.items()} for n in (0, 1))
    return rows
