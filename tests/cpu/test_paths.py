"""Every path through the CPU kernels alone: FASTATTN_CPU_PATH forces one short way, or none."""

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from helpers import output_with

import fastattn
from fastattn import testing
from fastattn.backends import cpu, operators
from fastattn.problem import Mask, Problem
from fastattn.testing import Case

pytestmark = pytest.mark.usefixtures("extension")

NAMES = (
    "tiles",
    "heads_as_rows",
    "heads_together",
    "split_keys",
    "rows_in_place",
    "one_query",
    "matrix_unit",
    "one_thread",
)
MASKS = dict(kv_len="rows", keep="bhmn", bias="hn", causal="bottom_right", lse=True)
# Each short way is the usual one of some case. Other cases can take it as well.
CASES = [
    Case("one-query", H=6, Hkv=2, M=1, N=300, D=24, E=20, lse=True),
    Case("one-query", H=24, Hkv=2, M=1, N=1300, D=24, E=20, keep="hn", bias="hn"),
    Case("few", H=4, Hkv=2, M=5, N=150, D=40, E=24, **MASKS),
    Case("few-columns", M=7, N=70, D=24, E=24, layout="bhdm"),
    Case("split", B=1, M=9, N=2500, D=16, E=16, lse=True),
    Case("many", H=4, Hkv=2, M=100, N=300, D=40, E=24, weights="mean", dropout_p=0.2, **MASKS),
    Case("many", H=2, M=130, N=260, D=32, E=32, dtype=torch.bfloat16),
    Case("one-query", "additive", M=1, N=150, D=24, E=20, **MASKS),
    Case("few", "additive", H=4, Hkv=2, M=3, N=70, D=24, E=20, weights="full", lse=True),
    Case("many", "additive", M=70, N=140, D=24, E=20, dropout_p=0.2, **MASKS),
]


def problem(score="dot", H=2, Hkv=2, M=64, N=128, mask=None, dtype=torch.float32, **options):
    sizes = (2, H, Hkv, M, N, 64, 64)
    where = dict(dtype=dtype, device=torch.device("cpu"))
    return Problem(score, *sizes, mask=mask or Mask(), **where, **options)


def paths() -> list[str]:
    """The usual paths of problems that differ in their path."""
    dropped = Mask(keep=torch.ones(1, 1, 600, 600, dtype=torch.bool))
    return [
        cpu.path(p)
        for p in (
            problem(M=8),
            problem(M=12, N=16),
            problem(M=13, N=16),
            problem(M=1, H=8, N=4000),
            problem("additive", M=1),
            problem(M=600, N=600),
            problem(M=600, N=600, mask=Mask(causal="top_left")),
            problem(M=600, N=600, mask=dropped),
        )
    ]


def test_usual_paths(isa):
    assert torch.ops.fastattn.select_cpu_path("auto")
    unit = isa.startswith("amx")
    assert paths() == [
        "rows in place",
        "rows in place",
        "tiles",
        "heads as rows, rows in place, keys in 4 chunks",
        "one query",
        "matrix unit 256x128" if unit else "tiles",
        "matrix unit 64x128" if unit else "tiles",
        "matrix unit 64x64" if unit else "tiles",
    ]


PRODUCTS = {  # of tiles, for one product of numbers
    "amx": {torch.float32: 6, torch.float16: 3, torch.bfloat16: 1},
    "amx_fp16": {torch.float32: 3, torch.float16: 1, torch.bfloat16: 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_matrix_unit_serves_whom_it_gains_by(isa, dtype):
    """0004: 10 pairs a product for each row and each key that are laid out, in tiles of 16 rows."""
    assert torch.ops.fastattn.select_cpu_path("auto")
    sizes = (4, 8, 9, 16, 33, 64, 70, 150), (7, 33, 64, 200, 300)
    bands = {}, dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(20, 30))
    bands += dict(window=(0, -1)), dict(window=(200, 3))
    served = set()
    for M, N, band, Hkv in itertools.product(*sizes, bands, (1, 8)):
        p = problem(H=8, Hkv=Hkv, M=M, N=N, mask=Mask(**band), dtype=dtype)
        served.add(expected := takes_unit(p, isa))
        assert cpu.path(p).startswith("matrix unit") == expected, p
    assert len(served) == 1 + (isa in PRODUCTS or (isa, dtype) == ("avx512_bf16", torch.bfloat16))


def takes_unit(p, isa):
    if isa == "avx512_bf16":
        return p.dtype is torch.bfloat16 and p.M > 8 and p.M * p.N > 1024
    i, j = torch.arange(p.M)[:, None], torch.arange(p.N)
    lo, hi = p.band()
    kept = (j >= i + (-p.M if lo is None else lo)) & (j <= i + (p.N if hi is None else hi))
    pairs = kept.sum().item()
    laid_out, share = p.H * p.M + p.Hkv * p.N, p.M / (math.ceil(p.M / 16) * 16)
    return isa in PRODUCTS and share * p.H * pairs > 10 * PRODUCTS[isa][p.dtype] * laid_out


@pytest.fixture
def forced(request):
    """Forces one path wherever it can be taken."""
    assert torch.ops.fastattn.select_cpu_path(request.param)
    yield request.param
    assert torch.ops.fastattn.select_cpu_path(os.environ.get("FASTATTN_CPU_PATH", "auto"))


ISA = "" if operators.EXTENSION_ERROR else torch.ops.fastattn.cpu_isa()


def differs(case: Case, name: str) -> bool:
    """Whether a way can change what the kernels do, by choose.h: else it is "tiles" again.

    Ways with other names than these change loops that no path names.
    """
    has_unit = "amx" in ISA or (ISA == "avx512_bf16" and case.dtype is torch.bfloat16)
    return {
        "heads_as_rows": case.M == 1 and case.H > case.Hkv,
        "heads_together": case.M <= 96 and case.H > case.Hkv,
        "split_keys": case.N > 192,  # backward; forward 1152
        "rows_in_place": case.score == "dot" or case.M <= 12,
        "one_query": case.score == "additive" and case.M == 1 and case.H == case.Hkv,
        "matrix_unit": case.score == "dot" and has_unit,
        "one_thread": torch.get_num_threads() > 1,
    }.get(name, True)


ALL = [*CASES, *testing.GRID]
FORCED = [(case, name) for case in ALL for name in NAMES if differs(case, name)]


# The path varies fastest: all paths share one reference computation of a case.
@pytest.mark.slow
@pytest.mark.parametrize(("case", "forced"), FORCED, ids=str, indirect=["forced"])
def test_every_path_gives_the_same_results(case, forced):
    testing.check(case, "cpu")


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("forced", ["tiles"], indirect=True)
def test_what_is_not_forced_would_be_tiles():
    """Without a mask, which turns ways off and none on."""

    def taken(case, name):
        assert torch.ops.fastattn.select_cpu_path(name)
        sizes = {x: getattr(case, x) for x in ("H", "Hkv", "M", "N")}
        return cpu.path(problem(case.score, **sizes, dtype=case.dtype)).partition(" (")[0]

    left_out = [(case, name) for case in ALL for name in NAMES if not differs(case, name)]
    assert left_out
    assert all(taken(case, name) == taken(case, "tiles") for case, name in left_out)


@pytest.mark.parametrize("forced", NAMES, indirect=True)
def test_what_a_name_forces(forced):
    found = paths()
    assert all(path.endswith(f" (FASTATTN_CPU_PATH={forced})") for path in found)
    short = {path.partition(" (")[0] for path in found} - {"tiles"}
    if forced in ("tiles", "heads_together", "one_thread"):
        assert not short
    elif forced == "split_keys":
        assert short == {"tiles, keys in 4 chunks"}
    elif forced == "heads_as_rows":
        assert short == {"heads as rows, tiles"}
    else:  # the matrix unit; nothing without one
        assert all(path.startswith(forced.replace("_", " ")) for path in short)


@pytest.mark.parametrize("name", ["", "shortest", "Tiles", "tiles,", "split_keys,,tiles"])
def test_an_unknown_path_is_refused_and_changes_nothing(name):
    before = paths()
    assert not torch.ops.fastattn.select_cpu_path(name)
    assert paths() == before


def test_what_is_no_problem_has_no_path():
    sizes = dict(B=1, H=4, Hkv=0, M=1, N=8, D=8, band_lo=-1, band_hi=8, score=0)
    names = ("contiguous_keys", "bias", "keep_by_row", "dropout", "weights")
    flags = dict.fromkeys(names, False) | dict(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="Hkv: expected a divisor of H, 4, got 0"):
        torch.ops.fastattn.cpu_path(**sizes, **flags)
    with pytest.raises(RuntimeError, match=r"score: expected 0 .* got 3"):
        torch.ops.fastattn.cpu_path(**sizes | dict(Hkv=4, score=3), **flags)
    with pytest.raises(RuntimeError, match="dtype: expected float32, bfloat16 or float16"):
        torch.ops.fastattn.cpu_path(**sizes | dict(Hkv=4), **flags | dict(dtype=torch.float64))


@pytest.mark.skipif("FASTATTN_CPU_PATH" in os.environ, reason="FASTATTN_CPU_PATH is set")
@pytest.mark.parametrize(
    ("score", "path"), [({}, "rows in place"), ({"weight": torch.ones(8)}, "one query")]
)
def test_strided_keys_have_another_path(score, path):
    """explain() tells of the tensors it is given, not of contiguous ones."""
    query, keys = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 300, 8)
    explained = fastattn.explain(query, keys, keys, **score)
    assert explained.path == path
    explained = fastattn.explain(query, keys.mT.contiguous().mT, keys, **score)
    assert explained.path == "tiles"


@pytest.mark.parametrize("forced", ["heads_as_rows,split_keys"], indirect=True)
def test_commas_join_ways(forced):
    assert f"heads as rows, tiles, keys in 4 chunks (FASTATTN_CPU_PATH={forced})" in paths()


@pytest.mark.slow
def test_the_variable_names_a_path():
    program = "from cpu import test_paths; print(test_paths.paths()[0])"
    names = ["rows_in_place", "tiles", "shortest"]
    found = output_with("FASTATTN_CPU_PATH", names, program, Path(__file__).parents[1])
    assert found == {
        "rows_in_place": ["rows in place (FASTATTN_CPU_PATH=rows_in_place)"],
        "tiles": ["tiles (FASTATTN_CPU_PATH=tiles)"],
        "shortest": ["rows in place (FASTATTN_CPU_PATH=shortest: no such path)"],
    }
