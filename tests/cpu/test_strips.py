"""Strips of rows that skip the columns which a mask drops: csrc/cpu/tile/strips.h."""

import math

import pytest
import torch
from helpers import SCORES, attend, everything, inputs

from fastattn import Mask, testing

pytestmark = pytest.mark.usefixtures("extension")

BF16 = {"dtype": torch.bfloat16}  # AVX512-BF16 has products of its own for it
CALLS = {"dot": ("dot", {}), "bf16": ("dot", BF16), "additive": ("additive", {})}
SIZES = [(150, 300), (97, 129), (33, 400)]  # more than a tile, one row or key more, two strips


def blocks(M, N, size=16, shift=0, share=0.25):
    """Random blocks; ``shift`` moves their edges into strips and vectors. Some rows are empty."""
    rng = torch.Generator().manual_seed(M + N)
    kept = torch.rand(-(-M // size) + 1, -(-N // size) + 1, generator=rng) < share
    whole = kept.repeat_interleave(size, 0).repeat_interleave(size, 1)
    keep = whole[shift : shift + M, shift : shift + N].clone()
    keep[5], keep[M // 2] = False, False
    return keep


MASKS = {
    "blocks": lambda M, N: Mask(keep=blocks(M, N)[None, None]),
    "shifted": lambda M, N: Mask(keep=blocks(M, N, shift=5)[None, None]),
    "transposed": lambda M, N: Mask(keep=blocks(N, M).T[None, None]),
    "large": lambda M, N: Mask(keep=blocks(M, N, size=48)[None, None]),
    "pairs": lambda M, N: Mask(keep=blocks(M, N, size=1, share=0.02)[None, None]),
    "causal": lambda M, N: Mask(causal="top_left"),
    "window": lambda M, N: Mask(window=(9, 20)),
    "rows": lambda M, N: Mask(kv_len=(torch.arange(M) * 7919 % 41)[None]),  # in no order
    "blocks of causal": lambda M, N: Mask(causal="bottom_right", keep=blocks(M, N)[None, None]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("score", "options"),
    [
        ("dot", {}),
        ("dot", {"softcap": 1.5}),
        ("dot", {"bias": True}),
        ("dot", BF16),
        ("additive", {}),
    ],
    ids=["dot", "cap", "bias", "bf16", "additive"],
)
def test_results_are_those_of_the_mask(isa, sizes, mask, score, options):
    options = options | {"mask": MASKS[mask](*sizes), "return_lse": True}
    dtype = options.pop("dtype", torch.float32)
    call = inputs(score, H=2, M=sizes[0], N=sizes[1], D=20, E=36, dtype=dtype)
    if "bias" in options:
        options["bias"] = torch.randn(sizes)
    double = {name: x.double() for name, x in call.items()}
    ours, plain = (attend(**call, **options, backend=name) for name in ("cpu", "eager"))
    if "bias" in options:
        options["bias"] = options["bias"].double()
    truth = attend(**double, **options, backend="eager")
    for name, *found in zip(("out", "lse"), ours, plain, truth, strict=True):
        kept = found[2] > -math.inf
        assert torch.equal(found[0] > -math.inf, kept)
        testing.assert_within_budget(*(x.where(kept, 0) for x in found), name)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["blocks", "shifted", "pairs"])
def test_no_bit_depends_on_what_is_skipped(isa, score, name):
    """A mask of one row for all is not sparse: every column is computed."""
    if score == "dot" and isa.startswith("amx"):
        pytest.skip("tiles of the matrix unit depend on the kind of mask, and have no strips")
    M, N = 150, 300
    call = inputs(score, H=2, M=M, N=N, D=20, E=36)
    keep = MASKS[name](M, N).keep
    sparse = attend(**call, mask=Mask(keep=keep), backend="cpu")
    for i in (0, 5, 17, 96, 149):
        alone = attend(**call, mask=Mask(keep=keep[:, :, i : i + 1]), backend="cpu")
        assert torch.equal(sparse[:, :, i], alone[:, :, i]), i


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["blocks", "shifted", "pairs"])
def test_no_bit_depends_on_the_other_rows_of_a_strip(isa, call, name):
    """One row that keeps every key makes its strip take every column."""
    score, options = CALLS[call]
    if score == "dot" and isa.startswith("amx"):
        pytest.skip("tiles of the matrix unit depend on the kind of mask, and have no strips")
    M, N = 150, 300
    tensors = inputs(score, H=2, M=M, N=N, D=20, E=36, **options)
    keep = MASKS[name](M, N).keep
    whole = keep.clone()
    whole[:, :, 3::16] = True
    others = torch.arange(M) % 16 != 3
    found, expected = (everything(tensors, mask=Mask(keep=k), backend="cpu") for k in (keep, whole))
    for what in ("out", "weights", "lse", "grad_query"):
        assert torch.equal(found[what][:, :, others], expected[what][:, :, others]), what


def test_values_past_the_last_key_are_not_used(isa):
    """The last vector of keys is not whole, and memory has NaN of an earlier call there."""
    call = inputs(M=128, N=128, D=20, E=36)
    short = call | {name: call[name][:, :, :120] for name in ("key", "value")}
    keep = blocks(128, 120)
    keep[:16, 112:] = True
    attend(**call | {"value": call["value"] * math.nan}, backend="cpu")
    assert attend(**short, mask=Mask(keep=keep), backend="cpu").isfinite().all()


def assert_unreached(isa, found, clean, name):
    """A tile has the fp16 parts that its largest number requires: garbage may change rounding."""
    if isa == "amx_fp16":
        testing.assert_within_budget(found, clean, clean.double(), name)
    else:
        assert torch.equal(found, clean), name


@pytest.mark.parametrize(("score", "options"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_values_reach_their_own_rows_alone(isa, score, options, garbage):
    M, N = 150, 300
    call = inputs(score, H=2, M=M, N=N, D=20, E=36, **options)
    keep = MASKS["blocks"](M, N).keep
    clean = attend(**call, mask=Mask(keep=keep), backend="cpu")
    call["value"][:, :, 77] = garbage
    found = attend(**call, mask=Mask(keep=keep), backend="cpu")
    reached = keep[0, 0, :, 77]
    assert 0 < reached.sum() < M
    assert not found[:, :, reached].isfinite().any()
    assert_unreached(isa, found[:, :, ~reached], clean[:, :, ~reached], "out")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("score", "options"), CALLS.values(), ids=CALLS)
def test_no_bit_of_a_gradient_depends_on_what_is_skipped(isa, score, options, mask):
    """A bias that wants a gradient needs every column; one of zeros changes nothing else."""
    if score == "dot" and isa.startswith("amx"):
        pytest.skip("tiles of the matrix unit have no strips")
    M, N = 150, 289  # one key behind whole vectors
    call = inputs(score, B=1, H=2, M=M, N=N, D=20, E=36, **options)
    options = {"mask": MASKS[mask](M, N), "softcap": 2.0, "backend": "cpu"}
    skipped = everything(call, **options)
    whole = everything(call, **options, bias=torch.zeros(M, N))
    for name, x in skipped.items():
        assert torch.equal(x, whole[name]), name


@pytest.mark.parametrize(("score", "options"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_gradients_reach_what_a_row_keeps_alone(isa, score, options, garbage):
    M, N, row = 150, 300, 40
    call = inputs(score, B=1, H=2, M=M, N=N, D=20, E=36, **options)
    options = {"mask": Mask(keep=blocks(M, N)[None, None]), "backend": "cpu"}
    grad_out = torch.randn(1, 2, M, 36).to(call["query"].dtype)
    clean = everything(call, grad_out, **options)
    grad_out[:, :, row] = garbage
    found = everything(call, grad_out, **options)
    kept, others = options["mask"].keep[0, 0, row], torch.arange(M) != row
    assert 0 < kept.sum() < N
    for name in ("grad_key", "grad_value"):
        assert not found[name][:, :, kept].isfinite().any(-1).all()
        assert_unreached(isa, found[name][:, :, ~kept], clean[name][:, :, ~kept], name)
    ours, theirs = (x["grad_query"][:, :, others] for x in (found, clean))
    assert_unreached(isa, ours, theirs, "grad_query")
