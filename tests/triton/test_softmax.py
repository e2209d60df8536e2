"""The online softmax and its inverse."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.tile import softmax

ROWS, COLS, STEP = 16, 64, 16
INF, NAN = math.inf, math.nan


@triton.jit
def softmax_kernel(
    s_ptr, p_ptr, lse_ptr, stats_ptr, scale, natural,
    R: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Two passes: online statistics, then weights computed from them."""
    head = tl.program_id(0)
    r = tl.arange(0, R)
    m_i = tl.full((R,), float("-inf"), tl.float32)
    l_i = tl.zeros((R,), tl.float32)
    for start in tl.range(0, C, STEP):
        s = tl.load(s_ptr + r[:, None] * C + start + tl.arange(0, STEP)[None, :])
        p, alpha, m_i, l_i = softmax.softmax_step(s, m_i, l_i, scale)
    shift, factor, lse = softmax.softmax_finish(m_i, l_i, None, natural)
    tl.store(lse_ptr + r, lse)
    softmax.store_stats(stats_ptr, head, head, 1, r, R, shift, factor)
    shift, factor = softmax.load_stats(stats_ptr, head, head, 1, r[:, None], R)
    if FOLDED:
        factor = softmax.fold_factor(factor)
    offs = r[:, None] * C + tl.arange(0, C)[None, :]
    s = tl.load(s_ptr + offs)
    tl.store(p_ptr + offs, softmax.weights_of(s, shift, factor, scale, FOLDED))


@pytest.fixture(params=[False, True], ids=["stats", "folded"])
def run(request, device):
    """s, scale -> (weights, lse, stats)."""

    def call(s, scale):
        s = s.to(device)
        p, lse, stats = (torch.empty(x, device=device) for x in (s.shape, ROWS, (ROWS, 2)))
        softmax_kernel[(1,)](
            s, p, lse, stats, scale * math.log2(math.e), scale,
            R=ROWS, C=COLS, STEP=STEP, FOLDED=request.param,
        )  # fmt: skip
        return p.cpu(), lse.cpu(), stats.cpu()

    return call


def scores(magnitude=1.0):
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * magnitude


def test_softmax(run):
    s = scores()
    p, lse, _ = run(s, 0.7)
    torch.testing.assert_close(p, torch.softmax(s * 0.7, -1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lse, torch.logsumexp(s * 0.7, -1), rtol=1e-6, atol=1e-6)


def test_rows_without_keys_and_late_first_keys(run):
    s = scores()
    s[0] = -INF
    s[1, :50] = -INF  # no keys in the first three steps
    p, lse, stats = run(s, 1.0)
    assert lse[0] == -INF
    assert stats[0].tolist() == [0.0, 0.0]
    assert (p[0] == 0).all()
    torch.testing.assert_close(p[1:], torch.softmax(s[1:], -1), rtol=1e-5, atol=1e-7)


def test_large_scores_stay_finite(run):
    p, lse, _ = run(scores(1e5), 1.0)
    assert p.isfinite().all()
    assert lse.isfinite().all()


def test_nan_makes_its_own_row_nan(run):
    s = scores()
    s[3, 40] = NAN
    p, lse, _ = run(s, 1.0)
    assert lse[3].isnan()
    assert p[3].isnan().all()
    assert p[:3].isfinite().all()
    assert p[4:].isfinite().all()
