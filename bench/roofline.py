"""The picture of a run's limits: where its cases stand under the roofs of the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from bench import limits, plot
from bench.report import SHORT, Row

COLOURS = {"torch.float32": "#1a5fb4", "torch.bfloat16": "#c64600", "torch.float16": "#813d9c"}


def write_png(rows: list[Row], rates: limits.Rates, about: dict, path: Path) -> str | None:
    """Draws the rows that have a bound; returns why there is no picture, or None."""
    return plot.write(path, plot.title(about), lambda figure: _draw(figure, rows, rates))


def _draw(figure, rows: list[Row], rates: limits.Rates) -> str | None:
    rows = [row for row in rows if row.of_bound is not None]
    if not rows:
        return "no row has a bound"
    figure.set_size_inches(12, max(5.0, 1.5 + 0.2 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _roofs(left, rows, rates)
    _shares(right, rows)
    return None


def _products(row: Row) -> tuple[str, float, float]:
    """(dtype, FLOP a byte, GFLOP/s) of a row's products."""
    ((name, flop),) = ((n, x) for n, x in row.needs.items() if n.startswith("products "))
    return name.removeprefix("products "), flop / row.needs["bytes"], flop / row.median_ms / 1e6


def _roofs(axes, rows: list[Row], rates: limits.Rates) -> None:
    """Products a second over products a byte; what is left of it are exponentials and the rest."""
    points = [(row, *_products(row)) for row in rows if row.unit == "FLOP"]
    intensities = [x for _, _, x, _ in points] or [1.0]
    low, high = min(*intensities, 0.5) / 2, max(*intensities, 64.0) * 4
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype)
        if not any(of == name for _, of, _, _ in points):
            continue
        top, colour = limits.peak(dtype, rates), COLOURS[name]
        axes.plot([low, top / rates["read"], high], [low * rates["read"], top, top], color=colour,
                  label=f"{name.removeprefix('torch.')}: {top:.0f} GFLOP/s")  # fmt: skip
        if gemm := rates.get(limits.GEMM[dtype]):
            axes.axhline(gemm, color=colour, linestyle=":", label=f"best GEMM: {gemm:.0f}")
    for row, dtype, x, y in points:
        style = dict(marker="o" if row.direction == "forward" else "s", markersize=5)
        axes.plot([x], [y], color=COLOURS[dtype], linestyle="", **style)
        axes.annotate(row.case, (x, y), (4, 3), textcoords="offset points", fontsize=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOP a byte of inputs and results", fontsize=9)
    axes.set_ylabel("GFLOP/s (o forward, square forward+backward)", fontsize=9)
    axes.grid(color="#e6e8eb", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)


def _shares(axes, rows: list[Row]) -> None:
    places = range(0, -len(rows), -1)
    shares = [100 * (row.of_bound or 0.0) for row in rows]
    axes.barh(places, shares, height=0.8, color=plot.FASTER[False])
    for y, share in zip(places, shares, strict=True):
        axes.annotate(f"{share:.0f}%", (share, y), (3, 0), textcoords="offset points",
                      va="center", fontsize=7)  # fmt: skip
    axes.set_yticks(places, [f"{row.case}  {SHORT[row.direction]}" for row in rows], fontsize=7)
    axes.set_xlim(0, max(115.0, *shares))
    axes.set_title("share of the bound", fontsize=10)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.6)
