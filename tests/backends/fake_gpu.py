"""Backends of a GPU that is none: eager behind another name, which counts, and may lie."""

import types

import torch

from fastattn import cache_file, scaled_dot_product_attention
from fastattn.backends import health, registry
from fastattn.problem import call_cache

CPU = torch.device("cpu")
EAGER = registry.BACKENDS["eager"]


def backend(forward=EAGER.forward, backward=EAGER.backward, reasons=()):
    """A backend that counts its forward passes."""
    fake = types.SimpleNamespace(calls=0, unsupported=lambda p: [*reasons], backward=backward)

    def counted(*args):
        fake.calls += 1
        return forward(*args)

    fake.forward = counted
    return fake


def call(backend="auto", shape=(1, 2, 3, 4), **options):
    q = torch.randn(shape)
    return scaled_dot_product_attention(q, q, q, backend=backend, **options)


def new_process():
    health.forget()
    call_cache.forget()


def verdicts():
    return cache_file.read(health.FILE)["a machine"]
