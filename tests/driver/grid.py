"""csrc/cpu in a program of its own, without Python and torch, on the smaller cases of the grid.

``make test-aarch64`` compiles NEON code for aarch64 and runs it under QEMU's user mode. ``make
sanitize-threads`` compiles for this machine with ThreadSanitizer, which sees every data race of the
threads of a call. `make test` runs neither, because both take minutes. A backend of the tests wraps
the program, so cases are checked like those of any other backend. ``driver.cpp`` runs one call.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattn import testing
from fastattn.backends import cpu, registry
from fastattn.problem import record, relative
from fastattn.problem.schemas import Saved
from fastattn.testing import GRID

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = os.environ.get("FASTATTN_DRIVER") == "threads"
BUILD = Path("build/sanitize-threads" if SANITIZED else "build/aarch64")
CXX = os.environ.get("CXX", "c++") if SANITIZED else "aarch64-linux-gnu-g++"
MORE = ["-O1", "-fexpensive-optimizations", "-g1", "-fsanitize=thread"] if SANITIZED else []
QEMU = next(filter(None, map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))), None)
PAIRS = 160_000  # B * H * M * N of the largest case; the emulator is about thirty times slower
THREADS = 3

if shutil.which(CXX) is None:
    pytest.skip(f"no {CXX}: apt-get install g++-aarch64-linux-gnu", allow_module_level=True)
if QEMU is None and not SANITIZED:
    pytest.skip("no qemu-aarch64: apt-get install qemu-user", allow_module_level=True)

PROGRAM_RULE = """\
rule program
  command = {cxx} {flags} $in -o $out
  description = LINK $out
"""


def build() -> Path:
    """The driver and csrc/cpu in one program, with the flags of setup.py."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    setup: Any = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(setup)
    setup.BUILD = BUILD
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    text = setup.RULES.format(build=BUILD, cxx=CXX, user="", ldflags="")
    text += PROGRAM_RULE.format(cxx=CXX, flags="-fsanitize=thread" if SANITIZED else "-static")
    isas = setup.isa_flags(platform.machine() if SANITIZED else "aarch64")
    isas = {isa: own for isa, own in isas.items() if isa not in setup.UNITS}
    flags = [*setup.FLAGS, *MORE]
    have = [f"-DFASTATTN_HAVE_{isa.upper()}" for isa in isas]
    jobs = [(Path("tests/driver/driver.cpp"), BUILD / "driver.o", flags)]
    jobs += [
        (p, BUILD / f"{p.stem}.o", flags + have) for p in sorted(Path("csrc/cpu").glob("*.cpp"))
    ]
    for isa, own in isas.items():
        for source in setup.entries(isa):
            of_isa = [*flags, *own, f"-DFASTATTN_ISA={isa}"]
            jobs.append((source, BUILD / f"{isa}_{source.stem}.o", of_isa))
    for source, target, flags in jobs:
        text += f"build {target}: cxx {source}\n  flags = {setup.quote(flags)}\n"
    program = BUILD / "driver"
    text += f"build {program}: program {' '.join(str(target) for _, target, _ in jobs)}\n"
    command = [setup.find_ninja(), "-f", str(BUILD / "build.ninja")]
    with open(ROOT / BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one builds, and others find it done
        (ROOT / BUILD / "build.ninja").write_text(text)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return ROOT / program


# ---- one call in the format of driver.cpp ----

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
UNBOUNDED = 2**60


def numbers(*values: int) -> bytes:
    return torch.tensor(values, dtype=torch.int64).numpy().tobytes()


def doubles(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float64).numpy().tobytes()


def encode(x: torch.Tensor | None, *dims: int) -> bytes:
    """A tensor and all memory between its elements. `dims`: its dims in [B, H, rows, columns]."""
    if x is None:
        return numbers(-1, 0, 0, 0, 0, 0)
    x = x.detach()
    strides = [0, 0, 0, 0]
    for dim, size, stride in zip(dims or range(4), x.shape, x.stride(), strict=True):
        strides[dim] = stride if size != 1 else 0
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((length if x.numel() else 0,), (1,))
    content = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return numbers(len(content), DTYPES.get(x.dtype, 0), *strides) + content


class Driver:
    """The program as a backend for the tests."""

    shift_unit = staticmethod(cpu.shift_unit)

    def __init__(self, program: Path, folder: Path):
        self.program, self.folder = program, folder

    def unsupported(self, p):
        reasons = ["float64 is left to eager"] if p.dtype == torch.float64 else []
        return [*reasons, *(["the driver has no wide results"] if p.wide else [])]

    def _problem(self, p, q, k, v, w, bias, sink) -> bytes:
        lo, hi = p.band()
        drop = p.dropout
        kv_len, keep, kv_begin, seed = p.tensors()
        return b"".join(
            [
                numbers(p.B, p.H, p.Hkv, p.M, p.N, p.D, p.E, record.WEIGHTS[p.weights]),
                numbers(record.SCORES[p.score]),
                numbers(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi),
                numbers(drop.threshold, int(seed), 1) if drop else numbers(0, 0, 0),
                numbers(p.origin.b, p.origin.h, p.origin.i, p.origin.j // 4),
                doubles(drop.scale if drop else 0.0, p.scale, p.softcap),
                *map(encode, (q, k, v)),
                encode(w, *((1, 3) if w is None or w.dim() == 2 else (0, 1, 3))),
                encode(bias),
                numbers(relative.is_line(bias, p.M, p.N)),
                encode(kv_len, 0, 2),
                encode(kv_begin, 0, 2),
                encode(keep),
                encode(sink, *((1,) if sink is None or sink.dim() == 1 else (0, 1))),
            ]
        )

    def _run(self, call: bytes, *results: tuple[tuple[int, ...], torch.dtype]):
        """The results, with these shapes and dtypes; None for a result without a shape."""
        given, found = self.folder / "problem", self.folder / "results"
        given.write_bytes(call)
        run = [str(self.program)] if SANITIZED else [str(QEMU), str(self.program)]
        command = [*run, str(given), str(found)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
        content, tensors, begin = found.read_bytes(), [], 0
        for shape, dtype in results:
            x = torch.empty(shape, dtype=dtype)
            size = x.numel() * x.element_size()
            if size:
                x = torch.frombuffer(bytearray(content[begin : begin + size]), dtype=dtype)
            tensors.append(x.view(shape))
            begin += size
        assert begin == len(content)
        return tensors

    def forward(self, p, q, k, v, w, bias, sink=None):
        out, lse, weights, stats = self._run(
            numbers(0, THREADS) + self._problem(p, q, k, v, w, bias, sink),
            ((p.B, p.H, p.M, p.E), p.dtype),
            ((p.B, p.H, p.M), torch.float32),
            (p.weights_shape(), p.dtype),
            ((p.B, p.H, p.M, 2), torch.float32),
        )
        return out, lse, weights, stats

    def backward(self, p, q, k, v, w, bias, *saved):
        s = Saved(*saved)
        absent = ((0,), torch.float32)
        rows = None if s.grad_lse is None else s.grad_lse.contiguous()
        head = (0, 2, 3) if p.weights == "mean" else (0, 1, 2, 3)
        wanted = numbers(1, *bias.shape) if s.bias_needs_grad else numbers(0)
        more = [encode(s.out), encode(s.stats), encode(s.grad_out), encode(rows, 0, 1, 2)]
        grads = self._run(
            numbers(1, THREADS)
            + self._problem(p, q, k, v, w, bias, s.sink)
            + b"".join([*more, encode(s.grad_weights, *head), wanted]),
            (q.shape, p.dtype),
            (k.shape, p.dtype),
            (v.shape, p.dtype),
            absent if w is None else ((p.B, p.H, p.D), torch.float32),
            (bias.shape, bias.dtype) if s.bias_needs_grad else absent,
            absent if s.sink is None else ((p.B, p.H), torch.float32),
        )
        present = w is not None, s.bias_needs_grad, s.sink is not None
        return *grads[:3], *(x if n else None for x, n in zip(grads[3:], present, strict=True))


@pytest.fixture(scope="module")
def program() -> Path:
    return build()


SMALL = [c for c in GRID if c.B * c.H * c.M * c.N <= PAIRS]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_case(case, program, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "cpu", Driver(program, tmp_path))
    testing.check(case, "cpu")
