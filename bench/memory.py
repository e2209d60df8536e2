"""Peak extra memory of one call: how far it raises the process's memory, results included.

On a CPU every measurement has its own process. It is forked from one that imported torch and did
nothing, so that no pool or cache of an earlier call hides an allocation. A call at a tiny size
comes first, which leaves out what only happens once (threads, set-up of libraries). Anonymous
memory is counted page by page, for torch's allocator and for malloc in C++. File-backed pages (code
that is loaded when first run) are not counted.

On a GPU, torch's allocator gives the peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import cases, packages, peers
from bench.measure import NO_TIME, reason

# Numbers of malloc.h for glibc's mallopt: what they are while memory is counted, and later. The
# latter are those that a process reaches by itself when it has freed something large.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
COUNTING = {M_MMAP_THRESHOLD: 2**16, M_TRIM_THRESHOLD: 2**16, M_TOP_PAD: 0}
USUAL = {M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**26, M_TOP_PAD: 2**17}


def measure(requests: list[dict], deadline: float = math.inf) -> Iterator[tuple[dict, int | str]]:
    """(request, bytes or an error) for each {case, direction, name, backend, tiny}.

    ``deadline``: on the clock of ``time.monotonic``. Requests after it are not measured.
    """
    if not requests:
        return
    command = [sys.executable, "-m", "bench.memory"]
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # each thread has its own buffers
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, cwd=root, **pipe) as child:
        child.stdin.write(json.dumps(requests))
        child.stdin.close()
        for request in requests:
            if time.monotonic() > deadline:
                child.kill()
            line = child.stdout.readline()
            yield request, json.loads(line) if line.endswith("\n") else NO_TIME


def cuda_bytes(call: Callable[[], object]) -> int:
    """The same on a GPU, in this process: its allocator records the peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def cpu_bytes(call: Callable[[], object]) -> int:
    """Peak growth of this process over one call. Resolution: some hundred KiB."""
    _trim()
    resets = _reset_peak()
    before = _status()
    result = call()
    after = _status()
    del result
    if not resets:  # the process is fresh, so its lifetime's peak is this call's
        return max(after["peak"] - before["peak"], 0)
    code = max(after["RssFile"] - before["RssFile"], 0)
    return max(after["VmHWM"] - before["VmRSS"] - code, 0)


def _status() -> dict[str, int]:
    """Bytes of this process: VmRSS (now), VmHWM (peak), RssFile (mapped files), peak (ever)."""
    sizes = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM", "RssFile"):
            sizes[key] = int(value.split()[0]) * 1024
    return sizes


def _reset_peak() -> bool:
    """Resets VmHWM to the current memory. Returns whether that worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _trim() -> None:
    """Returns free heap pages to the kernel, so that using them again counts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Meanwhile, what this process frees goes back to the kernel at once, page by page.

    Otherwise the next call could reuse it unseen, and one touched byte could count as 2 MiB. A
    process that has freed large memory before still reuses that: count first.
    """
    _set_malloc(COUNTING, huge_pages=False)
    try:
        yield
    finally:
        _set_malloc(USUAL, huge_pages=True)


def _set_malloc(values: dict[int, int], huge_pages: bool) -> None:
    library, PR_SET_THP_DISABLE = ctypes.CDLL(None), 41
    library.prctl(PR_SET_THP_DISABLE, int(not huge_pages), 0, 0, 0)
    if hasattr(library, "mallopt"):
        for name, value in values.items():
            library.mallopt(name, value)


# ---- the child ----


def _one(request: dict) -> int:
    """Measures in this process, which must not have computed anything yet."""
    case = cases.named(request["case"])
    name, direction = request["name"], request["direction"]

    def prepare(case: cases.Case) -> Callable[[], object]:
        compiled = name in peers.NEED_COMPILER  # which imports a lot, so not for the others
        return peers.build(case, "cpu", request["backend"], compiled).step(name, direction)

    call = prepare(case.tiny() if request["tiny"] else case)
    # A compiler must first compile this size, and packages make a graph of it.
    (call if name in (*peers.NEED_COMPILER, *packages.NAMES) else prepare(case.tiny()))()
    return cpu_bytes(call)


def _fork(request: dict) -> int | str:
    """Runs :func:`_one` in a copy of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = _one(request)
        except Exception as error:
            answer = reason(error)
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "the measuring process died (out of memory?)"


def main() -> None:
    requests = json.load(sys.stdin)
    if any(request["name"] in peers.NEED_COMPILER for request in requests):
        import torch._dynamo  # seconds that each child would need else
    if any(request["direction"] == cases.BOTH for request in requests):
        import torch.fx.experimental.symbolic_shapes  # noqa: F401  as a child's first gradient does
    with counting():
        for request in requests:
            print(json.dumps(_fork(request)), flush=True)


if __name__ == "__main__":
    main()
