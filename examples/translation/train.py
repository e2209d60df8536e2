"""Training with teacher forcing, and scoring."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from examples.common.vocabulary import PADDING, Vocabulary
from examples.translation.data import Batch, Corpus
from examples.translation.decode import translate
from examples.translation.transformer import Transformer

Schedule = torch.optim.lr_scheduler.LRScheduler


def loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of every next word, with END and without padding."""
    logits = model(batch.source, batch.lengths, batch.target[:, :-1])
    return cross_entropy(
        logits.flatten(0, 1),
        batch.target[:, 1:].flatten(),
        ignore_index=PADDING,
        label_smoothing=smoothing,
    )


def optimization(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Schedule]:
    """One cycle for an LSTM. A Transformer gets a longer warm-up, then 1 / sqrt(step) as in Vaswani
    et al., 2017. It ends at 0, because these trainings are short.
    """
    if not isinstance(model, Transformer):
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, fused=True)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), fused=True)
    warm = max(1, steps // 5)

    def factor(step: int) -> float:
        return min((step + 1) / warm, (warm / (step + 1)) ** 0.5) * min(1, 2 * (1 - step / steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(model: nn.Module, corpus: Corpus, epochs: int, size: int, seed: int, name: str) -> dict:
    """Trains; returns the mean ``losses`` of each epoch, ``seconds``, and ``cpu_seconds``, which
    other load on the machine does not change.
    """
    rng = random.Random(seed)
    total = epochs * -(-len(corpus) // size)
    optimizer, schedule = optimization(model, total)
    losses, begin, begin_cpu = [], time.perf_counter(), time.process_time()
    model.train()
    with tqdm(total=total, desc=name, unit="batch") as progress:
        for _ in range(epochs):
            batches = corpus.epoch(size, rng)
            summed = 0.0
            for batch in batches:
                optimizer.zero_grad()
                error = loss(model, batch, smoothing=0.1)
                error.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                summed += error.item()
                progress.update()
                progress.set_postfix(loss=f"{error.item():.3f}")
            losses.append(summed / len(batches))
    return {
        "losses": losses,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
    }


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, size: int) -> float:
    """Mean over batches, without label smoothing."""
    model.eval()
    batches = corpus.epoch(size, random.Random(0))
    return sum(loss(model, batch).item() for batch in batches) / len(batches)


def translations(model: nn.Module, corpus: Corpus, target: Vocabulary, beams: int) -> list[str]:
    """The model's translation of every English sentence, in the order of the corpus."""
    model.eval()
    order = sorted(range(len(corpus)), key=lambda n: len(corpus.encoded[n][0]))
    found: dict[int, str] = {}
    for n in tqdm(range(0, len(order), 256), desc=f"translating, {beams} beams", unit="batch"):
        indices = order[n : n + 256]
        batch = corpus.batch(indices)
        for index, row in zip(
            indices, translate(model, batch.source, batch.lengths, beams), strict=True
        ):
            found[index] = join(target.decode(row))
    return [found[n] for n in range(len(corpus))]


def join(tokens: list[str]) -> str:
    """Tokens as text, with spaces only between words of letters."""
    text = ""
    for token in tokens:
        apart = text[-1:].isascii() and text[-1:].isalnum() and token[0].isascii()
        text += (" " if apart and token[0].isalnum() else "") + token
    return text


def bleu(found: list[str], corpus: Corpus) -> float | None:
    """BLEU of sacrebleu with its Chinese tokens, 0 to 100; None if sacrebleu is not installed."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        return None
    truth = [join(chinese) for _, chinese in corpus.pairs]
    return corpus_bleu(found, [truth], tokenize="zh").score
