"""What this machine can do at most, and how long a case must take on it at least.

The loops of csrc/cpu/entry/limits.cpp give the rates: of multiply-adds, of products of bf16 (pairs
of AVX512-BF16, tiles of AMX), of exponentials, of the inner loops of the other scores, of memory.
The bound of a case is the longer of two times: of its operations at these rates, and of reading its
inputs and writing its results. The share of a row is its bound over its time.

The sum assumes that products and the rest take turns. That holds where both are operations of
vectors. AMX multiplies tiles beside them, so with it the sum is an estimate: a kernel that overlaps
both perfectly could pass it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bench.cases import BOTH, Case, work
from fastattn.backends import operators
from fastattn.testing.cases import _bias_shape

# In the order of Loop in csrc/cpu/base/limits.h, with what each rate counts.
LOOPS = {
    "multiply_add": "GFLOP/s", "pairs": "GFLOP/s", "tiles": "GFLOP/s", "exp2": "G/s",
    "exp2_half": "G/s", "additive": "Gel/s", "additive_grad": "Gel/s",
    "gaussian": "Gel/s", "read": "GB/s",
}  # fmt: skip
# MiB that are read again and again, of which caches hold some. The last is the rate of memory.
READS = tuple(2**n for n in range(9))

# The products of tiles that one of a dtype takes: score/amx/unit.h.
TILE_PRODUCTS = {torch.float32: 6, torch.float16: 3, torch.bfloat16: 1}
GEMM = {torch.float32: "gemm float32", torch.bfloat16: "gemm bfloat16"}
LIBRARIES = ("torch", "oneDNN")

SECONDS, REPEATS = 0.004, 5  # of one call, and calls: the best one counts

Rates = dict[str, float]  # 1e9 a second


def measure(quick: bool = False) -> Rates:
    """The rates of all threads together; empty without the compiled kernels."""
    if operators.EXTENSION_ERROR is not None:
        return {}
    seconds, size = (SECONDS / 16, 128) if quick else (SECONDS, 1024)
    sizes = READS[:3] if quick else READS
    memory, number = torch.zeros(sizes[-1] << 18), list(LOOPS).index("read")
    rates = {name: _loop_rate(n, memory[:0], seconds) for n, name in enumerate(LOOPS)}
    rates |= {_read(mib): _loop_rate(number, memory[: mib << 18], seconds) for mib in sizes}
    rates |= {"read": rates[_read(sizes[-1])], **_gemm_rates(size)}
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def best_of(first: Rates, second: Rates) -> Rates:
    """The higher of the rates measured at two times: the machine may have been busy at one."""
    return {name: max(rate, second.get(name, 0.0)) for name, rate in first.items()}


def _read(mib: int) -> str:
    return f"read {mib} MiB"


def _loop_rate(number: int, memory: torch.Tensor, seconds: float) -> float:
    rounds = 1 if memory.numel() else 1000

    def call() -> float:
        return torch.ops.fastattn.cpu_loop(memory, number, rounds)

    # The shortest of some calls: one that was interrupted would end the search too early.
    while call() > 0 and min(_seconds(call) for _ in range(3)) < seconds:
        rounds *= 2
    return call() / min(_seconds(call) for _ in range(REPEATS)) / 1e9


def _gemm_rates(size: int) -> Rates:
    """Square products of the libraries that torch ships, and of a dtype the best one."""
    rates: Rates = {}
    for dtype, name in GEMM.items():
        x, w = torch.randn(2, size, size).to(dtype)
        calls = dict(zip(LIBRARIES, (lambda: x @ w.T, lambda: _by_onednn(x, w)), strict=True))  # noqa: B023
        for library, call in calls.items():
            try:
                call()
            except (RuntimeError, AttributeError):  # this torch has no such library
                continue
            best = min(_seconds(call) for _ in range(REPEATS))
            rates[f"{name} {library}"] = 2 * size**3 / best / 1e9
            rates[name] = max(rates.get(name, 0.0), rates[f"{name} {library}"])
    return rates


def _by_onednn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- the bound of a case ----


def needs(case: Case, pairs: int, direction: str) -> dict[str, float]:
    """Operations and bytes of one call over this many kept pairs; empty where nobody counted them.

    Each kept pair has one exponential forward and one backward.
    """
    c, both = case.problem, direction == BOTH
    if c.score == "gaussian" and both:
        return {}
    found = {
        f"products {c.dtype}": work(case, pairs, direction)[0],
        "exp2" if c.dtype is torch.float32 else "exp2_half": pairs * (1 + both),
        "bytes": _bytes(case, both),
    }
    if c.score != "dot":
        elements = float(pairs * c.D)
        found[f"products {c.dtype}"] = 2.0 * pairs * c.E * (3 if both else 1)
        found[c.score] = elements * (1 + both)
        found |= {"additive_grad": elements} if both else {}
    return found


def _bytes(case: Case, both: bool) -> int:
    """Inputs and results; backward these are read again, and gradients are written.

    A dense mask has no gradient, and the weights of a module get none.
    """
    c, width = case.problem, case.problem.H * case.problem.D
    own = c.B * (c.H * c.M + c.Hkv * c.N) * (c.D + c.E)
    if case.module:
        own = 2 * c.B * c.N * width + 4 * width**2
    bias = math.prod(_bias_shape(c)) if c.bias else 0
    elements = own * (3 if both else 1) + bias * (1 + both * (1 + c.bias_grad))
    elements += c.B * c.M * c.N if case.need_weights else 0
    mask = {"padding": c.B * c.N, "blocks": c.M * c.N, "documents": c.M * c.N}.get(case.keys, 0)
    return elements * c.dtype.itemsize + mask * (1 + both)


def bound_ms(needed: dict[str, float], rates: Rates) -> float | None:
    """The least time of a call; None if nobody counted, or measured the machine."""
    if not needed or not rates:
        return None
    computing = sum(n / _rate(name, rates) for name, n in needed.items() if name != "bytes")
    return max(computing, needed["bytes"] / _read_rate(needed["bytes"], rates)) / 1e6


def _read_rate(size: float, rates: Rates) -> float:
    """The highest rate of reading so much, or more, again and again: a cache may hold it."""
    smallest = max((mib for mib in READS if mib << 20 <= size), default=READS[0])
    found = [rates[_read(mib)] for mib in READS if mib >= smallest and _read(mib) in rates]
    return max(found, default=rates["read"])


def _rate(name: str, rates: Rates) -> float:
    dtypes = {f"products {dtype}": dtype for dtype in TILE_PRODUCTS}
    return peak(dtypes[name], rates) if name in dtypes else rates[name]


def peak(dtype: torch.dtype, rates: Rates) -> float:
    """GFLOP/s of products of this dtype, on whichever unit has the most."""
    pairs = rates["pairs"] if dtype is torch.bfloat16 else 0.0
    return max(rates["multiply_add"], pairs, rates["tiles"] / TILE_PRODUCTS[dtype])


def text(rates: Rates) -> str:
    """The rates in a few lines, in words."""
    loops = [f"{n} {rates[n]:.4g} {unit}" for n, unit in LOOPS.items() if rates.get(n)]
    gemms = [f"{n} {rate:.4g} GFLOP/s" for n, rate in rates.items() if n.startswith("gemm ")]
    reads = [f"{mib} MiB {rates[_read(mib)]:.4g}" for mib in READS if _read(mib) in rates]
    sized = ["reads of " + ", ".join(reads) + " GB/s"] if reads else []
    lines = [", ".join(loops[:5]), ", ".join(loops[5:]), *sized, ", ".join(gemms)]
    return "\n".join(f"limits: {line}" for line in lines if line)
