"""Self-checks in child processes, which may hang or crash: what ``python -m fastattn`` makes.

A child makes one check after the other and prints a line for each verdict. If it falls silent or
dies, that is the verdict on the check at hand, and another child makes the rest.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import torch

from fastattn import self_check
from fastattn.backends import health, operators, registry, wgmma
from fastattn.backends.health import Check, Verdict
from fastattn.problem import validate

SECONDS = 180  # without a line from a child; Triton compiles for most of them
SECONDS_TO_BEGIN = 120
SECONDS_TO_END = 10
COMMAND = (sys.executable, "-m", "fastattn", "--child")
SIGN = "fastattn self-check: "  # of a child's own lines
READY = "ready"
NONE = Verdict(health.UNKNOWN, lasting=False)

# What most calls need. Triton compiles kernels for each.
EVERYDAY = (
    Check("triton", "", "dot", "bfloat16", "plain"),
    Check("triton", "", "dot", "bfloat16", "plain decoding"),
    Check("triton", "", "dot", "float32", "plain"),
    Check("triton", "", "additive", "float32", "plain"),
    Check("cuda", "", "dot", "bfloat16", ""),
    Check("cuda", "", "dot", "float16", ""),
    Check("cuda", "", "additive", "float32", ""),
    Check("cuda", "", "additive", "bfloat16", ""),
    wgmma.CHECK,
)


def everyday(device: torch.device) -> dict[Check, Verdict]:
    """Makes the checks of everyday calls that a device can run, and keeps their verdicts."""
    if health.mode() == "0" or health.machine(device) is None:
        return {}
    found = in_children([check for check in EVERYDAY if _runs(check, device)], device)
    for check, (reason, lasting) in found.items():
        health.keep(check, device, reason, lasting)
    return found


def _runs(check: Check, device: torch.device) -> bool:
    dtype = getattr(torch, check.dtype.partition(" ")[0])
    q = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    w = torch.zeros(1, 64, dtype=dtype, device=device) if check.score == "additive" else None
    p = validate.build("additive" if w is not None else "dot", q, q, q, w).p
    fits = check != wgmma.CHECK or wgmma.is_possible(p)
    return fits and not registry.get(check.backend).unsupported(p)


# ---- the parent ----


def in_children(
    checks: Sequence[Check],
    device: torch.device,
    command: Sequence[str] = COMMAND,
    seconds: float = SECONDS,
) -> dict[Check, Verdict]:
    """A verdict on each check, from children that ``command`` starts."""
    left, found = list(checks), {}
    while left:
        made = dict(zip(left, _from_child(left, device, command, seconds), strict=False))
        found |= made or dict.fromkeys(left, NONE)  # it could not begin
        left = [check for check in left if check not in found]
    return found


def _from_child(
    checks: list[Check], device: torch.device, command: Sequence[str], seconds: float
) -> Iterator[Verdict]:
    """Verdicts on the first checks, as many as one child makes."""
    paths = str(operators.PACKAGE.parent), os.environ.get("PYTHONPATH", "")
    child = subprocess.Popen(
        [*command, str(device), json.dumps(checks)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    silent = threading.Event()
    lines = _lines(child, seconds, silent)
    try:
        if next(lines, None) != READY:
            return
        for _ in checks:
            line = next(lines, None)
            if line is None:
                _stop(child)
                yield _end(child, seconds if silent.is_set() else None)
                return
            reason, lasting, may_go_on = json.loads(line)
            yield Verdict(reason, lasting)
            if not may_go_on:
                return
    finally:  # also where nobody asks for more
        _stop(child)


def _lines(child: subprocess.Popen[str], seconds: float, silent: threading.Event) -> Iterator[str]:
    """A child's own lines; it is killed when it falls silent."""

    def kill() -> None:
        silent.set()
        child.kill()

    assert child.stdout is not None
    for limit in itertools.chain([max(seconds, SECONDS_TO_BEGIN)], itertools.repeat(seconds)):
        timer = threading.Timer(limit, kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line:
            return
        if line.startswith(SIGN):
            yield line.removeprefix(SIGN).strip()


def _end(child: subprocess.Popen[str], seconds: float | None) -> Verdict:
    """How a child ended in the middle of a check; ``seconds``: of silence, for which it ended."""
    if seconds is not None:
        return Verdict(f"it hangs: no result within {seconds:g} s; {self_check.HOW_ELSE}")
    if child.returncode == -signal.SIGKILL:  # someone else's, as where memory ran out
        return NONE
    return Verdict(f"its process ended with status {child.returncode}; {self_check.HOW_ELSE}")


def _stop(child: subprocess.Popen[str]) -> None:
    if child.stdout is not None:
        child.stdout.close()
    try:
        child.wait(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:  # done, but it does not end
        child.kill()
        child.wait()


# ---- the child ----


def child(device: torch.device, checks: str) -> None:
    """Makes the checks, as JSON has them, and prints their verdicts."""
    torch.zeros(1, device=device)
    print(f"{SIGN}{READY}", flush=True)
    for check in json.loads(checks):
        reason, lasting = _verdict(Check(*check), device)
        broken = reason not in (None, health.UNKNOWN) and _is_broken(device)
        # Nothing else ran in this process.
        print(f"{SIGN}{json.dumps([reason, lasting or broken, not broken])}", flush=True)
        if broken:
            return


def _verdict(check: Check, device: torch.device) -> Verdict:
    try:
        return self_check.run(check, device)
    except Exception:
        return NONE


def _is_broken(device: torch.device) -> bool:
    """Whether an access out of bounds, or the like, made the device useless to this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False
