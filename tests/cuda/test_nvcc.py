"""The machine code of every CUDA kernel from `make build`: registers, spills, shared memory, loops.

The additive inner loop has two bounds. The special-function unit gives 16 results a clock and SM;
128 instructions are issued a clock.
"""

import re
from collections import Counter

import pytest
import sass
from machine_code import ROOT, instructions, kernel_name, listings, usage
from toolkit import find_nvcc

CUDA = ROOT / "csrc/cuda"
SOURCES = sorted(str(path.relative_to(CUDA)) for path in CUDA.rglob("*.cu"))
ARCHS = ("sm_80", "sm_90a")
THREADS = 128
REGISTERS = 65_536  # of an SM
STATIC_SHARED = 16 << 10

# Blocks that an SM must hold, as far as registers decide.
BLOCKS = {
    "additive_forward_kernel": 3,
    "additive_weights_kernel": 3,
    "additive_delta_kernel": 3,
    "additive_gradients_kernel": 3,
    "additive_bias_kernel": 2,
    "additive_few_kernel": 8,
    # Sums of 64 x 128 in a block take 64 registers a thread, scores 32.
    "sdpa_forward_kernel": 2,
    "sdpa_weights_kernel": 2,
    "sdpa_delta_kernel": 2,
    "sdpa_dq_kernel": 2,
    "sdpa_dkdv_kernel": 2,
    "sdpa_dbias_kernel": 2,
    # As large as these: a block of three warpgroups.
    "sdpa_wgmma_kernel": 3,
    "sdpa_wgmma_dkdv_kernel": 3,
    "sdpa_wgmma_dq_kernel": 3,
}

# Per score element of an inner loop: (issue slots, special-function operations). Loops are
# recognised by their reciprocals and, in direct tiles, exponentials.
LOOPS = {
    "additive_forward_kernel": {"scores": (3.6, 0.5), "direct scores": (7.7, 1.5)},
    "additive_gradients_kernel": {"gradients": (10.1, 0.5), "scores": (3.6, 0.5)},
}
SOURCE_OF = {
    "additive_forward_kernel": "additive/forward.cu",
    "additive_gradients_kernel": "additive/gradients.cu",
    "additive_bias_kernel": "additive/grad_bias.cu",
}
# Products of two 16-bit tiles of 64 x 64: 4 x 8 instructions a warp, in loops or not.
PRODUCTS = {
    "additive_forward_kernel": 1,  # P V
    "additive_gradients_kernel": 2,  # dO V^T, W^T dO
    "additive_bias_kernel": 1,  # dO V^T
}

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

every_kernel = pytest.mark.parametrize("source", SOURCES)
both_archs = pytest.mark.parametrize("arch", ARCHS)


@both_archs
@every_kernel
def test_registers_spills_and_shared_memory(source, arch):
    kernels = usage(source, arch)
    assert bool(kernels) == ("__global__" in (CUDA / source).read_text())
    for name, used in kernels.items():
        assert used["registers"] > 0, (name, used)
        assert used["spills"] == 0, (name, used)
        assert used["shared"] <= STATIC_SHARED, (name, used)
        blocks = REGISTERS // (used["registers"] * THREADS)
        assert blocks >= BLOCKS.get(name, 4), (name, used)


def test_budgets_name_kernels():
    kernels = {name for source in SOURCES for name in usage(source, "sm_80")}
    assert kernels >= BLOCKS.keys() | LOOPS.keys()


# ---- loops ----


def count(loop: Counter, operation: str) -> int:
    return sum(n for name, n in loop.items() if name.startswith(operation))


def inner_loops(source: str, arch: str, kernel: str) -> dict[str, tuple[float, float]]:
    """{"[direct ]scores" or "[direct ]gradients": (slots, special functions) an element}.

    Two elements share a reciprocal. A gradient squares each of them, a score does not.
    """
    found = {}
    for loop in sass.innermost_loops(instructions(source, arch)[kernel]):
        reciprocals, exponentials = count(loop, "MUFU.RCP"), count(loop, "MUFU.EX2")
        if reciprocals < 16:
            continue
        elements = 2 * reciprocals
        kind = "scores" if count(loop, "FMUL") < 1.7 * elements else "gradients"
        name = f"{'direct ' if exponentials else ''}{kind}"
        found[name] = (loop.total() / elements, (reciprocals + exponentials) / elements)
    return found


@both_archs
@pytest.mark.parametrize("kernel", LOOPS)
def test_inner_loops(kernel, arch):
    found = inner_loops(SOURCE_OF[kernel], arch, kernel)
    for name, (slots, special) in LOOPS[kernel].items():
        assert name in found, found
        assert found[name][0] <= slots, found
        assert found[name][1] <= special, found


@both_archs
@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        ("dot/forward.cu", "sdpa_forward_kernel"),
        ("dot/backward.cu", "sdpa_dq_kernel"),
        ("dot/backward.cu", "sdpa_dkdv_kernel"),
    ],
)
def test_copies_of_the_next_tile_begin_before_the_products_of_this_one(source, kernel, arch):
    """Without a wait for copies between both."""
    for listing in listings(source, arch):
        name = listing.partition("\n")[0]
        if kernel_name(name) == kernel and "HMMA" in listing:
            assert re.search(r"LDGSTS(?:(?!DEPBAR).)*?HMMA", listing, re.DOTALL), name


@both_archs
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_of_half_types_are_on_tensor_cores(kernel, arch):
    names = [(kernel_name(x.partition("\n")[0]), x) for x in listings(SOURCE_OF[kernel], arch)]
    codes = [code for name, code in names if name == kernel]
    assert len(codes) == 1  # additive and gaussian, with and without a softcap
    for code in codes:
        for operation in ("HMMA.16816.F32 ", "HMMA.16816.F32.BF16 "):
            assert code.count(operation) >= 8 * PRODUCTS[kernel], operation


def test_the_score_loop_is_bound_by_the_special_function_unit():
    """8 clocks a warp for a special function, 1 for an instruction: twice the tanh roof."""
    slots, special = inner_loops("additive/forward.cu", "sm_90a", "additive_forward_kernel")[
        "scores"
    ]
    assert slots <= 8 * special
    assert special <= 0.55
