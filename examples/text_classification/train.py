"""Training, validation and test."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm

from examples.common import devices
from examples.common.devices import moved


def train(
    model: nn.Module, batches: DataLoader, validation: DataLoader, epochs: int, name: str
) -> dict:
    """Trains. The model ends with the parameters of its best epoch on the validation set.

    Returns:
        ``losses`` (mean of each epoch), ``validation`` (accuracy after each epoch) and ``seconds``
        spent in training steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=epochs * len(batches)
    )
    history: dict = {"losses": [], "validation": [], "seconds": 0.0}
    best, parameters, device = -1.0, None, devices.of(model)
    for epoch in range(epochs):
        model.train()
        total, begin = 0.0, time.perf_counter()
        with tqdm(batches, desc=f"{name}, epoch {epoch + 1}/{epochs}", unit="batch") as progress:
            for batch in progress:
                batch = moved(batch, device)
                optimizer.zero_grad()
                loss = cross_entropy(model(batch)[0], batch.labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item()
        history["seconds"] += time.perf_counter() - begin
        history["losses"].append(total / len(batches))
        history["validation"].append(accuracy(model, validation))
        print(f"  loss {history['losses'][-1]:.4f}, validation {history['validation'][-1]:.2%}")
        if history["validation"][-1] > best:
            best, parameters = history["validation"][-1], copy.deepcopy(model.state_dict())
    model.load_state_dict(parameters)
    return history


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """The share of reviews for which the model predicts the label."""
    model.eval()
    right = count = 0
    for batch in batches:
        batch = moved(batch, devices.of(model))
        right += (model(batch)[0].argmax(dim=1) == batch.labels).sum().item()
        count += len(batch.labels)
    return right / count
