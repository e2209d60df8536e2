"""Whether a GPU backend computes right on this machine, found out once and kept in a file.

The first use of a backend on a device, driver, torch, Triton and build never seen runs a few tiny
problems, forward and backward (``fastattn/self_check.py``). A wrong backend warns once, and has a
reason against it from then on. ``$XDG_CACHE_HOME/fastattn/health.json`` keeps verdicts by machine:

    {"NVIDIA H200, capability 9.0, ...": {"triton/dot/bfloat16/plain": null}}

null means right, a text says what is wrong. The environment variable ``FASTATTN_SELF_CHECK`` turns
checks off (``0``), or makes each process check again (``force``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext

from fastattn import cache_file
from fastattn.backends import cuda, operators, triton
from fastattn.problem import arguments, call_cache

FILE = "health.json"
DEVICES = ("cuda",)  # the kinds of devices whose backends are checked; eager never is
MODES = ("1", "0", "force")
MOST_MACHINES = 16  # in the file; the latest stay
UNKNOWN = ""  # no verdict in this process, such as for lack of memory


class Check(NamedTuple):
    """What a verdict is about. Its text has no slash, as the file joins the fields by slashes."""

    backend: str
    score: str
    dtype: str  # names of torch's, or TF32: see dtype_name
    kind: str  # of the problems, where kinds are kernels of their own: see registry.py

    def __str__(self) -> str:
        kind = f", {self.kind} calls" if self.kind else ""
        return f"{self.backend}: {self.score}, {self.dtype}{kind}"


class Verdict(NamedTuple):
    """What a check found. ``reason``: what is wrong, or None."""

    reason: str | None
    lasting: bool = True  # whether other processes would find the same


# Makes a check on a device. If it raises, the error is not the backend's, and there is no verdict.
# fastattn/__init__.py sets it, because the budget of a check is in a storey above backends.
runner: Callable[[Check, torch.device], Verdict] | None = None

_found: dict[tuple[torch.device, Check], str | None] = {}  # None: right
_loaded: set[torch.device] = set()  # those for which the file was read
_LOCK = threading.Lock()  # held while a check runs
_local = threading.local()


@arguments.traced_as_constant
def reason(fields: tuple[str, ...], device: torch.device, may_check: bool) -> str | None:
    """Why a backend must not compute such calls on ``device``; None if nothing is known against it.

    A backend that is wrong in one kind is trusted in none. ``fields`` are those of a check, as
    torch.compile hands on no named tuple. ``may_check``: whether the check may run if there is no
    verdict yet.
    """
    if mode() == "0" or is_checking():
        return None
    if may_check:
        settle(Check(*fields), device)
    _load(device)
    alike = device, fields[:-1]
    return next((x for (d, c), x in _found.copy().items() if x and (d, c[:-1]) == alike), None)


def verdict(check: Check, device: torch.device) -> str | None:
    """What a check found on ``device``, in any process: None if right, UNKNOWN without a verdict.

    Runs nothing.
    """
    if mode() == "0":
        return UNKNOWN
    _load(device)
    return _found.get((device, check), UNKNOWN)


@functools.cache
def warn_once(text: str) -> None:
    """Warns the caller of a public function."""
    warnings.warn(text, RuntimeWarning, stacklevel=7)


@arguments.traced_as_constant
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as checks name it: products of float32 are others where torch allows TF32."""
    fast = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "TF32" if fast else str(dtype).removeprefix("torch.")


def mode() -> str:
    """What FASTATTN_SELF_CHECK says: "1" by default."""
    given = os.environ.get("FASTATTN_SELF_CHECK") or "1"
    if given not in MODES:
        raise ValueError(f"FASTATTN_SELF_CHECK: expected '0', '1' or 'force', got {given!r}")
    return given


def is_checking() -> bool:
    """Whether this thread makes a check: what that calls is not checked."""
    return getattr(_local, "checking", False)


@arguments.traced_as_constant
def must_wait() -> bool:
    """Whether no check may run now.

    A check waits for the GPU, which breaks the capture of a graph. It makes real tensors, which the
    mode of fake tensors does not expect.
    """
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    # In functions that are traced as constants, torch 2.11 says that nothing compiles.
    traces = TracingContext.try_get() is not None
    return fake is not None or traces or torch.compiler.is_compiling() or _captures()


def _captures() -> bool:
    """Whether the current stream captures, or the stream that torch.cuda.graph takes by default."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    stream = torch.cuda.graph.default_capture_stream  # of any thread
    if stream is None:
        return False
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


# ---- a verdict ----


def settle(check: Check, device: torch.device) -> None:
    """Makes a check that has no verdict yet, unless none may run now.

    The check has a thread of its own, in which torch is as it starts: grad mode, autocast,
    transforms, modes, default device, streams. An interrupt ends the wait, not the check.
    """
    if mode() == "0" or is_checking():  # this thread would wait for itself
        return
    _load(device)
    if (device, check) in _found or runner is None or machine(device) is None or must_wait():
        return
    work = check, device, runner
    thread = threading.Thread(target=_make, args=work, name="fastattn self-check", daemon=True)
    thread.start()
    thread.join()


def _make(check: Check, device: torch.device, runner: Callable[..., Verdict]) -> None:
    _local.checking = True
    with _LOCK:  # other checks wait for this one
        if (device, check) in _found:
            return
        try:
            reason, lasting = runner(check, device)
        except Exception:  # no call may break by that
            reason, lasting = UNKNOWN, False
        keep(check, device, reason, lasting)


def keep(check: Check, device: torch.device, reason: str | None, lasting: bool = True) -> None:
    """Keeps a verdict in this process and, if it is ``lasting``, in the file."""
    _found[device, check] = reason
    call_cache.forget()  # calls that are known to go to this backend, or to another one
    if lasting:
        _write(check, device, reason)


def forget() -> None:
    """Forgets what this process knows, for tests."""
    _found.clear()
    _loaded.clear()
    warn_once.cache_clear()


# ---- the file ----


def _load(device: torch.device) -> None:
    """Takes over what the file says of this machine, once."""
    if device in _loaded:
        return
    name = machine(device)
    if name is not None and mode() != "force":
        for check, reason in _read().get(name, {}).items():
            _found.setdefault((device, Check(*check.split("/"))), reason)  # or what is newer
    _loaded.add(device)


def _write(check: Check, device: torch.device, reason: str | None) -> None:
    name = machine(device)
    if name is None:
        return

    def changed() -> dict[str, Any]:
        known = _read()
        rows = known.pop(name, {}) | {"/".join(check): reason}
        return dict([*known.items(), (name, rows)][-MOST_MACHINES:])

    with contextlib.suppress(OSError):  # it cannot be written: each process checks
        cache_file.update(FILE, changed)


def _read() -> dict[str, dict[str, str | None]]:
    """What can be read of the file: a verdict that is lost is found again."""
    try:
        known = cache_file.read(FILE)
        return {str(name): _rows(rows) for name, rows in known.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _rows(rows: Any) -> dict[str, str | None]:
    slashes = len(Check._fields) - 1
    rows = rows.items() if isinstance(rows, dict) else ()
    known = {x: y for x, y in rows if x.count("/") == slashes and y != UNKNOWN}
    return {x: y for x, y in known.items() if y is None or isinstance(y, str)}


# ---- the machine ----


@functools.cache
def machine(device: torch.device) -> str | None:
    """All that a verdict depends on; None where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return ", ".join(
        (
            torch.cuda.get_device_name(device), f"capability {capability}", f"driver {_driver()}",
            f"torch {torch.__version__}", f"Triton {triton.version()}", f"build {_build()}",
            *(["PTX"] if os.environ.get("CUDA_FORCE_PTX_JIT") == "1" else []),  # without wgmma
        )
    )  # fmt: skip


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
    except (OSError, IndexError):
        return cuda.driver_version()


def _build() -> str:
    """Changes with the CUDA library and the sources of the Triton kernels."""
    files = [*operators.PACKAGE.glob("_cuda.so"), *operators.PACKAGE.glob("kernels/*/*.py")]
    stamps = sorted((x.name, x.stat().st_size, x.stat().st_mtime_ns) for x in files)
    return f"{zlib.crc32(repr(stamps).encode()):08x}"
