"""What the GPU backends have in common: what they require of the machine, what they save."""

from __future__ import annotations

import functools

import torch

from fastattn.problem import Problem, arguments
from fastattn.problem.record import natural_scale

MIN_CAPABILITY = (8, 0)  # older tensor cores have no bf16; Triton and csrc/cuda do not support them


@arguments.traced_as_constant
def reasons(device: torch.device) -> list[str]:
    """Why tensors on ``device`` cannot be computed on a GPU; empty if they can."""
    if device.type == "cuda":
        return list(capability_reasons(device))
    missing = "" if torch.cuda.is_available() else "; torch sees no CUDA device"
    return [f"tensors are on {device.type}{missing}"]


@functools.cache
def capability_reasons(device: torch.device) -> tuple[str, ...]:
    """The reason against a GPU that is too old; empty for others."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return (f"compute capability {have}: {need} or newer is needed",)
    return ()


def shift_unit(p: Problem, biased: bool) -> float:
    """See ``registry.Backend``: csrc/cuda has it as ``natural_of_logit``, Triton in ``Call``."""
    scale = natural_scale(p, p.scale)
    return scale if scale > 0 and not biased else 1.0
