"""Runs cases: checks them first, then times them, and measures memory at the end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from bench import cases, limits, measure, memory, packages, peers
from bench.cases import Case
from bench.check import Checker, worst
from bench.peers import OURS, PLAIN, Workload
from bench.report import Row
from fastattn.backends import registry

FARTHEST = 16.0  # a peer whose error is as many times the budget computes another thing
COMPILE_S = 2.0  # time left for each row; with less, nothing is compiled
OTHERS_S = 0.2  # for each of our other backends
MEMORY_S, LEAST_MEMORY_S = 75.0, 40.0  # after the deadline of timing; least after its end

Say = Callable[[str, int], None]  # (the current step, how many steps are finished now)


@dataclass
class Pace:
    """Keeps a run within its time on a slow or busy machine, by taking fewer samples.

    ``seconds`` is the most for one implementation of a row. ``rows`` is the number of rows still to
    be timed, ``deadline`` the time by which they should be, on the clock of ``time.monotonic``.
    """

    seconds: float
    rows: int
    deadline: float

    def left(self) -> float:
        """Seconds for each row still to be timed."""
        return max(self.deadline - time.monotonic(), 0.0) / max(self.rows, 1)

    def next(self, implementations: int) -> float:
        """Seconds for each implementation of the next row; its warm-up takes as long again."""
        share = self.left() / 2 / implementations
        self.rows -= 1
        return min(self.seconds, share)


@dataclass(frozen=True)
class Setting:
    """How to measure: ours on ``backend``; ``tiny`` sizes; ``compile`` among the peers."""

    device: str
    backend: str
    tiny: bool
    compile: bool


def run(
    chosen: Iterable[Case],
    setting: Setting,
    pace: Pace,
    say: Say,
    keep: Callable[[list[Row]], object] = len,
) -> list[Row]:
    """The rows of these cases. ``keep`` is called after each case with the rows so far.

    Cases whose peers are compiled come first. A run that is short of time then takes fewer samples
    of the others. A case that raises gives rows that say why. On a GPU, everything after it may
    fail as well, or a kernel may never end. So earlier results must be kept.
    """
    sized = [c.tiny() if setting.tiny else c for c in chosen]
    found: dict[str, list[Row]] = {case.name: [] for case in sized}  # in the order that was given
    rows: list[Row] = []
    for case in sorted(sized, key=lambda c: not (c.compiled and setting.compile)):
        main = found[case.name]
        try:
            main += _run_case(case, setting, pace, say)  # rows from before an error stay
            for backend in _others(case, setting, main[0].backend):
                main += _run_on(backend, case, setting, say)
        except Exception as error:
            traceback.print_exc()
            main += _fallen(case, setting, len(main), error)
        keep(rows := [row for each in found.values() for row in each])
    if setting.device == "cpu":
        deadline = max(pace.deadline + MEMORY_S, time.monotonic() + LEAST_MEMORY_S)
        _add_memory(rows, setting, deadline, say)
    return rows


def _fallen(case: Case, setting: Setting, done: int, error: Exception) -> Iterator[Row]:
    """The report's rows for a case that raised after ``done`` rows."""
    for direction in case.directions[done:] or case.directions[:1]:
        row = _new_row(case, setting.backend, direction, 0)
        if done >= len(case.directions):
            row.case += " (other backends)"
        row.failure = measure.reason(error)
        yield row


def steps(chosen: list[Case]) -> int:
    """The number of progress steps that :func:`run` reports."""
    return 2 * sum(len(case.directions) for case in chosen)


def _run_case(case: Case, setting: Setting, pace: Pace, say: Say) -> Iterator[Row]:
    say(f"{case.name}: inputs and truth", 0)
    compiled = case.compiled and setting.compile
    late = compiled and pace.left() < COMPILE_S
    work = peers.build(case, setting.device, setting.backend, compiled)
    pairs = cases.kept_pairs(case, work.t)
    rows = [_new_row(case, work.backend, direction, pairs) for direction in case.directions]
    _check(work, rows)
    if case.others:
        _check_others(work, rows)
    for row in rows:
        if late:
            names = peers.NEED_COMPILER & work.implementations.keys()
            row.skipped |= dict.fromkeys(names, measure.NO_TIME)
        _time(work, row, pace.next(len(work.implementations)), setting.device, say)
        say(f"{case.name} {row.direction}", 1)
        yield row
    if compiled:
        torch._dynamo.reset()  # its recompilation limit counts all cases of a function together


def _others(case: Case, setting: Setting, chosen: str) -> list[str]:
    """Our other fused backends for a case, which show whether the best one was chosen."""
    if setting.backend != "auto" or chosen == "cpu":
        return []
    p = cases.problem(case, cases.draw(case, setting.device))
    others = [name for name in registry.BACKENDS if name not in (chosen, "eager")]
    return [name for name in others if not registry.BACKENDS[name].unsupported(p)]


def _run_on(backend: str, case: Case, setting: Setting, say: Say) -> Iterator[Row]:
    """A case once more, on another backend of ours, without peers: they would need turns too."""
    say(f"{case.name} on {backend}", 0)
    work = peers.build(case, setting.device, backend, compiled=False)
    pairs = cases.kept_pairs(case, work.t)
    rows = [_new_row(case, work.backend, direction, pairs) for direction in case.directions]
    _check(work, rows)
    for row in rows:
        row.case = f"{case.name} ({backend})"
        seconds = 0.01 if setting.tiny else OTHERS_S
        _time(work, row, seconds, setting.device, say, only=OURS)
        yield row


def _new_row(case: Case, backend: str, direction: str, pairs: int) -> Row:
    c = case.problem
    amount, unit = cases.work(case, pairs, direction)
    return Row(
        case=case.name,
        about=case.about,
        shape=case.shape,
        direction=direction,
        backend=backend,
        work=amount,
        unit=unit,
        kept=pairs / (c.B * c.H * c.M * c.N),
        needs=limits.needs(case, pairs, direction),
    )


def _check(work: Workload, rows: list[Row]) -> None:
    try:
        ratios = Checker(work).error_ratios()
    except Exception as error:  # ours raised: as bad as a wrong number
        ratios = {}
        for row in rows:
            row.failure = measure.reason(error)
    for row in rows:
        row.error_ratios = ratios.get(row.direction, {})


def _check_others(work: Workload, rows: list[Row]) -> None:
    """The errors of other packages: what computes another thing is not timed."""
    checker = Checker(work)
    for name in packages.NAMES & work.implementations.keys():
        try:
            ratios = checker.error_ratios(name)
        except Exception:  # timing it will say why
            continue
        for row in rows:
            row.peer_errors[name] = error = worst(ratios[row.direction])
            if error > FARTHEST:
                row.skipped[name] = f"another result, {error:.2g} times the budget"


def _time(
    work: Workload, row: Row, seconds: float, device: str, say: Say, only: str | None = None
) -> None:
    """Times every implementation. If ours is wrong, there is nothing to compare."""
    if row.wrong:
        return

    def started(name: str) -> None:
        say(f"{row.case} {row.direction}: {name}", 0)

    names = [only] if only else [n for n in work.implementations if n not in row.skipped]
    calls = {name: work.step(name, row.direction) for name in names}
    apart = work.case.others
    row.timings, failed = measure.interleave(calls, seconds, device, started, apart)
    row.failure = failed.pop(OURS, None)
    row.skipped |= failed
    if device == "cuda" and not row.wrong:
        for name in row.timings:
            row.memory[name] = memory.cuda_bytes(calls[name])


def _add_memory(rows: list[Row], setting: Setting, deadline: float, say: Say) -> None:
    """Memory of ours, of the best peer, and of the plain way that the peer may have compiled."""
    asked: list[tuple[Row, str]] = []
    for row in rows:
        names = dict.fromkeys((OURS, row.best_peer, *PLAIN))
        asked += [(row, name) for name in names if name in row.timings]
    # Ours of all rows first. Compilers come last, since they may take all the time that is left.
    asked.sort(key=lambda x: (x[1] in peers.NEED_COMPILER, x[1] != OURS))
    of = {"backend": setting.backend, "tiny": setting.tiny}
    requests = [dict(case=x.case, direction=x.direction, name=name, **of) for x, name in asked]
    measured = memory.measure(requests, deadline)
    for (row, name), (_, answer) in zip(asked, measured, strict=True):
        say(f"{row.case} {row.direction}: memory of {name}", int(name == OURS))
        if isinstance(answer, int):
            row.memory[name] = answer
        else:
            row.skipped[f"{name} (memory)"] = answer
