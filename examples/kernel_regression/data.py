"""Two series to fill in: a noisy curve, and the CO2 of Mauna Loa with gaps."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import datetime

import torch
from torch import Tensor

from examples.common import packages


@dataclass(frozen=True)
class Series:
    """Points to learn from and held-out points, both in the order of x.

    ``x`` [N, D] are features, ``y`` [N] values, ``t`` [N] positions on the plot's horizontal axis.
    ``truth`` [M] is the curve without noise at the held-out points, if known.
    """

    x: Tensor
    y: Tensor
    t: Tensor
    test_x: Tensor
    test_y: Tensor
    test_t: Tensor
    truth: Tensor | None = None

    def to(self, device: torch.device) -> Series:
        """The same series on that device."""
        tensors = vars(self).items()
        return Series(**{name: x if x is None else x.to(device) for name, x in tensors})


def curve(points: int, seed: int, noise: float = 0.5) -> Series:
    """``y = 2 sin(x) + x^0.8 + noise`` at random points of [0, 5], with held-out points between."""
    generator = torch.Generator().manual_seed(seed)

    def sample(x: Tensor) -> Tensor:
        return _curve(x) + noise * torch.randn(x.shape, generator=generator)

    x = (5 * torch.rand(points, generator=generator)).sort().values
    test_x = torch.linspace(0, 5, 4 * points)
    return Series(x[:, None], sample(x), x, test_x[:, None], sample(test_x), test_x, _curve(test_x))


def _curve(x: Tensor) -> Tensor:
    return 2 * x.sin() + x**0.8


def co2(gap_weeks: int, every_weeks: int) -> Series:
    """Weekly CO2 in ppm at Mauna Loa, 1958-2001. Gaps of several weeks are held out regularly.

    The features are the year, and the season as a point (cos, sin) on a circle. Weeks of the same
    season are then close to each other in any year.

    Source: the data set ``co2`` of statsmodels (public domain; Keeling and Whorf, Scripps).
    """
    with (packages.folder("statsmodels") / "datasets/co2/co2.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["co2"]]
    dates = [datetime.strptime(row["date"], "%Y%m%d") for row in rows]
    years = torch.tensor([date.year + (date.timetuple().tm_yday - 1) / 365.25 for date in dates])
    ppm = torch.tensor([float(row["co2"]) for row in rows])
    return _with_gaps(years, ppm, gap_weeks, every_weeks)


def waves(weeks: int, gap_weeks: int, every_weeks: int) -> Series:
    """Looks like CO2 and needs no download: a trend, a season and a little noise."""
    generator = torch.Generator().manual_seed(0)
    years = 1990 + torch.arange(weeks) / 52.18
    season = 3 * (2 * math.pi * years).sin()
    ppm = 340 + 1.5 * (years - 1990) + season + 0.3 * torch.randn(weeks, generator=generator)
    return _with_gaps(years, ppm, gap_weeks, every_weeks)


def _with_gaps(years: Tensor, y: Tensor, gap_weeks: int, every_weeks: int) -> Series:
    angle = 2 * math.pi * years
    x = torch.stack([years, angle.cos(), angle.sin()], dim=1)
    # Each gap ends its stretch of weeks, so that the series does not begin with one.
    held_out = torch.arange(len(y)) % every_weeks >= every_weeks - gap_weeks
    kept = ~held_out
    return Series(x[kept], y[kept], years[kept], x[held_out], y[held_out], years[held_out])
