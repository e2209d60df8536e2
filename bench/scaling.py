"""The command: ``python -m bench.scaling``: how time and memory grow with the length of a sequence.

Runs the suite ``scaling`` and fits time ~ N^a and memory ~ N^a to its longer half by least squares
of the logarithms. Writes <device>/scaling.json and scaling.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import given, machine, plot, report, suite
from bench.cases import DIRECTIONS, SCALING_CASES
from bench.peers import OURS
from bench.report import SHORT, Row
from bench.run import progress, results_folder

SECONDS = 0.25  # for each measurement
STYLE = {OURS: dict(color=plot.FASTER[True], marker="o", linewidth=2)}


@dataclass
class Curve:
    """One implementation of one kind of problem in one direction, over N."""

    kind: str
    direction: str
    name: str
    milliseconds: dict[int, float] = field(default_factory=dict)
    mib: dict[int, float] = field(default_factory=dict)

    def as_json(self) -> dict:
        """The points and the exponents."""
        exponents = {"time": exponent(self.milliseconds), "memory": exponent(self.mib)}
        return {**vars(self), "exponents": exponents}


def exponent(points: dict[int, float]) -> float | None:
    """The slope of log y over log N in the longer half of at least 3 points; else None."""
    usable = sorted((n, y) for n, y in points.items() if y > 0)
    longer = usable[len(usable) // 2 :]
    if len(points) < 3 or len(longer) < 2:
        return None
    x, y = ([math.log(value) for value in column] for column in zip(*longer, strict=True))
    return round(statistics.linear_regression(x, y).slope, 2)


def curves(rows: list[Row]) -> list[Curve]:
    """The rows as curves, without wrong rows."""
    found: dict[tuple, Curve] = {}
    for row in (r for r in rows if not r.wrong):
        case, _, backend = row.case.partition(" ")  # on a GPU there are rows of each backend
        kind, n = case.rsplit("-", 1)
        kind = f"{kind} {backend}".strip()
        for name, timing in row.timings.items():
            curve = found.setdefault((kind, row.direction, name), Curve(kind, row.direction, name))
            curve.milliseconds[int(n)] = timing.median
            if name in row.memory:
                curve.mib[int(n)] = row.memory[name] / 2**20
    return list(found.values())


def table(found: list[Curve]) -> str:
    """One line a curve: its exponents, and its longest problem."""
    lines = [f"{'':<18}{'':<18}{'time ~ N^':>10}{'memory ~ N^':>13}  at the longest"]
    for c in found:
        time_a, memory_a = (
            "-" if a is None else f"{a:.2f}" for a in (exponent(c.milliseconds), exponent(c.mib))
        )
        n = max(c.milliseconds)
        mib = f", {c.mib[n]:.1f} MiB" if n in c.mib else ""
        lines.append(
            f"{c.kind + ' ' + SHORT[c.direction]:<18}{c.name:<18}{time_a:>10}{memory_a:>13}"
            f"  N {n}: {c.milliseconds[n]:.4g} ms{mib}"
        )
    return "\n".join(lines)


def write_png(found: list[Curve], about: dict, path: Path) -> str | None:
    """One panel a kind and direction, time above memory. Returns why there is none, or None."""
    return plot.write(path, plot.title(about), lambda figure: _draw(figure, found))


def _draw(figure, found: list[Curve]) -> str | None:
    panels = list(dict.fromkeys((c.kind, c.direction) for c in found))
    if not panels:
        return "every row is wrong"
    figure.set_size_inches(3.2 * len(panels), 6)
    grid = figure.subplots(2, len(panels), sharex="col", squeeze=False)
    for column, (kind, direction) in enumerate(panels):
        here = [c for c in found if (c.kind, c.direction) == (kind, direction)]
        for axes, quantity in zip(grid[:, column], ("milliseconds", "mib"), strict=True):
            for c in here:
                points = getattr(c, quantity)
                style = STYLE.get(c.name, dict(marker=".", linewidth=1.2))
                a = exponent(points)
                label = c.name if a is None else f"{c.name}, N^{a:.2f}"
                axes.plot(list(points), list(points.values()), label=label, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(color="#e6e8eb", linewidth=0.6)
            axes.legend(fontsize=7, frameon=False)
        grid[0, column].set_title(f"{kind} {SHORT[direction]}", fontsize=10)
        grid[1, column].set_xlabel("N")
    grid[0, 0].set_ylabel("ms")
    grid[1, 0].set_ylabel("peak extra MiB")
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.scaling", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="default: $OUT, or bench/results, or build/bench for a shorter run",
    )
    parser.add_argument(
        "--seconds", type=given.seconds, default=SECONDS, help="for each time measured"
    )
    parser.add_argument(
        "--longest", type=given.count, default=None, metavar="N", help="no longer problems"
    )
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [c for c in SCALING_CASES if c.problem.N <= (options.longest or math.inf)]
    if not chosen:
        shortest = min(c.problem.N for c in SCALING_CASES)
        parser.error(f"--longest: expected {shortest} or more, got {options.longest}")
    setting = suite.Setting(device, "auto", tiny=False, compile=False)
    pace = suite.Pace(options.seconds, len(DIRECTIONS) * len(chosen), math.inf)
    about, start = machine.describe(device), time.monotonic()
    shorter = options.longest is not None or options.seconds != SECONDS
    folder = (options.out or results_folder(shorter)) / machine.slug(about)
    folder.mkdir(parents=True, exist_ok=True)
    with progress(suite.steps(chosen)) as say:
        found = curves(rows := suite.run(chosen, setting, pace, say))
    about["seconds"] = round(time.monotonic() - start, 1)
    report.write_json(found, folder / "scaling.json", machine=about)
    print(report.header(rows, about), table(found), sep="\n\n")
    pictures = {"scaling.png": write_png(found, about, folder / "scaling.png")}
    print(plot.said(folder, "scaling.json", pictures))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
