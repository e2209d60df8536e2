"""Plants mistakes in the CUDA kernels and shows that the tests on the CPU find them.

    python tests/cuda/mutate.py [words of the names of mistakes]

Each mistake goes into a copy of csrc. Only the changed source is compiled again. The corner cases
then run on that library. Exits with 1 if a mistake is not found. Takes a few minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import host_build

# Compiled again: the mistakes are in one of these files or its headers. Its test finds them.
TESTS = {
    "dot/forward.cu": "test_cuda_sdpa.py",
    "dot/backward.cu": "test_cuda_sdpa.py",
    "dot/forward_wgmma.cu": "test_cuda_wgmma.py",
    "dot/backward_wgmma.cu": "test_cuda_wgmma.py",
    "additive/forward.cu": "test_cuda_additive.py",
    "additive/gradients.cu": "test_cuda_additive.py",
    "additive/gradient_sums.cu": "test_cuda_additive.py",
}


@dataclass(frozen=True)
class Mistake:
    name: str
    file: str
    right: str
    wrong: str
    found_by: str  # a text in pytest's output
    kind: str = "plain"
    source: str = "dot/forward.cu"
    test: str = ""  # that of the source by default


def of_warpgroups(name: str, right: str, wrong: str, found_by: str, file="wgmma_block.cuh"):
    """A mistake in the kernel of copies, barriers and products of warpgroups."""
    return Mistake(name, f"dot/{file}", right, wrong, found_by, source="dot/forward_wgmma.cu")


def of_large_heads(name: str, right: str, wrong: str) -> Mistake:
    """A mistake in the kernel that computes what these leave, of heads over 128."""
    test = TESTS["dot/forward_wgmma.cu"]
    return Mistake(name, "dot/forward.cu", right, wrong, "AssertionError", test=test)


def of_grads(name: str, right: str, wrong: str, found_by: str, file="wgmma_grads.cuh"):
    """The same in the backward pass."""
    return Mistake(name, f"dot/{file}", right, wrong, found_by, source="dot/backward_wgmma.cu")


def of_copies(name: str, right: str, wrong: str, file="turns.cuh"):
    """A mistake in the loop of dQ, or of dK and dV, with its copies ahead."""
    name, file, source = f"copies: {name}", f"dot/{file}", "dot/backward.cu"
    return Mistake(name, file, right, wrong, "AssertionError", source=source)


def of_halves(name: str, right: str, wrong: str, source: str, file="additive/half_products.cuh"):
    """A mistake in the additive score's products of 16-bit types."""
    return Mistake(f"halves: {name}", file, right, wrong, "AssertionError", source=source)


def of_one_pass(name: str, right: str, wrong: str, file="gradients.cu", source="gradients.cu"):
    """A mistake in the gradients of additive attention."""
    file, source = f"additive/{file}", f"additive/{source}"
    return Mistake(f"one pass: {name}", file, right, wrong, "AssertionError", source=source)


def of_parts(name: str, right: str, wrong: str) -> Mistake:
    """The same where parts are added up."""
    return of_one_pass(name, right, wrong, "gradient_sums.cu", "gradient_sums.cu")


LOAD = "if (aligned && r < rows && c + kChunk <= cols) {"
MISTAKES = [
    Mistake(
        "off by one: a tile load without its last row", "tile/half_tile.cuh",
        "chunk[i] = r < rows &&", "chunk[i] = r < rows - 1 &&", "AssertionError",
    ),
    Mistake(
        "off by one: a tile load of a row too many", "tile/half_tile.cuh",
        LOAD, LOAD.replace("r < rows", "r <= rows"), "heap-buffer-overflow", "sanitized",
    ),
    Mistake(
        "a missing barrier", "dot/forward.cu",
        "    wait_for_copies();\n    __syncthreads();\n    at.j0 += kTile;",
        "    wait_for_copies();\n    at.j0 += kTile;", "AssertionError",
    ),
    of_copies(
        "a V that comes while others read the last one",
        "    __syncthreads();  // others may still read V, and the bad rows of K\n", "",
        "backward.cu",
    ),
    of_copies(
        "stats that come while others read the last ones",
        "    __syncthreads();  // others may still read the stats, and the bad rows of Q and dO\n",
        "", "backward.cu",
    ),
    of_copies(
        "a dO that comes while others read the last one",
        "    __syncthreads();  // others may still read dO, and bad_rows\n", "", "backward.cu",
    ),
    of_copies(
        "one place for this tile and the next", "odd ? first : memory.other", "place(first)",
    ),
    of_copies("no wait", "    wait_for_copies();\n    __syncthreads();", "    __syncthreads();"),
    of_copies(
        "a tile that others still copy", "    wait_for_copies();\n    __syncthreads();",
        "    wait_for_copies();",
    ),
    of_copies("the mask of the next tile", "false, here().full", "false, next().full"),
    of_copies("the bits of the last tile", "bits = of_next, ", ""),
    of_copies(
        "one head of those that share keys", "n >= heads * tiles", "n >= tiles", "backward.cu",
    ),
    Mistake(
        "a wrong lane of a matrix operand", "tile/half_tile.cuh",
        "8 * n + lane % 8 + lane / 16 * 8", "8 * n + lane % 8 + lane / 8 % 2 * 8", "AssertionError",
    ),
    Mistake(
        "a ratio of a softcap that is wrong near 1", "tile/curve.cuh",
        "fmaf(-2.f, reciprocal, 1.f)", "1.f", "AssertionError",
    ),
    Mistake(
        "a softcap without its slope", "dot/backward.cuh", "*= slope",
        "*= slope == 0.f ? 0.f : 1.f", "AssertionError", source="dot/backward.cu",
    ),
    of_halves(
        "values that garbage takes out of every row", "= kept(bits, i % kRows, j % kCols)", "= 0",
        "additive/forward.cu",
    ),
    of_halves(
        "garbage that reaches masked rows", "= kept(bits, i % kRows, j % kCols)", "= 1",
        "additive/forward.cu",
    ),
    of_halves(
        "products of a tile that others still copy",
        "  wait_for_copies();\n  __syncthreads();\n  const bool bad", "  wait_for_copies();\n"
        "  const bool bad", "additive/forward.cu",
    ),
    of_halves(
        "a wrong lane of transposed weights", "16 * k + lane % 8 + lane / 16 * 8",
        "16 * k + lane % 8 + lane / 8 % 2 * 8", "additive/gradients.cu", "tile/half_tile.cuh",
    ),
    of_halves(
        "sums that a lane reads too early", "  __syncwarp();\n  row = ", "  row = ",
        "additive/gradients.cu",
    ),
    of_one_pass(
        "a group adds to passing sums that are not there yet",
        "      if (turn > 0) __syncthreads();\n", "",
    ),
    of_one_pass("the first group adds to the tile before", "pass_on(turn == 0,", "pass_on(false,"),
    of_one_pass("sums of rows that others have", "last_row0(key0) + n", "key0 + n"),
    of_one_pass("a slice from the wrong tile on", "first + (slice", "(slice"),
    of_parts("parts of one slice", "add_parts(parts, a.plan.slices_n,", "add_parts(parts, 1,"),
    of_parts("dk of one head for all that share the keys", "parts + g * of_head", "parts"),
    of_parts("weights of one head for all", "at.h = static_cast<int>(hkv * group + g);", ""),
    of_one_pass("dw of one group", "n < kOwnGroups; ++n) sum", "n < 1; ++n) sum"),
    of_one_pass("dims of a neighbour", "lane / 8 % 2 * kOwnDims", "lane / 8 % 2",
                "terms.cuh"),
    of_one_pass("the other dim's reciprocal", "reciprocal * x[1 - d]", "reciprocal * x[d]",
                "terms.cuh"),
    of_warpgroups(
        "a descriptor: the distance between groups of rows",
        "kAlongRows = {0, 8 * kRowBytes}", "kAlongRows = {0, 4 * kRowBytes}", "AssertionError",
    ),
    of_warpgroups(
        "a descriptor: the distance between panels",
        "= {kKeys * kRowBytes,", "= {kTile * kRowBytes,", "AssertionError",
    ),
    of_warpgroups(
        "a descriptor: panels of a tile of 80 keys", "8 * kTiles * kRowBytes", "128 * kRowBytes",
        "AssertionError",
    ),
    of_warpgroups(
        "masks of a tile of 80 keys: its other half",
        "at.j0 = j0 + n * 8 * Half::kTiles", "at.j0 = j0 + n * kTile", "AssertionError",
    ),
    of_warpgroups(
        "copies of a tile of 80 keys: the next tile", "tile * kKeys, at.hkv", "tile * 128, at.hkv",
        "AssertionError", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "a kernel with a softcap that caps nothing",
        "if constexpr (kCurved) curve_scores(p, s);", "", "AssertionError",
    ),
    of_warpgroups(
        "a softcap that no masked tile has",
        "if constexpr (kCurved) curve_scores", "if constexpr (kCurved && !kMasked) curve_scores",
        "AssertionError",
    ),
    of_large_heads(
        "a large head: the other columns of the values", "a.p.v = from_column(v, first)",
        "a.p.v = v",
    ),
    of_large_heads(
        "a large head: the other columns of the result", "a.p.out = from_column(out, first)",
        "a.p.out = out",
    ),
    of_warpgroups(
        "no fence after the barriers are initialised", "  publish_barriers();\n", "",
        "a barrier that only its own thread can see", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "half the bytes expected", "arrive_and_expect(full, sizeof(to))",
        "arrive_and_expect(full, sizeof(to) / 2)", "RuntimeError", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "the producer does not wait for a free stage",
        "    wait_for_phase(&memory.k_empty[to.number], to.parity ^ 1);\n", "",
        "more arrivals at a barrier", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "the producer waits for the wrong phase", "v_empty[to.number], to.parity ^ 1",
        "v_empty[to.number], to.parity", "deadlock", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "scores are read while they are made", "    wait_for_products<1>();\n", "", "Error",
    ),
    of_warpgroups(
        "products of keys that have not come",
        "    wait_for_phase(&memory.k_full[of_scores.number], of_scores.parity);\n", "", "Error",
    ),
    of_warpgroups(
        "no fence before a group", "hold(o);\n  fence_products();\n", "hold(o);\n",
        "a product without a fence",
    ),
    of_warpgroups(
        "weights are written while a product reads them",
        "    wait_for_products<0>();\n    take_values();\n    rescale(",
        "    pack_weights<kType>(s, w);\n    wait_for_products<0>();\n    take_values();\n"
        "    rescale(", "AssertionError",
    ),
    of_warpgroups(
        "the producer keeps its registers", "    give_registers<kProducerRegisters>();\n", "",
        "deadlock", "forward_wgmma.cu",
    ),
    of_warpgroups(
        "values are given back while a product reads them",
        "    wait_for_products<0>();\n    take_values();\n    rescale(",
        "    take_values();\n    wait_for_products<0>();\n    rescale(", "AssertionError",
    ),
    of_grads(
        "gradients, a descriptor: the distance between panels",
        "kDownColumns<kTile>)", "kDownColumns<2 * kTile>)", "AssertionError",
    ),
    of_grads(
        "gradients, a descriptor: the wrong operand passes by",
        "stage.number * kStage + kPassing), of_weights", "stage.number * kStage), of_weights",
        "AssertionError",
    ),
    of_grads(
        "gradients: no fence after the barriers are initialised", "  publish_barriers();\n", "",
        "a barrier that only its own thread can see", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: half the bytes expected", "arrive_and_expect(full, sizeof(memory.passing[0]))",
        "arrive_and_expect(full, sizeof(memory.passing[0]) / 2)", "RuntimeError",
        "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the producer does not wait for a free stage",
        "    wait_for_phase(&memory.empty[to.number], to.parity ^ 1);\n", "",
        "Error", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: the producer waits for the wrong phase", "empty[to.number], to.parity ^ 1",
        "empty[to.number], to.parity", "deadlock", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: stats that arrive before they are loaded",
        "    if (kOfKeys) load_stats(a.p, here, memory.rows[to.number]);\n"
        "    arrive_with_stats(full);",
        "    arrive_with_stats(full);\n"
        "    if (kOfKeys) load_stats(a.p, here, memory.rows[to.number]);",
        "AssertionError", "backward_wgmma.cu",
    ),
    of_grads(
        "gradients: products of what does not stay yet",
        "    wait_for_phase(&memory.own_full, 0);\n", "", "Error",
    ),
    of_grads(
        "gradients: products of what has not come",
        "    wait_for_phase(&memory.full[stage.number], stage.parity);\n", "", "Error",
    ),
    of_grads(
        "gradients: scores are read while they are made",
        "    wait_for_products<1>();\n    hold(s);\n", "    hold(s);\n", "AssertionError",
    ),
    of_grads(
        "gradients: dP is read while it is made", "wait_for_products<kOfKeys ? 1 : 0>();",
        "wait_for_products<kOfKeys ? 2 : 1>();", "AssertionError",
    ),
    of_grads(
        "gradients: a masked tile without a wait",
        "    wait_for_products<0>();\n    hold(s), hold(ds);\n", "    hold(s), hold(ds);\n",
        "AssertionError",
    ),
    of_grads(
        "gradients: a full tile is left while products read it",
        "    start_of_scores();\n    wait_for_products<0>();\n    leave_stage();\n  }\n\n"
        "  __device__ __forceinline__ void masked_tile",
        "    start_of_scores();\n    leave_stage();\n    wait_for_products<0>();\n  }\n\n"
        "  __device__ __forceinline__ void masked_tile", "AssertionError",
    ),
    of_grads(
        "gradients: a masked tile is left while products read it",
        "    start_of_scores();\n    wait_for_products<0>();\n    leave_stage();\n  }\n\n"
        "  __device__ __forceinline__ void run",
        "    start_of_scores();\n    leave_stage();\n    wait_for_products<0>();\n  }\n\n"
        "  __device__ __forceinline__ void run", "AssertionError",
    ),
    of_grads(
        "gradients: no tile is ever left", "    release(&memory.empty[stage.number]);\n", "",
        "deadlock",
    ),
    of_grads(
        "gradients: dW is not added to dP", "    start_products(true);\n",
        "    start_products(false);\n", "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dropout count as full",
        "masks_every_tile(p) || p.grad_weights.data != nullptr", "p.grad_weights.data != nullptr",
        "AssertionError",
    ),
    of_grads(
        "gradients: tiles with dW count as full", "masks_every_tile(p) || p.grad_weights.data",
        "masks_every_tile(p) || p.out.data == nullptr && p.grad_weights.data", "AssertionError",
    ),
    of_grads(
        "gradients: one head of those that share keys", "at.h += which.head, ", "",
        "AssertionError",
    ),
    of_grads(
        "gradients: the producer keeps its registers",
        "    give_registers<kProducerRegisters>();\n", "", "deadlock", "backward_wgmma.cu",
    ),
]  # fmt: skip


def build(mistake: Mistake, folder: Path) -> Path:
    """The library with the mistake."""
    csrc = folder / "csrc"
    shutil.copytree(host_build.ROOT / "csrc", csrc)
    text = (csrc / "cuda" / mistake.file).read_text()
    assert text.count(mistake.right) == 1, f"{mistake.name}: not found once in {mistake.file}"
    (csrc / "cuda" / mistake.file).write_text(text.replace(mistake.right, mistake.wrong))
    planted = folder / "planted.o"
    flags = f"{host_build.FLAGS} {host_build.KINDS[mistake.kind]}".split()
    include = [f"-I{host_build.SHIM}", f"-I{csrc}"]
    source = csrc / "cuda" / mistake.source
    compiler = host_build.compiler()
    host_build.run(
        [*compiler, *flags, *include, "-x", "c++", "-c", str(source), "-o", str(planted)]
    )
    replaced = host_build.target_of(source, mistake.kind)
    return host_build.link(
        [planted, *(x for x in host_build.objects(mistake.kind) if x != replaced)],
        mistake.kind, folder / "libplanted.so",
    )  # fmt: skip


def run_corners(mistake: Mistake, library: Path) -> subprocess.CompletedProcess:
    environment = dict(os.environ)
    if mistake.kind == "sanitized":
        environment = host_build.sanitizer_environment()
    environment |= {"FASTATTN_TEST_SHIM": mistake.kind, "FASTATTN_TEST_LIBRARY": str(library)}
    test = mistake.test or TESTS[mistake.source]
    tests = str(host_build.ROOT / "tests/cuda" / test)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--capture=sys", tests, "-k", "test_corner"],
        env=environment, cwd=host_build.ROOT, capture_output=True, text=True,
    )  # fmt: skip


def main() -> int:
    missed = 0
    for mistake in MISTAKES:
        if not all(word in mistake.name for word in sys.argv[1:]):
            continue
        host_build.library("kernels", mistake.kind)
        with tempfile.TemporaryDirectory() as folder:
            done = run_corners(mistake, build(mistake, Path(folder)))
        said = done.stdout + done.stderr
        found = done.returncode != 0 and mistake.found_by in said
        reports = [x for x in said.splitlines() if x.startswith(("E  ", "=="))]
        lines = [x for x in reports if mistake.found_by in x] or said.splitlines()[-3:]
        print(f"{'found ' if found else 'MISSED'}  {mistake.name}\n        {lines[0].strip()}")
        missed += not found
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
