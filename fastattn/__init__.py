"""fastattn: fused attention for PyTorch. Scores: scaled dot product, additive, gaussian, cosine."""

import importlib
from typing import Any

import torch

from fastattn.backends import flops, health, wgmma
from fastattn.backends.registry import Explanation
from fastattn.explanation import ModuleExplanation, explain
from fastattn.functional import additive_attention, scaled_dot_product_attention
from fastattn.integrations.sdpa import SdpaCalls, use_for_sdpa
from fastattn.merge import merge_attention
from fastattn.modules import (
    AdditiveAttention,
    AlignmentState,
    CosineAttention,
    HardAttention,
    HardChoice,
    KVCache,
    LocalAttention,
    LocationSensitiveAttention,
    LuongAttention,
    MultiheadAdditiveAttention,
    MultiheadAttention,
    NadarayaWatson,
    SelfAttention,
    coverage_loss,
    replace_attention,
)
from fastattn.plotting import plot_attention
from fastattn.problem import ALiBi, Mask, RelativeBias
from fastattn.scores import attention
from fastattn.tuning import autotune
from fastattn.varlen import varlen_attention

flops.register()


def _self_check(check: health.Check, device: torch.device) -> health.Verdict:
    from fastattn import self_check, watchdog

    # The kernels of this process may take warpgroups, which is not what other checks are about.
    usual = check.backend == "cuda" and check != wgmma.CHECK
    apart = usual and (wgmma.is_named() or wgmma.is_right(device))
    return watchdog.in_child(check, device) if apart else self_check.run(check, device)


health.runner = _self_check


def _take_dtensors() -> None:
    import fastattn.distributed.dtensor  # noqa: F401


flops.when_imported("torch.distributed.tensor", _take_dtensors)


def __getattr__(name: str) -> Any:
    """What takes time to import, and few need."""
    if name in ("distributed", "testing"):
        return importlib.import_module(f"fastattn.{name}")
    raise AttributeError(f"module 'fastattn' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AdditiveAttention",
    "AlignmentState",
    "CosineAttention",
    "Explanation",
    "HardAttention",
    "HardChoice",
    "KVCache",
    "LocalAttention",
    "LocationSensitiveAttention",
    "LuongAttention",
    "Mask",
    "ModuleExplanation",
    "MultiheadAdditiveAttention",
    "MultiheadAttention",
    "NadarayaWatson",
    "RelativeBias",
    "SdpaCalls",
    "SelfAttention",
    "additive_attention",
    "attention",
    "autotune",
    "coverage_loss",
    "explain",
    "merge_attention",
    "plot_attention",
    "replace_attention",
    "scaled_dot_product_attention",
    "use_for_sdpa",
    "varlen_attention",
]
