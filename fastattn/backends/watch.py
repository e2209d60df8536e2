"""What runs where, noted as it runs: ``fastattn.explain(module, ...)`` reads the notes.

Only the full path of a call makes notes. The short path of a known call makes none, so
``watching`` turns the cache of known calls off. Calls of other threads make no notes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from fastattn.backends import registry
from fastattn.problem import Problem, call_cache

Note = registry.Explanation | str  # a call that runs here, or why a call goes to torch

_NOTES: list[Note] | None = None  # None outside of watching()
_THREAD = 0  # the one that watches
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def watching() -> Iterator[list[Note]]:
    """Collects the notes of this thread's calls in the block, in order, in the list it yields."""
    global _NOTES, _THREAD
    with _ONE_AT_A_TIME, call_cache.paused():
        _THREAD = threading.get_ident()
        _NOTES, before = [], _NOTES
        try:
            yield _NOTES
        finally:
            _NOTES = before


def by_this_thread() -> bool:
    """Whether the running thread is the one that watches."""
    return threading.get_ident() == _THREAD


def call(p: Problem, *options: Any) -> None:
    """Notes a call that runs here; ``options`` as of ``registry.explain``."""
    if _NOTES is not None and by_this_thread():
        _NOTES.append(registry.explain(p, *options))


def call_of_torch(reason: str) -> None:
    """Notes a call that goes to torch's own code."""
    if _NOTES is not None and by_this_thread():
        _NOTES.append(reason)
