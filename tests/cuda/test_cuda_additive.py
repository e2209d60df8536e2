"""Additive attention in CUDA C++, run on the CPU, against the float64 reference.

The case grid, the tests of every backend, and tests for these kernels only. A separate process runs
the smaller cases under AddressSanitizer and UndefinedBehaviorSanitizer, with every tensor and the
workspace as an allocation of its exact size.
"""

import ctypes
import dataclasses
import math

import host_build
import pytest
import shim_backend
import torch

# These tests also run here, on this file's backend. conftest.py leaves out the dot product.
from helpers import assert_same_bits, attend, everything, inputs
from properties.blocks import (  # noqa: F401
    test_a_block_drops_what_the_whole_drops,
    test_wide_results_are_float32,
)
from properties.dropout import (  # noqa: F401
    test_backward_drops_what_forward_dropped,
    test_every_backend_drops_the_same_bit_for_bit,
)
from properties.empty_rows import (  # noqa: F401
    test_gradients_are_0_and_nothing_is_nan,
    test_results_are_0_and_minus_infinity,
    test_whole_tiles_of_empty_rows,
)
from properties.extremes import (  # noqa: F401
    test_a_large_bias_in_a_whole_row_leaves_it_uniform,
    test_a_large_negative_bias_masks_beside_others,
    test_additive_with_extreme_weights,
    test_additive_with_opposite_queries_and_keys,
    test_additive_with_some_weights_zero,
    test_errors_of_additive_weights_that_are_alike_do_not_add_up,
    test_gradients_of_additive_keys_with_huge_weights,
    test_gradients_under_a_large_bias,
    test_tiny_values_underflow_quietly,
    test_zero_size_results_have_their_shapes,
)
from properties.garbage import (  # noqa: F401
    test_memory_around_slices_is_not_used,
    test_nan_in_a_bias_stays_in_its_row,
    test_nan_in_a_key_reaches_the_rows_that_keep_it,
    test_nan_in_a_query_stays_in_its_row,
    test_nan_in_a_query_stays_in_its_row_under_a_softcap,
    test_nan_or_infinity_in_a_value_reaches_its_column_in_the_rows_that_keep_it,
    test_nan_reaches_the_rows_that_keep_it_where_its_weight_is_0,
    test_nan_upstream_stays_in_its_row,
    test_queries_without_keys_reach_nothing,
)
from properties.long_sums import LONG, assert_long_sums
from properties.sinks import (  # noqa: F401
    test_a_row_without_keys_has_no_gradient_but_of_its_log_sum_exp,
    test_sinks_far_above_and_below_every_score,
    test_sinks_of_samples_and_of_any_strides,
    test_the_largest_sinks_are_numbers,
    test_without_keys_the_log_sum_exp_is_the_sink,
)
from properties.strides import (  # noqa: F401
    far_storage,
    test_each_tensor_in_a_layout_of_its_own,
    test_strides_beyond_2_to_the_31,
)

from fastattn import ALiBi, Mask, testing
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

SANITIZED = shim_backend.KIND == "sanitized"
# Elements of the score: the shim takes about ten nanoseconds for each, plain PyTorch more.
LARGEST = 30_000 if SANITIZED else 2_000_000


@pytest.fixture
def backend(monkeypatch):
    return shim_backend.install(monkeypatch)


# ---- the grid ----


def elements(c: Case) -> int:
    return c.B * c.H * c.M * c.N * c.D


CASES = [c for c in GRID if c.score != "dot" and elements(c) <= LARGEST]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, backend):
    testing.check(case, backend)


# ---- what the grid does not reach ----


@pytest.mark.parametrize("score", ["additive", "gaussian"])
def test_long_sums(score, backend):
    assert_long_sums(backend, score, **LONG["keys"])  # the others take too long on the shim


j = torch.arange(90)
MASKS = {
    "kv-len": (dict(mask=Mask(kv_len=torch.tensor([5, 70]))), j < torch.tensor([[5], [70]])),
    "kv-begin": (dict(mask=Mask(kv_begin=[85, 20])), j >= torch.tensor([[85], [20]])),
    "keep": (dict(mask=Mask(keep=j % 3 != 1)), j % 3 != 1),
    "bias": (dict(bias=torch.where(j % 4 == 2, -math.inf, 0.3)), j % 4 != 2),
}


def assert_unused_keys_reach_nothing(backend, name, M, garbage, own_dtype):
    options, used = MASKS[name]
    call = {n: x.to(own_dtype) for n, x in inputs("additive", M=M, N=90).items()}
    unused = ~used.expand(2, 90)[:, None].expand(2, 2, 90)
    options = {n: x.to(own_dtype) if n == "bias" else x for n, x in options.items()}

    def run(backend, value, dtype=own_dtype):
        cast = {n: x.to(dtype, copy=True) for n, x in call.items()}
        cast["key"][unused] = cast["value"][unused] = value
        kept = {n: x.to(dtype) if n == "bias" else x for n, x in options.items()}
        return everything(cast, backend=backend, **kept)

    found, plain = run(backend, garbage), run("eager", 0.0)
    truth = run("eager", 0.0, torch.float64)
    largest = max(testing.largest(x) for name, x in truth.items() if name.startswith("grad_"))
    for result, x in found.items():
        scale = largest if result.startswith("grad_") else None
        testing.assert_within_budget(x, plain[result], truth[result], result, scale)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("M", [3, 20])
@pytest.mark.parametrize("name", MASKS)
def test_unused_keys_reach_nothing(backend, name, M, garbage):
    """Within the budget: a tile with garbage takes the careful path.

    The ulp of a gradient is that of the largest gradient, since some cancel.
    """
    assert_unused_keys_reach_nothing(backend, name, M, garbage, torch.float32)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(M=16, N=70),  # the last of few queries, the first of a tile
        dict(M=17, N=70),
        dict(M=64, N=64),  # a full tile, and one more
        dict(M=65, N=65),
        dict(M=3, N=128),
        dict(M=2, N=129),
        dict(M=1, N=16_385, B=1, H=1, Hkv=1),  # more chunks than one of 128 keys each
    ],
    ids=str,
)
@pytest.mark.parametrize("D", [1, 5, 32, 33])
def test_ends_of_tiles(backend, sizes, D):
    testing.check(Case(f"ends-{sizes}", "additive", **sizes, D=D, E=5, lse=True), backend)


@pytest.mark.parametrize("weights", ["full", "mean"])
def test_weights_of_few_queries(backend, weights):
    few = Case(f"few-{weights}", "additive", H=4, Hkv=2, M=5, N=150, D=9, E=3, weights=weights)
    testing.check(few, backend)
    masks = dict(kv_len="rows", bias="hmn", bias_inf=True, empty_rows=True, dropout_p=0.3, lse=True)
    testing.check(dataclasses.replace(few, name=f"few-masks-{weights}", **masks), backend)


def test_every_value_column(backend):
    """More than one stage of columns, and a partial one."""
    testing.check(Case("E", "additive", M=70, N=70, D=4, E=150, weights="full"), backend)
    testing.check(Case("most", "additive", B=1, H=1, Hkv=1, M=20, N=20, D=256, E=256), backend)


CAPPED = [
    Case("capped", "additive", Hkv=1, M=20, N=70, D=5, E=3, softcap=0.7, kv_len="rows",
         bias="hmn", dropout_p=0.3, weights="full", lse=True, garbage=math.nan),
    Case("capped-line", "additive", B=1, M=66, N=65, D=3, E=2, softcap=1.5, causal="top_left",
         bias="relative", weights="mean"),
    Case("capped-few", "additive", B=1, H=4, Hkv=2, M=3, N=150, D=5, E=3, softcap=0.7, keep="mn",
         bias="n", dropout_p=0.3, weights="full", lse=True),
    Case("capped-far", "additive", M=20, N=70, D=4, E=3, softcap=2.0, magnitude=1e4),
    Case("capped-no-dims", "additive", M=20, N=70, D=0, E=3, softcap=2.0, bias="mn"),
    Case("capped-gaussian", "gaussian", Hkv=1, M=20, N=70, D=5, E=3, softcap=2.0, kv_len="rows",
         bias="hmn", dropout_p=0.3, weights="full", lse=True, garbage=math.nan),
    Case("capped-gaussian-few", "gaussian", M=3, N=150, D=5, E=3, softcap=2.0, weights="mean"),
]  # fmt: skip


@pytest.mark.parametrize("case", CAPPED, ids=lambda case: case.name)
def test_softcap(backend, case):
    testing.check(case, backend)


# ---- slices of tiles, whose parts are added up ----

SLICES = [  # 1024 blocks are wanted: slices are fewer where there are many heads
    Case("one", "additive", B=40, H=26, Hkv=13, M=20, N=66, D=3, E=1),
    Case("several-tiles", "additive", B=8, H=32, Hkv=16, M=130, N=140, D=3, E=1, kv_begin="rows",
         window=(70, 20)),
    Case("many", "additive", B=1, H=1, Hkv=1, M=20, N=1300, D=3, E=2,
         causal="bottom_right", window=(500, 0)),
    Case("gaussian", "gaussian", H=4, Hkv=2, M=130, N=130, D=37, E=3, causal="bottom_right"),
]  # fmt: skip


@pytest.mark.parametrize("case", SLICES, ids=lambda case: case.name)
def test_corner_of_slices(backend, case):
    testing.check(case, backend)


# ---- few tiles of queries: blocks share the keys of one ----

CHUNKS = [
    Case("masks", "additive", Hkv=1, M=66, N=600, D=5, E=70, kv_len="rows", bias="hmn",
         dropout_p=0.3, weights="mean", lse=True, garbage=math.nan),
    Case("band", "additive", B=1, M=70, N=530, D=4, E=3, window=(20, 20), empty_rows=True),
    Case("gaussian", "gaussian", M=20, N=300, D=4, E=3, causal="bottom_right", lse=True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
def test_corner_of_chunks(backend, case, dtype):
    testing.check(dataclasses.replace(case, name=f"{case.name}-{dtype}", dtype=dtype), backend)


# ---- 16-bit types: products on tensor cores ----

HALVES = [
    Case("ends", "additive", M=65, N=129, D=5, E=5, lse=True),
    Case("columns", "additive", Hkv=1, M=66, N=70, D=4, E=150, layout="sliced", weights="full"),
    Case("most", "additive", B=1, H=1, Hkv=1, M=20, N=20, D=4, E=256),
    Case("masks", "additive", Hkv=1, M=66, N=70, D=4, E=66, kv_len="rows", bias="hmn",
         dropout_p=0.3, weights="mean", lse=True, garbage=math.nan),
    Case("capped", "additive", M=20, N=70, D=5, E=3, softcap=0.7, keep="mn", bias="n"),
    Case("no-dims", "additive", M=20, N=130, D=0, E=3),
    Case("no-columns", "additive", M=20, N=70, D=4, E=0, lse=True),
    Case("gaussian", "gaussian", M=66, N=70, D=4, E=70, causal="top_left", bias="mn"),
]  # fmt: skip
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])


@halves
@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_corner_of_half_types(backend, case, dtype):
    testing.check(dataclasses.replace(case, name=f"{case.name}-{dtype}", dtype=dtype), backend)


@halves
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("name", MASKS)
def test_corner_of_half_types_and_garbage(backend, name, garbage, dtype):
    assert_unused_keys_reach_nothing(backend, name, 20, garbage, dtype)


@halves
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_corner_of_half_types_that_use_garbage(backend, garbage, dtype):
    """A value and a gradient of the output reach exactly the rows that a causal mask lets them."""
    leaves = inputs("additive", M=130, N=130, dtype=dtype)
    leaves["value"][0, 1, 70, 2] = garbage
    leaves = {n: x.requires_grad_() for n, x in leaves.items()}
    out = attend(**leaves, is_causal=True, backend=backend)
    upstream = torch.randn(out.shape).to(dtype)
    upstream[1, 0, 100, 1] = garbage
    out.backward(upstream)
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[0, 1, 70:, 2] = True
    assert out.isfinite().equal(~spoilt)
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[1, 0, :101, 1] = True
    assert leaves["value"].grad.isfinite().equal(~spoilt)


# ---- large biases: a logit is the sum of score and bias, rounded once ----


def assert_as_right_as_plain(call, backend, **options):
    """Within the budget, where plain PyTorch rounds no sum: all of the error would be ours."""

    def run(backend, dtype=torch.float32):
        cast = {n: x.to(dtype) for n, x in call.items()}
        given = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        return everything(cast, backend=backend, **given)

    found, plain, truth = run(backend), run("eager"), run("eager", torch.float64)
    for result, x in found.items():
        testing.assert_within_budget(x, plain[result], truth[result], result)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("M", [3, 20])  # few queries, and a tile
def test_a_large_bias_loses_no_digits(backend, M, softcap):
    call = inputs("additive", M=M, N=90)
    call["query"] *= 0
    call["key"] *= 0
    bias = 200 + 3 * torch.randn(2, 2, M, 90)
    assert_as_right_as_plain(call, backend, bias=bias, softcap=softcap)


@pytest.mark.parametrize("M", [3, 20])
def test_alibi_far_from_the_diagonal_loses_no_digits(backend, M):
    call = inputs("additive", M=M, N=3200, E=5)
    call["key"][:, :, :3100] = call["query"][:] = 0
    bias = ALiBi(torch.tensor([0.07, 0.1]), 0).to_dense(M, 3200)
    mask = Mask(kv_begin=[3000, 3003], kv_len=[3090, 3100])
    assert_as_right_as_plain(call, backend, bias=bias, mask=mask)


def test_a_logit_that_just_leaves_the_maximum_where_it_is(backend):
    """The sum of a maximum and its slack may round up: the weight is then above 2."""
    call = inputs("additive", M=20, N=150)
    call["query"] *= 0
    call["key"] *= 0
    bias = torch.full([150], 2.0**14)
    bias[140] += 355 / 512
    assert_as_right_as_plain(call, backend, bias=bias)


@pytest.mark.parametrize("letters", ["bhmn", "mn", "hm", "bn", "", "h"])
def test_bias_gradients_from_many_parts(backend, letters):
    """Tiles of several batches and heads, summed in slices."""
    case = Case(f"parts-{letters}", "additive", B=5, H=3, Hkv=3, M=66, N=130, D=2, E=2)
    testing.check(dataclasses.replace(case, bias=letters, causal="top_left"), backend)


def assert_right(case: Case, t: testing.Tensors, backend: str) -> None:
    """testing.check for tensors that a test made itself."""
    ours, oracle = testing.run(case, t, backend), testing.oracle(case, t)
    for name in oracle.truth:
        truth, peer, scale = oracle[name]
        testing.assert_within_budget(ours[name], peer, truth, f"{case} {name}", scale)


RANGES = Case("ranges", "additive", M=20, N=70, D=4, E=3, weights="full", lse=True)


@pytest.mark.parametrize("stray", [None, 1e4, -math.inf])
@pytest.mark.parametrize("spread", [1.0, 5.0, 20.0])
def test_centres_and_tiles_out_of_range(backend, spread, stray):
    """Tiles multiply exponentials around a centre, or take one an element: both are right."""
    t = testing.make(RANGES)
    centres = torch.tensor([-50.0, 80.0, 0.0, 3.0])
    t.k, t.q = t.k * spread + centres, t.q - centres
    if stray is not None:
        t.k[:, :, 66] = stray
    assert_right(RANGES, t, backend)


@pytest.mark.parametrize("distance", [15.0, 25.0, 1e3])
def test_saturation_at_both_ends_of_the_range(backend, distance):
    """Keys as far from 0 as exponentials allow, and queries farther: the largest products."""
    t = testing.make(RANGES)
    t.k = torch.linspace(-13.9, 13.9, 70)[:, None].expand(2, 2, 70, 4).contiguous()
    t.q[:, :, :7] += distance
    t.q[:, :, 7:14] -= distance
    assert_right(RANGES, t, backend)


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no tiles")
@pytest.mark.parametrize(
    ("opposite", "magnitude", "direct"),
    [(0.0, 3.0, 0), (60.0, 3.0, 0), (3000.0, 1.0, 0), (0.0, 30.0, 2), (1e4, 1.0, 0)],
)
def test_keys_that_are_near_each_other_take_the_fast_loop(backend, opposite, magnitude, direct):
    """What a tile of keys is taken for changes no result, but the time."""
    case = Case("near", "additive", B=1, H=1, Hkv=1, M=20, N=70, D=40, E=3,
                opposite=opposite, magnitude=magnitude)  # fmt: skip
    library = ctypes.CDLL(str(shim_backend.library()))
    library.shim_scored.restype = ctypes.c_uint64
    before = [library.shim_scored(x) for x in (0, 1)]
    t = testing.make(case)
    attend(t.q, t.k, t.v, t.w, backend=backend)
    after = [library.shim_scored(x) for x in (0, 1)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 - direct, direct]


@pytest.mark.parametrize("size", [1e-27, 1e27])
@pytest.mark.parametrize("spread", [1.0, 5.0, 20.0])
def test_gradients_of_huge_and_of_tiny_values(backend, spread, size):
    """Sums keep their digits for any range of dS, with keys close together and far apart."""
    t = testing.make(RANGES)
    t.k, t.v = t.k * spread, t.v * size
    t.grad_weights, t.grad_lse = t.grad_weights * size, t.grad_lse * size
    assert_right(RANGES, t, backend)


def test_the_same_bits_again_and_beside_others(backend):
    call = inputs("additive", B=3, M=70, N=130, D=9)
    mask = Mask(causal="bottom_right")
    found = everything(call, mask=mask, backend=backend)
    assert_same_bits(everything(call, mask=mask, backend=backend), found)
    alone = {n: x if n == "weight" else x[1:2] for n, x in call.items()}
    results = everything(alone, mask=mask, backend=backend)
    for name in ("out", "weights", "lse"):
        assert results[name].equal(found[name][1:2]), name


@pytest.mark.parametrize("M", [1, 20])
def test_no_call_takes_shared_memory_from_others(M, backend):
    """A kernel's limit is one for all threads. The simulator refuses to lower one."""
    for D, E in (64, 256), (4, 8):
        everything(inputs("additive", M=M, D=D, E=E), backend=backend)


# ---- sanitizers ----


@pytest.mark.skipif(SANITIZED, reason="this is that process")
def test_under_sanitizers():
    ends = "ends_of_tiles and 33- and not 16385"
    tests = f"test_case or softcap or half_types or ({ends}) or out_of_range"
    host_build.assert_clean(__file__, tests)
