"""Sentence pairs as tensors."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.common.batching import by_length
from examples.common.devices import moved
from examples.common.vocabulary import BEGIN, END, PADDING, Vocabulary
from examples.translation.fetch import fetch

SAMPLE = Path(__file__).resolve().parent / "sample.tsv"  # its licence: sample.LICENSE
# A word, a Chinese character, or a punctuation mark.
TOKEN = re.compile(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+|[^\w\s]")

Pair = tuple[list[str], list[str]]  # English tokens, Chinese tokens


class Batch(NamedTuple):
    """``source`` [B, N] with ``lengths`` [B]; ``target`` [B, M + 1] from BEGIN to END, padded."""

    source: Tensor
    lengths: Tensor
    target: Tensor


def tokenize(text: str) -> list[str]:
    """Lower-case words, single Chinese characters and punctuation marks."""
    return TOKEN.findall(text.lower())


def load_pairs(folder: Path | None) -> list[Pair]:
    """The pairs that ``fetch`` writes into ``folder``; without a folder those of the sample.

    If Debian's packages are unavailable, it prints that and uses the sample.
    """
    path = fetch(folder) if folder else SAMPLE
    if path is None:
        print("apt-get cannot download LibreOffice's help here: 500 pairs must do")
        path = SAMPLE
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tuple(tokenize(side) for side in line.split("\t")) for line in lines]


def split(pairs: list[Pair], seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Training, validation and test pairs; validation and test get a twentieth each."""
    shuffled = pairs[:]
    random.Random(seed).shuffle(shuffled)
    part = len(shuffled) // 20
    return shuffled[2 * part :], shuffled[part : 2 * part], shuffled[:part]


class Corpus:
    """Encoded pairs.

    Args:
        pairs: tokens of both sides.
        source, target: the vocabularies.
        device: the device of the batches.
    """

    def __init__(
        self,
        pairs: list[Pair],
        source: Vocabulary,
        target: Vocabulary,
        device: torch.device | None = None,
    ) -> None:
        self.pairs = pairs
        self.device = device or torch.device("cpu")
        self.encoded = [
            (
                torch.tensor([*source.encode(english), END]),
                torch.tensor([BEGIN, *target.encode(chinese), END]),
            )
            for english, chinese in pairs
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: list[int]) -> Batch:
        """The pairs with these indices, padded."""
        chosen = [self.encoded[n] for n in indices]
        sides = (
            pad_sequence([pair[side] for pair in chosen], batch_first=True, padding_value=PADDING)
            for side in (0, 1)
        )
        source, target = sides
        lengths = torch.tensor([len(english) for english, _ in chosen])
        return moved(Batch(source, lengths, target), self.device)

    def epoch(self, size: int, rng: random.Random) -> list[Batch]:
        """All pairs once, in batches of similar length."""
        lengths = [len(english) + len(chinese) for english, chinese in self.encoded]
        return [
            self.batch(indices) for indices in by_length([*range(len(self))], lengths, size, rng)
        ]
