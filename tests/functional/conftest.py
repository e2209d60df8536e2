"""Which way a repeated call takes."""

import pytest

from fastattn import repeated
from fastattn.problem import call_cache


@pytest.fixture
def ordinary(monkeypatch):
    """The passes that went the ordinary way: "forward" or "backward"."""
    passes, recall, gradients = [], call_cache.recall, repeated._gradients
    monkeypatch.setattr(
        call_cache, "recall", lambda *args: passes.append("forward") or recall(*args)
    )
    monkeypatch.setattr(
        repeated, "_gradients", lambda *args: passes.append("backward") or gradients(*args)
    )
    return passes
