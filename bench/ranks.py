"""Processes of this machine as the ranks of a process group, started as torchrun starts them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

START_S = 120  # for all processes to find each other, on a busy machine


def device_for(size: int) -> str:
    """``cuda`` if each of so many ranks has a GPU of its own, else ``cpu``."""
    return "cuda" if torch.cuda.device_count() >= size else "cpu"


def on_ranks(function: Callable, size: int, *args: Any, device: str = "cpu") -> list:
    """What ``function(device, *args)`` returns on each rank: gloo on CPUs, NCCL on GPUs.

    Each rank has a GPU of its own, or an equal share of this process's threads, one at least. The
    function stands at the top of a module. A rank that raises ends all of them.
    """
    threads = max(1, torch.get_num_threads() // size)
    # The process that starts ranks keeps threads of a store for good. It is another than this one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, end_with_parent) as pool:
        return pool.submit(_start, size, device, threads, function, args).result()


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, whatever ended that."""

    def wait() -> None:
        cast(Any, multiprocessing.parent_process()).join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _start(size: int, *call: Any) -> list:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, run_id="fastattn", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", rdzv_configs={"timeout": START_S}, local_addr="localhost",
        max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    found = elastic_launch(config, _main)(*call)
    return [found[rank] for rank in range(size)]


def _main(kind: str, threads: int, function: Callable, args: tuple) -> Any:
    end_with_parent()
    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a name of this host may lead nowhere
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = function(device, *args)
    dist.destroy_process_group()
    return found
