"""The command: ``python -m bench.distributed``: one process beside several that share a sequence.

Alone a process has one thread, then all of them; several have an equal share of the threads each.
``ways.py`` says what is measured. Writes <device>/distributed.json and distributed.png. Exit status
1 when a result or a number of bytes is wrong. Each process has a GPU of its own, or all share the
CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from bench import given, machine, plot, report
from bench.cases import Case
from bench.ranks import device_for, on_ranks
from bench.report import SHORT
from bench.run import results_folder
from bench.ways import CASES, METHODS, RANKS_OF_BALANCE, SharedRow, alone, balance, measured

SECONDS, PROCESSES = 1.0, 2  # for each time measured; what is committed


def table(rows: list[SharedRow]) -> str:
    """One line a way: time, times over those of one process, memory and bytes."""
    head = f"{'':<20}{'':<18}{'ms':>14}{'speed-up over alone':>22}{'MiB a process':>16}"
    lines = [head + f"{'MiB sent':>10}{'error':>8}"]
    for row in rows:
        if row.wrong:
            lines.append(f"{row.case} {SHORT[row.direction]}: WRONG, {row.as_json()}")
            continue
        one, all_threads = (row.timings[alone(n)].median for n in alone_threads(row))
        for name, t in row.timings.items():
            gain = f"{one / t.median:.2f} / {all_threads / t.median:.2f}"
            sent = f"{row.sent[name] / 2**20:.1f}" if name in row.sent else "-"
            error = f"{row.error_ratios[name]:.2f}" if name in row.error_ratios else "-"
            lines.append(
                f"{row.case + ' ' + SHORT[row.direction]:<20}{name:<18}"
                f"{f'{t.median:.4g} ±{t.spread:.0%}':>14}{gain:>22}"
                f"{row.mib(name):>16.1f}{sent:>10}{error:>8}"
            )
    return "\n".join(lines)


def alone_threads(row: SharedRow) -> list[int]:
    """One thread, and all of them."""
    counts = [n for name, n in row.threads.items() if name not in METHODS]
    return [counts[0], counts[-1]]


def balance_table(found: dict[str, dict[str, list[float]]]) -> str:
    """The balance of each layout."""
    head = f"{'':<18}{'dearest rank over mean':<24}" + "".join(f"{n:>7}" for n in RANKS_OF_BALANCE)
    rows = [
        f"{case:<18}{name:<24}" + "".join(f"{x:>7.2f}" for x in numbers)
        for case, by_name in found.items()
        for name, numbers in by_name.items()
    ]
    return "\n".join([head + "  ranks", *rows])


def write_png(rows: list[SharedRow], about: dict, path: Path) -> str | None:
    """A panel a row, time above memory. Returns why there is none, or None."""
    title = f"{plot.title(about)}, {rows[0].ranks} processes"
    return plot.write(path, title, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[SharedRow]) -> str | None:
    rows = [row for row in rows if not row.wrong]
    if not rows:
        return "every row is wrong"
    figure.set_size_inches(3 * len(rows), 5.5)
    grid = figure.subplots(2, len(rows), sharex="col", squeeze=False)
    for column, row in enumerate(rows):
        mib = {name: row.mib(name) for name in row.memory}
        seconds = {name: t.median / 1e3 for name, t in row.timings.items()}
        for axes, values in zip(grid[:, column], (seconds, mib), strict=True):
            colours = [plot.FASTER[True] if name in METHODS else plot.PEER for name in values]
            axes.bar(list(values), list(values.values()), color=colours)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.tick_params("x", rotation=60)
        grid[0, column].set_title(f"{row.case} {SHORT[row.direction]}", fontsize=10)
    grid[0, 0].set_ylabel("seconds")
    grid[1, 0].set_ylabel("MiB a process, inputs included")
    return None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, with a device and a folder."""
    parser = argparse.ArgumentParser("bench.distributed", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="default: $OUT, or bench/results for a run without options, build/bench for others",
    )
    add("--procs", type=int, default=PROCESSES, help="that share the sequence (default: 2)")
    add(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        help="default: cuda if each process has a GPU, else cpu",
    )
    add("--seconds", type=given.seconds, default=SECONDS, help="for each time measured")
    add("--length", type=given.count, default=None, metavar="N", help="tokens, for a shorter run")
    options = parser.parse_args(argv)
    most = min(case.problem.Hkv for case in CASES)  # "heads" gives each process one at least
    if not 1 <= options.procs <= most:
        parser.error(f"--procs: expected 1 to {most}, got {options.procs}")
    if options.length == 1:  # of one query, every rank holds the whole mask
        parser.error("--length: expected 2 or more, got 1")
    options.device = options.device or device_for(options.procs)
    if options.device == "cuda" and device_for(options.procs) != "cuda":
        parser.error(f"--device: expected {options.procs} GPUs, one for each process")
    usual = (None, SECONDS, PROCESSES)
    partial = (options.length, options.seconds, options.procs) != usual
    options.out = options.out or results_folder(partial)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    chosen = [shortened(case, options.length) for case in CASES]
    about, start = machine.describe(options.device), time.monotonic()
    folder = options.out / machine.slug(about)
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    found = on_ranks(
        measured, options.procs, chosen, threads, options.seconds, device=options.device
    )
    # Rows are the same on all ranks, except for bytes. If every rank is right, the first rank's
    # bytes are shown.
    rows = [
        next((x for x in of_ranks if x.wrong), of_ranks[0]) for of_ranks in zip(*found, strict=True)
    ]
    balances = {case.name: balance(case) for case in chosen}
    about["seconds"] = round(time.monotonic() - start, 1)
    report.write_json(rows, folder / "distributed.json", machine=about, balance=balances)
    print(heading(rows[0], about), table(rows), balance_table(balances), sep="\n\n")
    pictures = {"distributed.png": write_png(rows, about, folder / "distributed.png")}
    print(f"\n{plot.said(folder, 'distributed.json', pictures)}")
    return 1 if any(row.wrong for row in rows) else 0


def heading(row: SharedRow, about: dict) -> str:
    """What ran where, and how many threads a process had."""
    return (
        f"fastattn {about['fastattn']}, torch {about['torch']}, on {about['device_name']}: "
        f"{about['cores']} cores, load average {about['load_average']} before the run\n"
        f"{row.shape}; {row.ranks} processes of {row.threads[METHODS[0]]} threads each, beside one "
        "process alone"
    )


def shortened(case: Case, length: int | None) -> Case:
    """The case with fewer tokens; documents become shorter in proportion."""
    if length is None:
        return case
    problem = dataclasses.replace(case.problem, M=length, N=length)
    mean = case.mean and max(1, case.mean * length // case.problem.N)
    return dataclasses.replace(case, problem=problem, mean=mean)


if __name__ == "__main__":
    sys.exit(main())
