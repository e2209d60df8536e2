"""`python -m fastattn`: a report that ends, says what is missing, and tells right from wrong."""

import collections
import importlib.metadata
import json
import os
import subprocess
import sys
import types

import pytest
import torch

import fastattn
from fastattn import doctor, watchdog
from fastattn.backends import _gpu, cpu, cuda, health, operators, registry, triton
from fastattn.backends.health import Check, Verdict

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _quick_and_compiled():
    """No user's process interprets the Triton kernels. In this one, tests/triton may have begun."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor, "SECONDS", 0.01)
        patched.setattr(triton, "_interpreted", lambda: False)
        yield


@pytest.fixture(scope="module")
def found():
    return doctor.report(CPU)


def test_the_program_prints_both_forms(tmp_path):
    folder = os.path.dirname(os.path.dirname(fastattn.__file__))
    environment = os.environ | {"PYTHONPATH": folder}
    command = [sys.executable, "-m", "fastattn", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["fastattn"] == fastattn.__version__


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    """As in ``python -m fastattn | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    folder = os.path.dirname(os.path.dirname(fastattn.__file__))
    command = [sys.executable, "-m", "fastattn"]
    environment = os.environ | {"PYTHONPATH": folder}
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.PIPE, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_every_backend_is_right_or_says_why_it_does_not_run(found):
    assert set(found["checks"]) == set(registry.BACKENDS)
    for check in found["checks"].values():
        assert (check["worst error"] is None) == bool(check["reasons"])
        assert doctor.right(check)
    assert 0 < found["checks"]["eager"]["worst error"] <= 1


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """What counts as one, whose backends are eager and count; children found them right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "1")
    monkeypatch.setattr(health, "DEVICES", ("cpu",))
    monkeypatch.setattr(health, "machine", lambda device: "a machine")
    monkeypatch.setattr(health, "runner", lambda *args: Verdict("made in this process"))
    monkeypatch.setattr(_gpu, "reasons", lambda device: [])
    monkeypatch.setattr(cuda, "LIBRARY_ERROR", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    eager = registry.BACKENDS["eager"]
    fakes, calls = {"eager": eager}, collections.Counter()
    for name, module in (("cuda", cuda), ("triton", triton)):

        def forward(*args, name=name):
            calls[name] += 1
            return eager.forward(*args)

        fakes[name] = types.SimpleNamespace(
            unsupported=module.unsupported, forward=forward, backward=eager.backward
        )
    monkeypatch.setattr(registry, "BACKENDS", {x: fakes[x] for x in ("triton", "cuda", "eager")})
    health.forget()
    for check in watchdog.EVERYDAY:
        health.keep(check, CPU, None)
    yield calls
    health.forget()


def test_the_report_needs_no_check_that_no_child_makes(gpu):
    for backends in (registry.BACKENDS, {x: registry.BACKENDS[x] for x in ("triton", "eager")}):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(registry, "BACKENDS", backends)
            assert {x.backend for x in doctor.calls(CPU).values()} <= {"triton", "cuda"}
            assert all(map(doctor.right, doctor.checks(CPU).values()))
            doctor.ratio(CPU)
    assert not any(health.verdict(check, CPU) for check in {c for _, c in health._found})
    assert {c for _, c in health._found} == {*watchdog.EVERYDAY}
    assert min(gpu["cuda"], gpu["triton"]) > 0


def test_what_could_not_be_checked_does_not_run(gpu):
    health.keep(Check("triton", "dot", "float32", "rich bias"), CPU, health.UNKNOWN, False)
    found = doctor.checks(CPU)
    reason = "triton: dot, float32, rich bias calls: could not be checked"
    assert found["triton"]["reasons"] == [reason]
    assert gpu["triton"] == 0
    assert found["cuda"]["worst error"] <= 1


def test_the_words_for_verdicts(monkeypatch):
    wrong, unknown, right = watchdog.EVERYDAY[:3]
    found = {wrong: Verdict("it hangs"), unknown: watchdog.NONE, right: Verdict(None)}
    monkeypatch.setattr(watchdog, "everyday", lambda device: found)
    for name in ("calls", "checks", "ratio"):
        monkeypatch.setattr(doctor, name, lambda device: {})
    assert json.loads(doctor.as_json(doctor.report(CPU)))["self-checks"] == {
        str(wrong): "WRONG: it hangs", str(unknown): "could not be made", str(right): "right"
    }  # fmt: skip


@pytest.mark.parametrize("name", triton.DISTRIBUTIONS)
def test_triton_has_several_packages(monkeypatch, name):
    def version(asked):
        if asked != name:
            raise importlib.metadata.PackageNotFoundError
        return "9.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(triton, "INSTALLED", True)
    assert doctor.versions()["triton"] == triton.version() == "9.9"
    assert doctor.libraries()["Triton kernels"]["missing"] is None


def test_a_wrong_backend_is_found(monkeypatch, capsys):
    eager = registry.BACKENDS["eager"]
    forward = eager.forward
    monkeypatch.setattr(eager, "forward", lambda *args: tuple(x * 1.001 for x in forward(*args)))
    assert doctor.main([]) == 1
    [line] = [x for x in capsys.readouterr().out.splitlines() if "WRONG" in x]
    assert line.split()[0] == "eager"


def test_a_backend_that_fails_does_not_end_the_report(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(registry.BACKENDS["eager"], "forward", broken)
    no_ratio = {"call": "a", "peer": "torch", "ours, ms": 1.0, "peer, ms": 2.0, "ratio": 2.0}
    monkeypatch.setattr(doctor, "ratio", lambda device: no_ratio)
    assert doctor.main([]) == 1
    assert "FAILED: RuntimeError: no such instruction" in capsys.readouterr().out


def test_an_unknown_mode_of_the_self_check_is_an_error_of_the_command(monkeypatch, capsys):
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "bad")
    with pytest.raises(SystemExit) as ended:
        doctor.main([])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith("error: FASTATTN_SELF_CHECK: expected '0', '1' or 'force', got 'bad'\n")


def test_the_calls_are_explained(found):
    assert len(found["calls"]) == 6
    assert all(isinstance(x, fastattn.Explanation) for x in found["calls"].values())
    text = doctor.text(found)
    for name, call in found["calls"].items():
        assert any(name in line and call.backend in line for line in text.splitlines())


def test_missing_kernels_are_told_with_their_remedy(monkeypatch):
    monkeypatch.setattr(operators, "EXTENSION_ERROR", "the compiled extension is missing")
    monkeypatch.setattr(cpu, "REMEDY", "`make build` compiles the kernels")
    monkeypatch.setattr(cpu, "_warn_once", lambda: None)  # it warns once in a process
    found = doctor.report(CPU)
    assert found["machine"]["instruction set"] is None
    assert {x.backend for x in found["calls"].values()} == {"eager"}
    assert found["checks"]["cpu"]["reasons"] == [operators.EXTENSION_ERROR]
    text = doctor.text(found)
    assert f"no: {operators.EXTENSION_ERROR}; {cpu.REMEDY}" in text
    assert f"no cpu: {operators.EXTENSION_ERROR}" in text


def test_json_holds_what_the_text_says(found):
    read = json.loads(doctor.as_json(found))
    assert list(read) == [
        *("versions", "machine", "libraries", "self-checks", "calls", "checks", "ratio")
    ]
    call = found["calls"]["additive"]
    assert read["calls"]["additive"]["reasons"] == call.reasons
    assert read["ratio"]["ratio"] == pytest.approx(
        read["ratio"]["peer, ms"] / read["ratio"]["ours, ms"]
    )


def test_errors_that_are_not_finite_are_json(found):
    """JSON knows no such numbers: other readers than Python's refuse them."""

    def refuse(name):
        raise AssertionError(name)

    checks = {name: {"worst error": float(name)} for name in ("inf", "nan")}
    read = json.loads(doctor.as_json({**found, "checks": checks}), parse_constant=refuse)
    assert [x["worst error"] for x in read["checks"].values()] == ["Infinity", "NaN"]
