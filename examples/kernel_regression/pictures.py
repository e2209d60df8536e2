"""Plots of fits and weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fastattn
from examples.common import plots
from examples.kernel_regression.data import Series


@torch.no_grad()
def draw_curve(series: Series, models: dict[str, nn.Module], path: Path) -> None:
    """The points, the true curve and the fits."""
    figure = plots.figure(7, 4)
    axis = figure.subplots()
    axis.plot(series.t, series.y, ".", color=plots.COLOURS["truth"], label="points")
    axis.plot(series.test_t, series.truth, "--", color=plots.COLOURS["truth"], label="truth")
    axis.axhline(series.y.mean(), color=plots.COLOURS["average"], label="average")
    for name, model in models.items():
        fit = model(series.test_x, series.x, series.y)
        axis.plot(series.test_t, fit, color=plots.COLOURS[name], label=f"{name} bandwidth")
    axis.set(xlabel="x", ylabel="y", title="y = 2 sin x + x^0.8 + noise")
    axis.legend()
    plots.save(figure, path)


@torch.no_grad()
def draw_weights(series: Series, models: dict[str, nn.Module], path: Path) -> None:
    """Heat maps of the weights."""
    weights = [
        model(series.test_x[::8], series.x, series.y, need_weights=True)[1]
        for model in models.values()
    ]
    figure = fastattn.plot_attention(
        torch.stack(weights),
        title="weights: rows are held-out x, columns the points, both from 0 to 5",
        names=[f"{name} bandwidth" for name in models],
    )
    plots.save(figure, path, dpi=40)


@torch.no_grad()
def draw_gaps(series: Series, models: dict[str, nn.Module], years: tuple, path: Path) -> None:
    """Some years' weeks with the fits, and the weights of the held-out week in the middle."""
    figure = plots.figure(9, 6)
    above, below = figure.subplots(2, 1)
    shown = {"color": plots.COLOURS["truth"], "markersize": 3}
    above.plot(series.t, series.y, ".", label="weeks to learn from", **shown)
    above.plot(series.test_t, series.test_y, "x", label="weeks held out", **shown)
    middle = len(series.test_t) // 2
    for name, model in models.items():
        fit = model(series.test_x, series.x, series.y)
        above.plot(series.test_t, fit, ".", markersize=4, color=plots.COLOURS[name], label=name)
        _, weights = model(
            series.test_x[middle : middle + 1], series.x, series.y, need_weights=True
        )
        below.plot(series.t, weights[0], color=plots.COLOURS[name], label=name)
    inside = (series.t >= years[0]) & (series.t <= years[1])
    span = series.y[inside]
    above.set(xlim=years, ylim=(span.min() - 1, span.max() + 1), ylabel="CO2, ppm")
    above.legend(ncols=2, fontsize=8)
    below.axvline(series.test_t[middle], color=plots.COLOURS["truth"], linestyle=":")
    below.set(
        xlim=years,
        xlabel="year",
        ylabel="weight",
        title="what the week at the dotted line looks at",
    )
    below.legend()
    plots.save(figure, path)
