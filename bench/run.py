"""The command: ``python -m bench.run``. Exit status 1 when a result is wrong, 2 for bad options."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from pathlib import Path

import torch

from bench import given, limits, machine, plot, report, roofline, suite
from bench.cases import QUICK, SUITES, Case
from bench.report import Row
from fastattn.backends import registry

# Seconds for the timing of a whole run. A CPU run takes four minutes; the rest is for memory. A GPU
# run spends most of it on compiling peers.
TIMING_S = {"cpu": 150.0, "cuda": 170.0}


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    cases = [c for c in _suite(options) if c.name in QUICK or not options.quick]
    chosen = [c for c in cases if options.filter in c.name]
    if not chosen:
        names = ", ".join(c.name for c in cases)
        print(f"{options.filter!r} is in no name of this run's cases: {names}", file=sys.stderr)
        return 2
    compiled = not (options.quick or options.no_compile)
    setting = suite.Setting(options.device, options.backend, options.quick, compiled)
    about, start = machine.describe(options.device), time.monotonic()
    folder = _folder(options) / machine.slug(about)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "bench.partial.json"  # of a run that was cut short

    def keep(rows: list[Row]) -> None:
        _write_json(rows, about, options, partial)

    with _threads(options.quick), progress(suite.steps(chosen)) as say:
        rates = _limits(options, say)
        rows = suite.run(chosen, setting, _pace(options, chosen), say, keep)
        about["limits"] = rates = limits.best_of(rates, _limits(options, say))
    for row in rows:
        row.bound_ms = limits.bound_ms(row.needs, rates)
    about["seconds"] = round(time.monotonic() - start, 1)
    _write(rows, about, options, folder)
    partial.unlink(missing_ok=True)
    return 1 if any(row.wrong for row in rows) else 0


def _suite(options: argparse.Namespace) -> list[Case]:
    name = options.suite or options.device
    return SUITES.get(f"{name}-{options.device}") or SUITES[name]


def _limits(options: argparse.Namespace, say: suite.Say) -> limits.Rates:
    say("limits of this machine", 0)
    return limits.measure(options.quick) if options.device == "cpu" else {}


def _pace(options: argparse.Namespace, chosen: list[Case]) -> suite.Pace:
    """Half a second a measurement, less if time runs out; always the time that the user sets."""
    rows, now = sum(len(case.directions) for case in chosen), time.monotonic()
    if options.seconds is not None:
        return suite.Pace(options.seconds, rows, math.inf)
    return suite.Pace(0.01 if options.quick else 0.5, rows, now + TIMING_S[options.device])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.run", description="Compares fastattn with PyTorch.")
    add = parser.add_argument
    default = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ["auto", *registry.BACKENDS]
    add("--filter", default="", metavar="TEXT", help="only cases with this in their name")
    add("--backend", default="auto", choices=backends, help="ours; default: the best for each case")
    add("--device", default=default, choices=["cpu", "cuda"], help=f"default here: {default}")
    add("--suite", default=None, choices=list(SUITES),
        help="sizes for a CPU or for a GPU (default: those of the device), of known models, of "
             "nn.MultiheadAttention at inference, of packed documents, softcap and sinks, beside "
             "other packages, or lengths that double")  # fmt: skip
    add(
        "--seconds",
        type=given.seconds,
        default=None,
        help="for each time measured; default 0.5, less on a slow machine",
    )
    add("--quick", action="store_true", help="tiny sizes, no torch.compile: tests the suite itself")
    add("--no-compile", action="store_true", help="without torch.compile among the peers")
    add("--out", type=Path, default=None, metavar="DIR",
        help="gets <device>/bench.json and pictures, in the folder of a suite other than the "
             "device's; default: $OUT, or bench/results for a whole run of usual length, "
             "build/bench for others")  # fmt: skip
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return options


@contextlib.contextmanager
def _threads(quick: bool):
    """One thread for tiny problems: on a busy machine a second thread costs more than it gains."""
    before = torch.get_num_threads()
    if quick:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def progress(total: int):
    """A bar on stderr that names the current step. In a file, a line every ten seconds."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda doing, done: None
        return
    quiet = {} if sys.stderr.isatty() else dict(mininterval=10, ascii=True)
    form = "{percentage:3.0f}% |{bar:20}| {elapsed} {desc}"
    with tqdm(total=total, file=sys.stderr, bar_format=form, leave=False, **quiet) as bar:

        def say(doing: str, done: int) -> None:
            bar.set_description_str(doing, refresh=sys.stderr.isatty())
            bar.update(done)

        yield say


# ---- reporting ----


def _write_json(rows: list[Row], about: dict, options: argparse.Namespace, path: Path) -> None:
    settings = {k: v for k, v in vars(options).items() if k != "out"}  # no paths of this machine
    report.write_json(rows, path, machine=about, options=settings)


def _write(rows: list[Row], about: dict, options: argparse.Namespace, folder: Path) -> None:
    _write_json(rows, about, options, folder / "bench.json")
    pictures = {
        "bench.png": plot.write_png(rows, about, folder / "bench.png"),
        "roofline.png": roofline.write_png(rows, about["limits"], about, folder / "roofline.png"),
    }
    print(report.header(rows, about), end="\n\n")
    print(report.table(rows, report.wants_colour(sys.stdout)), end="\n\n")
    print(report.legend(rows), end="\n\n")
    if about["limits"]:
        print(limits.text(about["limits"]), end="\n\n")
    print(f"{about['seconds']:.0f} s; {plot.said(_shown(folder), 'bench.json', pictures)}")


def _folder(options: argparse.Namespace) -> Path:
    """The results folder. A run of some cases must not replace the results of a whole run."""
    partial = options.quick or options.filter or options.no_compile or options.backend != "auto"
    partial = bool(partial) or options.seconds is not None
    suite = "" if options.suite in (None, options.device) else options.suite
    return (options.out or results_folder(partial)) / suite


def results_folder(partial: bool) -> Path:
    """Where results go unless the user says so: those of a whole run are committed.

    ``partial``: some cases, or other sizes, processes or seconds than usual.
    """
    default = machine.ROOT / ("build/bench" if partial else "bench/results")
    return Path(os.environ.get("OUT") or default)


def _shown(folder: Path) -> Path:
    folder = folder.resolve()
    here = Path.cwd().resolve()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


if __name__ == "__main__":
    sys.exit(main())
