"""Reads end where a tensor does: behind each one lies a page that nobody may read."""

import ctypes
import mmap

import pytest
import torch
from helpers import SCORES
from properties.strides import TENSORS, relayout

from fastattn import scaled_dot_product_attention as sdpa
from fastattn import testing
from fastattn.testing import Case

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def ending(x):
    """A copy with the same strides, whose last element is the last one that can be read."""
    if x is None or x.numel() == 0:
        return x
    count = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    size = -(-count * x.element_size() // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    last = ctypes.addressof(ctypes.c_char.from_buffer(memory, size))
    if _libc.mprotect(ctypes.c_void_p(last), ctypes.c_size_t(PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(
        memory, dtype=x.dtype, count=count, offset=size - count * x.element_size()
    )
    flat.copy_(x.as_strided((count,), (1,)))
    return flat.as_strided(x.shape, x.stride())


END = relayout(**dict.fromkeys((*TENSORS, "kv_len"), ending))
MASKS = {
    "dense": dict(keep="bhmn"),
    "few": dict(keep="bmn", keep_rate=0.05, empty_rows=True),
    "float": dict(bias="bmn", bias_inf=True),
    "keys": dict(keep="n", kv_len="batch", causal="bottom_right"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 48), (20, 80), (33, 176), (1, 300)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_nothing_is_read_past_the_end(isa, score, mask, sizes, dtype):
    M, N = sizes
    testing.check(
        Case("ends", score, B=2, M=M, N=N, D=20, E=9, dtype=dtype, lse=True, **MASKS[mask]),
        "cpu", END,
    )  # fmt: skip


@pytest.mark.parametrize("E", [8, 24, 64])
def test_values_in_place_end_with_their_rows(isa, E):
    testing.check(Case("ends", B=1, M=33, N=96, D=20, E=E), "cpu", END)


@pytest.mark.parametrize("N", [48, 80, 176])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_maximum_is_searched_among_the_keys(isa, dtype, N):
    """The last tile has an odd number of vectors, and its mask lies in a larger one."""
    wide = torch.ones(64, N + 16, dtype=torch.bool)
    wide[:, : N - 16] = False
    keep = wide[:, :N]
    call = draw(64, N, dtype)
    doubles = [x.double() for x in call]
    plain, truth = (sdpa(*x, attn_mask=keep, backend="eager") for x in (call, doubles))
    q, k, v = draw(64, 128, dtype)
    for sign in (300, -300):  # whose scores are left in memory
        sdpa(sign * q, k, v, is_causal=True, backend="cpu")
        for mask in (keep, torch.zeros(64, N).masked_fill(~keep, -torch.inf)):
            found = sdpa(*call, attn_mask=mask, backend="cpu")
            testing.assert_within_budget(found, plain, truth)


def draw(M, N, dtype):
    return [torch.randn(1, 2, n, 32).to(dtype) for n in (M, N, N)]
