"""Limits that vary by row, as of packed texts: which tiles run without mask code, and any limits.

A tile of which all pairs are kept needs no mask. A table of what all rows of a tile keep finds it
(csrc/cuda/tile/spans.cuh).
"""

import ctypes
import dataclasses
from typing import Any

import host_build
import pytest
import shim_backend
import torch

from fastattn import Mask, scaled_dot_product_attention, testing
from fastattn.problem import validate
from fastattn.testing import Case

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

TILE = 64
N = 330
LENGTHS = [262, 18, 1, 0, 49]


def limits(begin, end):
    return Mask(kv_begin=begin[None].int(), kv_len=end[None].int())


i, none = torch.arange(N), torch.zeros(N)
every_other = i // TILE % 2 * (N - 130)  # what these tiles of queries leave out
MASKS = {
    "texts": Mask.documents(lengths=LENGTHS),
    "causal texts": Mask.documents(lengths=LENGTHS, causal=True),
    "windows in texts": Mask.documents(lengths=LENGTHS, window=(140, 0)),
    "whole tiles apart": limits(none, N - every_other),
    "one row apart": limits(none, torch.where(i == 200, 70, N)),
    "an empty row": limits(torch.where(i == 200, 300, 0), torch.where(i == 200, 20, N)),
    "no row apart": limits(none, none + N),
    "at random": limits(*torch.randint(0, N, [2, N], generator=torch.Generator().manual_seed(2))),
    "descending": limits((N - 1 - i) // 3, N - i // 3),
}
BESIDE = {  # (the rest of the mask, options of a case)
    "alignment": (dict(causal="bottom_right"), {}),
    "window": (dict(window=(150, 60)), {}),
    "blocks": (dict(keep=(torch.arange(64) % 5 > 1).view(8, 8)), {}),
    "dropout": ({}, dict(dropout_p=0.3)),
    "weights": ({}, dict(weights="full")),
    "bias": ({}, dict(bias="mn")),
}


def check(mask, backend, simulator, **options):
    usual: dict[str, Any] = dict(B=1, H=1, Hkv=1, M=N, N=N, D=64, E=64, dtype=torch.float16)
    case = Case("limits", lse=True, **usual | options)
    t = dataclasses.replace(testing.make(case), mask=mask)
    with testing.poisoned():
        ours = testing.run(case, t, backend)
    testing.oracle(case, t).check(case, ours)
    testing.assert_invariants(case, t, ours)
    simulator.set_schedule(3)
    testing.assert_same_bits(testing.run(case, t, backend), ours)


@pytest.mark.parametrize("name", MASKS)
def test_any_limits(name, by_warpgroups, simulator):
    check(MASKS[name], by_warpgroups, simulator, H=2)  # which share a key head


@pytest.mark.parametrize("name", ["causal texts", "at random", "an empty row"])
def test_any_limits_of_other_kernels(name, by_warpgroups, simulator, monkeypatch):
    monkeypatch.delenv("FASTATTN_CUDA_PATH")
    check(MASKS[name], by_warpgroups, simulator)


@pytest.mark.parametrize("beside", BESIDE)
def test_limits_beside_others(beside, by_warpgroups, simulator):
    """Nothing of these may be left out of a tile of which the limits keep all."""
    fields, options = BESIDE[beside]
    if "keep" in fields:
        blocks = fields["keep"].repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
        fields = dict(keep=blocks[None, None, :N, :N])
    mask = dataclasses.replace(MASKS["texts"], **fields)
    check(mask, by_warpgroups, simulator, D=72, E=128, **options)


def test_samples_with_limits_of_their_own(by_warpgroups, simulator):
    masks = [MASKS["causal texts"], MASKS["descending"]]
    begin, end = (torch.cat([getattr(x, n) for x in masks]) for n in ("kv_begin", "kv_len"))
    check(Mask(kv_begin=begin, kv_len=end), by_warpgroups, simulator, B=2)


def test_the_last_tile_of_keys_alone(by_warpgroups, simulator):
    """A block of two has one."""
    check(limits(none, none + 5 * TILE), by_warpgroups, simulator, N=5 * TILE)


# ---- how many tiles are masked ----


def masked_so_far() -> int:
    library = ctypes.CDLL(str(shim_backend.library()))
    library.shim_masked.restype = ctypes.c_uint64
    return library.shim_masked()


def tiles(kept, rows: int, cols: int, full=False, in_one=False) -> list[str]:
    """What blocks of so many rows do with each tile of columns: "outside", "whole" or "masked".

    ``full``: blocks of fewer rows mask all. ``in_one``: so do those whose whole tiles lie apart.
    """
    found = []
    for r in kept.split(rows):
        parts = r.split(cols, 1)
        some = [n for n, x in enumerate(parts) if x.any()]
        whole = [n for n, x in enumerate(parts) if x.all() and x.shape[1] == cols]
        if (full and len(r) < rows) or (in_one and whole and whole[-1] - whole[0] >= len(whole)):
            whole = []
        for n in range(len(parts)):
            inside = some and some[0] <= n <= some[-1]
            found.append("whole" if n in whole else "masked" if inside else "outside")
    return found


def leaves_and_pairs(mask, D):
    q, k, v = (torch.randn(1, 1, N, D).half().requires_grad_() for _ in range(3))
    kept = validate.build("dot", q, k, v, mask=mask).p.kept()
    return (q, k, v), torch.as_tensor(kept).expand(1, 1, N, N)[0, 0]


@pytest.mark.skipif(shim_backend.ON_GPU, reason="the simulator counts tiles")
@pytest.mark.parametrize(
    ("name", "D"), [*((name, 64) for name in MASKS), ("causal texts", 128), ("an empty row", 128)]
)
def test_whole_tiles_run_no_mask(name, D, by_warpgroups):
    leaves, kept = leaves_and_pairs(MASKS[name], D)
    before = masked_so_far()
    out = scaled_dot_product_attention(*leaves, mask=MASKS[name], backend=by_warpgroups)
    behind = masked_so_far()
    consumers = 3 if D == 64 else 2
    forward = tiles(kept, TILE * consumers, 2 * TILE)
    assert behind - before == 2 * consumers * forward.count("masked")  # halves of a tile
    out.sum().backward()
    of_rows, of_keys = tiles(kept, 2 * TILE, TILE), tiles(kept.T, 2 * TILE, TILE, True, True)
    assert masked_so_far() - behind == 2 * (of_rows.count("masked") + of_keys.count("masked"))
    if name in ("texts", "causal texts", "no row apart", "whole tiles apart"):
        assert "whole" in forward or (name == "causal texts" and D == 64)  # of 192 queries
        assert "whole" in of_rows
        assert "whole" in of_keys


@pytest.mark.skipif(shim_backend.ON_GPU, reason="the simulator counts tiles")
@pytest.mark.parametrize("name", ["causal texts", "an empty row", "at random", "no row apart"])
def test_whole_tiles_of_other_kernels(name, monkeypatch, by_warpgroups):
    """Backward asks the tables for each tile."""
    monkeypatch.delenv("FASTATTN_CUDA_PATH")
    leaves, kept = leaves_and_pairs(MASKS[name], 64)
    out = scaled_dot_product_attention(*leaves, mask=MASKS[name], backend=by_warpgroups)
    before = masked_so_far()
    out.sum().backward()
    masked = tiles(kept, TILE, TILE, full=True).count("masked")
    assert masked_so_far() - before == 2 * masked  # of dQ; of dK and dV
