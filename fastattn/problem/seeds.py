"""Dropout's arguments as a record has them: a probability and a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.problem import Dropout, arguments


def dropout(dropout_p: float, seed: int | Tensor | None, device: torch.device) -> Dropout | None:
    """The record's dropout, None without any; raises TypeError or ValueError."""
    arguments.check_real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: expected a probability between 0 and 1, got {dropout_p}")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"seed: expected one int64 on {device}, "
                f"got {seed.dtype} {list(seed.shape)} on {seed.device}"
            )
    elif seed is not None:
        if not arguments.is_int(seed):
            raise TypeError(
                f"seed: expected an int, an int64 tensor or None, got {type(seed).__name__}"
            )
        if not -(2**63) <= seed < 2**64:  # as torch.manual_seed
            raise ValueError(f"seed: expected 64 bits, got {seed}")
    if dropout_p == 0.0:
        return None
    if seed is None:
        seed = draw(device)
    elif not isinstance(seed, Tensor):
        bits = arguments.as_int(seed)
        signed = bits - 2**64 if bits >= 2**63 else bits
        seed = torch.full((), signed, dtype=torch.int64, device=device)
    return Dropout(float(dropout_p), seed.reshape(()))


def draw(device: torch.device) -> Tensor:
    """A seed of the device's generator.

    ``torch.manual_seed`` governs it, and a replay of a CUDA graph redraws it.
    """
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
