"""The eager backend by blocks of rows: the same results, and no matrix of a whole problem."""

import pytest
import torch

from fastattn import Mask, additive_attention, blocks, testing
from fastattn import scaled_dot_product_attention as sdpa
from fastattn.backends import eager
from fastattn.problem import Problem, reference
from fastattn.testing import GRID

SMALL = [c for c in GRID if 0 < c.B * c.H * c.M * c.N <= 20_000 and 1 < c.B * c.H * c.M <= 300]


@pytest.fixture
def largest(monkeypatch):
    """Sets how many numbers a block may have, and of which rows."""

    def choose(numbers: int, rows: int = 7) -> None:
        per_thread = max(1, numbers // torch.get_num_threads())
        monkeypatch.setattr(eager, "_NUMBERS_OF_THREAD", per_thread)
        monkeypatch.setattr(blocks, "_ROWS", rows)

    return choose


@pytest.mark.parametrize("case", SMALL[::2], ids=str)
def test_case(case, largest):
    """Alternately one row of one head at a time, some rows, and several heads or samples."""
    numbers = (1, 200, 2000)[case.seed % 3]
    largest(numbers * (1 if case.score == "dot" else case.D))
    testing.check(case, "eager")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_blocks_are_wide(largest, dtype):
    """One row is a block: 2000 numbers add up to each gradient but that of the queries."""
    shapes = (1, 2000, 4), (1, 3, 4), (1, 3, 4), (4,), (1,)
    given, upstream = [torch.randn(s).to(dtype) for s in shapes], torch.randn(1, 2000, 4).to(dtype)

    def gradients(as_dtype):
        *tensors, sink = (x.to(as_dtype).requires_grad_() for x in given)
        out = additive_attention(*tensors, sink=sink, backend="eager")
        return torch.autograd.grad(out, (*tensors, sink), upstream.to(as_dtype))

    whole, exact = gradients(dtype), gradients(torch.float64)
    largest(1)
    for found in zip(gradients(dtype), whole, exact, strict=True):
        testing.assert_within_budget(*found)


def problem(**sizes) -> Problem:
    mask = sizes.pop("mask", Mask())
    sizes = dict(B=2, H=4, Hkv=2, M=50, N=40, D=8, E=8) | sizes
    return Problem("dot", dtype=torch.float64, device=torch.device("cpu"), mask=mask, **sizes)


LIMITS = torch.tensor([[17], [31]], dtype=torch.int32)
MASKS = {
    "none": Mask(),
    "causal": Mask(causal="bottom_right"),
    "window": Mask(window=(3, 5)),
    "length": Mask(kv_len=LIMITS),
    "begin": Mask(kv_begin=LIMITS, causal="top_left"),
    "nothing": Mask(kv_len=LIMITS * 0),
}


@pytest.mark.parametrize("numbers", [1, 100, 500, 2000, 10_000])
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_have_every_kept_pair_once(mask, numbers, monkeypatch):
    monkeypatch.setattr(blocks, "_ROWS", 7)
    others = dict(Hkv=4), dict(Hkv=1, weights="mean"), dict(M=1), dict(N=1), dict(H=8, M=4)
    for sizes in ({}, *others):
        p = problem(mask=MASKS[mask], **sizes)
        visits = torch.zeros(p.B, p.H, p.M, p.N)
        for cut in blocks.by_rows(p, numbers):
            blocks.pairs_of(visits, cut).add_(1)
            B, H, M, N = cut.sizes
            together = p.H if p.weights == "mean" else 1
            assert B * H * M * N <= max(numbers, p.N * together)
            assert cut.j[0] % 4 == 0
            blocks.block_of(p, cut)  # heads that share keys are whole groups, or within one
        kept = p.kept()
        kept = torch.ones(()) if kept is None else kept.expand(visits.shape).float()
        assert visits.max() <= 1
        assert (visits >= kept).all()


def test_what_no_row_keeps_is_left_out(largest, monkeypatch):
    """Band, lengths and packed texts leave out most pairs, and no block is large."""
    largest(2**12, rows=32)
    blocks_seen = spied_blocks(monkeypatch)
    q = torch.randn(1, 1, 256, 8, dtype=torch.float64)
    begin = torch.arange(256, dtype=torch.int32) // 32 * 32
    for mask, share in (
        (Mask(), 1.0),
        (Mask(causal="top_left"), 0.6),
        (Mask(kv_len=torch.tensor([64])), 0.25),
        (Mask(kv_begin=begin[None], kv_len=begin[None] + 32), 0.125),
    ):
        blocks_seen.clear()
        sdpa(q, q, q, mask=mask)
        assert sum(blocks_seen) <= share * 256**2
        assert max(blocks_seen) <= 2**12 * 2


def spied_blocks(monkeypatch) -> list[int]:
    real, seen = reference.forward, []

    def spy(p, *args, **options):
        seen.append(p.B * p.H * p.M * p.N)
        return real(p, *args, **options)

    monkeypatch.setattr(reference, "forward", spy)
    return seen
