"""A machine that the self-check takes for one with a GPU, and what went the ordinary way."""

import pytest
from fake_gpu import EAGER
from helpers import spied

from fastattn import repeated
from fastattn.backends import health, registry
from fastattn.problem import validate


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


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked: those that no plan and no record served."""
    return spied(monkeypatch, validate, "build")


@pytest.fixture
def ordinary_gradients(monkeypatch):
    """The backward passes of repeated calls that no plan served."""
    return spied(monkeypatch, repeated, "_gradients")
