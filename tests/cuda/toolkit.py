"""Where NVIDIA's programs are on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_tool(name: str) -> str | None:
    """Finds a tool beside nvcc, or in Triton's wheel."""
    folders = [Path(find_nvcc() or "/").resolve().parent, *Path("/usr/local").glob("cuda*/bin")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return next((str(f / name) for f in folders if (f / name).exists()), shutil.which(name))
