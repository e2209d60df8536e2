"""Memory after many calls of every compiled operator: each call frees what it allocated.

Except for UNTESTED. torch's stable ABI never frees a str that an operator returns. A process calls
those that return one once or twice. The operators of CUDA need a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastattn.problem.record import WEIGHTS
from fastattn.problem.schemas import COMPILED, Call

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.slow]

operators = torch.ops.fastattn
CALLS = 40_000
MOST = 10 * CALLS  # bytes


def problem():
    """The smallest arguments of forward, with one of each kind."""
    x, one = torch.randn(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.int32)
    options = dict(band_hi=0, dropout_p=0.5, weights=WEIGHTS["full"])
    return tuple(Call(x, x, x, kv_len=one, seed=torch.tensor(1), **options))


def gradients():
    out, lse, weights, stats = operators.forward(*problem())
    return (*problem(), out, stats, out, lse, weights, False)


def module():
    x, in_weight, out_weight = torch.randn(1, 1, 1), torch.randn(3, 1), torch.randn(1, 1)
    return (x, in_weight, None, out_weight, None, 1, 1.0, WEIGHTS["mean"], True)


CASES = {
    "forward": problem,
    "backward": gradients,
    "multi_head_attention": module,
    "select_cpu_isa": lambda: ("no instruction set has a name of so many letters",),
    "select_cpu_path": lambda: ("no path has a name of so many letters",),
    "linear": lambda: (torch.randn(1, 1), torch.randn(3, 1), torch.randn(3)),
    "linear_from": lambda: (torch.bfloat16,),
    "cpu_loop": lambda: (torch.ones(256), 8, 1),  # which reads the memory
}
UNTESTED = {"cpu_isa", "cpu_isas", "cpu_path", "cuda_forward", "cuda_backward"}


SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
# Runs in another process: leftovers of other tests make allocators grow.
GROWTH = """
import json, os, sys, test_leaks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

growth, calls = {}, int(sys.argv[1])
for name, case in test_leaks.CASES.items():
    call, arguments = getattr(test_leaks.operators, name).default, case()
    for _ in range(calls // 10):  # allocators reach their size
        call(*arguments)
    before = resident()
    for _ in range(calls):
        call(*arguments)
    growth[name] = resident() - before
print(json.dumps(growth))
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip


def test_these_are_the_operators():
    assert CASES.keys() | UNTESTED == COMPILED.keys()
    assert not CASES.keys() & UNTESTED


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer keeps what was freed for a while")
def test_calls_leave_nothing_behind():
    done = run(GROWTH, str(CALLS))
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout)
    assert growth.keys() == CASES.keys()
    assert {name: n for name, n in growth.items() if n >= MOST} == {}


PROGRAM = """
import test_leaks

for name, case in test_leaks.CASES.items():
    call, arguments = getattr(test_leaks.operators, name).default, case()
    for _ in range(3000):
        call(*arguments)
"""


@pytest.mark.skipif(not SANITIZED, reason="needs LeakSanitizer: make sanitize-cpu")
def test_leak_sanitizer_finds_none_of_ours():
    """Python and torch leak a little at exit. None of that may come from our calls."""
    options = "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=20"
    done = run(PROGRAM, ASAN_OPTIONS=options, LSAN_OPTIONS="exitcode=0")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "LeakSanitizer has encountered a fatal error" not in done.stderr, done.stderr
    under = "csrc/", "_C.abi3.so", "StableIValueBoxedKernel"  # the last is torch's, and calls ours
    ours = [leak for leak in done.stderr.split("\n\n") if any(name in leak for name in under)]
    assert not ours, "\n\n".join(ours[:3])
