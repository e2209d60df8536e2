"""Fixtures of all tests: the backends and instruction sets of this machine, and a fixed seed.

What a machine lacks is skipped with its reason, which pytest prints at the end. Tests marked gpu
need one: those of the GPU backends, whose kernels tests/triton interprets, and tests/cuda runs as
C++, where there is none.
"""

import importlib.util
import itertools
import math
import os
import time

# Before torch: idle OpenMP threads sleep. Spinning, they make small sums ten times slower wherever
# something else uses the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from helpers import BACKENDS, ISAS, ON_GPU, Carrier

from fastattn import functional
from fastattn.backends import cpu, operators, registry
from fastattn.problem import call_cache

pytest.register_assert_rewrite("properties")  # tests by another name

# Triton's language is compiled or interpreted as it is first imported, which torch._dynamo may do
# before tests/triton is collected.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_report_header():
    isa = "none" if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa()
    return f"fastattn: torch {torch.__version__}, CPU kernels: {operators.EXTENSION_ERROR or isa}"


# Of the whole run: what xdist starts, and starts again, is told when that began.
START = float(os.environ.setdefault("FASTATTN_TEST_START", str(time.monotonic())))
SECONDS = float(os.environ.get("FASTATTN_TEST_SECONDS", "inf"))


LATE = f"not begun within {SECONDS:.0f} s; a second run finds its kernels compiled"


def pytest_runtest_setup(item):
    """`make gpu-test` has so many seconds, and a GPU that is new to the tests compiles."""
    if time.monotonic() - START > SECONDS:
        pytest.skip(LATE)


def _by_compile_time(item) -> int:
    """C++ kernels are compiled already; of Triton's, those of plain problems take seconds."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if item.path.parent.name == "cuda" or params.get("backend") == "cuda":
        return 0
    case = params.get("case")
    return 2 if case is None or case.bias or case.dropout_p or case.weights else 1


# Folders whose files take longest, first of all: a long file at the end would run alone.
LONGEST = ("triton", "examples", "tools", "cuda", "cpu")


def _by_length(item) -> int:
    """A compilation ahead of time takes longest, and then the folders as they are listed."""
    if item.path.stem == "test_aot":
        return -1
    folder = item.path.parent.name
    return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(items):
    """Where seconds are counted, most of the code is to be seen in the first of them."""
    items.sort(key=_by_compile_time if math.isfinite(SECONDS) else _by_length)


def _is_late(report) -> bool:
    return isinstance(report.longrepr, tuple) and LATE in report.longrepr[2]


def pytest_sessionfinish(session, exitstatus):
    """The end of the time is no failure: what ran has passed."""
    if math.isfinite(SECONDS) and exitstatus == pytest.ExitCode.INTERRUPTED:
        session.exitstatus = min(session.testsfailed, 1)


def pytest_terminal_summary(terminalreporter, config):
    """How far a run came whose seconds are counted."""
    if math.isfinite(SECONDS):
        stats, chosen = terminalreporter.stats, terminalreporter._session.testscollected
        kinds = ("passed", "failed", "error", "skipped")
        reports = itertools.chain.from_iterable(stats.get(kind, []) for kind in kinds)
        ran = len({x.nodeid for x in reports if not _is_late(x)})
        terminalreporter.write_line(f"{ran} of {chosen} ran; {chosen - ran} were {LATE}")


@pytest.fixture(autouse=True)
def _afresh():
    """Each test has the same random numbers, and no call seen before: tests change backends."""
    torch.manual_seed(0)
    call_cache.forget()
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        _leave_if_broken()


def _leave_if_broken():
    """Ends a process whose GPU context is past use: every test after that would fail with it.

    So it is after an access out of bounds. The test itself has failed by now; xdist takes another
    process for those that follow.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the GPU cannot be used any more: {error}", returncode=1)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Each backend that can run here, by name; CPU tensors are carried to one for GPUs."""
    if request.param == "cpu" and operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)
    if request.param in ON_GPU:
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device: tests/triton and tests/cuda run on the CPU")
        carrier = Carrier(registry.BACKENDS[request.param], torch.device("cuda"))
        monkeypatch.setitem(registry.BACKENDS, request.param, carrier)
    return request.param


def _spied(monkeypatch, module, name: str, seen: list) -> list:
    """``seen``, to which every call of a function adds its keyword arguments."""
    real = getattr(module, name)

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return seen


@pytest.fixture
def operator_calls(monkeypatch):
    """The calls of a module that are one operator."""
    return _spied(monkeypatch, cpu, "self_attention", [])


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of all calls of a module that reach our attention."""
    seen = _spied(monkeypatch, cpu, "self_attention", [])
    return _spied(monkeypatch, functional, "scaled_dot_product_attention", seen)


@pytest.fixture
def extension():
    """For tests of the compiled operators alone."""
    if operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)


def _isas():
    """The instruction sets by name, all but the one in use marked slow."""
    widest = None if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa()
    return [x if x == widest else pytest.param(x, marks=pytest.mark.slow) for x in ISAS]


@pytest.fixture(params=_isas())
def isa(request, extension):
    """Forces the CPU kernels of one instruction set."""
    before = torch.ops.fastattn.cpu_isa()
    if not torch.ops.fastattn.select_cpu_isa(request.param):
        pytest.skip(f"this machine, or this build, has no {request.param}")
    yield request.param
    assert torch.ops.fastattn.select_cpu_isa(before)
