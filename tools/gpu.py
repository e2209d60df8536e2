"""What `make gpu-test`, `gpu-bench` and `gpu-sanitize` run. Each ends within LIMIT seconds.

    python tools/gpu.py test|bench|sanitize [arguments for pytest, or for bench.run]

Each first builds the CUDA library only. Every step has a time limit, after which it is interrupted,
and killed if that does not help: a kernel may never end. Tests that reach the limit do not fail,
and neither does a sanitizer that does not run on this device. Both are reported as *inconclusive*.
A build that reaches the limit fails. The other steps still run, as Triton's kernels need no build.
A program can tell these from real errors; lines of the Makefile cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 480  # seconds for one command, from a clean tree
GRACE = 10  # between the interrupt and the kill
BUILD = 150

PASSED, FAILED, INCONCLUSIVE = "passed", "FAILED", "inconclusive"


class Step(NamedTuple):
    """A command, its seconds, and its additional environment."""

    name: str
    seconds: int
    command: list[str]
    environment: Mapping[str, str] = MappingProxyType({})


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def steps(target: str, *arguments: str) -> list[Step]:
    """The steps of a target."""
    return [Step("build", BUILD, python("setup.py", "cuda")), *TARGETS[target](*arguments)]


def test_steps(*arguments: str) -> list[Step]:
    """Processes share the GPU. Each gets few tests at a time, which keeps conftest's order."""
    parallel = ["-n", "auto", "--dist", "load", "--maxschedchunk", "2"]
    if importlib.util.find_spec("xdist") is None:
        parallel = []
    command = python("-m", "pytest", "tests", "-m", "gpu", "-q", *parallel, *arguments)
    environment = {"FASTATTN_TEST_SECONDS": "240", "OMP_NUM_THREADS": "1"}
    return [Step("tests", 290, command, environment)]


def bench_steps(*arguments: str) -> list[Step]:
    return [Step("bench", 300, python("-m", "bench.run", "--device", "cuda", *arguments))]


# Small cases of the CUDA C++ kernels: every read, write and barrier. Failing calls of the driver
# are ignored: torch makes some to find out what exists. racecheck does not understand a barrier at
# which one lane arrives for its warp, as in wgmma: tests/cuda/simulator looks for races there.
SANITIZED = "test_corner or (ends_of_tiles and 33- and not 16385)"
TOOLS = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--kernel-regex-exclude", "kns=wgmma"],
}
FOUND = re.compile(r"(ERROR|RACECHECK) SUMMARY: [1-9]|=+ (Invalid|Misaligned|Error: Race)")
REFUSED = re.compile(r"(?i)device not supported|not supported on this|internal sanitizer error")


def sanitize_steps(*arguments: str) -> list[Step]:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = python("-m", "pytest", "tests/cuda", "-m", "gpu", "-k", SANITIZED, "-q")
    tests += ["-p", "no:cacheprovider", *arguments]
    environment = {
        "FASTATTN_TEST_SECONDS": "90",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--target-processes", "all", "--error-exitcode", "1"]
    return [
        Step(tool, 140, [sanitizer, *options, "--tool", tool, *more, *tests], environment)
        for tool, more in TOOLS.items()
    ]


TARGETS = {"test": test_steps, "bench": bench_steps, "sanitize": sanitize_steps}


def run(step: Step) -> tuple[int | None, str]:
    """(exit status, or None at the time limit; output). Shows the output as it comes."""
    lines: list[str] = []
    process = subprocess.Popen(
        step.command, cwd=ROOT, env={**os.environ, **step.environment}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip

    def show() -> None:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    status = None
    try:
        status = process.wait(step.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:  # also ends its child processes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(1)
    return status, "".join(lines)


def verdict(step: Step, status: int | None, output: str) -> str:
    """The verdict on a finished step."""
    if status == 0:
        return PASSED
    if FOUND.search(output) or re.search(r"\b[1-9]\d* (failed|errors?)\b", output):
        return FAILED
    late = status is None and step.name != "build"
    refused = step.name in TOOLS and REFUSED.search(output)
    return INCONCLUSIVE if late or refused else FAILED


def main(target: str, *arguments: str) -> int:
    verdicts = {}
    for step in steps(target, *arguments):
        print(f"== {step.name}: {step.seconds} s at most", flush=True)
        if shutil.which(step.command[0]) is None:
            verdicts[step.name] = f"{INCONCLUSIVE}: there is no {step.command[0]}"
            continue
        status, output = run(step)
        verdicts[step.name] = verdict(step, status, output)
        if status is None:
            verdicts[step.name] += f": out of time after {step.seconds} s"
    print("== " + "; ".join(f"{name}: {found}" for name, found in verdicts.items()))
    return any(found.startswith(FAILED) for found in verdicts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest or bench.run")
    given = parser.parse_args()
    sys.exit(main(given.target, *given.arguments))
