"""Garbage behind masks: which launches look for it, and which rows a second launch computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.launch import FEW_QUERIES, Call
from ..tile.masking import varies_within_tiles
from ..tile.strided import Spec


@triton.jit
def mended(marks_ptr, size, GARBAGE: tl.constexpr):
    """``size``, or 0 for a program that has nothing to mend, and so neither loads nor stores."""
    if GARBAGE == "mend":
        return tl.where(tl.load(marks_ptr + tl.program_id(0)) != 0, size, 0)
    else:
        return size


def row_of(kernel: str, call: Call) -> str:
    """The kernel's name in config.TABLE."""
    return f"decode_{kernel}" if call.M <= FEW_QUERIES and call.w is None else kernel


def launches(
    call: Call, shape, programs: int, spoils: bool
) -> list[tuple[Spec, Tensor | None, str]]:
    """(spec, marks, what to do about garbage) of each launch of a kernel.

    Where masks cut through tiles, a masked value that is not finite spoils a plain product, because
    0 * NaN is NaN. A program that sees such a result computes it again, pair by pair ("mind"). That
    takes registers. A kernel without enough of them leaves a "mark", and a second launch of it will
    "mend" the marked blocks. ``spoils``: whether the kernel multiplies tiles; gradients of the
    additive score are no such products.
    """
    if not (varies_within_tiles(call) and spoils):
        return [(shape, None, "none")]
    if call.w is not None or crowded(call) or width(shape) > 128:
        marks = call.q.new_empty(programs, dtype=torch.int8)
        mend = shape._replace(STREAM=tl.constexpr(width(shape) > 128))
        return [(shape, marks, "mark"), (mend, marks, "mend")]
    return [(shape, None, "mind")]


def crowded(call: Call) -> bool:
    """Whether registers are short: exact products of fp32 take their operands from registers."""
    return call.rich or call.q.dtype == torch.float32


def width(shape) -> int:
    return max(shape.BLOCK_D.value, shape.BLOCK_E.value)
