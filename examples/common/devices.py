"""The device of a program: named once by an option, then read off the model."""

from __future__ import annotations

import argparse
from typing import TypeVar

import torch
from torch import nn

Tensors = TypeVar("Tensors", bound=tuple)


def default() -> str:
    """``cuda`` if there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device(name: str) -> torch.device:
    """The device that an option names: ``cpu``, ``cuda`` or, with several GPUs, ``cuda:1``.

    Raises:
        argparse.ArgumentTypeError: another name, or torch sees no such device.
    """
    try:
        named = torch.device(name)
    except RuntimeError:
        named = None
    if named is None or named.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {name!r}")
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{name}: torch sees no such device")
    return named


def of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next(model.parameters()).device


def moved(tensors: Tensors, to: torch.device) -> Tensors:
    """A named tuple of tensors on that device."""
    return type(tensors)(*(x.to(to) for x in tensors))


def synchronize(used: torch.device) -> None:
    """Waits until the device has finished its work; a CPU has finished already."""
    if used.type == "cuda":
        torch.cuda.synchronize(used)
