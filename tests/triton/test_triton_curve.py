"""The ratio of a softcap and its slope, digit by digit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.tile import curve

EPS = 2.0**-23


@triton.jit
def tanh_kernel(x_ptr, ratio_ptr, slope_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ratio, slope = curve.tanh_and_slope(tl.load(x_ptr + at))
    tl.store(ratio_ptr + at, ratio)
    tl.store(slope_ptr + at, slope)


def tanh_and_slope(x):
    ratio, slope = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(x.numel() // 128,)](x, ratio, slope, SIZE=128)
    return ratio.cpu().double(), slope.cpu().double()


@pytest.fixture
def x(device):
    sizes = torch.cat([torch.logspace(-20, 0, 256), torch.linspace(0.5, 42.9, 768)])
    return torch.cat([sizes, -sizes]).to(device)


def test_ratios_have_all_digits(x):
    want = torch.tanh(x.cpu().double())
    ratio, _ = tanh_and_slope(x)
    assert ((ratio - want).abs() <= 4 * EPS * want.abs()).all()


def test_slopes_have_digits_where_the_ratio_is_1(x):
    """The exponent's own rounding is 2^-25 of it: a slope e^-2|x| is off by as many times |x|."""
    size = x.cpu().double().abs()
    want = 4 / (torch.exp(size) + torch.exp(-size)) ** 2
    _, slope = tanh_and_slope(x)
    assert ((slope - want).abs() <= (4 + size) * EPS * want).all()


def test_the_ends(device):
    ends = [0.0, -0.0, 43.0, -1e30, math.inf, -math.inf, math.nan, 1e-45]
    ratio, slope = tanh_and_slope(torch.tensor(ends * 16, device=device))
    assert ratio[:6].tolist() == [0.0, 0.0, 1.0, -1.0, 1.0, -1.0]
    assert ratio[6].isnan()
    assert slope[:6].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
