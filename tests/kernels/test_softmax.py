"""The online softmax and its inverse."""

import math

import torch
import triton
import triton.language as tl

from fastattn.kernels import softmax

ROWS, COLS, STEP = 16, 64, 16
INF, NAN = math.inf, math.nan


@triton.jit
def softmax_kernel(
    s_ptr, p_ptr, lse_ptr, scale, R: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr
):
    """Two passes: online statistics, then the weights from them."""
    r = tl.arange(0, R)
    m_i = tl.full((R,), float("-inf"), tl.float32)
    l_i = tl.zeros((R,), tl.float32)
    for start in tl.range(0, C, STEP):
        s = tl.load(s_ptr + r[:, None] * C + start + tl.arange(0, STEP)[None, :])
        p, alpha, m_i, l_i = softmax.softmax_step(s, m_i, l_i, scale)
    inv_l, lse = softmax.softmax_finish(m_i, l_i)
    tl.store(lse_ptr + r, lse)
    shift = softmax.load_lse_log2(lse_ptr, tl.program_id(0), tl.program_id(0), 1, r, R)
    offs = r[:, None] * C + tl.arange(0, C)[None, :]
    s = tl.load(s_ptr + offs)
    tl.store(p_ptr + offs, softmax.weights_of(s, shift[:, None], 1.0, scale, False))


def run(s, scale, device):
    s = s.to(device)
    p, lse = torch.empty_like(s), torch.empty(ROWS, device=device)
    softmax_kernel[(1,)](s, p, lse, scale * math.log2(math.e), R=ROWS, C=COLS, STEP=STEP)
    return p.cpu(), lse.cpu()


def scores(magnitude=1.0):
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * magnitude


def test_softmax(device):
    s = scores()
    p, lse = run(s, 0.7, device)
    torch.testing.assert_close(p, torch.softmax(s * 0.7, -1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lse, torch.logsumexp(s * 0.7, -1), rtol=1e-6, atol=1e-6)


def test_rows_without_keys_and_late_first_keys(device):
    s = scores()
    s[0] = -INF
    s[1, :50] = -INF  # nothing in the first three steps
    p, lse = run(s, 1.0, device)
    assert lse[0] == -INF
    assert (p[0] == 0).all()
    torch.testing.assert_close(p[1:], torch.softmax(s[1:], -1), rtol=1e-5, atol=1e-7)


def test_large_scores_stay_finite(device):
    p, lse = run(scores(1e5), 1.0, device)
    assert p.isfinite().all()
    assert lse.isfinite().all()


def test_nan_makes_its_own_row_nan(device):
    s = scores()
    s[3, 40] = NAN
    p, lse = run(s, 1.0, device)
    assert lse[3].isnan()
    assert p[3].isnan().all()
    assert p[:3].isfinite().all()
    assert p[4:].isfinite().all()
