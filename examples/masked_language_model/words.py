"""Where words begin: a question about every character, with labels for few texts.

Chinese is written without spaces. The labels are those of the package jieba, which looks words up
in a dictionary.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence

from examples.common import devices, options, packages
from examples.common.devices import moved
from examples.common.vocabulary import PADDING
from examples.masked_language_model.model import Encoder, Tagger
from examples.text_classification.dataset import ReviewDataset

BATCH, RATE, CHECKS = 32, 1e-3, 5
TINY = "酒店 房间 这本书 电脑 服务 屏幕 早餐 故事 糟糕 失望 真的 意思 非常 满意 喜欢 不错".split()

Cut = Callable[[str], list[str]]


class Tagged(NamedTuple):
    """``tokens`` [N] of a text; ``starts`` [N]: 1.0 where a word begins, else 0.0."""

    tokens: Tensor
    starts: Tensor


def cutter(smoke: bool) -> Cut:
    """Cuts a text into words: by jieba, or by a few words that need no package."""
    if smoke:
        return re.compile("|".join([*TINY, "."])).findall
    packages.folder("jieba")
    import jieba

    jieba.setLogLevel(logging.WARNING)
    return jieba.lcut


def tag(reviews: ReviewDataset, cut: Cut) -> list[Tagged]:
    """The tokens of reviews, and where their words begin."""
    pairs = zip(reviews.items, reviews.reviews, strict=True)
    return [
        Tagged(tokens, starts(cut(review.text))[: len(tokens)]) for (tokens, *_), review in pairs
    ]


def starts(words: list[str]) -> Tensor:
    """1.0 at the first character of each word, else 0.0."""
    return torch.tensor([float(n == 0) for word in words for n in range(len(word))])


def fine_tune(
    encoder: Encoder, splits: list[list[Tagged]], steps: int, name: str, seed: int
) -> dict:
    """Trains a tagger on this encoder. It ends with its best parameters on the validation set.

    Returns:
        ``test``: the F1 score of the words; ``validation``: this score, at every fifth of the
        steps; ``seconds``.
    """
    training, validation, test = splits
    options.set_seed(seed)
    model = Tagger(encoder).to(devices.of(encoder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    begin, best, parameters = time.perf_counter(), -1.0, None
    found: list[float] = []
    for step in range(1, steps + 1):
        model.train()
        drawn = torch.randint(len(training), (BATCH,), generator=generator).tolist()
        loss = tag_loss(model, [training[n] for n in drawn])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (steps // CHECKS) == 0:
            found.append(score(model, validation))
            print(f"{name}, step {step}/{steps}: words {found[-1]:.2%}")
            if found[-1] > best:
                best, parameters = found[-1], copy.deepcopy(model.state_dict())
    model.load_state_dict(parameters)
    seconds = time.perf_counter() - begin
    return {"test": score(model, test), "validation": found, "seconds": seconds}


def padded(texts: list[Tagged], device: torch.device) -> Tagged:
    """Texts as one batch [B, N], padded to the longest."""
    columns = zip(*texts, strict=True)
    batch = (pad_sequence(list(x), True, PADDING) for x in columns)
    return moved(Tagged(*batch), device)


def tag_loss(model: Tagger, texts: list[Tagged]) -> Tensor:
    """Cross entropy of every character of these texts."""
    tokens, wanted = padded(texts, devices.of(model))
    inside = tokens != PADDING
    return binary_cross_entropy_with_logits(model(tokens)[inside], wanted[inside])


@torch.no_grad()
def score(model: Tagger, texts: list[Tagged]) -> float:
    """F1 of the words: one is found if it begins and ends at the same places as the label's."""
    model.eval()
    right = total = 0
    texts = sorted(texts, key=lambda text: len(text.tokens))
    for n in range(0, len(texts), 256):
        part = texts[n : n + 256]
        rows = (model(padded(part, devices.of(model)).tokens) > 0).cpu()
        for row, text in zip(rows, part, strict=True):
            mine, theirs = spans(row[: len(text.tokens)]), spans(text.starts)
            right += len(mine & theirs)
            total += len(mine) + len(theirs)
    return 2 * right / total


def spans(starts: Tensor) -> set[tuple[int, int]]:
    """(begin, end) of the words of a text; the first one always begins at 0."""
    cuts = [0, *(n for n, begins in enumerate(starts.tolist()) if begins and n), len(starts)]
    return set(itertools.pairwise(cuts))
