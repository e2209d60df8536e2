"""The CUDA backend for CPU tensors: on a GPU, or on the shim, which runs its kernels on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import host_build
import torch
from helpers import Carrier

from fastattn.backends import _gpu, cuda, registry

NAME = "cuda"
KIND = os.environ.get("FASTATTN_TEST_SHIM", "plain")  # "sanitized" in a process for sanitizers
ON_GPU = torch.cuda.is_available() and "FASTATTN_TEST_SHIM" not in os.environ


def library() -> Path:
    """The kernels for the shim."""
    named = os.environ.get("FASTATTN_TEST_LIBRARY")
    return Path(named) if named else host_build.library("kernels", KIND)


def install(monkeypatch) -> str:
    """Makes the backend available on any machine; returns its name."""
    if ON_GPU:
        monkeypatch.setitem(registry.BACKENDS, NAME, Carrier(cuda, torch.device("cuda")))
        return NAME
    torch.ops.load_library(str(library()))
    monkeypatch.setattr(_gpu, "reasons", lambda device: [])
    monkeypatch.setattr(cuda, "LIBRARY_ERROR", None)
    return NAME
