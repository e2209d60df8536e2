"""Tiles of strided arrays: bounds, 64-bit offsets, order of programs, products that handle NaN."""

import math

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.loop import gaussian
from fastattn.kernels.tile import strided

INF, NAN = math.inf, math.nan


@triton.jit
def copy_kernel(x, out, n_rows, n_cols, R: tl.constexpr, C: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, R), tl.arange(0, C)
    tile = strided.load_tile(strided.head_ptr(x, b, h), x, r, c, n_rows, n_cols, True, True)
    strided.store_tile(strided.head_ptr(out, b, h), out, r, c, n_rows, n_cols, tile.to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_strides(dtype, device):
    storage = torch.full((2, 40, 3, 33), NAN, dtype=dtype, device=device)
    x = storage[:, ::2, :, 1::2].permute(0, 2, 1, 3)  # [2, 3, 20, 16]
    x.copy_(torch.randn(x.shape))
    out = torch.full((2, 3, 16, 20), 7.0, dtype=dtype, device=device).mT
    copy_kernel[(2, 3)](strided.view(x), strided.view(out), 17, 13, R=32, C=16)
    assert torch.equal(out[:, :, :17, :13], x[:, :, :17, :13])
    assert (out[:, :, 17:] == 7).all()  # nothing outside is written
    assert (out[:, :, :, 13:] == 7).all()


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_offsets_beyond_32_bits(dim, device):
    """Strides that exceed 2^31 elements at the second step of a dim, or a stride of 2^31 itself."""
    far = 2**31 + 24
    try:
        storage = torch.empty(far + 16, dtype=torch.float16, device=device)  # pages stay untouched
    except RuntimeError:
        pytest.skip("needs 4.3 GB of address space")
    shape, strides = [1, 1, 1, 1], [0, 0, 0, 0]
    shape[dim], strides[dim] = 2, far
    x = storage.as_strided(shape, strides)
    x.view(-1)[:1].fill_(1.0) if x.is_contiguous() else storage[:1].fill_(1.0)
    storage[far] = 2.0
    out = torch.zeros(shape, dtype=torch.float16, device=device)
    copy_kernel[tuple(shape[:2])](strided.view(x), strided.view(out), *shape[2:], R=16, C=16)
    assert out.flatten().tolist() == [1.0, 2.0]


@triton.jit
def offsets_kernel(out_ptr, x, b, h, H, M):
    zero = tl.zeros((), tl.int32)
    i, j = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    pairs = strided.pair_ptrs(x, b + zero, h + zero, i, j)
    tl.store(out_ptr + i * 4 + j, pairs.to(tl.int64) - x.ptr.to(tl.int64))
    tl.store(out_ptr + 16 + i, strided.row_numbers(b + zero, h + zero, H, i, M))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_products_beyond_32_bits(dim, device):
    """A stride within 32 bits, whose product with an index is not. No memory is touched."""
    strides = [8, 8, 8, 8]
    strides[dim] = 2**31 - 8
    x = torch.zeros((), dtype=torch.int8, device=device)
    out = torch.empty(20, dtype=torch.int64, device=device)
    b, h, H, M = 3, 5, 7, 2**28
    offsets_kernel[(1,)](out, strided.View(x, *strides), b, h, H, M)
    start = b * strides[0] + h * strides[1]
    want = [start + i * strides[2] + j * strides[3] for i in range(4) for j in range(4)]
    assert out.tolist() == [*want, *((b * H + h) * M + i for i in range(4))]


@triton.jit
def sums_kernel(out_ptr, head, padded, D):
    i = tl.arange(0, 2)
    at = gaussian.side_offsets(head + tl.zeros((), tl.int32), i, i, padded, D)
    tl.store(out_ptr + i[:, None] * 2 + i[None, :], at)


def test_sums_beyond_32_bits(device):
    """The workspaces of other scores than the dot product, [heads, dims, tokens]."""
    out = torch.empty(4, dtype=torch.int64, device=device)
    head, padded, D = 4000, 2**16, 33
    sums_kernel[(1,)](out, head, padded, D)
    assert out.tolist() == [(head * 34 + d) * padded + i for i in range(2) for d in range(2)]


@triton.jit
def place_kernel(out_ptr, n_blocks, H, REVERSE: tl.constexpr):
    block, b, h = strided.place(n_blocks, H, REVERSE)
    to = out_ptr + tl.program_id(0) * 3
    tl.store(to, block)
    tl.store(to + 1, b)
    tl.store(to + 2, h)


@pytest.mark.parametrize("reverse", [False, True])
def test_every_program_has_its_own_place(reverse, device):
    n_blocks, B, H = 3, 2, 4
    out = torch.empty(n_blocks * B * H, 3, dtype=torch.int32, device=device)
    place_kernel[(n_blocks * B * H,)](out, n_blocks, H, REVERSE=reverse)
    places = [tuple(x) for x in out.tolist()]
    assert len(set(places)) == n_blocks * B * H
    assert places[0] == ((n_blocks - 1 if reverse else 0), 0, 0)
    assert {p[0] for p in places[:n_blocks]} == set(range(n_blocks))  # one head's are neighbours


@triton.jit
def exact_kernel(a_ptr, used_ptr, x, out_ptr, flag_ptr, n_cols, R: tl.constexpr, C: tl.constexpr):
    r, s, c = tl.arange(0, R), tl.arange(0, 16), tl.arange(0, C)
    a = tl.load(a_ptr + r[:, None] * 16 + s[None, :])
    used = tl.load(used_ptr + r[:, None] * 16 + s[None, :]) != 0
    ptr = strided.head_ptr(x, tl.program_id(0), tl.program_id(0))
    acc = tl.zeros((R, C), tl.float32)
    acc = strided.exact_dot(a, used, ptr, x, s, 12, c, n_cols, acc, 16)
    tl.store(out_ptr + r[:, None] * C + c[None, :], acc)
    tl.store(flag_ptr, strided.any_not_finite(acc, r, R, False).to(tl.int32))
    tl.store(flag_ptr + 1, strided.any_not_finite(acc, r, 3, True).to(tl.int32))


@pytest.mark.parametrize("garbage", [0.0, NAN, INF, -INF])
def test_exact_dot_uses_what_is_used(garbage, device):
    rng = torch.Generator().manual_seed(0)
    a = torch.rand(16, 16, generator=rng)
    x = torch.randn(16, 16, generator=rng)
    used = torch.rand(16, 16, generator=rng) < 0.5
    used[:, 12:] = False  # past the last row of x
    used[:3, 5], used[3, 5] = False, True
    a[~used] = 0.0
    x[5, 2] = garbage
    want = torch.zeros(16, 16)
    for r, s in used.nonzero().tolist():
        want[r] += a[r, s] * x[s]
    out, flags = (
        torch.empty(16, 16, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
    )
    exact_kernel[(1,)](
        a.to(device), used.to(device).view(torch.uint8), strided.view(x[None, None].to(device)),
        out, flags, 16, R=16, C=16,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), want, equal_nan=True)
    assert flags.tolist() == [int(garbage != 0), 0]


@triton.jit
def machine_kernel(x_ptr, out_ptr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + i * 16 + j)
    product = tl.dot(x, (i == j).to(tl.float32), input_precision=PRECISION)
    nan = tl.where(j < 16, float("nan"), x)
    tl.store(out_ptr + i * 16 + j, product)
    tl.store(out_ptr + (i + 16) * 16 + j, tl.minimum(nan, x))
    tl.store(out_ptr + (i + 32) * 16 + j, tl.maximum(x, nan))


@pytest.mark.parametrize(("precision", "bits"), [("ieee", 23), ("tf32", 10)])
def test_the_interpreter_is_like_the_machine(precision, bits, device):
    """Digits of products; of NaN and a number, the smaller and the larger one are the number."""
    x = 1 + torch.arange(256, device=device).view(16, 16) * 2.0**-13
    out = torch.empty(3, 16, 16, device=device)
    machine_kernel[(1,)](x, out, PRECISION=precision)
    assert (out[0] - x).abs().max() <= (0 if bits == 23 else 2.0**-bits)
    assert out[0].equal((out[0] * 2**bits).round() * 2.0**-bits)
    assert out[1].equal(x)
    assert out[2].equal(x)
