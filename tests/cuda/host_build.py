"""Compiles csrc/cuda and its binding for the CPU, over the shim in tests/cuda/simulator.

Objects and libraries are kept in build/cuda_on_cpu, and rebuilt when a file is newer. A process
runs one compiler at a time; several processes share the work.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from fastattn.problem import schemas

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests/cuda/simulator"
BUILD = ROOT / "build/cuda_on_cpu"
RUNTIME = [SHIM / "runtime.cpp", SHIM / "async.cpp"]

# Contraction as in nvcc: a * b + c is one fma.
FLAGS = (
    "-std=c++17 -fPIC -Wall -Wextra -Wno-unknown-pragmas "
    "-ffp-contract=fast -fno-math-errno -fno-trapping-math"
)
KINDS = {
    "plain": "-O2 -march=native",
    # Without -fexpensive-optimizations, -O1 makes no fused multiply-adds, which GPUs have.
    "sanitized": "-O1 -fexpensive-optimizations -g1 -march=native "
    "-fsanitize=address,undefined -fno-sanitize-recover=all",
}

# The binding. Its operators are registered for the CPU's dispatch key.
OPS = ROOT / "csrc/binding/attention.cpp"
TORCH = Path(torch.__file__).parent
OPS_FLAGS = (
    "-DFASTATTN_FOR_CUDA -DFASTATTN_CUDA_ON_CPU -DFASTATTN_DISPATCH_KEY=CPU "
    f"-DTORCH_TARGET_VERSION=0x020b000000000000 -isystem {TORCH}/include"
)
LINK = f"-L{TORCH}/lib -ltorch_cpu -lc10 -Wl,--no-as-needed"


def compiler() -> list[str]:
    """The C++ compiler's command; empty if there is none."""
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    return cxx if shutil.which(cxx[0]) else []


def newest_header() -> float:
    folders = (SHIM, *(ROOT / "csrc" / name for name in ("binding", "cuda", "problem")))
    headers = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".h", ".cuh")]
    return max(p.stat().st_mtime for p in (*headers, Path(schemas.__file__)))


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")


def target_of(source: Path, kind: str) -> Path:
    return BUILD / kind / f"{source.parent.name}_{source.stem}.o"


def is_stale(source: Path, kind: str) -> bool:
    target = target_of(source, kind)
    newest = max(source.stat().st_mtime, newest_header())
    return not target.exists() or target.stat().st_mtime <= newest


def compile_object(source: Path, kind: str) -> None:
    target = target_of(source, kind)
    flags = f"{FLAGS} {KINDS[kind]} {OPS_FLAGS if source == OPS else ''}".split()
    include = [f"-I{SHIM}", f"-I{ROOT / 'csrc'}", f"-I{BUILD}"]
    if source == OPS:
        schemas.write(BUILD)
    new = target.with_suffix(f".{os.getpid()}.o")
    run([*compiler(), *flags, *include, "-x", "c++", "-c", str(source), "-o", str(new)])
    new.replace(target)


def compile_objects(sources: list[Path], kind: str) -> None:
    """Compiles each source once: first those that no other process compiles, then the rest."""
    (BUILD / kind).mkdir(parents=True, exist_ok=True)
    for blocking in False, True:
        for source in sources:
            with open(target_of(source, kind).with_suffix(".lock"), "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
                except BlockingIOError:
                    continue
                if is_stale(source, kind):
                    compile_object(source, kind)


def sources_of(name: str) -> list[Path]:
    if name == "shim":
        return [*RUNTIME, SHIM / "shim_kernels.cu", SHIM / "async_kernels.cu"]
    return [*RUNTIME, OPS, *sorted((ROOT / "csrc/cuda").rglob("*.cu"))]


def objects(kind: str, name: str = "kernels") -> list[Path]:
    return [target_of(source, kind) for source in sources_of(name)]


def link(parts: list[Path], kind: str, target: Path) -> Path:
    flags = KINDS[kind].split()
    run([*compiler(), *flags, "-shared", *map(str, parts), *LINK.split(), "-o", str(target)])
    return target


@functools.cache
def library(name: str, kind: str = "plain") -> Path:
    """csrc/cuda with its binding ("kernels"), for torch; or the test of the shim ("shim")."""
    compile_objects(sources_of(name), kind)
    parts = objects(kind, name)
    target = BUILD / kind / f"lib{name}.so"
    with open(target.with_suffix(".lock"), "w") as lock:  # two links would make two copies of it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists() or target.stat().st_mtime < max(o.stat().st_mtime for o in parts):
            link(parts, kind, target.with_suffix(f".{os.getpid()}.so")).replace(target)
    # Under the name that torch resolves it to: what has one name is loaded once, even if the file
    # is replaced between two loads.
    return target.resolve()


def sanitizer_environment() -> dict[str, str]:
    """The environment for a Python that loads a sanitized library."""

    def found(name: str) -> str:
        command = [*compiler(), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    preload = f"{found('libasan.so')} {found('libstdc++.so')}"
    return {
        **os.environ,
        "FASTATTN_TEST_SECONDS": "inf",  # what has begun ends
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run_sanitized(code: str) -> subprocess.CompletedProcess:
    """Runs Python code beside the tests, which may load the sanitized shim."""
    library("shim", "sanitized")
    return subprocess.run(
        [sys.executable, "-c", code],
        env=sanitizer_environment(), cwd=ROOT / "tests/cuda", capture_output=True, text=True,
    )  # fmt: skip


def run_tests(file: str, tests: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs these tests of a file (pytest's -k) in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--capture=sys", file, "-k", tests],  # reports go to the file descriptor
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def assert_clean(file: str, tests: str) -> None:
    """Runs these tests of a file under the sanitizers."""
    library("kernels", "sanitized")
    environment = sanitizer_environment() | {"FASTATTN_TEST_SHIM": "sanitized"}
    done = run_tests(file, tests, environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[:4000]}"
    assert " passed" in done.stdout
