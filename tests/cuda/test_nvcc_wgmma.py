"""The machine code of the forward pass by products of warpgroups: slots, waits, registers.

A warp's tile has 64 x 128 scores a warpgroup, which is 64 a thread.
"""

import pytest
import sass
from machine_code import listings
from toolkit import find_nvcc

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

SOURCE = "dot/forward_wgmma.cu"
# Of 64 scores a thread, by head size: issue slots while no maximum grows, and at most; products.
SLOTS = {64: (440, 500, 12), 128: (460, 550, 16)}


@pytest.fixture(params=["1", "2"], ids=["bf16", "fp16"])
def kernels(request):
    """{head size: the kernel} of a dtype, by the numbers in their mangled names."""
    named = {x.partition("\n")[0]: x for x in listings(SOURCE, "sm_90a")}
    found = {}
    for size in SLOTS:
        arguments = f"DTypeE{request.param}ELi{size}E"
        [found[size]] = [text for name, text in named.items() if arguments in name]
    return found


@pytest.mark.parametrize("size", SLOTS)
def test_the_loop_without_masks(size, kernels):
    steady, slots, products = SLOTS[size]
    loop = min(sass.product_loops(kernels[size]), key=lambda loop: loop["slots"])
    assert loop["steady_slots"] <= steady, loop
    assert loop["slots"] <= slots, loop
    assert loop["products"] == products, loop
    assert loop["steady_mufu"] == 64, loop  # an exponential an element
    assert loop["mufu"] == 66, loop  # and one for each of two rows whose maximum rises
    assert loop["local"] == 0, loop


@pytest.mark.parametrize("size", SLOTS)
def test_products_run_beside_each_other(size, kernels):
    """ptxas waits after each product where it cannot tell what they depend on."""
    for loop in sass.product_loops(kernels[size]):
        assert loop["waits"] == 2, loop


@pytest.mark.parametrize("size", SLOTS)
def test_nothing_touches_the_registers_of_a_product(size, kernels):
    assert "HGMMA" in kernels[size]
    assert sass.early_accesses(kernels[size]) == []
    assert sass.late_writes(kernels[size]) == []
