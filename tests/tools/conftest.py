"""Programs beside the package: found where they are."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root))  # bench/ is no part of the installed package
