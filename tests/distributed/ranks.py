"""Some processes of this machine as the ranks of a gloo group, which run a function each."""

from __future__ import annotations

import datetime
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = int(os.environ.get("FASTATTN_TEST_RANKS", "2"))
TIMEOUT = 60  # seconds until a collective gives up


def _main(rank: int, size: int, timeout: float, store: str, results: Any, call: tuple):
    function, args = call
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"file://{store}",
            timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
        results.put((rank, function(*args), None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def errors_of(functions: list[Callable]) -> list[str | None]:
    """What each of the functions raises on this rank; None for nothing."""
    found = []
    for function in functions:
        try:
            function()
        except BaseException:
            found.append(traceback.format_exc())
        else:
            found.append(None)
    return found


def by_name(calls: dict[str, Callable]) -> dict[str, tuple[str | None, ...]]:
    """The errors of every rank, by the names of the calls; processes start once for all."""
    found = on_ranks(errors_of, list(calls.values()))
    assert all(isinstance(x, list) for x in found), found
    return dict(zip(calls, zip(*found, strict=True), strict=True))


def on_ranks(function: Callable, *args: Any, size: int = RANKS, timeout: float = TIMEOUT) -> list:
    """What ``function(*args)`` returns on each rank, or the text of its error.

    The function stands at the top of a module: processes find it by its name. A rank that ends
    without a word has None.
    """
    context = mp.get_context("spawn")
    results, found = context.Queue(), [None] * size
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_main, args=(r, size, timeout, store, results, (function, args)))
            for r in range(size)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) or not results.empty():
            try:
                rank, result, error = results.get(timeout=0.2)
            except queue.Empty:
                continue
            found[rank] = result if error is None else error
        for process in processes:
            process.join()
    return found
