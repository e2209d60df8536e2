"""Small problems through the kernels: every size modulo every tile, on every instruction set."""

import dataclasses

import pytest
import torch
from helpers import SCORES, everything, inputs

from fastattn import Mask, testing
from fastattn.testing import GRID, Case

scores = pytest.mark.parametrize("score", SCORES)
pytestmark = pytest.mark.usefixtures("extension")

# Cases for the branches of the kernels: sizes, masks, half types, ranges of the additive score.
NAMES = {
    *("M65-N127", "M1-N1000", "M127-N65", "D3-E5", "D64-E64", "D65-E8", "D8-E127", "N0", "gqa"),
    *("layout-sliced", "all-masks", "keep-sparse", "kv-len-rows", "bias-inf", "bias-n", "bias-bhm"),
    *("alibi-causal", "alibi-whole", "relative"),
    *("weights-full", "weights-mean", "dropout-mean", "large-logits", "huge", "opposite-25"),
}
SUBSET = [c for c in GRID if c.name in NAMES or c.name.startswith("plain-")]


@pytest.mark.parametrize("case", SUBSET, ids=str)
def test_instruction_set(case, isa):
    assert torch.ops.fastattn.cpu_isa() == isa
    testing.check(case, "cpu")


def test_instruction_sets_agree_on_dropout(isa):
    call = inputs(M=9, N=70)
    found = everything(call, dropout_p=0.4, seed=5, backend="cpu")["weights"] != 0
    assert torch.equal(
        found, everything(call, dropout_p=0.4, seed=5, backend="eager")["weights"] != 0
    )


# ---- sizes ----

CAUSAL = dict(causal="bottom_right", bias="mn", keep="mn")


def assert_sizes(score, sizes, **more):
    """Checks many sizes in one test: separate tests would take longer to report than to run."""
    for values in sizes:
        name = "-".join(f"{k}{v}" for k, v in values.items())
        case = Case(
            name,
            score,
            **({"B": 1, "H": 1, "Hkv": 1, "M": 3, "N": 5, "D": 4, "E": 4} | values),
            **more,
        )
        testing.check(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@scores
def test_no_features_of_many_pairs(score, dtype, isa):
    empty = [dict(D=0), dict(E=0), dict(D=0, E=0)]
    assert_sizes(score, [{"M": 40, "N": 70} | sizes for sizes in empty], dtype=dtype, bias="mn")


@pytest.mark.parametrize("masks", [{}, CAUSAL], ids=["plain", "masks"])
@scores
def test_every_number_of_queries(score, masks):
    assert_sizes(score, [dict(M=m) for m in range(1, 70)], **masks)


@pytest.mark.parametrize("masks", [{}, CAUSAL], ids=["plain", "masks"])
@scores
def test_every_number_of_keys(score, masks):
    assert_sizes(score, [dict(N=n) for n in [*range(1, 70), 127, 128, 129, 255, 256, 257]], **masks)


@scores
def test_every_head_dim(score):
    assert_sizes(score, [dict(D=d) for d in [*range(1, 36), 63, 64, 65, 127, 128, 129]])


@scores
def test_every_value_dim(score):
    assert_sizes(score, [dict(E=e) for e in [*range(1, 36), 63, 64, 65, 127, 128, 129]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@scores
def test_every_size_in_half(score, dtype):
    """All four tails at once. Half types are converted one vector at a time."""
    sizes = [dict(M=n, N=n + 3, D=n, E=n + 1) for n in range(1, 40)]
    assert_sizes(score, sizes, dtype=dtype, weights="full")


def test_tiles_of_the_matrix_unit_in_groups_of_odd_size(isa):
    """It takes them in pairs; a group is what fits the cache, of three parts and of two."""
    assert_sizes("dot", [dict(M=64, N=144, D=80), dict(M=64, N=208, D=208)])


@pytest.mark.parametrize("N", [1151, 1152, 1153, 2304, 2305])
@scores
def test_chunks_of_keys_when_decoding(score, N):
    # The first sample has no keys.
    assert_sizes(score, [dict(B=2, M=m, N=N) for m in (1, 2)], lse=True, kv_len="rows")


@pytest.mark.parametrize("M", range(1, 9))
@scores
def test_few_queries_of_many_heads(score, M):
    case = Case(f"few-{M}", score, H=8, Hkv=2, M=M, N=150, causal="bottom_right", lse=True)
    testing.check(case, "cpu")
    testing.check(dataclasses.replace(case, weights="mean"), "cpu")


# ---- tiles that masks skip ----


@pytest.mark.parametrize("left", [0, 1, 63, 64, 65])
@scores
def test_windows_that_start_and_end_in_any_tile(score, left):
    case = Case(f"window-{left}", score, B=1, H=1, Hkv=1, M=150, N=200, D=4, E=4, window=(left, 1))
    testing.check(case, "cpu")
    testing.check(dataclasses.replace(case, causal="bottom_right"), "cpu")


@scores
def test_skipped_tiles_hold_no_result_back(score):
    """Block masks: whole tiles kept and masked, in any order."""
    call = inputs(score, B=1, H=1, M=192, N=256, D=4, E=4)
    blocks = torch.rand(6, 8) < 0.4
    keep = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    ours = everything(call, mask=Mask(keep=keep), backend="cpu")
    double = {name: x.double() for name, x in call.items()}
    plain = everything(call, mask=Mask(keep=keep), backend="eager")
    truth = everything(double, mask=Mask(keep=keep), backend="eager")
    for name, x in ours.items():
        testing.assert_within_budget(x, plain[name], truth[name], name)
