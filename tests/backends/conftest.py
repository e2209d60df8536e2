"""A machine that the self-check takes for one with a GPU."""

import pytest
from fake_gpu import EAGER

from fastattn.backends import health, registry


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """The CPU counts as a GPU, of a machine that nobody has seen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FASTATTN_SELF_CHECK", raising=False)
    monkeypatch.setattr(health, "DEVICES", ("cpu",))
    monkeypatch.setattr(health, "machine", lambda device: "a machine")
    health.forget()
    yield
    health.forget()


@pytest.fixture
def install(monkeypatch):
    def installed(fake):
        monkeypatch.setattr(registry, "BACKENDS", {"fake": fake, "eager": EAGER})
        return fake

    return installed
