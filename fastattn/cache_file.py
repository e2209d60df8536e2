"""What one process finds out and later ones read: JSON files in the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def path(name: str) -> Path:
    """``$XDG_CACHE_HOME/fastattn/<name>``, in ``~/.cache`` by default.

    Raises:
        FileNotFoundError: there is no home folder.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}, and XDG_CACHE_HOME is not set") from error
    return Path(cache) / "fastattn" / name


def read(name: str) -> Any:
    """What the file holds. Raises OSError without a file, and ValueError where it is no JSON."""
    return json.loads(path(name).read_text("utf-8"))


def update(name: str, change: Callable[[], Any]) -> Path:
    """Replaces the file by what ``change`` makes of it, while no other process changes a file.

    Other processes may be reading: the file is replaced in one step. Returns where it is.

    Raises:
        OSError: there is no such folder, or it cannot be written.
    """
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        draft = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            draft.write_text(json.dumps(change(), indent=1), "utf-8")
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)  # where the disk is full, or the file is a folder
    finally:
        os.close(folder)
    return file
