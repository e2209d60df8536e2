"""Dropout bits are those of problem.Dropout, for both orientations of a tile, on every backend."""

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn.kernels.tile import dropout
from fastattn.problem import record, validate

B, H, M, N = 2, 3, 32, 64
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]


@triton.jit
def survives_kernel(
    out_ptr, drop, H, i0, j0, BM: tl.constexpr, BN: tl.constexpr, TRANSPOSED: tl.constexpr
):
    head = tl.program_id(0)
    kept = dropout.survives(drop, head // H, head % H, i0, j0, BM, BN, TRANSPOSED)
    rows: tl.constexpr = BN if TRANSPOSED else BM
    cols: tl.constexpr = BM if TRANSPOSED else BN
    offs = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
    tl.store(out_ptr + head * BM * BN + offs, kept.to(tl.int8))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_the_definition(seed, transposed, device):
    rule = record.Dropout(0.37, torch.tensor(seed))
    p = record.Problem("dot", B, H, H, M, N, 4, 4, torch.float32, torch.device("cpu"))
    want = (rule.bits(p) >= rule.threshold)[:, :, 16:, 48:]  # the tile at i0 = 16, j0 = 48
    drop = dropout.dropout_args(0.37, rule.seed.to(device))
    shape = (B, H, 16, 16)
    out = torch.empty(shape, dtype=torch.int8, device=device)
    survives_kernel[(B * H,)](out, drop, H, 16, 48, BM=16, BN=16, TRANSPOSED=transposed)
    found = out.cpu() != 0
    assert torch.equal(found.mT if transposed else found, want)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_block_counts_from_its_origin(transposed, device):
    rule = record.Dropout(0.37, torch.tensor(SEEDS[-1]))
    origin = record.Origin(3, 1, 17, 20)
    p = record.Problem("dot", B, H, H, M, N, 4, 4, torch.float32, torch.device("cpu"),
                       origin=origin)  # fmt: skip
    want = (rule.bits(p) >= rule.threshold)[:, :, 16:, 48:]
    drop = dropout.dropout_args(0.37, rule.seed.to(device), origin[:4])
    out = torch.empty(B, H, 16, 16, dtype=torch.int8, device=device)
    survives_kernel[(B * H,)](out, drop, H, 16, 48, BM=16, BN=16, TRANSPOSED=transposed)
    found = out.cpu() != 0
    assert torch.equal(found.mT if transposed else found, want)


@pytest.mark.parametrize("p", [1e-9, 0.25, 0.5, 0.75, 1.0])
def test_thresholds_of_any_size(p, device):
    drop = dropout.dropout_args(p, torch.tensor(5, device=device))
    assert -(2**31) <= drop.threshold < 2**31
    out = torch.empty(1, 1, 64, 64, dtype=torch.int8, device=device)
    survives_kernel[(1,)](out, drop, 1, 0, 0, BM=64, BN=64, TRANSPOSED=False)
    assert abs(out.float().mean().item() - (1 - p)) < 0.05


def test_every_backend_drops_the_same_weights(device):
    """The record, the CPU operator, eager and Triton agree in every bit."""
    q, k = torch.randn(B, H, M + 3, 8), torch.randn(B, H, N + 6, 8)
    p = validate.build("dot", q, k, k, dropout_p=0.37, seed=SEEDS[-1]).p
    want = p.dropout.bits(p) >= p.dropout.threshold
    assert 0 < want.sum() < want.numel()
    for backend in ("cpu", "eager", "triton"):
        x, y = (t.to(device if backend == "triton" else "cpu") for t in (q, k))
        seed = torch.tensor([SEEDS[-1]], device=x.device)
        _, weights = fastattn.scaled_dot_product_attention(
            x, y, y, dropout_p=0.37, seed=seed, return_weights="full", backend=backend
        )
        assert torch.equal(weights.cpu() != 0, want), backend


def test_no_dropout_is_nothing():
    assert set(dropout.dropout_args(0.0, None)) == {None}
