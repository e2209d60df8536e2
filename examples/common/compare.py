"""fastattn beside the plain PyTorch module that it replaces: time and memory of the same step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch
from torch import nn

from bench.measure import interleave
from bench.memory import cpu_bytes, cuda_bytes


def side_by_side(
    steps: dict[str, Callable[[], object]], seconds: float, device: torch.device
) -> dict[str, dict]:
    """Milliseconds and extra MiB of each step, by name.

    Args:
        steps: name -> a function without arguments that computes on ``device``.
        seconds: time for each step. Steps take turns, so that other load on the machine affects all
            alike.
        device: a CPU or a GPU. On a GPU, times and memory are those of the GPU.

    Returns:
        name -> ``ms`` (median), ``spread`` (half the interquartile range over it) and ``mib``: how
        far one step raises the memory in use, results included. Memory pools of an earlier step are
        not counted again.

    Raises:
        RuntimeError: a step raised.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _side_by_side(steps, seconds, device.type)


def _side_by_side(steps: dict[str, Callable[[], object]], seconds: float, kind: str) -> dict:
    timings, failed = interleave(steps, seconds, kind)
    if failed:
        raise RuntimeError(f"could not run: {failed}")
    return {
        name: {
            "ms": timings[name].median,
            "spread": timings[name].spread,
            "mib": extra_bytes(step, kind) / 2**20,
        }
        for name, step in steps.items()
    }


def extra_bytes(step: Callable[[], object], kind: str) -> int:
    """How far a call raises the memory in use, on a device of this kind."""
    gc.collect()
    return cpu_bytes(step) if kind == "cpu" else cuda_bytes(step)


def training_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """A step for :func:`side_by_side`: the loss and its gradients; parameters do not change."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step
