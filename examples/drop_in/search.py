"""Finds the page that answers a question, by the similarity of sentence embeddings."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor, nn

from examples.common import devices

QUESTIONS = {
    "How do I repeat a block of code until a condition is false?": "while",
    "How can I handle an error when opening a file fails?": "try",
    "What does a generator function produce?": "yield",
    "How do I write a small anonymous function?": "lambda",
    "Where are the keys and values of a mapping stored?": "typesmapping",
    "How do I set a breakpoint and step through my program?": "debugger",
    "How are names of modules bound when I load a library?": "import",
    "How do I check that something is true while testing?": "assert",
}


def pages(most: int | None = None) -> dict[str, str]:
    """The reference pages of Python's help(), part of every Python: title -> text."""
    return dict(sorted(pydoc_data.topics.topics.items())[:most])


class Words:
    """A tokenizer for the tiny model: gives each new word the next number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def __call__(self, texts: list[str], max_length: int, **_) -> dict[str, Tensor]:
        rows = [
            torch.tensor([self.numbers.setdefault(w, len(self.numbers)) for w in text.split()])
            for text in texts
        ]
        ids = nn.utils.rnn.pad_sequence([row[:max_length] for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@torch.no_grad()
def embed(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The mean over a text's tokens, scaled to length 1: [texts, dim]."""
    means, device = [], devices.of(model)
    for batch in batches:
        batch = {name: x.to(device) for name, x in batch.items()}
        hidden = model(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        inside = batch["attention_mask"][..., None]
        means.append((hidden * inside).sum(dim=1) / inside.sum(dim=1))
    return nn.functional.normalize(torch.cat(means), dim=-1)


def batches(tokenizer, texts: list[str], size: int, max_length: int) -> list[dict[str, Tensor]]:
    """Batches of ``size`` tokenized texts, padded to the longest."""
    return [
        dict(
            tokenizer(
                texts[n : n + size],
                max_length=max_length,
                truncation=True,
                padding=True,
                return_tensors="pt",
            )
        )
        for n in range(0, len(texts), size)
    ]
