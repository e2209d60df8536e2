"""The same cases through pytest-benchmark: ``pytest bench --benchmark-only``.

One group a case and direction, with ours and each peer. torch.compile is measured by ``bench.run``
only: compiling would take most of the time here.
"""

from __future__ import annotations

import functools
import time

import pytest

pytest.importorskip("pytest_benchmark")

from bench import check, peers
from bench.cases import CASES

SECONDS, FEWEST, MOST = 0.3, 2, 20  # rounds of one measurement


@functools.lru_cache(maxsize=1)  # the tests of a case follow each other
def _checked(case) -> tuple[peers.Workload, dict[str, dict[str, float]]]:
    work = peers.build(case, compiled=False)
    return work, check.Checker(work).error_ratios()


def _rows() -> list:
    return [
        pytest.param(case, direction, name, id=f"{case.name}-{direction}-{name.replace(' ', '-')}")
        for case in CASES
        for direction in case.directions
        for name in peers.build(case.tiny(), compiled=False).implementations
    ]


@pytest.mark.parametrize(("case", "direction", "name"), _rows())
def test_bench(benchmark, case, direction, name):
    work, error_ratios = _checked(case)
    if name == peers.OURS:
        assert check.worst(error_ratios[direction]) <= 1, error_ratios[direction]
    step = work.step(name, direction)
    step()
    start = time.perf_counter()
    step()
    rounds = int(SECONDS / (time.perf_counter() - start))
    benchmark.group = f"{case.name} {direction}"
    benchmark.pedantic(step, rounds=max(FEWEST, min(MOST, rounds)), iterations=1)
