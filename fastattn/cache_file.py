"""What one process finds out and later ones read: JSON files in the user's cache folder."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any


def path(name: str) -> Path:
    """``$XDG_CACHE_HOME/fastattn/<name>``, in ``~/.cache`` by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastattn" / name


def read(name: str) -> Any:
    """What the file holds. Raises OSError without a file, and ValueError where it is no JSON."""
    return json.loads(path(name).read_text("utf-8"))


def write(name: str, content: Any) -> Path:
    """Replaces the file in one step, as other processes may be reading; returns where it is."""
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    draft.write_text(json.dumps(content, indent=1), "utf-8")
    draft.replace(file)
    return file
