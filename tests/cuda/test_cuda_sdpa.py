"""Scaled dot-product attention in CUDA C++, run on the CPU, against the float64 reference.

A separate process runs the corner cases under AddressSanitizer and UndefinedBehaviorSanitizer, with
every tensor and the workspace as an allocation of its exact size.
"""

import ctypes
import dataclasses

import host_build
import pytest
import shim_backend
import torch
from properties import large_logits, sinks
from properties.extremes import (  # noqa: F401, of both scores
    test_a_scale_below_the_numbers_of_float32,
    test_a_scale_far_above_the_softcap,
    test_keys_without_query_heads_have_gradients_of_0,
)

from fastattn import Mask, scaled_dot_product_attention, testing
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

HALF = (torch.float16, torch.bfloat16)
LARGEST = 120_000  # pairs: the shim takes a microsecond for each


def _cases() -> list[Case]:
    """The small enough cases of the grid, alternately in both half types."""
    chosen = [c for c in GRID if c.score == "dot" and max(c.D, c.E) <= 128]
    chosen = [c for c in chosen if c.B * c.H * c.M * c.N <= LARGEST and c.dtype == torch.float32]
    chosen.append(Case("full-tiles", M=128, N=192, D=128, E=64, causal="bottom_right"))
    # fp16 ends at 65504, and so do the logits of plain PyTorch, the peer.
    return [
        dataclasses.replace(c, dtype=HALF[n % 2 if c.magnitude**2 < 65504 else 1])
        for n, c in enumerate(chosen)
    ]


@pytest.fixture
def backend(monkeypatch):
    return shim_backend.install(monkeypatch)


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_case(case, backend):
    testing.check(case, backend)


# Small cases of both tile widths for every kernel: sizes that end inside tiles and inside chunks of
# 16 bytes, strides, all masks.
CORNERS = [
    Case("narrow", B=1, Hkv=1, M=67, N=70, D=33, E=5, causal="bottom_right", bias="hmn", lse=True,
         weights="full", scale=-0.7),
    Case("wide", B=2, H=1, Hkv=1, M=66, N=65, D=72, E=128, kv_len="rows", kv_begin="rows",
         keep="mn", dropout_p=0.3, weights="mean", layout="sliced", garbage=float("nan")),
    Case("few-narrow", B=1, M=5, N=300, D=64, E=9, keep="bhmn", bias="n", layout="bmhd"),
    Case("few-wide", B=1, H=1, Hkv=1, M=16, N=70, D=128, E=65, bias="mn", bias_inf=True,
         empty_rows=True, dropout_p=0.3, weights="full"),
    Case("capped", B=2, Hkv=1, M=67, N=130, D=33, E=70, softcap=1.5, kv_len="rows", keep="mn",
         bias="hmn", dropout_p=0.3, weights="full", lse=True, garbage=float("nan"), scale=-0.7),
    Case("capped-line", B=1, H=4, Hkv=2, M=66, N=70, D=128, E=5, softcap=4.0, magnitude=3.0,
         causal="bottom_right", bias="relative", weights="mean", layout="sliced"),
    Case("capped-few", B=1, M=5, N=300, D=64, E=9, softcap=0.5, keep="bhmn", bias="n"),
    # A tile with garbage before full tiles.
    Case("full", B=2, H=1, Hkv=1, M=64, N=192, D=8, E=4, kv_begin="batch", garbage=float("nan")),
    # No mask's barrier orders these tiles.
    Case("full-weights", B=1, H=2, Hkv=1, M=64, N=128, D=64, E=4, weights="mean"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CORNERS, ids=lambda case: case.name)
def test_corner(case, dtype, backend):
    testing.check(dataclasses.replace(case, dtype=dtype), backend)


@pytest.mark.skipif(shim_backend.KIND == "sanitized", reason="this is that process")
def test_under_sanitizers():
    host_build.assert_clean(__file__, "test_corner")


# ---- a bias that many share: slices of them have blocks of their own ----


@pytest.mark.parametrize("letters", ["", "h", "mn", "relative", "alibi"])
def test_the_gradient_of_a_shared_bias_fills_a_gpu(letters, backend):
    """Two blocks for each of 132 multiprocessors, and one sum behind them."""
    case = Case(f"shared-{letters}", B=140, H=2, Hkv=2, M=20, N=18, D=4, E=4, bias=letters)
    testing.check(dataclasses.replace(case, dtype=torch.float16), backend)
    if not shim_backend.ON_GPU:
        library = ctypes.CDLL(str(shim_backend.library()))
        assert library.shim_blocks(0) < library.shim_blocks(1)
        assert library.shim_blocks(1) >= 264


@pytest.mark.parametrize("letters", ["bhmn", "m", "bn", "", "relative", "alibi-b"])
def test_bias_gradients_of_many_tiles(letters, backend):
    """Slices end within rows of tiles, and some diagonals have fewer tiles than slices."""
    case = Case(f"slices-{letters}", B=3, H=2, Hkv=1, M=130, N=200, D=8, E=8, bias=letters)
    testing.check(dataclasses.replace(case, causal="top_left", dtype=torch.float16), backend)


# ---- few queries: keys are split over blocks and warps ----


@pytest.mark.parametrize("M", [1, 16, 17])  # the last of few queries, the first of a tile
@pytest.mark.parametrize("N", [1, 64, 257, 1025])
def test_ends_of_chunks(M, N, backend):
    case = Case(f"M{M}-N{N}", B=1, H=2, Hkv=1, M=M, N=N, D=16, E=24, dtype=torch.float16, lse=True)
    testing.check(case, backend)


def test_more_chunks_than_one_of_four_tiles_each(backend):
    case = Case("long", B=1, H=1, Hkv=1, M=1, N=8_300, D=8, E=8, dtype=torch.bfloat16, lse=True)
    testing.check(case, backend)


def test_few_queries_are_the_same_alone(backend):
    q, k, v = (torch.randn(3, 2, n, 16).half() for n in (2, 600, 600))
    out = scaled_dot_product_attention(q, k, v, backend=backend)
    alone = scaled_dot_product_attention(q[1:2, :1], k[1:2, :1], v[1:2, :1], backend=backend)
    assert alone.equal(out[1:2, :1])


# ---- strides ----


@pytest.mark.parametrize("M", [5, 70])
def test_every_other_column(M, backend):
    """Rows begin at multiples of 16 bytes, but their numbers lie apart."""
    apart = [torch.randn(1, 2, n, 32).half()[..., ::2] for n in (M, 90, 90, M)]

    def results(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = scaled_dot_product_attention(*leaves, backend=backend)
        return dict(enumerate([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]))

    testing.assert_same_bits(results(*apart), results(*(x.contiguous() for x in apart)))


# ---- large logits ----


# Few queries; rows and keys of full tiles; a bias, which is only added in tiles that are not full.
@pytest.mark.parametrize(("M", "N", "biased"), [(5, 128, False), (64, 64, False), (64, 128, True)])
@pytest.mark.parametrize("logit", large_logits.LOGITS)
@pytest.mark.parametrize("dtype", HALF)
def test_large_logits(dtype, logit, M, N, biased, backend):
    bias = torch.linspace(-1, 1, N).to(dtype) if biased else None
    large_logits.check(logit, dtype, M, N, backend, bias=bias)


# ---- garbage ----


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


@pytest.mark.parametrize("column", [5, 62])  # two lanes look for it, each in half of a row
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_garbage_reaches_the_rows_that_keep_it(backend, special, column):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (40, 80, 80))
    keep = torch.rand(40, 80) < 0.5
    clean = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    v[0, 0, 77, column] = special
    found = scaled_dot_product_attention(q, k, v, mask=Mask(keep=keep), backend=backend)
    keeps_it, others = keep[:, 77], torch.arange(64) != column
    assert 0 < keeps_it.sum() < 40
    assert not found[0, 0, keeps_it, column].isfinite().any()
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


@pytest.mark.parametrize("M", [1, 40])
def test_sinks(M, backend):
    sinks.test_sinks_far_above_and_below_every_score("dot", M, torch.float16, backend)
    sinks.test_sinks_of_samples_and_of_any_strides("dot", M, backend)
    sinks.test_without_keys_the_log_sum_exp_is_the_sink("dot", M, backend)
    sinks.test_a_row_without_keys_has_no_gradient_but_of_its_log_sum_exp("dot", M, backend)
