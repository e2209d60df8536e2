"""fastattn.integrations.flash_attn: larger caches, huge windows, caches that cannot be written."""

import sys

import pytest
import torch

from fastattn.integrations import flash_attn

B, H, HKV, D = 2, 4, 2, 8


def draw(M, N):
    rng = torch.Generator().manual_seed(0)
    shapes = (B, M, H, D), (B, N, HKV, D), (B, N, HKV, D)
    return [torch.randn(shape, generator=rng) for shape in shapes]


@pytest.mark.parametrize("new", [False, True])
def test_samples_have_the_first_rows_of_a_larger_cache(new):
    q, k, v = draw(1, 1)
    _, k_cache, v_cache = (torch.cat([x, x + 1]) for x in draw(1, 6))
    more = (k, v) if new else ()
    parts = k_cache[:B].clone(), v_cache[:B].clone()
    expected = flash_attn.flash_attn_with_kvcache(q, *parts, *more, cache_seqlens=3)
    got = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *more, cache_seqlens=3)
    assert torch.equal(got, expected)
    assert torch.equal(k_cache[:B], parts[0])


@pytest.mark.parametrize("M", [3, 6])
def test_a_window_as_large_as_integers_is_none(M):
    q, k, v = draw(M, 6)
    for window in ((sys.maxsize, sys.maxsize), (2**70, -1)):
        got = flash_attn.flash_attn_func(q, k, v, window_size=window)
        assert torch.equal(got, flash_attn.flash_attn_func(q, k, v))
        got = flash_attn.flash_attn_with_kvcache(q, k, v, window_size=window)
        assert torch.equal(got, flash_attn.flash_attn_with_kvcache(q, k, v))


def test_a_cache_of_inference_mode_is_not_half_written():
    _, k, v = draw(1, 1)
    cache = torch.zeros(B, 4, HKV, D)
    with torch.inference_mode():
        other = cache.clone()
    with pytest.raises(ValueError, match=r"v_cache: .* torch.inference_mode\(\)"):
        flash_attn.flash_attn_with_kvcache(draw(1, 1)[0], cache, other, k, v, cache_seqlens=1)
    assert not cache.any()
