"""Which launches mind garbage behind masks, and which rows a second launch goes over again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.launch import Call
from ..tile.strided import (
    Spec,
)
from .forward import FEW_QUERIES


@triton.jit
def mended(marks_ptr, size, GARBAGE: tl.constexpr):
    """``size``, or 0 where a kernel that mends finds no mark and so neither loads nor stores."""
    if GARBAGE == "mend":
        return tl.where(tl.load(marks_ptr + tl.program_id(0)) != 0, size, 0)
    else:
        return size


def _row_of(kernel: str, call: Call) -> str:
    """The kernel's name in config.TABLE."""
    return f"decode_{kernel}" if call.M <= FEW_QUERIES and call.w is None else kernel


def _launches(
    call: Call, shape, programs: int, spoils: bool
) -> list[tuple[Spec, Tensor | None, str]]:
    """(spec, marks, what to do about garbage) of each launch of a kernel.

    Where masks cut through tiles, a masked value that is not finite spoils a plain product: 0 * NaN
    is NaN. A program that sees such a result starts again, minding every pair ("mind"). That takes
    registers: kernels short of them leave a "mark", and a second launch will "mend" what it finds.
    Gradients of the additive score are no products, and do not ``spoil``.
    """
    if not (call.masks_within_tiles and spoils):
        return [(shape, None, "none")]
    if call.w is not None or _crowded(call) or _width(shape) > 128:
        marks = call.q.new_empty(programs, dtype=torch.int8)
        mend = shape._replace(STREAM=tl.constexpr(_width(shape) > 128))
        return [(shape, marks, "mark"), (mend, marks, "mend")]
    return [(shape, None, "mind")]


def _crowded(call: Call) -> bool:
    """Whether registers are short: exact products of fp32 take their operands from there."""
    return call.rich or call.q.dtype == torch.float32


def _width(shape) -> int:
    return max(shape.BLOCK_D.value, shape.BLOCK_E.value)
