"""Every configuration of config.py, compiled for sm_80 and sm_90: registers, spills, shared memory.

The compiler runs in other processes, two at a time, because this one interprets kernels.
"""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastattn.kernels.host import config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Bytes that a block may have. Rows of sm_80 also serve 8.6, 8.9 and 12.x, which have no more.
SHARED_MEMORY = {"sm_80": 101_376, "sm_90": 232_448}
SCORES = ("dot", "additive", "gaussian")
RUNS = list(itertools.product(SHARED_MEMORY, ("2", "4"), SCORES))
# The problems that `make test` compiles. All of them take ten times as long: `make test-kernels`.
# Of rich problems, kernels that need all registers.
USUAL: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sm_90", "2", "dot"): (
        "plain", "curved/64/fwd", "rich wide/64/dkdv", "rich/128/dq", "rich wide/128/dq|dkdv",
        "rich/256/dq|dkdv", "rich wide/256/dkdv", "curved/256/dq", "dropout/64/dkdv",
        "weights/128/dkdv",
    ),
    ("sm_90", "2", "additive"): ("plain", "plain decode/64"),
    ("sm_90", "2", "gaussian"): ("plain/64",),
    ("sm_80", "2", "dot"): (
        "rich wide/64",  # which has least shared memory to spare
        "curved/128/dkdv", "rich/128/dkdv", "rich wide/128/dkdv", "rich/256/dkdv",
        "rich wide/256/dkdv",
    ),
    ("sm_80", "4", "dot"): ("plain/64/dq", "rich decode/64/dkdv"),
}  # fmt: skip
CHOSEN = dict.fromkeys(RUNS, ()) if os.environ.get("FASTATTN_AOT") == "all" else USUAL
PRODUCTS = ("sdpa_fwd_kernel", "sdpa_bwd_dq_kernel", "sdpa_bwd_dkdv_kernel")


def run_aot(run: tuple[str, ...], cache: Path = ROOT / "build/triton") -> str:
    """The output of aot.py. Its cache in build/ makes reruns fast."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(cache),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "aot.py"), *run]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def compile_all(run: tuple[str, ...]):
    """What aot.py found, an entry for each kernel."""
    return json.loads(run_aot(run))


@pytest.fixture(scope="module")
def compiled():
    """The future result of each run. All runs start with the first test that uses this."""
    with ThreadPoolExecutor(2) as pool:
        yield {run: pool.submit(compile_all, run + problems) for run, problems in CHOSEN.items()}


def result(compiled, *run: str) -> list[dict]:
    """The result of a run."""
    if run not in compiled:
        pytest.skip("only with FASTATTN_AOT=all, as in `make test-kernels`")
    return compiled[run].result()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_configuration_fits(run, compiled):
    arch, size, _ = run
    kernels = result(compiled, *run)
    whole = [x for x in CHOSEN[run] if x.count("/") < 2]
    if whole or not CHOSEN[run]:
        assert {k["name"] for k in kernels} >= {"classify_kernel", "compact_kernel", *PRODUCTS}
    for problem in {*CHOSEN[run]} - {*whole}:
        name, size_class, names = problem.split("/")
        here = [k for k in kernels if (k["problem"], k["head_size"]) == (name, int(size_class))]
        for x in names.split("|"):
            assert any(x in k["name"] for k in here), problem
    for k in kernels:
        assert k["spills"] == 0, k
        assert k["shared"] <= SHARED_MEMORY[arch], k
        assert k["registers"] <= 255, k
        if size == "2" and k["name"] in PRODUCTS:
            assert k["wgmma"] + k["mma"] > 0, f"no tensor cores: {k}"


@pytest.mark.slow
@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_exponents_are_made_of_differences(arch, score, compiled):
    """The interpreter contracts nothing, so this test reads the compiled code: see softmax.py.

    The additive score is last multiplied by a power of two, which a contraction cannot harm.
    """
    kernels = result(compiled, arch, "2", score)
    weights = {"sdpa_weights_kernel"} if CHOSEN is not USUAL else set()  # "rich" returns these
    assert {k["name"] for k in kernels if k["exponents"][0]} >= {*PRODUCTS, *weights}
    for k in kernels:
        found, rounded = k["exponents"]
        assert rounded == found, k


@pytest.mark.slow
def test_hopper_multiplies_by_warpgroup(compiled):
    """The most important configurations: plain, ordinary head sizes, many queries."""
    kernels = result(compiled, "sm_90", "2", "dot")
    plain = [k for k in kernels if k["problem"] == "plain" and k["head_size"] <= 128]
    found = {k["name"] for k in plain if k["wgmma"] > 0}
    assert found == set(PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_no_kernel_copies_by_tensor_map(score, compiled):
    """Pointers serve every stride (docs/decisions/0007): the `wgmma` path has the tensor maps."""
    kernels = result(compiled, "sm_90", "2", score)
    assert {k["name"]: k["tensor_copies"] for k in kernels if k["tensor_copies"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128])
def test_forward_on_hopper_computes_the_softmax_once_beside_products(head_size, compiled):
    """A mask once made Triton compute it in two layouts, and ptxas wait for each product."""
    block = config.TABLE["fwd"]["sm_90", 2][head_size].plain
    scores = block.BLOCK_M * block.BLOCK_N // (32 * block.num_warps)  # of a thread, in an iteration
    [kernel] = [
        k
        for k in result(compiled, "sm_90", "2", "dot")
        if (k["name"], k["problem"], k["head_size"]) == ("sdpa_fwd_kernel", "plain", head_size)
    ]
    assert len(kernel["product_loops"]) == 2  # over masked and over full tiles
    for loop in kernel["product_loops"]:
        assert loop["waits"] <= 2, loop
        assert scores <= loop["mufu"] <= 1.1 * scores, loop


# Issue slots a score in the loop over full tiles, and columns of the narrowest product: products of
# 32 columns wait for shared memory.
STEPS = {
    ("sdpa_fwd_kernel", 64): (9.2, 64), ("sdpa_fwd_kernel", 128): (10.2, 128),
    ("sdpa_bwd_dq_kernel", 64): (11.2, 64), ("sdpa_bwd_dq_kernel", 128): (13.2, 64),
    ("sdpa_bwd_dkdv_kernel", 64): (15.2, 64), ("sdpa_bwd_dkdv_kernel", 128): (18.2, 64),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_size"), STEPS)
def test_steps_on_hopper_are_short_and_have_wide_products(name, head_size, compiled):
    [kernel] = [
        k
        for k in result(compiled, "sm_90", "2", "dot")
        if (k["name"], k["problem"], k["head_size"]) == (name, "plain", head_size)
    ]
    block = config.TABLE[name.split("_")[-2]]["sm_90", 2][head_size].plain
    scores = block.BLOCK_M * block.BLOCK_N // (32 * block.num_warps)  # of a thread, in an iteration
    slots, columns = STEPS[name, head_size]
    masked, full = kernel["product_loops"]
    assert full["slots"] <= slots * scores, full
    for loop in masked, full:
        assert loop["local"] == 0, loop
        assert loop["columns"] >= columns, loop


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_additive_score_is_near_what_its_reciprocals_allow(arch, head_size, compiled):
    """Half a reciprocal an element, 16 a clock, and 128 issue slots: 4 are free, 5 cost 20%."""
    row = config.TABLE["additive_fwd"][arch, 2][head_size].plain
    elements = 2 * row.BLOCK_M * row.BLOCK_N // (32 * row.num_warps)  # of a thread, in an iteration
    [kernel] = [
        k
        for k in result(compiled, arch, "2", "additive")
        if (k["name"], k["problem"], k["head_size"]) == ("sdpa_fwd_kernel", "plain", head_size)
    ]
    # The loops over masked and over full tiles. A third loop handles a slice of a tile with NaN.
    loops = sorted(kernel["paired_loops"], key=lambda loop: loop["slots"])[-2:]
    assert len(loops) == 2
    for loop in loops:
        assert loop["local"] == 0, loop
        assert loop["slots"] <= 5.0 * elements, loop
        assert loop["mufu"] <= 0.55 * elements, loop
        assert loop["mufu"] >= 0.5 * elements, f"not the loop that is meant: {loop}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_scores_of_few_queries_have_one_order(arch, compiled):
    """Both passes launch the same machine code, and nothing else computes such a score."""
    kernels = [
        k for k in result(compiled, arch, "2", "additive") if k["problem"].endswith("decode")
    ]
    for size in {k["head_size"] for k in kernels}:
        for problem in {k["problem"] for k in kernels}:
            here = [k for k in kernels if (k["head_size"], k["problem"]) == (size, problem)]
            found = [k["hash"] for k in here if k["name"] == "additive_row_scores_kernel"]
            assert len(found) == 2, (size, problem)
            assert len({*found}) == 1, (size, problem)
            assert not any(k["paired_loops"] for k in here), (size, problem)
    assert kernels


# Issue slots an element: for the score, which backward recomputes, and for the gradients.
BACKWARD = {"dq": (6.0, 20.0), "dkdv": (7.5, 16.0)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("kernel", BACKWARD)
def test_no_element_of_an_additive_gradient_is_computed_twice(kernel, arch, head_size, compiled):
    """Too many warps for a tile's strips of 16 rows compute elements again: 4 times the work."""
    row = config.TABLE[f"additive_{kernel}"][arch, 2][head_size].plain
    elements = 2 * row.BLOCK_M * row.BLOCK_N // (32 * row.num_warps)
    found = [
        k
        for k in result(compiled, arch, "2", "additive")
        if (k["problem"], k["head_size"]) == ("plain", head_size)
        and k["name"] == f"sdpa_bwd_{kernel}_kernel"
        and k["gradient_loops"]
    ]
    assert found
    for kind, slots in zip(("paired_loops", "gradient_loops"), BACKWARD[kernel], strict=True):
        assert found[0][kind], kind
        for loop in found[0][kind]:
            assert loop["slots"] <= slots * elements, (kind, loop)
            assert loop["mufu"] <= 0.55 * elements, (kind, loop)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kernel", ["sdpa_fwd_kernel", "sdpa_bwd_dq_kernel"])
def test_the_gaussian_score_is_near_its_operations(kernel, head_size, arch, compiled):
    """3 a pair and a dim, and the loads of a thread's rows and keys; gradients take 7 and sums.

    Two warps with one strip of 16 rows would compute its gradients twice.
    """
    row = config.TABLE["gaussian_dq"][arch, 2][head_size].plain
    pairs = row.BLOCK_M * row.BLOCK_N // (32 * row.num_warps)  # of a thread
    found = [
        k["difference_loops"]
        for k in result(compiled, arch, "2", "gaussian")
        if (k["name"], k["problem"], k["head_size"]) == (kernel, "plain", head_size)
    ]
    if not found:
        pytest.skip("only with FASTATTN_AOT=all, as in `make test-kernels`")
    [loops] = found
    scores = [x for x in loops if not x["stores"] and x["slots"] <= 4.5 * x["fma"]]
    assert len(scores) >= 2, loops  # masked tiles and full ones; a slice of a tile loads more
    gradients = [x for x in loops if x["stores"]]
    assert len(gradients) == (2 if kernel == "sdpa_bwd_dq_kernel" else 0), loops
    assert all(x["slots"] <= 13 * pairs for x in gradients), loops
    assert not any(x["local"] for x in loops), loops


# Architectures for which a few kernels are compiled: they fit, and use the tensor cores.
PLAUSIBLE = {"gfx942": (65_536, "mfma"), "sm_100": (232_448, "tcgen05")}


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("arch", PLAUSIBLE)
def test_other_architectures_are_plausible(arch, score):
    if CHOSEN is USUAL:
        pytest.skip("only with FASTATTN_AOT=all, as in `make test-kernels`")
    shared, products = PLAUSIBLE[arch]
    kernels = compile_all((arch, "2", score, "plain", "plain decode"))
    for k in kernels:
        assert k["shared"] <= shared, k
        assert k["spills"] == 0 or arch == "sm_100", k
        assert k.get("tensor_memory", 0) <= 512, k  # columns
        if k["name"] in PRODUCTS and k["problem"] == "plain" and k["head_size"] == 64:
            assert k[products] > 0 or k.get("mma", 0) > 0, k


# Triton makes sizes and strides of 1 constants; the interpreter does not.
ONES = ("M1-N1", "D1-E1", "gqa-decode", "kv-len-rows", "layout-expanded")


@pytest.mark.slow
def test_triton_accepts_the_cases_of_the_grid():
    found = compile_all(("sm_90", "grid", *(ONES if CHOSEN is USUAL else ())))
    assert found["refused"] == {}
    assert {*PRODUCTS, "additive_row_scores_kernel"} <= set(found["accepted"])


@pytest.mark.slow
def test_a_cache_is_made_without_a_gpu(tmp_path):
    """Its machine code is enough: docs/gpu-kernels.md leaves out the rest."""
    if CHOSEN is USUAL:
        pytest.skip("only with FASTATTN_AOT=all, as in `make test-kernels`")

    def made() -> dict[Path, int]:
        run_aot(("sm_90", "cache", "M1-N1"), tmp_path)
        return {x: x.stat().st_mtime_ns for x in tmp_path.rglob("*.cubin")}

    first = made()
    assert {x.stem for x in first} >= {*PRODUCTS}
    for path in tmp_path.rglob("*.*"):
        if path.suffix not in (".cubin", ".json"):
            path.unlink()
    assert made() == first


# How many kernels a sweep of aot.py may make of one launch: by parity of a mask's strides, with
# keys in chunks or without, aligned or not. Sizes themselves make none.
SWEEPS = {
    "plain": 1, "causal": 1, "cross": 1, "keep": 3, "lengths": 2, "intervals": 2, "decode": 2,
    "unaligned": 2,
}  # fmt: skip
# Kernels that are launched in several forms.
FORMS = {
    "classify_kernel": 3, "additive_factors_kernel": 4, "gaussian_side_kernel": 4,
    "sdpa_bwd_dkdv_kernel": 2, "sdpa_bwd_merge_kernel": 2,
}  # fmt: skip


@pytest.mark.slow
def test_sizes_make_no_kernels_and_a_capture_compiles_none():
    found = compile_all(("sm_90", "variants"))
    assert len(found["variants"]) == len(SCORES) * len(SWEEPS)
    for name, kernels in found["variants"].items():
        for kernel, count in kernels.items():
            assert count <= SWEEPS[name.split()[1]] * FORMS.get(kernel, 1), (name, kernel, count)
    assert "sdpa_fwd_kernel is not compiled" in found["error"]
    assert "once before the capture" in found["error"]


@pytest.mark.slow
def test_rows_of_whole_chunks_are_copied_in_chunks():
    """Rows of 72 begin at multiples of 16 bytes, as rows of 64 do. Those of 76 do not."""
    found = compile_all(("sm_90", "copies"))
    for size in ("64", "72"):
        wide, narrow = found[size]
        assert wide > 0, found
        assert narrow == 0, found
    assert found["76"][0] == 0, found


def test_every_architecture_has_every_row():
    archs = {key for rows in config.TABLE.values() for key in rows}
    assert {a for a, _ in archs} == {"sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter"}
    for kernel, rows in config.TABLE.items():
        assert rows.keys() == archs, kernel
        assert all(row.keys() == set(config.HEAD_SIZES) for row in rows.values()), kernel


@pytest.mark.parametrize(
    ("capability", "rows"),
    [((9, 0), "sm_90"), ((10, 3), "sm_100"), ((11, 0), "sm_100"), ((12, 0), "sm_86")],
)
def test_rows_of_newer_devices(capability, rows, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert config.architecture.__wrapped__(torch.device("cuda", 0)) == rows


@pytest.mark.parametrize(("size", "padded"), [(0, 16), (1, 16), (17, 32), (64, 64), (65, 128)])
def test_head_sizes_are_padded(size, padded):
    assert config.padded(size) == padded
