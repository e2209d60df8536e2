"""Tile sizes, warps and pipeline stages: one table a kernel, rows by architecture, with reasons.

A row is found by architecture, bytes an element, the head size rounded up to 64, 128 or 256, and
the kind of the problem:

    wide_bias   a bias of larger elements than q's: each stage holds a tile of it
    rich        else with two of dropout, a bias, weights and a curve
    single      else with dropout, a bias or weights, which need more registers than a mask
    curved      else with a curve (tile/curve.py): backward holds a slope for each score
    plain       else

Nothing is measured here and nothing runs at import. What ``fastattn.autotune`` has measured on this
machine goes first (tuned.py). A row is the largest tile that fits: registers without a spill, and
shared memory within the device. tests/triton/test_aot.py compiles every row to check both. Larger
tiles are better because each loaded key element takes part in BLOCK_M products (forward). Only
rows of kind single were compared by time on a GPU, where their tests did not run.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import triton

from fastattn.problem.record import Score

from . import tuned


class Config(NamedTuple):
    """How a kernel runs; what it computes does not depend on it."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


Kind = Literal["plain", "rich", "wide_bias", "curved", "single"]


class Row(NamedTuple):
    """The configurations of each kind of problem."""

    plain: Config
    rich: Config
    wide_bias: Config
    curved: Config
    single: Config


def _row(
    plain: tuple[int, ...],
    rich: tuple[int, ...] | None = None,
    wide_bias: tuple[int, ...] | None = None,
    curved: tuple[int, ...] | None = None,
    single: tuple[int, ...] | None = None,
) -> Row:
    rich = rich or plain
    rows = plain, rich, wide_bias or rich, curved or plain, single or rich
    return Row(*(Config(*c) for c in rows))


# {kernel: {(architecture, bytes an element): {head size: row}}}. "tile" serves the kernels that own
# one tile (weights, dbias) or one row block (delta).
TABLE: dict[str, dict[tuple[str, int], dict[int, Row]]] = {
    "fwd": {
        # Two warpgroups of 64 rows: at head size 128, O and S take 64 registers of a thread each.
        # To try on a GPU: tl.range(warp_specialize=True) with TMA descriptors where strides allow
        # them, 4 warps and 128 x 128, which compiles without a spill, in 197 KB.
        ("sm_90", 2): {
            64: _row((128, 128, 8, 3), (128, 64, 8, 3), curved=(128, 64, 8, 3)),
            128: _row((128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3)),
            # O of 128 rows alone takes half of the registers
            256: _row((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        },
        # Products take Q from registers: 64 keys where Hopper takes 128.
        ("sm_80", 2): {
            64: _row((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
            128: _row((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
            256: _row((64, 32, 8, 2)),
        },
        # 64 KB of shared memory, four waves of 64 lanes with 512 registers each; compiled only.
        ("gfx942", 2): {
            64: _row((128, 64, 4, 1)),
            128: _row((128, 32, 4, 1)),
            256: _row((64, 32, 4, 1)),
        },
    },
    # The forward of few queries, bound by reading K and V: the smallest tile of rows, many stages.
    "decode": {
        ("sm_90", 2): {
            64: _row((16, 128, 4, 3)),
            128: _row((16, 64, 4, 3), (16, 64, 4, 2), (16, 64, 4, 3)),
            256: _row((16, 32, 4, 3)),
        },
        ("sm_80", 2): {
            64: _row((16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
            128: _row((16, 64, 4, 2)),
            256: _row((16, 32, 4, 2)),
        },
        ("gfx942", 2): {
            64: _row((16, 64, 4, 1)),
            128: _row((16, 64, 4, 1)),
            256: _row((16, 32, 4, 1)),
        },
    },
    "dq": {
        # Q and dO stay as well as dQ, and S and dP are two tiles.
        ("sm_90", 2): {
            64: _row((128, 64, 8, 3), (128, 32, 8, 2)),
            128: _row((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
            256: _row((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), (32, 64, 8, 2)),
        },
        ("sm_80", 2): {
            64: _row((128, 32, 8, 2), (64, 32, 4, 2)),  # 64 keys spill a register
            128: _row((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
            256: _row((64, 32, 8, 1), (32, 32, 8, 1)),
        },
        ("gfx942", 2): {
            64: _row((128, 32, 4, 1)),
            128: _row((64, 32, 4, 1)),
            256: _row((32, 32, 4, 1)),
        },
    },
    "dkdv": {
        # dK and dV are two accumulators of BLOCK_N rows: queries stream by in smaller steps.
        ("sm_90", 2): {
            # One feature leaves registers for tiles that warpgroups multiply: decision 0022.
            64: _row((64, 128, 8, 3), (64, 32, 8, 2), single=(32, 128, 8, 2)),
            128: _row(
                (64, 128, 8, 2), (32, 128, 8, 2), (64, 32, 8, 2), (32, 128, 8, 2), (64, 128, 8, 2)
            ),
            256: _row((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (32, 64, 8, 2)),
        },
        ("sm_80", 2): {
            64: _row((64, 32, 8, 2)),
            128: _row((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (64, 32, 8, 2)),
            256: _row((64, 32, 8, 1), (64, 32, 8, 1), (64, 16, 8, 1)),
        },
        ("gfx942", 2): {
            64: _row((32, 64, 4, 1)),
            128: _row((32, 32, 4, 1)),
            256: _row((16, 32, 4, 1)),
        },
    },
    # The backward of few queries is bound by reading K and V, too.
    "decode_dq": {
        ("sm_90", 2): {
            64: _row((16, 128, 4, 2), (16, 64, 8, 2)),
            128: _row((16, 64, 4, 2)),
            256: _row((16, 32, 8, 2)),  # 4 warps: the launch that mends spills
        },
        ("sm_80", 2): {
            64: _row((16, 64, 4, 2)),
            128: _row((16, 64, 4, 2), (16, 32, 4, 2)),
            256: _row((16, 32, 8, 2)),
        },
        ("gfx942", 2): {
            64: _row((16, 64, 4, 1)),
            128: _row((16, 32, 4, 1)),
            256: _row((16, 32, 4, 1)),
        },
    },
    # One step a head, so stages are for registers: operands wait in shared memory.
    "decode_dkdv": {
        ("sm_90", 2): {
            64: _row((16, 128, 8, 1), (16, 64, 8, 1)),
            128: _row((16, 64, 8, 1)),
            256: _row((16, 64, 8, 2), (16, 64, 8, 2), (16, 32, 8, 1)),
        },
        ("sm_80", 2): {
            64: _row((16, 64, 8, 1)),
            128: _row((16, 64, 8, 1), (16, 16, 4, 1)),
            256: _row((16, 32, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1)),
        },
        ("gfx942", 2): {
            64: _row((16, 64, 4, 1)),
            128: _row((16, 32, 4, 1)),
            256: _row((16, 32, 4, 1)),
        },
    },
    "tile": {
        ("sm_90", 2): {
            64: _row((64, 64, 8, 2)),
            128: _row((64, 64, 8, 2), (64, 32, 8, 2)),
            256: _row((16, 32, 8, 1)),  # dbias holds a tile of each of Q, K, dO and V at once
        },
        ("sm_80", 2): {
            64: _row((64, 32, 8, 2)),
            128: _row((16, 32, 8, 2)),
            256: _row((16, 32, 8, 1)),
        },
        ("gfx942", 2): {
            64: _row((64, 32, 4, 1)),
            128: _row((32, 32, 4, 1)),
            256: _row((16, 32, 4, 1)),
        },
    },
}

# Exact fp32 products run on FMA units and take their operands from registers, so tiles are small.
# Products over 256 stream (strided.stream_dot_t), and hold no operands.
_FP32 = {
    "fwd": {64: _row((32, 32, 8, 1)), 128: _row((32, 16, 8, 1)), 256: _row((16, 32, 8, 1))},
    "decode": {
        64: _row((16, 32, 4, 1), (16, 32, 8, 1)),
        128: _row((16, 32, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "dq": {
        64: _row((32, 32, 4, 1), (32, 32, 8, 1)),
        128: _row((16, 16, 8, 1), (16, 32, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "dkdv": {
        64: _row((16, 32, 8, 1), (16, 16, 8, 1)),
        128: _row((16, 16, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "decode_dq": {
        64: _row((16, 32, 8, 1)),
        128: _row((16, 32, 4, 1), (16, 32, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "decode_dkdv": {
        64: _row((16, 32, 8, 1), (16, 32, 16, 1)),
        128: _row((16, 16, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "tile": {
        64: _row((16, 16, 8, 1)),
        128: _row((32, 32, 8, 1)),
        256: _row((32, 32, 8, 1), (16, 32, 8, 1)),
    },
}
# Few queries: where scores are in memory, forward is bound by reading V, and copies ahead.
_FEW = dict.fromkeys((64, 128, 256), _row((16, 64, 4, 3)))
# Their backward (additive_backward.py, which replaces BLOCK_N); 4 warps spill in a rich problem.
_FEW_BWD = {
    64: _row((16, 64, 4, 1)),
    128: _row((16, 64, 4, 1), (16, 64, 8, 1)),
    256: _row((16, 64, 4, 1)),
}
# Issue slots and reciprocals bound the additive score. With 64 x 64 pairs and 4 warps, a thread
# loads 22 numbers of E and F for 64 elements. Twice as many pairs spill. Half as many load 14
# numbers for 32 elements; rich problems have no room for more, above all in transposed tiles. In
# backward a warp should own 16 rows (16 keys in dkdv): sums over a row then stay in the warp, and
# no two warps compute the same element. Compiled only.
_ADDITIVE = {
    "sm_90": {
        "fwd": {
            64: _row((64, 64, 4, 1), (64, 32, 4, 1)),
            128: _row((64, 64, 4, 1), (64, 64, 8, 1)),
            256: _row((64, 64, 8, 1), (64, 32, 8, 1)),
        },
        "dq": {
            64: _row((64, 64, 4, 1), (64, 32, 4, 1)),
            128: _row((64, 32, 4, 1)),
            256: _row((128, 32, 8, 1), (32, 32, 4, 1)),
        },
        "dkdv": {
            64: _row((32, 64, 4, 1)),
            128: _row((32, 64, 4, 1), (32, 128, 8, 1)),
            256: _row((32, 64, 4, 1), (32, 32, 8, 1)),  # rich: all that is larger spills
        },
        "tile": {
            64: _row((64, 64, 4, 1), (64, 64, 8, 1)),
            128: _row((64, 64, 4, 1), (64, 64, 8, 1), (64, 32, 8, 1)),
            256: _row((64, 64, 8, 1), (32, 32, 4, 1)),
        },
        "decode": _FEW,
        "decode_bwd": _FEW_BWD,
    },
    "sm_80": {
        "fwd": {
            64: _row((64, 64, 4, 1), (64, 64, 8, 1)),
            128: _row((64, 64, 4, 1), (64, 64, 8, 1)),
            256: _row((64, 64, 8, 1), (64, 32, 8, 1)),
        },
        "dq": {
            64: _row((64, 64, 8, 1), (64, 32, 4, 1)),
            128: _row((64, 64, 8, 1), (64, 32, 8, 1)),
            256: _row((64, 64, 8, 1), (32, 32, 4, 1)),
        },
        "dkdv": {
            64: _row((128, 32, 8, 1), (16, 64, 4, 1)),  # 64 x 32 and 4 warps spill a register
            128: _row((128, 32, 8, 1), (16, 64, 4, 1)),
            256: _row((16, 32, 2, 1), (32, 32, 8, 1)),
        },
        "tile": {
            64: _row((64, 64, 4, 1), (64, 64, 8, 1)),
            128: _row((64, 64, 4, 1), (64, 32, 8, 1)),
            256: _row((64, 64, 8, 1), (32, 32, 8, 1)),
        },
        "decode": _FEW,
        "decode_bwd": _FEW_BWD,
    },
}
# The gaussian score has no reciprocals, and the compiler unrolls its loops over dims up to 64
# multiply-adds of a thread. That takes registers. Its rows are the additive ones where these spill
# nothing, and no two warps of a plain problem share 16 rows: both would compute their gradients.
# Else, of rows without a spill, one of fewest instructions a pair and a dim. Compiled only.
_GAUSSIAN = {
    "sm_90": _ADDITIVE["sm_90"]
    | {
        "fwd": _ADDITIVE["sm_90"]["fwd"]
        | {128: _row((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1))},
        "dkdv": {
            64: _row((32, 64, 4, 1)),
            128: _row((32, 64, 4, 1), (16, 64, 4, 1)),
            256: _row((64, 64, 8, 1), (16, 32, 4, 1)),
        },
        "tile": _ADDITIVE["sm_90"]["tile"] | {256: _row((64, 64, 8, 1), (64, 32, 8, 1))},
    },
    "sm_80": _ADDITIVE["sm_80"]
    | {
        "dq": {
            64: _row((64, 64, 4, 1), (64, 32, 4, 1)),
            128: _row((64, 64, 4, 1), (64, 32, 4, 1)),
            256: _row((128, 32, 8, 1), (32, 32, 4, 1), (32, 16, 4, 1)),
        },
        "dkdv": {
            64: _row((64, 32, 4, 1), (16, 64, 4, 1)),
            128: _row((128, 32, 8, 1), (16, 32, 2, 1), (16, 32, 4, 1)),
            256: _row((16, 64, 4, 1), (16, 32, 4, 1)),
        },
        "tile": {
            64: _row((64, 64, 4, 1), (64, 32, 8, 1)),
            128: _row((64, 64, 4, 1), (64, 32, 8, 1)),
            256: _row((64, 64, 8, 1), (32, 16, 4, 1)),
        },
    },
}
_FP32_ADDITIVE = {
    "fwd": {64: _row((32, 32, 8, 1)), 128: _row((32, 16, 8, 1)), 256: _row((16, 32, 8, 1))},
    "decode": {64: _row((16, 32, 4, 1)), 128: _row((16, 32, 8, 1)), 256: _row((16, 16, 8, 1))},
    "dq": {
        64: _row((32, 32, 8, 1)),
        128: _row((32, 32, 8, 1), (16, 64, 8, 1)),
        256: _row((16, 32, 8, 1)),
    },
    "dkdv": {64: _row((16, 16, 8, 1)), 128: _row((16, 16, 8, 1)), 256: _row((16, 16, 8, 1))},
    "tile": {
        64: _row((32, 32, 8, 1), (16, 16, 8, 1)),
        128: _row((32, 32, 8, 1)),
        256: _row((32, 32, 8, 1)),
    },
}
_FP32_GAUSSIAN = _FP32_ADDITIVE | {
    "fwd": _FP32_ADDITIVE["fwd"] | {64: _row((32, 32, 4, 1), (32, 16, 4, 1))}
}
_FP32_ADDITIVE["decode_bwd"] = _FP32_ADDITIVE["decode"]
for _score, _rows, _fp32 in (
    ("additive", _ADDITIVE, _FP32_ADDITIVE),
    ("gaussian", _GAUSSIAN, _FP32_GAUSSIAN),
):
    for _kernel in _fp32:
        TABLE[f"{_score}_{_kernel}"] = {
            (_arch, 2): _rows.get(_arch, _rows["sm_80"])[_kernel]
            for _arch in ("sm_80", "sm_90", "gfx942")
        }
        _FP32[f"{_score}_{_kernel}"] = _fp32[_kernel]
# Small tiles that are not square, so that small problems have tiles of every kind.
_INTERPRETER = {"fwd": (64, 32, 4, 1), "decode": (16, 32, 4, 1), "dq": (64, 32, 4, 1),
                "dkdv": (32, 64, 4, 1), "decode_dq": (16, 32, 4, 1), "decode_dkdv": (16, 64, 4, 1),
                "tile": (64, 32, 4, 1), "decode_bwd": (16, 32, 4, 1)}  # fmt: skip
HEAD_SIZES = (64, 128, 256)
for _kernel, _rows in TABLE.items():
    _plain = _kernel.removeprefix("additive_").removeprefix("gaussian_")
    for _arch in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942"):
        _rows[_arch, 4] = _FP32[_kernel]
    for _bytes in (2, 4):
        _rows["interpreter", _bytes] = dict.fromkeys(HEAD_SIZES, _row(_INTERPRETER[_plain]))
        # 8 waves are more lanes than 8 warps, and leave 256 registers to each.
        _rows["gfx942", _bytes] = {
            _size: Row(*(_c._replace(num_warps=4) for _c in _r))
            for _size, _r in _rows["gfx942", _bytes].items()
        }
    _rows["sm_100", 2] = _rows["sm_90", 2]  # same registers and shared memory
    _rows["sm_86", 2] = _rows["sm_80", 2]  # whose rows all fit the 99 KB that these have
# Where the largest of these spill with tensor memory, or take more shared memory than there is:
TABLE["fwd"]["sm_100", 2] = TABLE["fwd"]["sm_90", 2] | {
    128: _row((128, 64, 8, 3), (128, 64, 8, 3), (128, 32, 8, 3))
}
TABLE["dkdv"]["sm_100", 2] = TABLE["dkdv"]["sm_90", 2] | {
    128: _row((32, 128, 8, 2), (32, 64, 8, 2), (16, 64, 8, 2)),
    256: _row((32, 64, 8, 2), (16, 64, 8, 2), (16, 16, 8, 2)),
}
TABLE["dq"]["sm_100", 2] = TABLE["dq"]["sm_90", 2] | {256: _row((64, 32, 8, 2))}


def choose(
    kernel: str, device: torch.device, dtype: torch.dtype, D: int, E: int, kind: Kind
) -> Config:
    """The configuration of ``kernel`` for a problem."""
    measured = tuned.lookup(device, tuned.name(kernel, dtype, padded(D), padded(E), kind))
    if measured is not None:
        return Config(*measured)
    row = TABLE[kernel][architecture(device), dtype.itemsize][size_class(max(D, E))]
    return getattr(row, kind)


def row_name(score: Score, kernel: str) -> str:
    """What ``TABLE`` calls a kernel of a score."""
    return kernel if score == "dot" else f"{score}_{kernel}"


def size_class(head_size: int) -> int:
    """The head size whose rows serve this one."""
    return next(s for s in HEAD_SIZES if head_size <= s)


@functools.cache
def architecture(device: torch.device) -> str:
    """The rows that serve a device; ``interpreter`` where there is none."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "sm_80" if minor == 0 else "sm_86"
    # 11.x is taken for 10.x, which has tensor memory too: not run on a GPU. 12.x is like 8.6.
    # Unknown architectures get the smallest rows.
    return {9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_86"}.get(major, "sm_86")


def speaks_ptx(device: torch.device) -> bool:
    """Whether kernels may hold NVIDIA's instructions."""
    return architecture(device).startswith("sm_")


def padded(size: int) -> int:
    """A head size as tiles hold it: a power of two, at least the 16 that tl.dot asks for."""
    return max(16, triton.next_power_of_2(size))
