"""Compares a translator with its plain PyTorch twin, and decoding with and without caches."""

from __future__ import annotations

import statistics
import time
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from examples.common import plots, report
from examples.common.compare import side_by_side, training_step
from examples.common.devices import synchronize
from examples.translation import train
from examples.translation.data import Corpus
from examples.translation.decode import Recomputing, translate
from examples.translation.transformer import Transformer


@torch.no_grad()
def results(models: dict[str, nn.Module], test: Corpus, sentences: int) -> dict:
    """``loss`` of each model on the test set, and how many of the first ``sentences`` they
    ``greedily translate alike``. The second model may lack caches: it then recomputes.
    """
    losses = {name: train.validation_loss(model, test, 64) for name, model in models.items()}
    batch = test.batch([*range(min(sentences, len(test)))])
    decoders = [
        Recomputing(m) if isinstance(m, Transformer) and n else m
        for n, m in enumerate(models.values())
    ]
    rows = [translate(decoder, batch.source, batch.lengths) for decoder in decoders]
    alike = sum(a == b for a, b in zip(*rows, strict=True))
    print(f"\nwith equal parameters: loss {losses}, {alike} of {len(rows[0])} translated alike")
    return {"loss": losses, "sentences": len(rows[0]), "translated alike": alike}


def training_steps(models: dict[str, nn.Module], corpus: Corpus, size: int, smoke: bool) -> dict:
    """Time and memory of a training step on the longest pairs."""
    length = [len(english) + len(chinese) for english, chinese in corpus.encoded]
    batch = corpus.batch(sorted(range(len(corpus)), key=length.__getitem__)[-size:])
    steps = {}
    for name, model in models.items():
        model.train()
        steps[name] = training_step(model, lambda model=model: train.loss(model, batch))
    measured = side_by_side(steps, 0.05 if smoke else 3.0, corpus.device)
    N, M = batch.source.shape[1], batch.target.shape[1] - 1
    print(f"\none training step on {len(batch.source)} pairs, {N} English and {M} Chinese tokens")
    print(report.comparison(measured))
    return {"pairs": len(batch.source), "English": N, "Chinese": M, **measured}


@torch.no_grad()
def decoding_steps(model: nn.Module, corpus: Corpus, smoke: bool) -> dict:
    """Milliseconds of one word, with caches and recomputed, at several positions.

    Measured on 16 translations that never end. With caches, this is the median of 8 words in each
    of 5 runs. The recomputed words take turns with these runs.
    """
    model.eval()
    places = [8, 16] if smoke else [8, 16, 32, 64, 128, 192, 256]
    batch = corpus.batch([*range(min(16, len(corpus)))])
    words = torch.randint(
        4, model.target.num_embeddings, (len(batch.source), places[-1]), device=corpus.device
    )
    cached: list[list[float]] = [[] for _ in words[0]]
    recomputed: list[list[float]] = [[] for _ in places]
    for _ in range(1 if smoke else 5):
        state = model.begin(batch.source, batch.lengths)
        for samples, word in zip(cached, words.split(1, dim=1), strict=True):
            samples.append(_ms(corpus.device, model.next_words, word, state))
        for samples, place in zip(recomputed, places, strict=True):
            samples.append(_ms(corpus.device, model, batch.source, batch.lengths, words[:, :place]))
    result = {
        "position": places,
        "cached": [statistics.median(chain(*cached[place - 8 : place])) for place in places],
        "recomputed": [statistics.median(samples) for samples in recomputed],
    }
    rows = [dict(zip(result, row, strict=True)) for row in zip(*result.values(), strict=True)]
    print(f"\nms for one more word of {len(batch.source)} translations\n{report.table(rows)}")
    return result


def _ms(device: torch.device, function, *args) -> float:
    synchronize(device)
    begin = time.perf_counter()
    function(*args)
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def draw_decoding(measured: dict, picture: Path) -> None:
    """Draws the time of a step over its position."""
    figure = plots.figure(5, 3)
    axes = figure.subplots()
    for name in ("recomputed", "cached"):
        axes.plot(measured["position"], measured[name], ".-", label=name)
    axes.set(xlabel="words written so far", ylabel="ms for one more", ylim=0)
    axes.legend()
    plots.save(figure, picture)
