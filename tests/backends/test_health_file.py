"""The file of the self-check's verdicts: what it keeps, and that a broken one breaks no call."""

import json
import os
import warnings

import pytest
import torch
from fake_gpu import CPU, backend, call, verdicts

from fastattn import cache_file
from fastattn.backends import health

pytestmark = pytest.mark.usefixtures("fake_gpu")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "7", '{"a machine": 1}', '{"a machine": {"x": null}}', "\ud800",
     '{"a machine": {"fake/dot/float32/": 3}}', '{"a machine": {"fake/dot/float32/": ""}}',
     '{"a machine": {"fake//dot/float32/": "old"}}',
     '{"another": {"fake/dot/float32/": "wrong"}}', '{"a machine": {"fake/dot/float32": "old"}}',
     "[" * 100_000],
)  # fmt: skip
def test_a_file_that_says_nothing_is_written_anew(install, text):
    file = cache_file.path(health.FILE)
    file.parent.mkdir()
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    fake = install(backend())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    assert fake.calls > 1
    assert verdicts()["fake/dot/float32/"] is None
    assert os.listdir(file.parent) == [file.name]


def test_a_folder_that_cannot_be_written(install, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fake = install(backend())
    call()
    calls = fake.calls
    call(shape=(1, 2, 5, 4))
    assert fake.calls == calls + 1


def test_the_latest_machines_stay(install, monkeypatch):
    install(backend())
    check = health.Check("fake", "dot", "float32", "")
    most = health.MOST_MACHINES
    numbers = [*range(2, most - 1), 0, most - 1, most]
    for n in (0, 1, *numbers):  # the first one comes twice
        monkeypatch.setattr(health, "machine", lambda device, n=n: f"machine {n}")
        health.keep(check, CPU, None)
    known = json.loads(cache_file.path(health.FILE).read_text())
    assert list(known) == [f"machine {n}" for n in numbers]


def test_a_machine_is_all_that_a_verdict_depends_on(monkeypatch):
    monkeypatch.undo()
    health.machine.cache_clear()
    assert health.machine(CPU) is None
    device = torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert health.machine(device) is None
    health.machine.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    name = health.machine(device)
    health.machine.cache_clear()
    assert name.startswith("NVIDIA H200, capability 9.0, driver ")
    assert f"torch {torch.__version__}" in name
    assert all(part in name for part in ("Triton ", "build "))
