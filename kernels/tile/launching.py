"""How the host launches a kernel: in Triton's way, and watched while a plan is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Watcher = Callable[[Any, Any, int, tuple, dict[str, Any]], None]


class _Watching(threading.local):
    """Who is told of this thread's launches; see host/prepared.py."""

    watcher: Watcher | None = None
    compiled = False  # and whether some of them launched nothing


watching = _Watching()


def launch(kernel: Any, programs: int) -> Callable[..., None]:
    """What launches ``programs`` of a kernel with the arguments that it is called with."""

    def with_arguments(*args: Any, **options: Any) -> None:
        compiled = kernel[(programs,)](*args, **options)
        if watching.watcher is not None:
            watching.watcher(kernel, compiled, programs, args, options)

    return with_arguments
