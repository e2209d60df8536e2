"""Fits both series with average pooling, a fixed and a learned bandwidth, and compares."""

from __future__ import annotations

import torch
from torch import nn

from examples.common import options, report
from examples.common.compare import side_by_side, training_step
from examples.kernel_regression import data, pictures
from examples.kernel_regression.data import Series
from examples.kernel_regression.model import PlainNadarayaWatson, far_apart, learn, loss
from fastattn import NadarayaWatson


@torch.no_grad()
def rmse(model: nn.Module | None, series: Series) -> float:
    """Root mean square error at the held-out points; None means average pooling."""
    fit = series.y.mean() if model is None else model(series.test_x, series.x, series.y)
    return (fit - series.test_y).square().mean().sqrt().item()


def fit(series: Series, start: list[float], others: torch.Tensor, steps: int) -> dict:
    """The models of one series, moved to the CPU, and their errors on held-out points."""
    device = others.device
    fixed = NadarayaWatson(1.0).to(device)
    learned = NadarayaWatson(start, learnable=True).to(device)
    plain = PlainNadarayaWatson(start, learnable=True).to(device)
    learn(learned, series.x, series.y, others, steps, "fastattn")
    learn(plain, series.x, series.y, others, steps, "plain PyTorch")
    errors = {
        "average pooling": (rmse(None, series), "-"),
        "fixed bandwidth": (rmse(fixed, series), "1"),
        "learned, fastattn": (rmse(learned, series), _numbers(learned.bandwidth)),
        "learned, plain PyTorch": (rmse(plain, series), _numbers(plain.bandwidth)),
    }
    print(
        report.table(
            [
                {"": name, "held-out RMSE": error, "bandwidth": bandwidth}
                for name, (error, bandwidth) in errors.items()
            ]
        )
    )
    return {
        "errors": {name: error for name, (error, _) in errors.items()},
        "bandwidth": learned.bandwidth.tolist(),
        "models": {"fixed": fixed.cpu(), "learned": learned.cpu()},
    }


def _numbers(bandwidth: torch.Tensor) -> str:
    return " ".join(f"{h:.3f}" for h in bandwidth.detach().view(-1))


def compare(series: Series, start: list[float], others: torch.Tensor, seconds: float) -> dict:
    """Time and memory of one training step on all points."""
    device = others.device
    models = {
        "fastattn": NadarayaWatson(start, learnable=True).to(device),
        "plain PyTorch": PlainNadarayaWatson(start, learnable=True).to(device),
    }
    steps = {
        name: training_step(model, lambda model=model: loss(model, series.x, series.y, others))
        for name, model in models.items()
    }
    return side_by_side(steps, seconds, device)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("kernel_regression", __doc__), argv)
    options.set_seed(given.seed)
    steps, device = 15 if given.smoke else 100, given.device

    print("y = 2 sin x + x^0.8 + noise, 50 points, leaving one out")
    curve = data.curve(50, given.seed)
    alone = far_apart(50, 0).to(device)
    on_curve = fit(curve.to(device), [1.0], alone, steps)
    models = on_curve.pop("models")
    pictures.draw_curve(curve, models, given.out / "curve.png")
    pictures.draw_weights(curve, models, given.out / "weights.png")

    gap, every = 26, 104
    series = data.waves(520, gap, every) if given.smoke else data.co2(gap, every)
    print(f"\n{'waves' if given.smoke else 'CO2'}: {gap} of every {every} weeks held out")
    others = far_apart(len(series.y), gap // 2).to(device)
    start = [1.0, 1.0, 1.0]  # year, and the two features of the season
    on_gaps = fit(series.to(device), start, others, steps)
    middle = series.test_t[len(series.test_t) // 2].item()
    models = on_gaps.pop("models")
    pictures.draw_gaps(series, models, (middle - 4, middle + 4), given.out / "gaps.png")

    print(f"\none training step on {len(series.y)} points")
    measured = compare(series.to(device), start, others, 0.05 if given.smoke else 3.0)
    print(report.comparison(measured))
    result = {"curve": on_curve, "gaps": on_gaps, "training_step": measured}
    report.save(result, given.out, device)
    return result


if __name__ == "__main__":
    main()
