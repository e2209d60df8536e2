"""What the GPU backends ask of the machine, beyond what each needs for itself."""

from __future__ import annotations

import functools

import torch

MIN_CAPABILITY = (8, 0)  # older tensor cores have no bf16, and neither Triton nor csrc/cuda a path


def reasons(device: torch.device) -> list[str]:
    """Why tensors on ``device`` cannot be computed on a GPU; empty where they can."""
    if device.type == "cuda":
        return list(capability_reasons(device))
    missing = "" if torch.cuda.is_available() else "; torch sees no CUDA device"
    return [f"tensors are on {device.type}{missing}"]


# What torch.compiler.assume_constant_result does, less its import of half a second: nothing in
# there can be traced, and machines do not change.
reasons._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def capability_reasons(device: torch.device) -> tuple[str, ...]:
    """Of GPUs that are too old."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return (f"compute capability {have}: {need} or newer is needed",)
    return ()
