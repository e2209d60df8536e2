"""A small multi-head module of ours and a batch for it."""

import pytest
import torch
from helpers import spied

from fastattn import MultiheadAttention
from fastattn.modules.multihead import inputs


@pytest.fixture
def checked(monkeypatch):
    """The calls that went the ordinary way, past ``inference.attend``."""
    return spied(monkeypatch, inputs, "canonical")


@pytest.fixture
def module():
    torch.manual_seed(0)
    return MultiheadAttention(8, 2, batch_first=True)


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
