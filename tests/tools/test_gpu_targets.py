"""What `make gpu-test`, `gpu-bench` and `gpu-sanitize` report, with replaced programs."""

import math
import os
import runpy
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from fastattn import testing
from fastattn.backends import operators

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu  # noqa: E402

pytestmark = pytest.mark.slow

TARGETS = ("test", "bench", "sanitize")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_ends_within_its_limit(target):
    steps = gpu.steps(target)
    assert [steps[0].name, steps[0].command[-2:]] == ["build", ["setup.py", "cuda"]]
    assert sum(step.seconds + gpu.GRACE for step in steps) <= gpu.LIMIT
    for step in steps:  # tests that have started need time to end
        assert float(step.environment.get("FASTATTN_TEST_SECONDS", 0)) <= step.seconds - 40


@pytest.mark.parametrize("command", [["gpu"], ["gpu", "tests"], ["wheel", "--help-me"]])
def test_wrong_arguments_start_nothing(command, monkeypatch):
    def never(*_, **options):
        raise AssertionError("it began")

    for module, name in ((subprocess, "Popen"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / f"tools/{command[0]}.py"), run_name="__main__")


@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_the_target(target):
    done = subprocess.run(
        ["make", "-n", f"gpu-{target}", "NO_VENV=1", "PYTHON=py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"py tools/gpu.py {target}" in done.stdout


ERROR = "echo '========= Invalid __global__ read of size 4 bytes'"
SANITIZERS = {
    "clean": ("echo '========= ERROR SUMMARY: 0 errors'", gpu.PASSED),
    "refuses": ("echo '========= Error: Device not supported.'; exit 1", gpu.INCONCLUSIVE),
    "slow": ("sleep 60", gpu.INCONCLUSIVE),
    "deaf": ("trap '' INT; sleep 60 & wait; wait", gpu.INCONCLUSIVE),
    "finds": (f"{ERROR}; echo '========= ERROR SUMMARY: 1 error'; exit 1", gpu.FAILED),
    "races": ("echo '========= RACECHECK SUMMARY: 2 hazards displayed'; exit 1", gpu.FAILED),
    "slow, finds": (f"{ERROR}; sleep 60", gpu.FAILED),
    "tests fail": ("echo '1 failed, 3 passed in 2.0s'; exit 1", gpu.FAILED),
    "crashes": ("exit 139", gpu.FAILED),
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_what_a_sanitizer_says(name, tmp_path, monkeypatch):
    script, want = SANITIZERS[name]
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\n{script}\n")
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    step = gpu.sanitize_steps()[0]
    assert step.command[0] == str(sanitizer)
    step = step._replace(seconds=1 if "sleep" in script else 30)
    assert gpu.verdict(step, *gpu.run(step)) == want


@pytest.mark.parametrize(
    ("build", "tests", "status", "last"),
    [
        ("true", "true", 0, "build: passed; tests: passed"),
        ("true", "exit 1", 1, "build: passed; tests: FAILED"),
        ("true", "sleep 9", 0, "build: passed; tests: inconclusive: out of time after 1 s"),
        ("exit 1", "true", 1, "build: FAILED; tests: passed"),
        ("sleep 9", "true", 1, "build: FAILED: out of time after 1 s; tests: passed"),
    ],
)
def test_the_exit_status_is_of_failures_alone(build, tests, status, last, monkeypatch, capsys):
    made = [
        gpu.Step(name, 1, ["sh", "-c", command])
        for name, command in (("build", build), ("tests", tests))
    ]
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    monkeypatch.setattr(gpu, "steps", lambda target: made)
    assert gpu.main("test") == status
    assert capsys.readouterr().out.splitlines()[-1] == f"== {last}"


# ---- conftest.py with a time limit ----


@pytest.fixture
def conftest(request):
    plugins = request.config.pluginmanager.get_plugins()
    [found] = [p for p in plugins if hasattr(p, "_by_compile_time")]
    return found


def test_a_run_out_of_time_passes_and_says_how_many_ran(conftest, monkeypatch):
    conftest.pytest_runtest_setup(None)  # this run has no time limit
    monkeypatch.setattr(conftest, "SECONDS", 10.0)
    monkeypatch.setattr(conftest, "START", time.monotonic())
    conftest.pytest_runtest_setup(None)
    monkeypatch.setattr(conftest, "START", time.monotonic() - 11)
    with pytest.raises(pytest.skip.Exception) as late:
        conftest.pytest_runtest_setup(None)

    def report(name, why=None):
        return types.SimpleNamespace(nodeid=name, longrepr=why and ("file", 1, f"Skipped: {why}"))

    stats = {
        "passed": [report("a"), report("b")],
        "failed": [report("c")],
        "skipped": [report("d", "no AVX2"), *(report(name, late.value.msg) for name in "efg")],
        "error": [report("c")],  # a test that failed, and then its fixture too
    }
    lines = []
    chosen = types.SimpleNamespace(testscollected=8)
    reporter = types.SimpleNamespace(stats=stats, _session=chosen, write_line=lines.append)
    conftest.pytest_terminal_summary(reporter, types.SimpleNamespace(stash={}))
    assert lines == [f"4 of 8 ran; 4 were {conftest.LATE}"]


class Item:
    """What conftest.py asks a test."""

    path = Path("tests/contract/test_grid.py")

    def __init__(self, backend, name, marks=(), **params):
        case = next(c for c in testing.GRID if c.name == name)
        self.callspec = types.SimpleNamespace(params=dict(backend=backend, case=case) | params)
        self.name, self.marks = f"{backend}-{name}", marks

    def get_closest_marker(self, name):
        return name in self.marks


@pytest.fixture
def chosen(conftest):
    """The names of those of some items that are left, in their order."""
    left_out = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = types.SimpleNamespace(stash={}, hook=hook)

    def choose(items):
        given = len(items)
        conftest.pytest_collection_modifyitems(config, items)
        assert len(items) + len(left_out) == given
        return [item.name for item in items], config

    return choose


def test_compiled_kernels_come_first_and_plain_problems_next(conftest, chosen, monkeypatch):
    monkeypatch.setattr(conftest, "SECONDS", 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ("bias-hmn", "dropout", "causal", "weights-full", "M1-N1")
    order, _ = chosen([Item(backend, name) for name in names for backend in ("triton", "cuda")])
    assert set(order[:5]) == {f"cuda-{name}" for name in names}
    assert set(order[5:7]) == {"triton-causal", "triton-M1-N1"}


def test_without_a_gpu_the_quickest_come_first(conftest, chosen, monkeypatch):
    monkeypatch.setattr(conftest, "SECONDS", 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    items = [Item("eager", name) for name in ("dropout", "causal", "M1-N1", "bias-hmn")]
    items[0].path = Path("tests/triton/test_shared.py")
    items[1].path = Path("tests/triton/test_masking.py")
    items[3].path = Path("tests/modules/test_layers.py")
    assert chosen(items)[0] == ["eager-bias-hmn", "eager-M1-N1", "eager-causal", "eager-dropout"]


def test_what_needs_a_device_that_is_missing_is_counted(conftest, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(operators, "EXTENSION_ERROR", None)
    isas = types.SimpleNamespace(cpu_isas=lambda: ["avx2", "baseline"])
    monkeypatch.setattr(torch.ops, "fastattn", isas)
    items = [Item("cpu", "M1-N1", isa=isa) for isa in ("baseline", "amx")]
    items += [Item(backend, "dropout", ["gpu"]) for backend in ("triton", "cuda")]
    order, config = chosen([*items, Item("eager", "dropout")])
    assert order == ["cpu-M1-N1", "eager-dropout"]
    lines = []
    monkeypatch.setattr(conftest, "SECONDS", math.inf)
    conftest.pytest_terminal_summary(types.SimpleNamespace(write_line=lines.append), config)
    assert lines == [
        "deselected: 1 that need amx, which this machine, or this build, does not have",
        "deselected: 2 that need a GPU, and torch sees no CUDA device",
    ]


@pytest.mark.parametrize("failed", [0, 3])
def test_an_interrupted_run_is_as_good_as_what_ran(failed, conftest, monkeypatch):
    session = types.SimpleNamespace(exitstatus=2, testsfailed=failed, config=None)
    monkeypatch.setattr(conftest, "SECONDS", math.inf)
    conftest.pytest_sessionfinish(session, pytest.ExitCode.INTERRUPTED)
    assert session.exitstatus == 2  # this run has no time limit
    monkeypatch.setattr(conftest, "SECONDS", 10.0)
    conftest.pytest_sessionfinish(session, pytest.ExitCode.INTERRUPTED)
    assert session.exitstatus == min(failed, 1)


# ---- the driver ----


@pytest.mark.parametrize(
    ("runtime", "driver", "fits"),
    [("13.0", "12.8", False), ("13.0", "13.0", True), ("12.8", "12.2", True),
     ("12.8", "13.0", True), ("13.0", None, True), (None, "12.8", True)],
)  # fmt: skip
def test_a_driver_older_than_the_runtime_is_a_reason(runtime, driver, fits, monkeypatch):
    from fastattn.backends import cuda

    monkeypatch.setattr(cuda.torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda.operators, "load", lambda *args: None)
    monkeypatch.setattr(cuda.operators, "build_info", lambda *keys: runtime)
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    error = cuda._load_library()
    if fits:
        assert error is None
    else:
        assert error is not None
        assert f"built with CUDA {runtime}, and this driver ends at {driver}" in error
