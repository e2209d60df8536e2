"""Training on gaps."""

from __future__ import annotations

import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm

from examples.common import devices
from examples.common.devices import moved
from examples.masked_language_model.masking import IGNORED, mask_tokens
from examples.masked_language_model.model import GapFiller


def pretrain(
    model: GapFiller, batches: DataLoader, epochs: int, vocabulary: int, name: str, seed: int
) -> dict:
    """Trains; returns ``losses`` (mean of each epoch) and ``seconds``. Labels are not used."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=epochs * len(batches), pct_start=0.2
    )
    generator = torch.Generator().manual_seed(seed)
    history: dict = {"losses": [], "seconds": 0.0}
    model.train()
    for epoch in range(epochs):
        total, begin = 0.0, time.perf_counter()
        with tqdm(batches, desc=f"{name}, epoch {epoch + 1}/{epochs}", unit="batch") as progress:
            for batch in progress:
                loss = gap_loss(model, batch.characters, vocabulary, generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item()
        history["seconds"] += time.perf_counter() - begin
        history["losses"].append(total / len(batches))
        print(f"  loss {history['losses'][-1]:.4f}")
    return history


def gap_loss(
    model: GapFiller, tokens: torch.Tensor, vocabulary: int, generator: torch.Generator
) -> torch.Tensor:
    """Cross entropy of the characters in the gaps. The model computes only these.

    ``tokens`` are on the generator's device, where the gaps are chosen. The gaps are thus the same
    for any device of the model.
    """
    masked = moved(mask_tokens(tokens, vocabulary, generator), devices.of(model))
    where = masked.targets != IGNORED
    logits = model(masked.tokens, where)
    return cross_entropy(logits, masked.targets[where], reduction="sum") / where.sum().clamp(min=1)


@torch.no_grad()
def fill(model: GapFiller, tokenizer, text: str, most: int = 3) -> list[list[str]]:
    """The likeliest characters for each ``_`` in a text."""
    vocabulary = len(tokenizer.characters)
    numbers = [
        vocabulary if character == "_" else tokenizer.characters.encode([character])[0]
        for character in text[: tokenizer.max_length]
    ]
    tokens = torch.tensor([numbers], device=devices.of(model))
    model.eval()
    best = model(tokens, tokens == vocabulary).topk(most).indices
    return [[tokenizer.characters.tokens[n] for n in row] for row in best.tolist()]
