"""Reviews as tensors, in balanced batches of similar length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from examples.common.batching import by_length
from examples.common.vocabulary import PADDING
from examples.text_classification.data import Review
from examples.text_classification.tokenizer import Tokenizer


class Batch(NamedTuple):
    """``characters`` and ``bigrams`` [B, N], padded; ``lengths`` [B]; ``labels`` [B]."""

    characters: Tensor
    bigrams: Tensor
    lengths: Tensor
    labels: Tensor


class ReviewDataset(Dataset):
    """The encoded reviews: item -> (characters [N], bigrams [N], label)."""

    def __init__(self, reviews: list[Review], tokenizer: Tokenizer) -> None:
        self.reviews = reviews
        self.items = [
            (*(torch.tensor(row) for row in tokenizer(review.text)), review.label)
            for review in reviews
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.items[index]


class ShuffledBatches:
    """Batches of indices for a DataLoader, in a new order each epoch.

    Batches hold reviews of similar length, so that little is padding.
    """

    def __init__(self, dataset: ReviewDataset, batch_size: int, seed: int) -> None:
        self.lengths = [len(characters) for characters, _, _ in dataset.items]
        self.batch_size = batch_size
        self.random = random.Random(seed)

    def _epoch(self) -> list[int]:
        return [*range(len(self.lengths))]

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(by_length(self._epoch(), self.lengths, self.batch_size, self.random))


class BalancedBatches(ShuffledBatches):
    """Every epoch has equally many reviews of both labels. Missing reviews of the rarer label are
    drawn again.
    """

    def __init__(self, dataset: ReviewDataset, batch_size: int, seed: int) -> None:
        super().__init__(dataset, batch_size, seed)
        labels = [label for _, _, label in dataset.items]
        self.by_label = [[n for n, l in enumerate(labels) if l == label] for label in (0, 1)]

    def _epoch(self) -> list[int]:
        most = max(len(indices) for indices in self.by_label)
        return [
            index
            for indices in self.by_label
            for index in indices + self.random.choices(indices, k=most - len(indices))
        ]

    def __len__(self) -> int:
        most = max(len(indices) for indices in self.by_label)
        return -(-2 * most // self.batch_size)


def collate(items: list[tuple[Tensor, Tensor, int]]) -> Batch:
    """Pads the reviews of a batch to the longest."""
    characters, bigrams, labels = zip(*items, strict=True)
    padded = [
        pad_sequence(list(rows), batch_first=True, padding_value=PADDING)
        for rows in (characters, bigrams)
    ]
    return Batch(*padded, torch.tensor([len(row) for row in characters]), torch.tensor(labels))


def training_batches(
    dataset: ReviewDataset, batch_size: int, seed: int, balanced: bool = True
) -> DataLoader:
    """All reviews in random order; ``balanced``: equally many of both labels."""
    kind = BalancedBatches if balanced else ShuffledBatches
    sampler = kind(dataset, batch_size, seed)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


def evaluation_batches(dataset: ReviewDataset) -> DataLoader:
    """Every review once, by length."""
    order = sorted(range(len(dataset)), key=lambda n: len(dataset.items[n][0]))
    return DataLoader(dataset, batch_size=256, sampler=order, collate_fn=collate)
