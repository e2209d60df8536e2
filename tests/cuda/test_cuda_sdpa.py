"""Scaled dot-product attention in CUDA C++, run on the CPU, against the float64 reference."""

import dataclasses

import host_build
import pytest
import shim_backend
import torch

from fastattn import Mask, scaled_dot_product_attention, testing
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

HALF = (torch.float16, torch.bfloat16)
LARGEST = 120_000  # pairs: the shim takes a microsecond for each


def _cases() -> list[Case]:
    """Those of the grid that are small enough, in either half type in turn."""
    chosen = [c for c in GRID if c.score == "dot" and max(c.D, c.E) <= 128]
    chosen = [c for c in chosen if c.B * c.H * c.M * c.N <= LARGEST and c.dtype == torch.float32]
    chosen.append(Case("full-tiles", M=128, N=192, D=128, E=64, causal="bottom_right"))
    return [dataclasses.replace(c, dtype=HALF[n % 2]) for n, c in enumerate(chosen)]


@pytest.fixture
def backend(monkeypatch):
    return shim_backend.install(monkeypatch)


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_case(case, backend):
    testing.check(case, backend)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_behind_a_mask_reaches_nothing(backend, dtype, garbage):
    """Keys 3 and 70 are masked for some rows only: 0 * NaN in P V must not count."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32).to(dtype) for n in (70, 90, 90))
    keep = torch.rand(70, 90) < 0.7
    keep[:, [3, 70]] = False
    clean = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    k[:, :, [3, 70]] = v[:, :, [3, 70]] = garbage
    found = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    assert clean.isfinite().all()
    assert torch.equal(found, clean)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_garbage_reaches_the_rows_that_keep_it(backend, special):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16).half() for n in (40, 80, 80))
    keep = torch.rand(40, 80) < 0.5
    clean = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    v[0, 0, 77, 5] = special
    found = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    keeps_it, others = keep[:, 77], torch.arange(16) != 5
    assert 0 < keeps_it.sum() < 40
    assert not found[0, 0, keeps_it, 5].isfinite().any()
    assert found[0, 0][:, others].isfinite().all()
    assert torch.equal(found[0, 0, ~keeps_it], clean[0, 0, ~keeps_it])


def test_a_large_bias_in_a_whole_row(backend):
    q, k, v = (torch.randn(1, 1, 5, 16).half() for _ in range(3))
    bias = torch.zeros(5, 5)
    bias[2], bias[3] = -1e30, 3e38
    out, weights = scaled_dot_product_attention(
        q, k, v, bias=bias, return_weights="full", backend=backend
    )
    torch.testing.assert_close(
        weights[0, 0, 2:4].float(), torch.full((2, 5), 0.2), rtol=1e-3, atol=0
    )
    assert out.isfinite().all()
