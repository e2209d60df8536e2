"""Configurations measured on this machine, which ``config.choose`` prefers to its table.

``fastattn.autotune`` writes them to a JSON file in the user's cache folder, by device and by
version of Triton, because either may change which one is fastest:

    {"NVIDIA H200, Triton 3.7.1": {"fwd, 2 bytes, head size 128, plain": [128, 64, 8, 3]}}
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
import triton

from fastattn import cache_file

FILE = "autotune.json"
BLOCKS = (16, 32, 64, 128)  # tl.dot needs at least 16; additive workspaces are padded for 128

_trial: dict[str, tuple[int, ...]] = {}  # what is being measured right now


def name(kernel: str, dtype: torch.dtype, head_size: int, rich: bool) -> str:
    """How a row of the table is called in the file."""
    kind = "rich" if rich else "plain"
    return f"{kernel}, {dtype.itemsize} bytes, head size {head_size}, {kind}"


def lookup(device: torch.device, name: str) -> tuple[int, ...] | None:
    """The configuration on trial, or the one remembered for this device; None without either."""
    return _trial.get(name) or _remembered(device).get(name)


@contextlib.contextmanager
def trial(name: str, config: tuple[int, ...]) -> Iterator[None]:
    """Within it, kernels of that name run with ``config``."""
    _trial[name] = config
    try:
        yield
    finally:
        del _trial[name]


def remember(device: torch.device, found: dict[str, tuple[int, ...]]) -> None:
    """Adds to what this process uses, and to the file; warns where that cannot be written."""
    machine = _machine(device)
    if machine is None:
        return
    _remembered(device).update(found)

    def changed() -> dict[str, dict[str, list[int]]]:
        known = _read()
        known.setdefault(machine, {}).update({n: list(c) for n, c in found.items()})
        return known

    try:
        cache_file.update(FILE, changed)
    except OSError as error:
        warnings.warn(f"later processes do not know what autotune found: {error}", stacklevel=3)


@functools.cache
def _remembered(device: torch.device) -> dict[str, tuple[int, ...]]:
    machine = _machine(device)
    if machine is None:
        return {}
    return {n: tuple(c) for n, c in _read().get(machine, {}).items()}


def _machine(device: torch.device) -> str | None:
    """None where kernels are interpreted, and no configuration is faster than another."""
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}"


def _read() -> dict[str, dict[str, list[int]]]:
    """The file; empty where there is none, or where it is not what ``remember`` writes."""
    try:
        known = cache_file.read(FILE)
        for rows in known.values():
            for config in rows.values():
                if len(config) != 4 or not all(type(n) is int and n > 0 for n in config):
                    raise ValueError(f"expected four positive integers, got {config}")
                if not {*config[:2]} <= {*BLOCKS}:
                    raise ValueError(f"expected blocks of {BLOCKS}, got {config[:2]}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        path = cache_file.path(FILE)
        warnings.warn(f"ignoring {path}, which autotune did not write: {error}", stacklevel=2)
        return {}
    return known
