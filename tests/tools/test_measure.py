"""How the benchmark suite takes time."""

from __future__ import annotations

import itertools
import time
import types

import pytest
import torch


@pytest.fixture
def measure():
    from bench import measure

    return measure


def test_the_timer_of_a_gpu_hides_the_time_of_launching(measure, monkeypatch):
    slept = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    fakes = dict(
        Event=Event, synchronize=lambda: None, current_device=lambda: 0, _sleep=slept.append,
        get_device_properties=lambda device: types.SimpleNamespace(L2_cache_size=2**20),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(1))
    timer = measure._CudaTimer()
    calls = [lambda: time.sleep(0.001), lambda: time.sleep(0.1)]
    for _ in range(2):
        assert [timer(call) for call in calls] == [1.0, 1.0]
    assert slept[:2] == [0, 0]  # nothing is measured yet
    assert 0.002 * measure.CLOCKS <= slept[2] <= slept[3] == measure.BUSY_S * measure.CLOCKS


def test_short_calls_share_a_sample(measure, monkeypatch):
    clock, made = itertools.count(), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))  # one second later each time
    monkeypatch.setattr(measure, "BLOCK_MS", 4000.0)
    timer, call = measure._CpuTimer(), lambda: made.append(1)
    samples = [timer(call) for _ in range(3)]
    assert len(made) == 1 + 4 + 16
    assert samples == [1000, 1000 / 4, 1000 / 16]


def test_a_peer_that_cannot_run_is_a_reason(measure):
    calls = {"good": lambda: torch.zeros(1), "bad": lambda: torch.zeros(2) + torch.zeros(3)}
    timings, failed = measure.interleave(calls, 0.001, "cpu")
    assert list(timings) == ["good"]
    assert failed["bad"].startswith("RuntimeError: The size of tensor")
