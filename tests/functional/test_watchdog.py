"""Self-checks in child processes: one that hangs or crashes is a verdict."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

from fastattn import doctor, self_check, watchdog
from fastattn.backends import health, registry, wgmma
from fastattn.backends.health import Check, Verdict

CPU = torch.device("cpu")

EAGER = registry.BACKENDS["eager"]
POPEN = subprocess.Popen
RIGHT = Verdict(None)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """What children change in this process: they are functions here."""
    monkeypatch.setattr(watchdog.signal, "alarm", lambda seconds: None)
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def check(name):
    return Check(name, "dot", "float32", "plain decoding")


# ---- the parent ----

# A child whose check ends as the name of its backend says.
SCRIPT = """
import json, os, subprocess, sys, time
SIGN = "fastattn self-check: "
name, *_ = json.loads(sys.argv[-1])
print("a library talks", flush=True)
print(SIGN + "ready", flush=True)
sys.stdout.write("a library talks without an end of the line")
if name == "hangs":
    time.sleep(60)
if name == "hangs with a compiler":
    with open(os.environ["FIFO"], "w") as writer:
        subprocess.run(["sleep", "60"], stderr=writer)
if name == "crashes":
    os._exit(3)
if name == "says goodbye and crashes":
    os.close(1)
    time.sleep(1)
    os.abort()
if name == "killed":
    os.kill(os.getpid(), 9)
print(SIGN + json.dumps(["wrong" if name == "wrong" else None, True]), flush=True)
if name == "stays":
    time.sleep(60)
"""


def in_child(name, command=(sys.executable, "-S", "-c", SCRIPT), seconds=20.0):
    return watchdog.in_child(check(name), CPU, command, seconds)


def test_a_check_gets_its_verdict():
    assert in_child("right") == RIGHT
    assert in_child("wrong") == Verdict("wrong")
    assert in_child("killed") == watchdog.NONE  # by the system where memory ran out, for example


@pytest.mark.parametrize(
    ("name", "status"), [("crashes", 3), ("says goodbye and crashes", -signal.SIGABRT)]
)
def test_what_crashes_is_wrong(name, status):
    crashes = in_child(name)
    assert crashes.lasting
    start = f"its process ended with status {status}; FASTATTN_SELF_CHECK=0"
    assert crashes.reason.startswith(start)


@pytest.fixture
def children(monkeypatch):
    """The children that were started."""
    started = []

    def popen(*args, **options):
        started.append(POPEN(*args, **options))
        return started[-1]

    monkeypatch.setattr(watchdog.subprocess, "Popen", popen)
    return started


@pytest.mark.parametrize("name", ["hangs", "hangs with a compiler"])
def test_what_hangs_is_wrong(name, children, monkeypatch, tmp_path):
    """A compiler that the child started ends with the child, and nobody waits for it."""
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    began = time.monotonic()
    hangs = in_child(name, seconds=2)
    assert time.monotonic() - began < 30
    assert hangs.reason.startswith("it hangs: no result within 2 s; FASTATTN_SELF_CHECK=0")
    assert hangs.lasting
    assert [child.poll() for child in children] == [-signal.SIGKILL]
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # the end, as nobody can write any more
    assert time.monotonic() - began < 30
    os.close(reader)


def test_a_child_that_does_not_end_is_ended(children):
    assert in_child("stays", seconds=2) == RIGHT
    assert [child.poll() for child in children] == [-signal.SIGKILL]


def test_a_child_without_its_parent_ends():
    script = """
import sys, time, torch
from fastattn import self_check, watchdog
watchdog.SECONDS = 1
self_check.run = lambda *_: time.sleep(60)
watchdog.child(torch.device(sys.argv[1]), sys.argv[2])
"""
    found = in_child("plain", (sys.executable, "-c", script), seconds=50)
    assert found.reason.startswith(f"its process ended with status {-signal.SIGALRM};")


def test_an_interrupt_ends_the_child(children, monkeypatch):
    def interrupt(child, timeout=None):
        if timeout == 20:
            raise KeyboardInterrupt
        return wait(child, timeout)

    wait = POPEN.wait
    monkeypatch.setattr(POPEN, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_child("hangs")
    assert [child.poll() for child in children] == [-signal.SIGKILL]


def test_a_child_that_does_not_begin_says_nothing_of_a_backend():
    command = sys.executable, "-S", "-c", "raise SystemExit(1)"
    assert in_child("right", command=command) == watchdog.NONE


@pytest.mark.slow
def test_a_child_loads_this_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    eager = Check("eager", "dot", "float32", "plain decoding")
    assert watchdog.in_child(eager, CPU) == RIGHT


def test_a_child_takes_the_path_of_its_check_alone(monkeypatch):
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    script = """
import os
print("fastattn self-check: ready")
print("fastattn self-check: [null, %s]" % ("false" if os.environ["FASTATTN_CUDA_PATH"] else "true"))
"""
    assert in_child("any", command=(sys.executable, "-S", "-c", script)) == RIGHT


@pytest.mark.parametrize(
    ("check", "named", "right", "apart"),
    [
        (wgmma.CHECK, False, True, False),
        (Check("cuda", "dot", "bfloat16", ""), True, False, True),
        (Check("cuda", "dot", "bfloat16", ""), False, True, True),
        (Check("cuda", "dot", "bfloat16", ""), False, False, False),
        (Check("triton", "dot", "bfloat16", "plain"), True, True, False),
    ],
)
def test_which_checks_run_apart(monkeypatch, check, named, right, apart):
    """No process of a user checks warpgroups for the usual kernels."""
    monkeypatch.setattr(wgmma, "is_named", lambda: named)
    monkeypatch.setattr(wgmma, "is_right", lambda device: right)
    monkeypatch.setattr(watchdog, "in_child", lambda *args: "in a child")
    monkeypatch.setattr(self_check, "run", lambda *args: "here")
    assert health.runner(check, CPU) == ("in a child" if apart else "here")


# ---- the child ----


def verdict_of(capfd, monkeypatch, forward):
    """What a child prints of a backend with this forward pass."""
    fake = types.SimpleNamespace(forward=forward, backward=EAGER.backward)
    monkeypatch.setitem(registry.BACKENDS, "fake", fake)
    watchdog.child(CPU, json.dumps(check("fake")))
    ready, line = capfd.readouterr().out.splitlines()
    assert ready == f"{watchdog.SIGN}{watchdog.READY}"
    return json.loads(line.removeprefix(watchdog.SIGN))


def lies(*args):
    out, *others = EAGER.forward(*args)
    return out * 1.05, *others


def raises(*args):
    raise RuntimeError("mine")


def no_memory(*args):
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("forward", "reason", "lasting"),
    [(lies, "its error is", True), (raises, "it raises RuntimeError: mine;", False)],
)
def test_a_child_tells_what_is_wrong(capfd, monkeypatch, forward, reason, lasting):
    found = verdict_of(capfd, monkeypatch, forward)
    assert found[0].startswith(reason)
    assert found[1] == lasting


def test_a_child_tells_of_a_right_backend_and_of_no_verdict(capfd, monkeypatch):
    assert verdict_of(capfd, monkeypatch, EAGER.forward) == [None, True]
    monkeypatch.setattr(watchdog, "_is_broken", lambda device: True)
    assert verdict_of(capfd, monkeypatch, no_memory) == [health.UNKNOWN, False]


@pytest.mark.parametrize(("dtype", "precision"), [("TF32", "tf32"), ("float32", "ieee")])
def test_a_child_allows_the_products_of_its_check(capfd, monkeypatch, dtype, precision):
    seen = set()

    def forward(*args):
        seen.add(torch.backends.cuda.matmul.fp32_precision)
        return EAGER.forward(*args)

    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "ieee" else "ieee"
    fake = types.SimpleNamespace(forward=forward, backward=EAGER.backward)
    monkeypatch.setitem(registry.BACKENDS, "fake", fake)
    watchdog.child(CPU, json.dumps(check("fake")._replace(dtype=dtype)))
    assert seen == {precision}


def test_an_error_that_broke_the_device_lasts(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "_is_broken", lambda device: True)
    reason, lasting = verdict_of(capfd, monkeypatch, raises)
    assert reason.startswith("it raises RuntimeError: mine;")
    assert lasting


# ---- the doctor ----


def test_the_doctor_is_its_own_child(capfd):
    eager = Check("eager", "dot", "bfloat16", "plain decoding")
    doctor.main(["--child", "cpu", json.dumps(eager)])
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"{watchdog.SIGN}ready", f"{watchdog.SIGN}[null, true]"]


def test_the_doctor_keeps_what_the_children_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FASTATTN_SELF_CHECK", raising=False)
    monkeypatch.setattr(health, "machine", lambda device: "a machine")
    monkeypatch.setattr(watchdog, "_runs", lambda check, device: check.dtype == "float32")
    reasons = {True: None, False: "it hangs"}
    monkeypatch.setattr(
        watchdog, "in_child", lambda check, device: Verdict(reasons[check.score == "dot"])
    )
    for name in ("calls", "checks"):
        monkeypatch.setattr(doctor, name, lambda device: {})
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    health.forget()
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "  triton: dot, float32, plain calls: right\n" in text
    assert "  cuda: additive, float32: WRONG: it hangs\n" in text
    health.forget()
    right, wrong = (Check("triton", s, "float32", "plain") for s in ("dot", "additive"))
    assert health.verdict(right, CPU) is None
    assert health.verdict(wrong, CPU) == "it hangs"
    health.forget()
    monkeypatch.setattr(watchdog, "in_child", lambda *args: pytest.fail("a child was started"))
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
    assert watchdog.everyday(CPU) == {}


def test_which_checks_a_device_runs(monkeypatch):
    """None without a GPU, but for those of backends that other tests interpret."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "1")
    monkeypatch.setattr(watchdog, "in_child", lambda *args: pytest.fail("a child was started"))
    assert watchdog.everyday(CPU) == {}
    assert not watchdog._runs(wgmma.CHECK, CPU)
    assert not any(watchdog._runs(check, CPU) for check in watchdog.EVERYDAY
                   if check.backend == "cuda")  # fmt: skip
