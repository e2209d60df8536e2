"""Dense masks of the path of warpgroups: csrc/cuda/dot/dense_tiles.cuh finds tiles to leave out."""

import host_build
import pytest
import shim_backend
import torch

from fastattn import Mask, scaled_dot_product_attention, testing

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")


@pytest.fixture
def backend(by_warpgroups):
    return by_warpgroups


KEPT = [(0, 400), (0, 37), (150, 330), (256, 384), (399, 400), (20, 20)]  # of each sample


def taken(simulator, leaves, mask, backend):
    """The output, its gradients where leaves want them, and how many products they took."""
    before = simulator.products()
    out = scaled_dot_product_attention(*leaves, mask=mask, backend=backend, enable_gqa=True)
    found = [out.detach()]
    if leaves[0].requires_grad:
        found += torch.autograd.grad(out, leaves, torch.ones_like(out))
    return found, before if before is None else simulator.products() - before


def leaves_of(*shapes, grad=True):
    torch.manual_seed(5)
    return [torch.randn(shape).half().requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("M", [1, 140])
def test_it_takes_the_tiles_of_limits(M, causal, backend, simulator):
    """The same tiles in the same order, hence the same bits and, without a diagonal, products."""
    begin, end = torch.tensor(KEPT).T
    keys = torch.arange(400)
    keep = ((keys >= begin[:, None]) & (keys < end[:, None]))[:, None, None]
    keep = keep.expand(-1, 1, M, -1).contiguous()
    leaves = leaves_of(*((len(KEPT), 2, n, 64) for n in (140, 400, 400)))
    found, products = taken(simulator, leaves, Mask(causal, keep=keep), backend)
    limits = Mask(causal, kv_begin=begin, kv_len=end)
    others, of_limits = taken(simulator, leaves, limits, backend)
    testing.assert_same_bits(dict(enumerate(found)), dict(enumerate(others)))
    assert causal or products == of_limits


def blocks_of(size: int, *shape: int) -> torch.Tensor:
    """About a third of these blocks is kept. The first rows of several keep nothing."""
    kept = torch.rand(*shape[:-2], *(-(-n // size) for n in shape[-2:])) < 0.35
    kept[..., 0, :] &= kept.shape[-2] == 1
    wide = kept.repeat_interleave(size, -2).repeat_interleave(size, -1)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products")
@pytest.mark.parametrize(
    ("D", "rows", "cols", "M", "N"),
    [(64, 192, 128, 500, 900), (128, 128, 128, 500, 900), (256, 128, 80, 500, 900),
     (64, 192, 128, 30, 4300)],
)  # fmt: skip
def test_tiles_of_which_nothing_is_kept_are_not_computed(D, rows, cols, M, N, backend, simulator):
    leaves = leaves_of(*((1, 2, n, D) for n in (M, N, N)), grad=False)
    keep = blocks_of(64, 1, 2, M, N)
    _, products = taken(simulator, leaves, Mask(keep=keep), backend)
    visited = total = 0
    for i in range(0, M, rows):
        for j in range(0, N, cols):
            # What is kept of tiles of 64 that it meets.
            near = keep[..., i : i + rows, j // 64 * 64 : -(-(j + cols) // 64) * 64]
            visited += int(near.any(-1).any(-1).sum())
            total += 2
    _, of_all = taken(simulator, leaves, Mask(), backend)
    assert 0 < visited < total
    assert products * total == of_all * visited


@pytest.mark.parametrize("keep_run", [False, True], ids=["pairs", "run"])
@pytest.mark.parametrize(("M", "N"), [(40, 2500), (1600, 40)])
def test_a_warp_finds_several_tiles(M, N, keep_run, backend):
    """Lists of more tiles than a block has warps: masked ones, or whole ones between them."""
    sizes = dict(B=1, H=2, Hkv=1, M=M, N=N, D=64, E=64, dtype=torch.float16)
    testing.check(testing.Case("several", keep="mn", keep_run=keep_run, **sizes), backend)


def test_a_warp_finds_tiles_in_a_long_list(backend):
    """More than 32 of a warp, of which few are left."""
    sizes = dict(B=1, H=1, Hkv=1, M=20, N=70_000, D=64, E=64, dtype=torch.float16)
    testing.check(testing.Case("long", keep="n", keep_rate=1e-4, **sizes), backend)


def test_heads_that_share_keys_have_masks_of_their_own(backend):
    """Which tiles keep nothing differs by head."""
    sizes = dict(B=1, H=4, Hkv=1, M=200, N=300, D=64, E=64, dtype=torch.float16)
    testing.check(testing.Case("sparse", keep="hmn", keep_rate=1e-4, **sizes), backend)


STRIDES = {
    "of samples": lambda: blocks_of(64, 2, 1, 140, 300),
    "of heads": lambda: blocks_of(16, 1, 4, 140, 300),
    "of queries": lambda: (torch.rand(2, 1, 140, 1) < 0.7).expand(-1, -1, -1, 300),
    "of keys and heads": lambda: torch.rand(1, 4, 1, 300) < 0.7,
    "transposed": lambda: blocks_of(40, 2, 4, 300, 140).mT,
    "from an odd address": lambda: blocks_of(64, 2, 1, 140, 303)[..., 3:],
    "every other key": lambda: blocks_of(64, 2, 1, 140, 600)[..., ::2],
    "aligned": lambda: blocks_of(64, 2, 4, 140, 304)[..., :300],
    "of bytes": lambda: torch.randint(0, 3, (2, 4, 140, 300), dtype=torch.uint8).bool(),
    "nothing": lambda: torch.zeros(2, 1, 140, 300, dtype=torch.bool),
}


@pytest.mark.parametrize("D", [64, 72, 200])
@pytest.mark.parametrize("keep", STRIDES.values(), ids=STRIDES)
def test_any_strides(keep, D, backend, simulator):
    """The same bits as of a mask that holds every pair, one after the other. Heads share keys."""
    keep = keep()
    shapes = (2, 4, 140, D), (2, 2, 300, D), (2, 2, 300, D)
    leaves = leaves_of(*shapes, grad=D <= 128)
    whole = keep.expand(2, 4, 140, 300).contiguous()
    mask, wide = Mask(keep=keep, window=(260, 100)), Mask(keep=whole, window=(260, 100))
    found, products = taken(simulator, leaves, mask, backend)
    others, of_whole = taken(simulator, leaves, wide, backend)
    testing.assert_same_bits(dict(enumerate(found)), dict(enumerate(others)))
    assert products == of_whole
