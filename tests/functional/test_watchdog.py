"""Self-checks in child processes: one that hangs or crashes is a verdict, and the rest is made."""

import json
import signal
import subprocess
import sys
import types

import pytest
import torch

from fastattn import doctor, watchdog
from fastattn.backends import health, registry, wgmma
from fastattn.backends.health import Check, Verdict

CPU = torch.device("cpu")

EAGER = registry.BACKENDS["eager"]
RIGHT = Verdict(None)


def check(name):
    return Check(name, "", "dot", "float32", "plain decoding")


# ---- the parent ----

# A child whose checks end as the names of their backends say.
SCRIPT = """
import json, os, sys, time
SIGN = "fastattn self-check: "
print("a library talks", flush=True)
print(SIGN + "ready", flush=True)
for name, *_ in json.loads(sys.argv[-1]):
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        os._exit(3)
    if name == "killed":
        os.kill(os.getpid(), 9)
    print("a library talks", flush=True)
    print(SIGN + json.dumps(["wrong" if name == "breaks" else None, True, name != "breaks"]),
          flush=True)
    if name == "breaks":
        break
    if name == "stays":
        time.sleep(60)
"""


def in_children(*names, command=(sys.executable, "-S", "-c", SCRIPT), seconds=20.0):
    checks = [check(name) for name in names]
    found = watchdog.in_children(checks, CPU, command, seconds)
    assert list(found) == checks
    return list(found.values())


def test_each_check_gets_its_verdict():
    breaks, right, crashes, killed, again = in_children(
        "breaks", "right", "crashes", "killed", "right too"
    )
    assert breaks == Verdict("wrong")
    assert right == again == RIGHT
    assert crashes.lasting
    assert crashes.reason.startswith("its process ended with status 3; FASTATTN_SELF_CHECK=0")
    assert killed == watchdog.NONE  # by the system where memory ran out, for example


def test_what_hangs_is_wrong():
    right, hangs, again = in_children("right", "hangs", "right too", seconds=2)
    assert hangs.reason.startswith("it hangs: no result within 2 s; FASTATTN_SELF_CHECK=0")
    assert hangs.lasting
    assert right == again == RIGHT


def test_a_child_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(watchdog, "SECONDS_TO_END", 0.5)
    children = []
    start = subprocess.Popen
    monkeypatch.setattr(
        watchdog.subprocess,
        "Popen",
        lambda *a, **k: children.append(start(*a, **k)) or children[-1],
    )
    assert in_children("stays") == [RIGHT]
    assert [child.poll() for child in children] == [-signal.SIGKILL]


def test_children_that_do_not_begin_say_nothing_of_a_backend():
    command = sys.executable, "-S", "-c", "raise SystemExit(1)"
    assert in_children("right", "other", command=command) == [watchdog.NONE] * 2


@pytest.mark.slow
def test_a_child_loads_this_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checks = [Check("eager", "", "dot", "float32", "plain decoding")]
    assert watchdog.in_children(checks, CPU) == {checks[0]: RIGHT}


# ---- the child ----


def verdicts_of(capfd, monkeypatch, **forwards):
    """What a child prints of backends with these forward passes."""
    for name, forward in forwards.items():
        fake = types.SimpleNamespace(forward=forward, backward=EAGER.backward)
        monkeypatch.setitem(registry.BACKENDS, name, fake)
    watchdog.child(CPU, json.dumps([check(name) for name in forwards]))
    ready, *lines = capfd.readouterr().out.splitlines()
    assert ready == f"{watchdog.SIGN}{watchdog.READY}"
    return [json.loads(line.removeprefix(watchdog.SIGN)) for line in lines]


def lies(*args):
    out, *others = EAGER.forward(*args)
    return out * 1.05, *others


def raises(*args):
    raise RuntimeError("mine")


def no_memory(*args):
    raise torch.OutOfMemoryError


def test_a_child_goes_on_after_a_wrong_backend(capfd, monkeypatch):
    found = verdicts_of(
        capfd, monkeypatch, lies=lies, raises=raises, empty=no_memory, right=EAGER.forward
    )
    assert [x[1:] for x in found] == [[True, True], [False, True], [False, True], [True, True]]
    assert found[0][0].startswith("its error is")
    assert found[1][0].startswith("it raises RuntimeError: mine;")
    assert [found[2][0], found[3][0]] == [health.UNKNOWN, None]


def test_a_broken_device_ends_the_child_and_is_wrong(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "_is_broken", lambda device: True)
    [(reason, *others)] = verdicts_of(capfd, monkeypatch, raises=raises, right=EAGER.forward)
    assert reason.startswith("it raises RuntimeError: mine;")
    assert others == [True, False]


# ---- the doctor ----


def test_the_doctor_is_its_own_child(capfd):
    checks = [Check("eager", "", "dot", "bfloat16", "plain decoding")]
    doctor.main(["--child", "cpu", json.dumps(checks)])
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"{watchdog.SIGN}ready", f"{watchdog.SIGN}[null, true, true]"]


def test_the_doctor_keeps_what_the_children_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FASTATTN_SELF_CHECK", raising=False)
    monkeypatch.setattr(health, "machine", lambda device: "a machine")
    monkeypatch.setattr(watchdog, "_runs", lambda check, device: check.dtype == "float32")
    reasons = {True: None, False: "it hangs"}
    monkeypatch.setattr(watchdog, "in_children", lambda checks, device: {
        check: Verdict(reasons[check.score == "dot"]) for check in checks
    })  # fmt: skip
    for name in ("calls", "checks"):
        monkeypatch.setattr(doctor, name, lambda device: {})
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    health.forget()
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "  triton: dot, float32, plain calls: right\n" in text
    assert "  cuda: additive, float32: WRONG: it hangs\n" in text
    health.forget()
    right, wrong = (Check("triton", "", s, "float32", "plain") for s in ("dot", "additive"))
    assert health.verdict(right, CPU) is None
    assert health.verdict(wrong, CPU) == "it hangs"
    health.forget()
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
    assert watchdog.everyday(CPU) == {}


def test_which_checks_a_device_runs():
    """None without a GPU, but for those of backends that other tests interpret."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert watchdog.everyday(CPU) == {}
    assert not watchdog._runs(wgmma.CHECK, CPU)
    assert not any(watchdog._runs(check, CPU) for check in watchdog.EVERYDAY
                   if check.backend == "cuda")  # fmt: skip
