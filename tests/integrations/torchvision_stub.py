"""Lets torchvision be imported where it was built for another kind of torch than there is.

A torchvision for CUDA finds no operators beside a torch for CPUs, and its import fails at the first
one that it looks for. transformers, timm and open_clip import it. Their models need no operator.
"""

import contextlib

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define_missing_operators() -> None:
    """Gives the operators their names; nothing computes them."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{name}", SCHEMA)
