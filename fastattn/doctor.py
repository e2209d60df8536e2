"""What fastattn finds on a machine: libraries, choices, right results, a first ratio to torch.

``python -m fastattn`` prints a report, ``python -m fastattn --json`` the same as JSON. The exit
status is 1 where a backend's results are wrong, and 0 otherwise. A missing library is no error: the
report says why it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from fastattn import scores, testing, watchdog
from fastattn.backends import cpu, cuda, health, operators, registry, triton
from fastattn.problem import Mask
from fastattn.testing.runners import _kept

ABOUT = "What fastattn finds on this machine. The exit status is 1 where results are wrong."
WRONG = "WRONG"
SECONDS = 0.3  # of the ratio to torch
PEER = "torch.nn.functional.scaled_dot_product_attention"


def report(device: torch.device) -> dict[str, Any]:
    """Everything that is found out, as JSON has it.

    Self-checks come first: child processes make them, and what hangs or crashes there does not run
    here.
    """
    checked = watchdog.everyday(device)
    return {
        "versions": versions(),
        "machine": machine(),
        "libraries": libraries(),
        "self-checks": {str(check): _told(verdict.reason) for check, verdict in checked.items()},
        "calls": calls(device),
        "checks": checks(device),
        "ratio": ratio(device),
    }


def _told(reason: str | None) -> str:
    """A verdict in words."""
    words = {None: "right", health.UNKNOWN: "could not be made"}
    return words.get(reason) or f"{WRONG}: {reason}"


# ---- what there is ----


def versions() -> dict[str, str | None]:
    """The versions of fastattn, and of what it runs on; None where a package is missing."""
    return {
        "fastattn": fastattn.__version__,
        "torch": torch.__version__,
        "triton": triton.version(),
        "CUDA of torch": torch.version.cuda,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine() -> dict[str, Any]:
    """The processor, its cores and GPUs, and the instruction sets of the CPU kernels."""
    has_kernels = operators.EXTENSION_ERROR is None
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "instruction set": cpu.instruction_set() if has_kernels else None,
        "that run here": list(torch.ops.fastattn.cpu_isas()) if has_kernels else [],
        "GPUs": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }


def processor() -> str:
    """The name of the CPU. Virtual machines hide models: Zen 4 and Zen 5 differ in the family."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name, family = fields.get("model name"), fields.get("cpu family")
    return ", family ".join(x for x in (name or platform.machine(), family) if x)


def libraries() -> dict[str, dict[str, str | None]]:
    """For each compiled library: its compiler, and why it is not used; None where it is."""
    return {
        "CPU kernels": {
            "built by": operators.build_info("compiler"),
            "missing": operators.EXTENSION_ERROR,
            "remedy": cpu.REMEDY,
        },
        "CUDA kernels": {
            "built by": operators.build_info("cuda", "compiler"),
            "missing": cuda.LIBRARY_ERROR,
            "remedy": None,
        },
        "Triton kernels": {
            "built by": None,
            "missing": None if triton.INSTALLED else "Triton is not installed",
            "remedy": None if triton.INSTALLED else "pip install triton",
        },
    }


# ---- which backend takes what ----


def calls(device: torch.device) -> dict[str, registry.Explanation]:
    """What serves six calls of everyday use."""
    q = torch.zeros(2, 8, 256, 64, device=device)
    half, one = q.bfloat16(), q[:, :, :1]
    lengths = torch.tensor([256, 100], device=device)
    explain = scores.explain
    return {
        "training, causal": explain(q.requires_grad_(), is_causal=True),
        "a padded batch, weights": explain(q, mask=Mask(kv_len=lengths), return_weights="mean"),
        "bfloat16, 2 key heads of 8": explain(half, half[:, :2], enable_gqa=True),
        "one query, decoding": explain(one, q),
        "a bias with gradient": explain(q, bias=torch.zeros(8, 256, 256, device=device)),
        "additive": explain(q, q, q, torch.zeros(8, 64, device=device)),
    }


# ---- whether it is right ----

SIZES: dict[str, Any] = dict(M=65, N=130, D=32, E=32, H=4)
CASES = (
    testing.Case("doctor-masks", **SIZES, causal="bottom_right", kv_len="batch", weights="mean"),
    testing.Case("doctor-bias", **SIZES, bias="hmn", dropout_p=0.2),
    testing.Case("doctor-half", **SIZES, dtype=torch.bfloat16, lse=True),
    testing.Case("doctor-additive", "additive", **SIZES, causal="top_left"),
)


def checks(device: torch.device) -> dict[str, dict[str, Any]]:
    """For each backend, its worst error over what the budget allows, or why there is none.

    Outputs and gradients of ``CASES`` are compared with the float64 reference. At most 1 is right.
    A GPU backend runs only where children found it right.
    """
    drawn = {case: testing.make(case, str(device)) for case in CASES}
    oracles = {case: testing.oracle(case, t) for case, t in drawn.items()}
    found = {}
    for name in registry.BACKENDS:
        reasons = scores.explain(drawn[CASES[2]].q).reasons[name] or _unchecked(name, drawn)
        found[name] = {"worst error": None, "failure": None, "reasons": reasons}
        try:
            if not reasons:
                found[name]["worst error"] = max(
                    _worst(c, drawn[c], oracles[c], name) for c in CASES
                )
        except Exception as error:  # a report has to end, whatever a library does
            found[name]["failure"] = f"{type(error).__name__}: {error}"
    return found


def _unchecked(backend: str, drawn: dict[testing.Case, testing.Tensors]) -> list[str]:
    """The checks of a backend that no child could make."""
    missing = []
    for case, t in drawn.items():
        p, _ = _kept(case, t)
        check = registry.check_of(backend, p, case.bias is not None)
        on_gpu = p.device.type in health.DEVICES and backend != "eager" and health.mode() != "0"
        if on_gpu and not registry.get(backend).unsupported(p):
            missing += [check] if health.verdict(check, p.device) == health.UNKNOWN else []
    return [f"{check}: could not be checked" for check in dict.fromkeys(missing)]


def _worst(case: testing.Case, t: testing.Tensors, oracle: testing.Oracle, backend: str) -> float:
    """The largest error of a case's results, over what is allowed; 0 if the backend declines it."""
    weight = t.w if case.score == "additive" else None
    if scores.explain(t.q, weight=weight).reasons[backend]:
        return 0.0
    return oracle.worst(case, testing.run(case, t, backend))[0]


# ---- how fast it is ----


def ratio(device: torch.device) -> dict[str, Any]:
    """Our time and torch's of one call, which take turns for ``SECONDS``; both are medians."""
    q, k, v = (torch.randn(2, 8, 512, 64, device=device) for _ in range(3))
    with torch.no_grad():
        ours, torchs = _in_turns(
            device,
            lambda: fastattn.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
    return {
        "call": f"float32 {list(q.shape)}, causal, no gradient",
        "peer": PEER,
        "ours, ms": ours,
        "peer, ms": torchs,
        "ratio": torchs / ours,
    }


def _in_turns(device: torch.device, *functions: Callable[[], Tensor]) -> list[float]:
    """Median milliseconds of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        _milliseconds(device, function)  # warm
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or not times[0]:
        for mine, function in zip(times, functions, strict=True):
            mine.append(_milliseconds(device, function))
    return [statistics.median(mine) for mine in times]


def _milliseconds(device: torch.device, function: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


# ---- as text ----


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    parts = (
        _pairs(found["versions"]),
        _pairs(found["machine"]),
        [_library(name, x) for name, x in found["libraries"].items()],
        *([_self_checks(found["self-checks"])] if found["self-checks"] else []),
        ["Which backend serves", *(_call(name, x) for name, x in found["calls"].items())],
        *([_reasons(found["calls"])] if _reasons(found["calls"]) else []),
        [
            "Worst error, outputs and gradients, over what is allowed (at most 1 is right)",
            *(_check(name, x) for name, x in found["checks"].items()),
        ],
        _ratio(found["ratio"]),
    )
    return "\n\n".join("\n".join(lines) for lines in parts)


def _pairs(found: dict[str, Any]) -> list[str]:
    def shown(value: object) -> str:
        return ", ".join(value) or "none" if isinstance(value, list) else str(value or "none")

    return [f"{name:<16}{shown(value)}" for name, value in found.items()]


def _library(name: str, found: dict[str, str | None]) -> str:
    if not found["missing"]:
        return f"{name:<16}found" + (f", built by {found['built by']}" if found["built by"] else "")
    return f"{name:<16}no: {found['missing']}" + (f"; {found['remedy']}" if found["remedy"] else "")


def _self_checks(found: dict[str, str]) -> list[str]:
    title = "Self-checks of GPU backends, each in a child process"
    return [title, *(f"  {name}: {told}" for name, told in found.items())]


def _call(name: str, found: registry.Explanation) -> str:
    path = f", path {found.path}" if found.path else ""
    return f"  {name:<28}{found.backend}{path}"


def _reasons(found: dict[str, registry.Explanation]) -> list[str]:
    """Why backends that are preferred to the chosen one do not serve a call, each once."""
    lines = []
    for name, explanation in found.items():
        for backend, reasons in explanation.reasons.items():
            if backend == explanation.backend:
                break
            lines.append(f"  {name}: no {backend}: {'; '.join(reasons)}")
    return lines


def _check(name: str, found: dict[str, Any]) -> str:
    if found["reasons"]:
        return f"  {name:<28}not here: {'; '.join(found['reasons'])}"
    if found["failure"]:
        return f"  {name:<28}FAILED: {found['failure']}"
    return f"  {name:<28}{found['worst error']:.2f}{'' if right(found) else f'  {WRONG}'}"


def _ratio(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['call']}: {found['ours, ms']:.3g} ms, {found['peer']}: {found['peer, ms']:.3g} ms",
        f"ratio {found['ratio']:.2f}x, medians of {SECONDS} s in turns; `make bench` measures more",
    ]


def right(check: dict[str, Any]) -> bool:
    """Whether a backend's results are within the budget, or it does not run here."""
    return check["failure"] is None and (check["worst error"] or 0.0) <= 1


def as_json(found: dict[str, Any]) -> str:
    """The report for programs. JSON has no infinity and no NaN: such an error is a string."""
    read = json.loads(json.dumps(found, default=vars), parse_constant=str)
    return json.dumps(read, indent=2)


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; 0 where all results are right."""
    parser = argparse.ArgumentParser(prog="python -m fastattn", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        watchdog.child(torch.device(given.child[0]), given.child[1])
        return 0
    try:
        health.mode()
    except ValueError as error:  # of the environment
        parser.error(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of missing kernels: the report has those
        found = report(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        print(as_json(found) if given.json else text(found), flush=True)
    except BrokenPipeError:  # the reader has enough; Python would write the rest when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    wrong = [x for x in found["self-checks"].values() if x.startswith(WRONG)]
    return 0 if all(map(right, found["checks"].values())) and not wrong else 1
