"""Self-checks in child processes, which may hang or crash: what ``python -m fastattn`` makes.

A child makes one check and prints a line with its verdict. If the child falls silent or dies, that
is the verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import torch

from fastattn import self_check
from fastattn.backends import health, operators, registry, wgmma
from fastattn.backends.health import Check, Verdict
from fastattn.problem import validate

SECONDS = 300  # of a child; Triton compiles for most of them
SECONDS_TO_DIE = 10  # a process that waits for a driver may outlive its end
COMMAND = (sys.executable, "-m", "fastattn", "--child")
SIGN = "fastattn self-check: "  # before what a child says, behind whatever a library has printed
READY = "ready"
NONE = Verdict(health.UNKNOWN, lasting=False)

# What most calls need. Those that compile nothing come first. Triton compiles kernels for each.
EVERYDAY = (
    Check("cuda", "dot", "bfloat16", ""),
    Check("cuda", "dot", "float16", ""),
    Check("cuda", "additive", "float32", ""),
    Check("cuda", "additive", "bfloat16", ""),
    wgmma.CHECK,
    Check("triton", "dot", "bfloat16", "plain"),
    Check("triton", "dot", "bfloat16", "plain decoding"),
    Check("triton", "dot", "bfloat16", "plain D<=128"),
    Check("triton", "dot", "bfloat16", "plain decoding D<=128"),
    Check("triton", "dot", "float32", "plain"),
    Check("triton", "dot", "float32", "plain decoding"),
    Check("triton", "dot", "float32", "rich bias"),
    Check("triton", "dot", "float32", "weights"),
    Check("triton", "dot", "float32", "bias"),
    Check("triton", "additive", "float32", "plain"),
)


def everyday(device: torch.device) -> dict[Check, Verdict]:
    """Makes the checks of everyday calls that a device can run, and keeps their verdicts."""
    if health.mode() == "0" or health.machine(device) is None:
        return {}
    found = {}
    for check in EVERYDAY:
        if _runs(check, device):
            found[check] = in_child(check, device)
            health.keep(check, device, *found[check])
    return found


def _runs(check: Check, device: torch.device) -> bool:
    dtype = getattr(torch, check.dtype.partition(" ")[0])
    q = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    w = torch.zeros(1, 64, dtype=dtype, device=device) if check.score == "additive" else None
    p = validate.build("additive" if w is not None else "dot", q, q, q, w).p
    fits = check != wgmma.CHECK or wgmma.has_capability(device)
    return fits and not registry.get(check.backend).unsupported(p)


# ---- the parent ----


def in_child(
    check: Check,
    device: torch.device,
    command: Sequence[str] = COMMAND,
    seconds: float = SECONDS,
) -> Verdict:
    """The verdict on a check, from a child that ``command`` starts."""
    paths = str(operators.PACKAGE.parent), os.environ.get("PYTHONPATH", "")
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FASTATTN_SELF_CHECK": "0"}
    own["FASTATTN_CUDA_PATH"] = ""  # the check says which path it takes
    with tempfile.TemporaryFile() as output:  # a pipe would stay open while grandchildren live
        child = subprocess.Popen(
            [*command, str(device), json.dumps(check)],
            stdout=output, env=os.environ | own, start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.returncode is None:
                _end(child)
        output.seek(0)
        return _read(output.read().decode("utf-8", "replace"), status, seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child and all that it started, without waiting for what cannot end."""
    os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(SECONDS_TO_DIE)


def _read(text: str, status: int | None, seconds: float) -> Verdict:
    """The verdict of a child that printed ``text``; its exit status is None if it took too long."""
    _, *said = [x.partition("\n")[0] for x in text.split(SIGN)]
    if READY not in said:
        return NONE
    if said[-1] != READY:
        return Verdict(*json.loads(said[-1]))
    if status is None:
        return Verdict(f"it hangs: no result within {seconds:g} s; {self_check.HOW_ELSE}")
    if status == -signal.SIGKILL:  # someone else's, as where memory ran out
        return NONE
    return Verdict(f"its process ended with status {status}; {self_check.HOW_ELSE}")


# ---- the child ----


def child(device: torch.device, text: str) -> None:
    """Makes a check, as JSON has it, and prints its verdict."""
    signal.alarm(2 * SECONDS)  # should the parent be gone
    check = Check(*json.loads(text))
    torch.backends.cuda.matmul.fp32_precision = "tf32" if check.dtype == "TF32" else "ieee"
    torch.zeros(1, device=device)
    print(f"{SIGN}{READY}", flush=True)
    try:
        reason, lasting = self_check.run(check, device)
    except Exception:
        reason, lasting = NONE
    # An error is one of the backend's where it broke the device, as nothing else ran here.
    lasting = lasting or (reason != health.UNKNOWN and _is_broken(device))
    print(f"{SIGN}{json.dumps([reason, lasting])}", flush=True)


def _is_broken(device: torch.device) -> bool:
    """Whether an access out of bounds, or the like, made the device useless to this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False
