"""The picture: speed-up over the best peer, and peak extra memory of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import machine
from bench.cases import FORWARD
from bench.peers import OURS
from bench.report import SHORT, Row

FASTER = {True: "#1a7f4b", False: "#7cc4a0"}  # forward, forward+backward
SLOWER = {True: "#b3261e", False: "#e39a94"}
PEER = "#8a8f98"
SMALLEST_MIB = 0.1  # drawn for anything smaller on the log axis


def write(path: Path, title: str, draw: Callable[[Any], str | None]) -> str | None:
    """Writes what ``draw(figure)`` draws, and removes an older picture.

    Returns why there is none, as ``draw`` does, or None.
    """
    path.unlink(missing_ok=True)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed"
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    why = draw(figure)
    if why is None:
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=120)
    return why


def said(folder: Path, data: str, pictures: dict[str, str | None]) -> str:
    """Which files a run wrote, and why a picture is missing."""
    written = [data, *(name for name, why in pictures.items() if why is None)]
    missing = [f"no {name}: {why}" for name, why in pictures.items() if why is not None]
    return "\n".join([f"in {folder}: {', '.join(written)}", *missing])


def write_png(rows: list[Row], about: dict, path: Path) -> str | None:
    """Draws the rows that have a ratio; returns why there is no picture, or None."""
    return write(path, title(about), lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[Row]) -> str | None:
    rows = [row for row in rows if row.speedup is not None]
    if not rows:
        return "no row has a ratio"
    figure.set_size_inches(10, 1.5 + 0.27 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    places = _places(rows)
    _speedups(left, rows, places)
    _memory(right, rows, places)
    return None


def title(about: dict) -> str:
    """What ran where, in one line."""
    where = about["device_name"]
    if about["device"] == "cpu":
        where += f", {about['threads']} threads, {machine.isa(about)}"
    return f"fastattn {about['fastattn']} and PyTorch {about['torch']} on {where}"


def _places(rows: list[Row]) -> list[float]:
    """Heights from top to bottom, with a gap between cases."""
    places, y = [], 0.0
    for n, row in enumerate(rows):
        if n and rows[n - 1].case != row.case:
            y -= 0.5
        places.append(y)
        y -= 1
    return places


def _speedups(axes, rows: list[Row], places: list[float]) -> None:
    ratios = [row.speedup for row in rows]
    forward = [row.direction == FORWARD for row in rows]
    colours = [
        (FASTER if ratio >= 1 else SLOWER)[f] for ratio, f in zip(ratios, forward, strict=True)
    ]
    # Bars start at 1: faster to the right, slower to the left, equal factors equally long.
    axes.barh(places, [r - 1 for r in ratios], left=1, height=0.85, color=colours)
    smallest, largest = min(0.5, *ratios), max(2.0, *ratios)
    room = (largest / smallest) ** 0.6  # for the text after the longest bar
    axes.set_xscale("log")
    axes.set_xlim(smallest / 1.1, largest * room)
    axes.axvline(1, color="black", linewidth=0.8)
    for row, y in zip(rows, places, strict=True):
        text = f"{_factor(row.speedup)}  {row.best_peer}"
        at = max(row.speedup, 1.0)
        axes.annotate(text, (at, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [f"{row.case}  {SHORT[row.direction]}" for row in rows], fontsize=8)
    axes.set_ylim(places[-1] - 0.7, places[0] + 0.7)
    axes.set_title("times faster than the best peer", fontsize=10)
    _clean(axes)


def _factor(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def _memory(axes, rows: list[Row], places: list[float]) -> None:
    def mib(row: Row, name: str) -> float | None:
        return max(row.memory[name] / 2**20, SMALLEST_MIB) if name in row.memory else None

    pairs = [
        (mib(row, OURS), mib(row, row.best_peer), y) for row, y in zip(rows, places, strict=True)
    ]
    pairs = [pair for pair in pairs if None not in pair]
    axes.set_title("peak extra memory, MiB", fontsize=10)
    axes.set_xscale("log")
    _clean(axes)
    if not pairs:
        return
    ours, peers, heights = zip(*pairs, strict=True)
    axes.hlines(heights, ours, peers, color="#d0d3d8", linewidth=1.5)
    axes.plot(peers, heights, "o", color=PEER, markersize=5, label="best peer")
    axes.plot(ours, heights, "o", color=FASTER[True], markersize=5, label="fastattn")
    axes.figure.legend(loc="outside lower right", ncols=2, fontsize=8, frameon=False)


def _clean(axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="both", labelsize=8, length=0)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
