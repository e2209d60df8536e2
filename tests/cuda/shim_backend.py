"""The CUDA backend for CPU tensors: its binding and its kernels, run on the CPU by the shim."""

from __future__ import annotations

import os

import host_build
import torch

from fastattn.backends import cuda, gpu

NAME = "cuda"
KIND = os.environ.get("FASTATTN_TEST_SHIM", "plain")  # "sanitized" in a process made for it


def install(monkeypatch) -> str:
    """Makes the backend available, whatever the machine; returns its name."""
    library = os.environ.get("FASTATTN_TEST_LIBRARY") or host_build.library("kernels", KIND)
    torch.ops.load_library(str(library))
    monkeypatch.setattr(gpu, "reasons", lambda device: [])
    monkeypatch.setattr(cuda, "LIBRARY_ERROR", None)
    return NAME
