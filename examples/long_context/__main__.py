"""Trains a language model whose context is cut over processes, and the same in one process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from bench.context import Shape
from bench.ranks import device_for, on_ranks
from examples.common import options, plots, report
from examples.long_context.train import Settings, layout_of, run

METHODS = ["heads", "gather", "ring"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. The device is one for all processes: CPUs, or a GPU for each."""
    made = options.parser("long_context", __doc__, one_device=False)
    made.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda if each process has a GPU, else cpu",
    )
    made.add_argument(
        "--procs", type=int, default=2, help="processes that share the context (default: 2)"
    )
    given = options.parse(made, argv)
    if given.procs < 2:
        made.error(f"--procs: expected 2 or more, got {given.procs}")
    given.device = torch.device(given.device or device_for(given.procs))
    if given.device.type == "cuda" and device_for(given.procs) != "cuda":
        made.error(f"--device: expected {given.procs} GPUs, one for each process")
    return given


def by_table(settings: Settings, method: str, procs: int) -> float:
    """MiB that attention sends in a step, by the formulas of docs/distributed.md: the most."""
    width = settings.dim // settings.heads
    shape = Shape(1, settings.heads, settings.heads, settings.context, width, width, size=4)
    sizes = layout_of(settings.context, procs).sizes
    sent = [sum(shape.bytes_sent(method, sizes, rank)) for rank in range(procs)]
    return settings.layers * max(sent) / 2**20


def rows_of(settings: Settings, results: dict[str, list[dict]]) -> list[dict]:
    """The table: memory of the process that takes most, and bytes of the one that sends most."""
    rows = []
    for name, ranks in results.items():
        for method in ranks[0]["steps"]:
            steps = [rank["steps"][method] for rank in ranks]
            expected = by_table(settings, method, len(ranks)) if len(ranks) > 1 else 0.0
            rows.append(
                {
                    "": name if len(ranks) == 1 else f"{name}, {method}",
                    "MiB a process": max(step["mib"] for step in steps),
                    "MiB sent": max(sum(step["sent"]) for step in steps) / 2**20,
                    "by the table": expected,
                }
            )
    return rows


def draw(losses: dict[str, list[float]], rows: list[dict], path: Path) -> None:
    """Both curves of the loss; memory and bytes of a step."""
    figure = plots.figure(9, 3)
    curves, *bars = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        curves.plot(range(1, len(values) + 1), values, style, label=name)
    curves.set(xlabel="step", ylabel="loss, nats a character")
    curves.legend()
    names = [row[""].rpartition(", ")[2] for row in rows]
    for axes, key in zip(bars, ("MiB a process", "MiB sent"), strict=True):
        axes.bar(names, [row[key] for row in rows], color="tab:blue")
        axes.set_title(f"a step, {key}", fontsize=10)
        axes.tick_params("x", rotation=45)
    plots.save(figure, path)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = parse(argv)
    settings = Settings(seed=given.seed)
    if given.smoke:
        settings = Settings(128, 8, 16, 4, 1, given.seed, pages=3)
    together = f"{given.procs} processes"
    device = given.device.type
    results = {
        "1 process": on_ranks(run, 1, settings, [], device=device),
        together: on_ranks(run, given.procs, settings, METHODS, device=device),
    }
    one, shared = (ranks[0] for ranks in results.values())
    apart = max(abs(a - b) for a, b in zip(one["losses"], shared["losses"], strict=True))
    rows = rows_of(settings, results)
    table = [
        {
            "": name,
            "last loss": x["losses"][-1],
            "held-out": x["held_out"],
            "s a step": x["seconds"],
        }
        for name, (x, *_) in results.items()
    ]
    print(
        f"\n{settings.context} characters of context; losses differ by {apart:.1g} at most\n"
        f"\n{report.table(table)}\n\n{report.table(rows)}"
    )
    draw({name: x["losses"] for name, (x, *_) in results.items()}, rows, given.out / "loss.png")
    result = {
        "settings": vars(settings),
        "python": sys.version.split()[0],  # whose help() is the text
        "largest difference": apart,
        "rows": rows,
        **results,
    }
    report.save(result, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
