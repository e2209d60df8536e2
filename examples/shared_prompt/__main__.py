"""One step of generation for many samples of one prompt: the prompt's keys are read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from examples.common import options, plots, report
from examples.common.compare import side_by_side

H, D = 8, 64


@dataclass(frozen=True)
class Step:
    """What a step of generation is given, of S samples with P tokens of prompt and n of their own.

    query: ``[S, H, 1, D]``. prompt: keys and values ``[1, H, P, D]``. own: keys and values
    ``[S, H, n, D]``. copied: the keys and values of both for each sample, ``[S, H, P + n, D]``.
    """

    query: Tensor
    prompt: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor]
    copied: tuple[Tensor, Tensor]


def draw(samples: int, prompt: int, own: int, device: torch.device) -> Step:
    """Random queries, keys and values."""

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(shape, device=device), torch.randn(shape, device=device)

    shared, each = pair(1, H, prompt, D), pair(samples, H, own, D)
    both = [
        torch.cat([s.expand(samples, -1, -1, -1), e], 2) for s, e in zip(shared, each, strict=True)
    ]
    query = torch.randn(samples, H, 1, D, device=device)
    return Step(query, shared, each, (both[0], both[1]))


def merged(step: Step) -> Tensor:
    """The samples are rows of one call over the prompt; their own keys are merged in."""
    rows = step.query.transpose(0, 2)  # [1, H, S, D]
    over_prompt = fastattn.scaled_dot_product_attention(rows, *step.prompt, return_lse=True)
    over_own = fastattn.scaled_dot_product_attention(step.query, *step.own, return_lse=True)
    out, lse = over_prompt
    outs = (out.transpose(0, 2), over_own[0])
    return fastattn.merge_attention(outs, (lse.transpose(0, 2), over_own[1]))[0]


def copied(step: Step) -> Tensor:
    """Every sample has a copy of the prompt's keys."""
    return fastattn.scaled_dot_product_attention(step.query, *step.copied)


def plain(step: Step) -> Tensor:
    """The same in plain PyTorch."""
    return F.scaled_dot_product_attention(step.query, *step.copied)


WAYS = {"prompt once, merged": merged, "prompt copied": copied, "plain PyTorch": plain}


def cache_mib(step: Step, name: str) -> float:
    """MiB of keys and values that a way keeps between steps."""
    kept = (*step.prompt, *step.own) if WAYS[name] is merged else step.copied
    return sum(x.numel() * x.element_size() for x in kept) / 2**20


@torch.no_grad()
def compare(step: Step, seconds: float) -> dict[str, dict]:
    """Milliseconds of a step and MiB of its cache, by way; the results must be equal."""
    want = plain(step)
    for way in WAYS.values():
        torch.testing.assert_close(way(step), want)
    calls = {name: lambda way=way: way(step) for name, way in WAYS.items()}
    measured = side_by_side(calls, seconds, step.query.device)
    return {
        name: {"ms": row["ms"], "cache MiB": cache_mib(step, name)}
        for name, row in measured.items()
    }


def draw_times(results: dict[int, dict], path: Path) -> None:
    """Milliseconds and MiB over the number of samples, a line for each way."""
    figure = plots.figure(8, 3.2)
    for axes, key in zip(figure.subplots(1, 2), ("ms", "cache MiB"), strict=True):
        for name in WAYS:
            axes.plot(list(results), [row[name][key] for row in results.values()], "o-", label=name)
        axes.set(xlabel="samples of one prompt", ylabel=key, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    plots.save(figure, path)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("shared_prompt", __doc__), argv)
    options.set_seed(given.seed)
    prompt, own, most = (64, 8, 4) if given.smoke else (2048, 64, 64)
    results, samples = {}, 1
    while samples <= most:
        step = draw(samples, prompt, own, given.device)
        results[samples] = compare(step, 0.05 if given.smoke else 1.0)
        rows = [{"": name, **row} for name, row in results[samples].items()]
        print(f"\n{samples} samples, {prompt} tokens of prompt, {own} of their own")
        print(report.table(rows))
        samples *= 4
    draw_times(results, given.out / "samples.png")
    result = {"prompt": prompt, "own": own, "samples": results}
    report.save(result, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
