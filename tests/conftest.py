"""Fixtures of all tests: the backends and instruction sets of this machine, and a fixed seed.

Tests that a machine cannot run are skipped with a reason, which pytest prints at the end. Thousands
need a GPU (those marked gpu) or an instruction set. Without it they are deselected, and the end of
a run says how many and why. Without a GPU, tests/triton interprets the Triton kernels, and
tests/cuda runs the CUDA kernels as C++.
"""

import collections
import gc
import itertools
import math
import os
import time

# Set before torch is imported: idle OpenMP threads then sleep. Spinning threads make small sums ten
# times slower if something else uses the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On a GPU, a test must see a wrong kernel, and no file of the user's is to change.
os.environ.setdefault("FASTATTN_SELF_CHECK", "0")

import pytest
import torch
from helpers import BACKENDS, ISAS, ON_GPU, Carrier, spied

from fastattn import functional
from fastattn.backends import operators, registry
from fastattn.backends import triton as triton_backend
from fastattn.problem import call_cache

pytest.register_assert_rewrite("properties")  # tests without the name test_*.py

# The first import of Triton's language decides between compiler and interpreter. torch._dynamo may
# import it before tests/triton is collected.
if triton_backend.INSTALLED and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_report_header():
    isa = "none" if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa()
    return f"fastattn: torch {torch.__version__}, CPU kernels: {operators.EXTENSION_ERROR or isa}"


# The start of the whole run. xdist's workers, also restarted ones, inherit it.
START = float(os.environ.setdefault("FASTATTN_TEST_START", str(time.monotonic())))
SECONDS = float(os.environ.get("FASTATTN_TEST_SECONDS", "inf"))


LATE = f"not begun within {SECONDS:.0f} s"
if torch.cuda.is_available():
    LATE += "; a second run finds its kernels compiled"


def pytest_runtest_setup(item):
    """`make gpu-test` has a time limit, and a GPU that is new to the tests must compile first.

    CI has one for machines that take three times as long as others.
    """
    if time.monotonic() - START > SECONDS:
        pytest.skip(LATE)


def _by_compile_time(item) -> int:
    """C++ kernels are already compiled. Triton's kernels for plain problems take seconds."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if item.path.parent.name == "cuda" or params.get("backend") == "cuda":
        return 0
    case = params.get("case")
    return 2 if case is None or case.bias or case.dropout_p or case.weights else 1


# What takes longest comes first: a long file at the end would run alone. With a time limit it comes
# last: most code is tested once before grids test it many times. Parts of paths: ahead-of-time
# compilation, grids in the interpreter and the simulator, Inductor, whole programs, what else is
# interpreted or simulated, several processes, the paths of the CPU kernels, grids of every backend.
LONGEST = (
    "/test_aot", "triton/test_sdpa", "triton/test_shared", "triton/test_additive", "/test_cuda_",
    "/test_compile", "tests/examples/", "/test_bench", "tests/triton/", "/test_as_gpu",
    "tests/cuda/", "tests/distributed/", "tests/cpu/", "tests/contract/",
)  # fmt: skip


def _by_length(item) -> int:
    known = (n for n, part in enumerate(LONGEST) if part in item.path.as_posix())
    return next(known, len(LONGEST))


# With a time limit: what reads the files themselves, which no other test would notice.
FIRST = ("docs", "tools")


def _quickest_first(item) -> int:
    length = _by_length(item)
    is_first = item.path.parent.name in FIRST and length == len(LONGEST)
    return -length - is_first


@pytest.hookimpl(trylast=True)  # after the folders' own conftest.py, which mark tests
def pytest_collection_modifyitems(config, items):
    """With a time limit, the first tests should cover most of the code."""
    lacking = {item: what for item in items if (what := _what_is_missing(item))}
    config.stash[MISSING] = collections.Counter(lacking.values())
    config.hook.pytest_deselected(items=list(lacking))
    items[:] = [item for item in items if item not in lacking]
    if math.isinf(SECONDS):
        items.sort(key=_by_length)
    else:
        items.sort(key=_by_compile_time if torch.cuda.is_available() else _quickest_first)


def pytest_collection_finish():
    """What was imported and collected stays: half a second of every full garbage collection."""
    gc.freeze()


# ---- what this machine does not have ----

MISSING = pytest.StashKey[collections.Counter]()
NO_GPU = "a GPU, and torch sees no CUDA device"


def _what_is_missing(item) -> str | None:
    """What a test needs that is not here, and why; None for what can run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return NO_GPU
    isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
    if isa is None or operators.EXTENSION_ERROR or isa in torch.ops.fastattn.cpu_isas():
        return None
    return f"{isa}, which this machine, or this build, does not have"


def pytest_sessionfinish(session, exitstatus):
    """Reaching the time limit is no failure if every test so far passed."""
    if hasattr(session.config, "workeroutput"):  # of xdist: the controller collects nothing
        session.config.workeroutput["missing"] = dict(session.config.stash.get(MISSING, {}))
    if math.isfinite(SECONDS) and exitstatus == pytest.ExitCode.INTERRUPTED:
        session.exitstatus = min(session.testsfailed, 1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every worker of xdist collects, and therefore leaves out, the same."""
    said = collections.Counter((getattr(node, "workeroutput", None) or {}).get("missing"))
    node.config.stash[MISSING] = node.config.stash.get(MISSING, said) | said


# ---- at the end ----


def _is_late(report) -> bool:
    return isinstance(report.longrepr, tuple) and LATE in report.longrepr[2]


def pytest_terminal_summary(terminalreporter, config):
    """Says what was deselected and why, and how many tests ran before the time limit."""
    for what, count in config.stash.get(MISSING, {}).items():
        terminalreporter.write_line(f"deselected: {count} that need {what}")
    if math.isfinite(SECONDS):
        stats, chosen = terminalreporter.stats, terminalreporter._session.testscollected
        kinds = ("passed", "failed", "error", "skipped")
        reports = itertools.chain.from_iterable(stats.get(kind, []) for kind in kinds)
        ran = len({x.nodeid for x in reports if not _is_late(x)})
        terminalreporter.write_line(f"{ran} of {chosen} ran; {chosen - ran} were {LATE}")


@pytest.fixture(autouse=True)
def _afresh():
    """Each test starts with the same seed and without known calls, as tests change backends."""
    torch.manual_seed(0)
    call_cache.forget()
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        _leave_if_broken()


def _leave_if_broken():
    """Ends a process whose GPU context is broken: every later test in it would fail.

    An access out of bounds breaks the context. The test itself has already failed; xdist starts a
    new process for the remaining tests.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the GPU cannot be used any more: {error}", returncode=1)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Each backend that can run here, by name. GPU backends get copies of the CPU tensors."""
    if request.param == "cpu" and operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)
    if request.param in ON_GPU:
        carrier = Carrier(registry.BACKENDS[request.param], torch.device("cuda"))
        monkeypatch.setitem(registry.BACKENDS, request.param, carrier)
    return request.param


@pytest.fixture
def set_threads():
    """torch.set_num_threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def operator_calls(monkeypatch):
    """The calls of a module that run as one operator."""
    return spied(monkeypatch, operators, "multi_head_attention")


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of all calls that reach our attention from a module."""
    seen = spied(monkeypatch, operators, "multi_head_attention")
    return spied(monkeypatch, functional, "scaled_dot_product_attention", seen)


@pytest.fixture
def extension():
    """For tests of the compiled operators only."""
    if operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)


def _isas():
    """The instruction sets by name. All except the one in use are marked slow."""
    widest = None if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa()
    return [x if x == widest else pytest.param(x, marks=pytest.mark.slow) for x in ISAS]


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """The instruction set varies fastest: all of them share one reference computation of a case."""
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _isas(), indirect=True)


@pytest.fixture
def isa(request, extension):
    """Forces the CPU kernels of one instruction set, and AMX even where vectors are faster.

    Most problems of tests are so small that AMX would else compute few of them.
    """
    before = torch.ops.fastattn.cpu_isa()
    assert torch.ops.fastattn.select_cpu_isa(request.param)
    if request.param.startswith("amx"):
        ways = "heads_as_rows,heads_together,split_keys,one_query,matrix_unit"
        assert torch.ops.fastattn.select_cpu_path(ways)
    yield request.param
    assert torch.ops.fastattn.select_cpu_path(os.environ.get("FASTATTN_CPU_PATH", "auto"))
    assert torch.ops.fastattn.select_cpu_isa(before)
