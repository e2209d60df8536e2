"""When the dot product runs by products of warpgroups: a path of the CUDA backend.

``csrc/cuda/dot/forward_wgmma.cu`` and ``backward_wgmma.cu`` are the kernels, and have the same
conditions. The backward pass takes no softcap, and needs strides of the output's gradient that
``why_not`` cannot know. ``backward.cu`` computes the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastattn.backends import cuda, health, operators
from fastattn.problem import Problem, arguments
from fastattn.problem.mask import LIMITS

FEW_QUERIES = 16  # csrc/cuda/tile/few_queries.h
USUAL_HEAD_SIZE = 128  # of the kernels for all GPUs and for gradients: csrc/cuda/dispatch.cu
CAPABILITY = (9, 0)
NAME = "wgmma"
USUAL = "sm_80"  # the kernels for compute capability 8.0 and later
UNCHECKED = "wgmma was not checked on this device yet; calls with backend='auto' make the check"
CHECK = health.Check("cuda", "dot", "float16 and bfloat16", NAME)


@arguments.traced_as_constant
def is_named() -> bool:
    """Whether the user names this path, which the kernels read for themselves."""
    return os.environ.get("FASTATTN_CUDA_PATH") == NAME


def why_not(p: Problem, tensors: Sequence[Tensor] = ()) -> str | None:
    """Why a call that the CUDA backend can compute takes other kernels; None if it need not.

    ``tensors`` are q, k and v.
    """
    if p.score != "dot":
        return f"the {p.score} score has kernels of its own"
    if not has_capability(p.device):
        return "wgmma needs compute capability 9.0"
    if arguments.known(p.M <= FEW_QUERIES):
        return f"up to {FEW_QUERIES} queries have kernels of their own"
    if arguments.known(p.B * p.H * p.N * p.D * p.E == 0):
        return "a size is 0"
    if odd := odd_strides(tensors):
        return f"wgmma needs strides of {odd} in steps of 16 bytes, and contiguous columns"
    return None


def against_large_heads(p: Problem, grad: bool) -> str | None:
    """Why the CUDA kernels cannot compute a dot product whose heads are over 128; None if they can.

    ``grad``: whether a gradient may be needed. As ``against_large_heads`` of
    csrc/cuda/dot/forward_wgmma.cu, which is for the forward pass.
    """
    if p.score != "dot" or max(p.D, p.E) <= USUAL_HEAD_SIZE:
        return None
    if grad:
        what = "gradients have"
    elif p.weights != "none":
        what = "returned weights have"
    elif p.M <= FEW_QUERIES:
        what = f"up to {FEW_QUERIES} queries have"
    elif not has_capability(p.device):
        what = "GPUs of another compute capability than 9.0 have"
    else:
        return None
    return f"{what} D and E up to {USUAL_HEAD_SIZE}, here they are {p.D} and {p.E}"


def odd_strides(tensors: Sequence[Tensor]) -> str:
    """The names of those of q, k and v that the copies of this path cannot read."""
    named = zip("qkv", tensors, strict=False)
    return ", ".join([name for name, x in named if not cuda.has_tensor_map(x)])


@arguments.traced_as_constant
def has_capability(device: torch.device) -> bool:
    """Whether a device has such products."""
    return device.type in health.DEVICES and torch.cuda.get_device_capability(device) == CAPABILITY


@arguments.traced_as_constant
def is_right(device: torch.device, may_check: bool = False) -> bool:
    """Whether this path was found right on a device. Then the kernels take it wherever they can.

    Runs the check only if it may, or where FASTATTN_SELF_CHECK forces checks.
    """
    if cuda.LIBRARY_ERROR is not None or not has_capability(device):
        return False
    if may_check or health.mode() == "force":
        health.settle(CHECK, device)
    right = health.verdict(CHECK, device) is None
    if right:
        choose(device)
    return right


def suits(p: Problem) -> bool:
    """Whether this path can take calls without gradient, and is right on their device.

    The first call on a device makes the check, but compiled code makes none.
    """
    if cuda.unsupported(p) or against_large_heads(p, grad=False):
        return False
    may_check = not torch.compiler.is_compiling()
    return why_not(p) is None and is_right(p.device, may_check)


def has_gradients(p: Problem) -> bool:
    """Whether this path has the backward pass of a problem, too."""
    return not p.softcap and max(p.D, p.E) <= USUAL_HEAD_SIZE


def not_found_faster(p: Problem, bias: bool) -> str | None:
    """What of a call keeps it with Triton, as this path was not found faster with it; None if none.

    Dropout and biases mask every tile here (``masks_every_tile`` of csrc/cuda/dot/wgmma_tiles.cuh),
    and take Triton half the time on an H200. Limits of rows were not measured.
    """
    limits = [getattr(p.mask, name) for name in LIMITS]
    there = {
        "a bias": bias,
        "dropout": p.dropout is not None,
        "a limit for each row": any(isinstance(x, Tensor) and x.shape[1] != 1 for x in limits),
    }
    return next((name for name in there if there[name]), None)


def path(p: Problem, tensors: Sequence[Tensor]) -> tuple[str, str]:
    """The path of a dot product through the CUDA kernels, and why it takes that one."""
    if (why := why_not(p, tensors)) is not None:
        return USUAL, why
    if is_named():
        return NAME, "FASTATTN_CUDA_PATH names it"
    if suits(p):
        return NAME, "the self-check found it right on this device"
    if health.mode() == "0":
        return USUAL, "FASTATTN_SELF_CHECK=0, and wgmma waits for the self-check"
    wrong = health.verdict(CHECK, p.device)
    return USUAL, f"wgmma: {wrong}" if wrong else UNCHECKED


def choose(device: torch.device, chosen: bool = True) -> None:
    """Makes the CUDA kernels take this path on a device wherever they can, or not."""
    operators.choose_wgmma(device.index or 0, chosen)


@contextlib.contextmanager
def tried(device: torch.device, check: health.Check) -> Iterator[None]:
    """Takes this path inside the block, if it is what is checked: see ``is_right``."""
    if check != CHECK:
        yield
        return
    choose(device)
    try:
        yield
    finally:
        choose(device, False)
