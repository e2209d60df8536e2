"""The command: ``python -m bench.compare BASELINE NEW``: has anything become slower?

Machines differ, and one machine differs by the hour. So times are never compared. On one kind of
machine, a row is judged by its ratio to a peer that took turns in the same run: the best peer of
the baseline. On two kinds, it is judged by its share of what each can do (``limits.py``). A run of
some cases (``--filter``) is compared with those of the baseline. Exit status 1 if a row is slower,
wrong or missing, 2 for files that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import given, machine, report
from bench.cases import DIRECTIONS, SUITES
from bench.peers import OURS

BOUND = "bound"  # what shares are against
ALIKE = ("suite", "backend", "quick", "no_compile")  # options that decide what is measured
LEAST = 0.10  # the smallest change, for runs without noise; --least names another
SPREADS = 3.0  # ... and in half interquartile ranges of the ratio's two times


@dataclass
class Change:
    """A row of the baseline, and the change of its ratio to a peer, or of its share."""

    name: str
    peer: str | None
    before: float | None
    after: float | None  # None if the rows cannot be compared; reason says why
    reason: str = ""
    tolerance: float = LEAST

    @property
    def slower(self) -> bool:
        """Slower than noise explains, or missing, which is as bad."""
        if self.before is None:
            return False
        return self.after is None or self.after < self.before * (1 - self.tolerance)

    @property
    def faster(self) -> bool:
        """Faster than noise explains."""
        if self.before is None or self.after is None:
            return False
        return self.after > self.before * (1 + self.tolerance)


def alike(baseline: dict, new: dict) -> bool:
    """Whether both runs were on one kind of machine."""
    return machine.slug(baseline["machine"]) == machine.slug(new["machine"])


def other_options(baseline: dict, new: dict) -> str | None:
    """Why the runs measured other things; None if they did not."""

    def option(run: dict, name: str) -> object:
        found = run.get("options", {}).get(name) or None
        return run["machine"]["device"] if name == "suite" and found is None else found

    for name in ALIKE:
        before, after = option(baseline, name), option(new, name)
        if before != after:
            return f"expected runs of one {name}, got {before} in the baseline and {after} now"
    return None


def changes(baseline: dict, new: dict, least: float = LEAST) -> list[Change]:
    """The change of each row of the baseline, in its order, of cases that the new run chose.

    Changes up to ``least`` are noise, and more than that in rows whose times vary more. Directions
    that a case is no longer timed in are left out.
    """
    rows = {(row["case"], row["direction"]): row for row in new["rows"]}
    timed = {case.name: case.directions for suite in SUITES.values() for case in suite}
    against = (lambda old: old.get("best_peer")) if alike(baseline, new) else _of_bound
    return [
        _change(old, rows.get((old["case"], old["direction"])), against(old), least)
        for old in baseline["rows"]
        if new.get("options", {}).get("filter", "") in old["case"]
        and old["direction"] in timed.get(old["case"], DIRECTIONS)
    ]


def _of_bound(old: dict) -> str | None:
    return BOUND if old.get("of_bound") else None


def _change(old: dict, new: dict | None, against: str | None, least: float) -> Change:
    name = f"{old['case']} {report.SHORT[old['direction']]}"
    if old["wrong"] or against is None:
        return Change(name, None, None, None, "nothing to judge by in the baseline")
    before = _ratio(old, against)
    if new is None:
        return Change(name, against, before, None, "not in the new run")
    if new["wrong"]:
        return Change(name, against, before, None, new["failure"] or "WRONG result")
    after = _ratio(new, against)
    if after is None:
        reason = "no share was measured" if against == BOUND else f"{against} did not run"
        return Change(name, against, before, None, reason)
    names = {OURS, against} - {BOUND}
    noise = math.hypot(*(_spread(row["times_ms"][n]) for row in (old, new) for n in names))
    return Change(name, against, before, after, "", max(least, SPREADS * noise))


def _ratio(row: dict, against: str) -> float | None:
    """The peer's time over ours, or the share of the bound; None if that was not measured."""
    times = row["times_ms"]
    if against == BOUND:
        return row.get("of_bound")
    return times[against]["median"] / times[OURS]["median"] if against in times else None


def _spread(timing: dict) -> float:
    """Half the interquartile range over the median."""
    return (timing["q75"] - timing["q25"]) / 2 / timing["median"]


# ---- the command ----


def table(found: list[Change], colour: bool) -> str:
    """One line a row: its ratio to the peer before and after, and the verdict."""
    width = max(len(c.name) for c in found)

    def shown(c: Change, value: float) -> str:
        return f"{value:7.0%}" if c.peer == BOUND else f"{value:6.2f}x"

    lines = [f"{'case':<{width}}  before   after  change  within  against"]
    for c in found:
        if c.before is None:
            lines.append(f"{c.name:<{width}}  {c.reason}")
            continue
        after = (
            "      -       -"
            if c.after is None
            else f"{shown(c, c.after)} {c.after / c.before - 1:+7.0%}"
        )
        verdict = f"  SLOWER {c.reason}".rstrip() if c.slower else "  faster" if c.faster else ""
        line = f"{c.name:<{width}} {shown(c, c.before)} {after}  {c.tolerance:6.0%}"
        line += f"  {c.peer}{verdict}"
        paint = report.RED if c.slower else report.GREEN if c.faster else ""
        lines.append(f"{paint}{line}{report.RESET}" if colour and paint else line)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    try:
        baseline, new = (_read(path) for path in (options.baseline, options.new))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for what, run in (("baseline", baseline), ("new", new)):
        about = run["machine"]
        commit = (about["commit"] or "no commit")[:9]
        print(f"{what:<9}{machine.slug(about)}, torch {about['torch']}, {commit}, {about['date']}")
    if not alike(baseline, new):
        print("two kinds of machine: each row is judged by its share of what its machine can do")
    if why := other_options(baseline, new):
        print(f"{why}; name a run like it, as in BASELINE=bench/results/...", file=sys.stderr)
        return 2
    found = changes(baseline, new, options.least)
    judged = sum(c.before is not None for c in found)
    if not judged:
        print("no row of the baseline says what to judge by: measure it anew", file=sys.stderr)
        return 2
    print(table(found, report.wants_colour(sys.stdout)))
    slower = [c.name for c in found if c.slower]
    print(f"{judged} of {len(found)} rows judged;", end=" ")
    print(f"slower: {', '.join(slower)}" if slower else "nothing is slower")
    return 1 if slower else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("baseline", type=Path, help="bench.json of a run, or its folder")
    parser.add_argument("new", type=Path, help="bench.json of the run to judge, or its folder")
    parser.add_argument(
        "--least", type=given.share, default=LEAST, metavar="SHARE",
        help="the smallest change that counts, of a row without noise (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _read(path: Path) -> dict:
    path = path / "bench.json" if path.is_dir() else path
    try:
        run = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a bench.json: {error}") from error
    if run.get("schema") != report.SCHEMA:
        raise ValueError(f"{path}: expected schema {report.SCHEMA}, got {run.get('schema')}")
    return run


if __name__ == "__main__":
    sys.exit(main())
