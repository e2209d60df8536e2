"""Time. Implementations take turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MIN_SAMPLES, MAX_SAMPLES = 3, 60
SLOW_MS = 2000.0  # slower calls need one sample fewer
BLOCK_MS = 0.5  # shorter calls are repeated until a sample takes about as long
IDLE_S = 0.02  # libgomp's threads spin for up to 10 ms after a call
WAKE_S = 0.01  # a thread that wakes may share the core of its caller for a tick or two
NO_TIME = "no time left"  # why an implementation has no number
BUSY_S, CLOCKS = 0.004, 2e9  # longest busy wait, and about how many GPU clocks a second has


@dataclass
class Timing:
    """Milliseconds of a call, a sample each, in the order they were taken."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median, ms."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, ms."""
        if len(self.samples) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        first, third = self.quartiles
        return (third - first) / 2 / self.median

    def wants_more(self, seconds: float) -> bool:
        """Whether ``seconds`` of samples, or the fewest samples for a median, are still missing."""
        count, spent = len(self.samples), sum(self.samples)
        fewest = MIN_SAMPLES - 1 if spent > SLOW_MS * max(count, 1) else MIN_SAMPLES
        return count < fewest or (count < MAX_SAMPLES and spent < 1e3 * seconds)


def interleave(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    device: str,
    started: Callable[[str], None] = lambda name: None,
    apart: bool = False,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times calls in turns, round by round, each for ``seconds`` in all.

    ``apart``: each has threads of its own. Those of one rest before another one's turn, whose first
    calls wake its threads and are not timed.

    Returns the timings, and the errors of calls that could not run. ``started(name)`` is called
    before each warm-up, in which torch.compile takes its time.
    """
    timer = _CudaTimer() if device == "cuda" else _apart_ms if apart else _CpuTimer()
    timings, failed = {}, {}
    for name, call in calls.items():
        started(name)
        try:
            _warm_up(timer, call, seconds)
            timings[name] = Timing()
        except Exception as error:  # a peer that cannot run is a line of the report
            failed[name] = reason(error)
    take_turns(timer, {name: calls[name] for name in timings}, timings, seconds)
    return timings, failed


def reason(error: Exception) -> str:
    """One line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def _warm_up(timer, call, seconds: float) -> None:
    """One call for work that happens once. If cheap, some more for caches, clocks and allocator."""
    spent = timer(call)
    for _ in range(3):
        if spent > 100 * seconds:
            break
        spent += timer(call)


def take_turns(timer, calls, timings: dict[str, Timing], seconds: float) -> None:
    """Adds samples of each call in turns, until all have enough of them.

    Each round has an order of its own: threads of one call may still be busy in the next one.
    """
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        while waiting := [name for name in calls if timings[name].wants_more(seconds)]:
            for name in order.sample(waiting, len(waiting)):
                timings[name].samples.append(timer(calls[name]))
    finally:
        gc.enable()


class _CpuTimer:
    """Milliseconds of a call. A sample of short ones is the mean of a block, as in ``timeit``."""

    def __init__(self):
        self.block: dict[Callable, int] = {}  # calls of a sample

    def __call__(self, call: Callable[[], object]) -> float:
        count = self.block.get(call, 1)
        elapsed = _cpu_ms(call, count)
        self.block[call] = max(count, math.ceil(BLOCK_MS / elapsed))
        return elapsed


def _cpu_ms(call: Callable[[], object], count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    elapsed = time.perf_counter() - start
    del result  # freeing the last one is not part of the call
    return 1e3 * elapsed / count


def _apart_ms(call: Callable[[], object]) -> float:
    time.sleep(IDLE_S)
    start = time.perf_counter()
    call()
    while time.perf_counter() - start < WAKE_S:
        call()
    return _cpu_ms(call)


class _CudaTimer:
    """Milliseconds on the device's own clock, each call with a cold L2, as in triton's do_bench."""

    def __init__(self):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        flush_bytes = 4 * max(getattr(properties, "L2_cache_size", 0), 2**26)
        self.flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")
        self.enqueuing: dict[Callable, float] = {}  # the host's shortest time in seconds, by call

    def __call__(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        # The GPU is busy while the host enqueues the call. So the device's time is measured,
        # without the launch, which takes Python longer than a small problem takes a GPU.
        enqueuing = self.enqueuing.get(call, 0.0)
        torch.cuda._sleep(int(min(2 * enqueuing, BUSY_S) * CLOCKS))
        start.record()
        began = time.perf_counter()
        call()
        spent = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        self.enqueuing[call] = min(spent, enqueuing or spent)
        return start.elapsed_time(end)
