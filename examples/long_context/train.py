"""What every process does: train on its part of the context."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import fastattn
from bench import memory
from examples.common import devices, options
from examples.common.compare import extra_bytes, training_step
from examples.long_context import data
from examples.long_context.model import Attend, CharacterModel
from fastattn.distributed import Layout, context_parallel_attention, count_bytes

UNIT = 16  # pieces of the layout begin at multiples of this


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training; ``pages`` of the text, None for all."""

    context: int = 8192
    steps: int = 40
    dim: int = 128
    heads: int = 4
    layers: int = 2
    seed: int = 0
    pages: int | None = None


@dataclass(frozen=True)
class Share:
    """The part of a context that one process holds, and how it attends to all of it."""

    context: int
    positions: Tensor  # in the context, of this process
    attend: Attend


def layout_of(context: int, ranks: int) -> Layout:
    """Causal attention costs each rank the same in it."""
    return Layout.zigzag(context, ranks, UNIT)


def share(context: int, method: str | None, device: torch.device) -> Share:
    """This rank's share."""
    group, rank = dist.group.WORLD, dist.get_rank()
    layout = layout_of(context, dist.get_world_size())
    attend: Attend = partial(
        context_parallel_attention, mesh=group, layout=layout, method=method, is_causal=True
    )
    return Share(context, layout.positions(rank, device), attend)


def alone(context: int, device: torch.device) -> Share:
    """The whole context in one process."""
    attend: Attend = partial(fastattn.scaled_dot_product_attention, is_causal=True)
    return Share(context, torch.arange(context, device=device), attend)


def loss_of(model: CharacterModel, text: Tensor, own: Share) -> Tensor:
    """This process's part of the mean loss over a context: parts of all processes add up to it."""
    text = text.to(own.positions.device)
    logits = model(text[own.positions][None], own.positions, own.attend)
    return cross_entropy(logits[0], text[own.positions + 1], reduction="sum") / own.context


def total(x: Tensor) -> Tensor:
    """The sum over processes, on each of them."""
    dist.all_reduce(x)
    return x


def add_gradients(model: CharacterModel) -> None:
    """Each process has the gradients of its part of the loss; the sum is that of the whole."""
    gradients = [x.grad for x in model.parameters()]
    vector_to_parameters(total(parameters_to_vector(gradients)), gradients)


def train(model: CharacterModel, text: Tensor, own: Share, settings: Settings) -> dict:
    """``losses`` of the steps, which are the same on every rank, and ``seconds`` of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=settings.steps, pct_start=0.2
    )
    generator = torch.Generator().manual_seed(settings.seed)  # the same windows on every rank
    losses, seconds = [], []
    ranks, hidden = dist.get_world_size(), dist.get_rank() > 0
    name = f"{ranks} process" + ("es" if ranks > 1 else "")
    for _ in tqdm(range(settings.steps), desc=name, unit="step", disable=hidden):
        begin = time.perf_counter()
        loss = loss_of(model, data.window(text, settings.context, generator), own)
        optimizer.zero_grad()
        loss.backward()
        add_gradients(model)
        optimizer.step()
        schedule.step()
        losses.append(total(loss.detach()).item())
        seconds.append(time.perf_counter() - begin)
    return {"losses": losses, "seconds": statistics.median(seconds)}


def measured(model: CharacterModel, text: Tensor, own: Share) -> dict:
    """Of one step of this process: MiB of memory, and bytes that its attention sends."""
    step = training_step(model, lambda: loss_of(model, text, own))
    step()  # for what happens once
    mib = extra_bytes(step, own.positions.device.type) / 2**20
    model.zero_grad(set_to_none=True)
    with count_bytes() as sent:
        loss = loss_of(model, text, own)
        forward = sent.bytes
        loss.backward()
    return {"mib": mib, "sent": [forward, sent.bytes - forward]}


def run(device: torch.device, settings: Settings, methods: list[str]) -> dict:
    """Measures a step of each method, then trains by the default one; without methods, alone."""
    vocabulary, text = data.read(settings.pages)
    known, held_out = data.split(text, settings.context)
    options.set_seed(settings.seed)
    model = CharacterModel(len(vocabulary), settings.dim, settings.heads, settings.layers)
    model.to(device)
    of = partial(share, settings.context, device=device)
    shares = {method: of(method) for method in methods} or {
        "alone": alone(settings.context, device)
    }
    own = of(None) if methods else shares["alone"]
    with memory.counting():
        rows = {name: measured(model, held_out, x) for name, x in shares.items()}
    history = train(model, known, own, settings)
    with torch.no_grad():
        history["held_out"] = total(loss_of(model, held_out, own)).item()
    devices.synchronize(device)
    return {**history, "steps": rows, "characters": len(text), "vocabulary": len(vocabulary)}
