"""What runs where, noted as it runs: ``fastattn.explain(module, ...)`` reads the notes.

Only code that has to find out something first makes notes, never the short way of a call that was
seen before. ``watching`` therefore has all calls find out everything again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fastattn.backends import registry
from fastattn.problem import Problem, call_cache

Note = registry.Explanation | str  # of a call that runs here; why a call goes to torch

_NOTES: list[Note] | None = None  # None while nobody watches
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def watching() -> Iterator[list[Note]]:
    """The notes of all calls that are made meanwhile, in their order; a list that grows."""
    global _NOTES
    with _ONE_AT_A_TIME, call_cache.paused():
        _NOTES, before = [], _NOTES
        try:
            yield _NOTES
        finally:
            _NOTES = before


def call(p: Problem, backend: str = "auto", bias: bool = False) -> None:
    """Notes a call that runs here."""
    if _NOTES is not None:
        _NOTES.append(registry.explain(p, backend, bias))


def call_of_torch(reason: str) -> None:
    """Notes a call that goes to torch's own code."""
    if _NOTES is not None:
        _NOTES.append(reason)
