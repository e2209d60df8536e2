"""What `make gpu-test`, `gpu-bench` and `gpu-sanitize` report, with replaced programs."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import gpu
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("test", "bench", "sanitize")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_ends_within_its_limit(target):
    steps = gpu.steps(target)
    assert [steps[0].name, steps[0].command[-2:]] == ["build", ["setup.py", "cuda"]]
    assert sum(step.seconds + gpu.GRACE for step in steps) <= gpu.LIMIT
    for step in steps:  # tests that have started need time to end
        assert float(step.environment.get("FASTATTN_TEST_SECONDS", 0)) <= step.seconds - 40


@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_the_target(target):
    done = subprocess.run(
        ["make", "-n", f"gpu-{target}", "NO_VENV=1", "PYTHON=py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"py tests/tools/gpu.py {target}" in done.stdout


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
        ("exit 1", "true", 1, "build: FAILED"),
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


def counted(seconds, *arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = {n: x for n, x in os.environ.items() if n != "FASTATTN_TEST_START"}
    environment |= {"FASTATTN_TEST_SECONDS": str(seconds), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_a_run_out_of_time_passes_and_says_how_many_ran():
    output = counted(-1, "tests/problem/test_reference.py")
    chosen = re.search(r"(\d+) skipped", output)
    assert chosen is not None
    assert f"0 of {chosen[1]} ran; {chosen[1]} were not begun within -1 s" in output


def test_compiled_kernels_come_first_and_plain_problems_next():
    output = counted(60, "--collect-only", "-m", "gpu", "tests/contract/test_grid.py")
    names = re.findall(r"::test_\w+\[(.*)\]", output)
    kinds = [
        "cuda" if "cuda" in n else "rich" if re.search("bias|dropout|weights", n) else "plain"
        for n in names
    ]
    assert kinds[0] == "cuda"
    assert kinds[-1] == "rich"
    first = {kind: kinds.index(kind) for kind in ("cuda", "plain", "rich")}
    assert first["cuda"] < first["plain"] < first["rich"]
    assert "cuda" not in kinds[first["plain"] :]


@pytest.mark.parametrize("failed", [0, 3])
def test_an_interrupted_run_is_as_good_as_what_ran(failed, request, monkeypatch):
    plugins = request.config.pluginmanager.get_plugins()
    [conftest] = [p for p in plugins if hasattr(p, "_by_compile_time")]
    session = types.SimpleNamespace(exitstatus=2, testsfailed=failed)
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
