"""The gaussian kernels through the public function, against the float64 reference."""

import dataclasses
import math

import pytest
import torch

import fastattn
from fastattn import testing
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.usefixtures("carried")


def small(name, **features):
    """A case that spans three key tiles of the interpreter's, a tail included."""
    sizes = dict(B=1, H=2, Hkv=2, M=20, N=70, D=5, E=6)
    return Case(name, "gaussian", **{**sizes, **features})


EVERYTHING = dict(
    B=2, Hkv=1, causal="bottom_right", window=(60, -1), keep="bhmn", bias="bhmn", bias_inf=True,
    empty_rows=True, dropout_p=0.3, sink=0.0, weights="full", lse=True, garbage=math.nan,
)  # fmt: skip
NAMES = "M1-N1 M0 N0 D0 E0 B0 H0 D1-E1 D3-E5"
CASES = [
    *(c for c in GRID if c.score == "gaussian" and c.name in NAMES.split()),
    *(small(f"bandwidth-{x}", bandwidth=x, B=2, M=9, lse=True) for x in ("", "d", "bhd")),
    small("tall", M=70, N=20, causal="bottom_right", lse=True),
    small("one", M=1, N=1100, D=3, lse=True),  # keys in chunks, queries in none
    small("few", B=2, M=3, N=150, kv_len="rows", weights="mean", lse=True),
    small("huge", magnitude=1e4, M=9),
    small("everything", **EVERYTHING),
    small("softcap", softcap=1.0, weights="full", lse=True),
    small("softcap-everything", **(EVERYTHING | dict(softcap=2.0))),
    small("softcap-few", B=2, M=3, N=150, softcap=3.0, bias="n"),
]
CASES += [dataclasses.replace(small("half", M=9), dtype=x) for x in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, device):
    if device.type == "cuda":
        pytest.skip("on a GPU the grid runs in tests/contract/test_grid.py")
    testing.check(case, "triton")


@pytest.mark.parametrize("D", [1, 5])
def test_infinite_bandwidths(D):
    """A dim with one adds nothing to a score, even where a head has no other."""
    q, k, v = (torch.randn(1, 2, n, size) for n, size in ((20, D), (70, D), (70, 6)))
    h = torch.full((2, 1, D), math.inf)
    h[1, :, 0] = 0.7
    found = fastattn.attention(q, k, v, score="gaussian", bandwidth=h, backend="triton")
    between = (q[..., None, :] - k[..., None, :, :]) / h[..., None, :]
    expected = (between.square().sum(-1) / -2).softmax(-1) @ v
    torch.testing.assert_close(found, expected)
