"""Configurations measured on this machine, which ``config.choose`` prefers to its table.

``fastattn.autotune`` writes them to a JSON file in the user's cache folder. Each stands by device
and by version of Triton, because either may change which one is fastest:

    {"NVIDIA H200, Triton 3.7.1": {"fwd, 2 bytes, D 128, E 128, plain": [128, 64, 8, 3]}}

D and E are the sizes of tiles, because these decide on the shared memory. A problem may still need
more than the one that was measured, as with another mask: ``fall_back`` then forgets the row.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import triton

from fastattn import cache_file

FILE = "autotune.json"
BLOCKS = (16, 32, 64, 128)  # tl.dot needs at least 16; additive workspaces are padded for 128
WARPS = (2, 4, 8, 16)  # those of the table
MOST_STAGES = 4  # one more than the table has: each takes shared memory

Result = TypeVar("Result")

_trial: dict[str, tuple[int, ...]] = {}  # what is being measured right now


class _Latest(threading.local):
    """The remembered row that this thread's latest ``lookup`` found: its next launch runs so."""

    name: str | None = None


_latest = _Latest()
_changes = itertools.count(1)
_generation = 0


def name(kernel: str, dtype: torch.dtype, D: int, E: int, kind: str) -> str:
    """How a row is called in the file; D and E as tiles hold them."""
    return f"{kernel}, {dtype.itemsize} bytes, D {D}, E {E}, {kind}"


def generation() -> int:
    """A number that changes whenever ``lookup`` may find another row."""
    return _generation


def _changed() -> None:
    global _generation
    _generation = next(_changes)


def lookup(device: torch.device, name: str) -> tuple[int, ...] | None:
    """The configuration on trial, or the one remembered for this device; None without either."""
    found = _remembered(device).get(name)
    _latest.name = None if found is None or name in _trial else name
    return _trial.get(name, found)


def fall_back(device: torch.device, launch: Callable[[], Result]) -> Result:
    """``launch()``, again with the table's row where a remembered one does not fit the device."""
    while True:
        _latest.name = None
        try:
            return launch()
        except triton.OutOfResources as error:
            if _latest.name is None:
                raise
            warnings.warn(f"forgetting what autotune found: {_latest.name}: {error}", stacklevel=2)
            _forget(device, _latest.name)


@contextlib.contextmanager
def trial(name: str, config: tuple[int, ...]) -> Iterator[None]:
    """Within it, kernels of that name run with ``config``."""
    _trial[name] = config
    _changed()
    try:
        yield
    finally:
        del _trial[name]
        _changed()


def remember(device: torch.device, found: dict[str, tuple[int, ...]]) -> None:
    """Adds to what this process uses, and to the file; warns where that cannot be written."""
    machine = _machine(device)
    if machine is None:
        return
    _remembered(device).update(found)
    _changed()
    try:
        _change_file(machine, lambda rows: rows.update({n: [*c] for n, c in found.items()}))
    except OSError as error:
        warnings.warn(f"later processes do not know what autotune found: {error}", stacklevel=3)


def _forget(device: torch.device, name: str) -> None:
    _remembered(device).pop(name, None)
    _changed()
    machine = _machine(device)
    if machine is not None:
        with contextlib.suppress(OSError):  # later processes forget it, too
            _change_file(machine, lambda rows: rows.pop(name, None))


def _change_file(machine: str, change: Callable[[dict[str, list[int]]], object]) -> None:
    def changed() -> dict[str, dict[str, list[int]]]:
        known = _read()
        change(known.setdefault(machine, {}))
        return known

    cache_file.update(FILE, changed)


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
                if config[2] not in WARPS or config[3] > MOST_STAGES:
                    raise ValueError(
                        f"expected warps of {WARPS} and at most {MOST_STAGES} stages, "
                        f"got {config[2:]}"
                    )
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        path = cache_file.path(FILE)
        warnings.warn(f"ignoring {path}, which autotune did not write: {error}", stacklevel=2)
        return {}
    return known
