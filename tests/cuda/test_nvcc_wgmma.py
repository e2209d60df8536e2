"""The machine code of the forward pass by products of warpgroups: slots, waits, registers."""

from typing import NamedTuple

import pytest
import sass
from machine_code import listings
from toolkit import find_nvcc

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")

SOURCE = "dot/forward_wgmma.cu"


class Loop(NamedTuple):
    """What a tile without masks may take, a thread."""

    scores: int
    steady: int  # issue slots while no maximum grows
    slots: int  # at most
    products: int


# By head size, and whether there is a softcap.
LOOPS = {
    (64, False): Loop(64, 440, 500, 12),
    (128, False): Loop(64, 460, 550, 16),
    (256, False): Loop(40, 375, 520, 21),
    (128, True): Loop(64, 1830, 1920, 16),
    (256, True): Loop(40, 1240, 1380, 21),
}

every_kernel = pytest.mark.parametrize("which", LOOPS, ids=str)


@pytest.fixture(params=["1", "2"], ids=["bf16", "fp16"])
def kernel(request, which):
    """The kernel of a dtype, by the numbers in its mangled name."""
    size, capped = which
    arguments = f"DTypeE{request.param}ELi{size}ELb{capped:d}E"
    [found] = [x for x in listings(SOURCE, "sm_90a") if arguments in x.partition("\n")[0]]
    return found


def test_the_table_has_all_kernels():
    assert len(listings(SOURCE, "sm_90a")) == 2 * len(LOOPS)


@every_kernel
def test_the_loop_without_masks(which, kernel):
    budget, (_, capped) = LOOPS[which], which
    loop = min(sass.product_loops(kernel), key=lambda loop: loop["slots"])
    assert loop["steady_slots"] <= budget.steady, loop
    assert loop["slots"] <= budget.slots, loop
    assert loop["products"] == budget.products, loop
    # An exponential a score. Under a softcap a reciprocal as well, and one of its scale.
    special = 2 * budget.scores + 1 if capped else budget.scores
    assert loop["steady_mufu"] == special, loop
    assert loop["mufu"] == loop["steady_mufu"] + 2, loop  # of two rows whose maximum rises
    assert loop["local"] == 0, loop


@every_kernel
def test_products_run_beside_each_other(kernel):
    """ptxas waits after each product where it cannot tell what they depend on."""
    for loop in sass.product_loops(kernel):
        assert loop["waits"] == 2, loop


@every_kernel
def test_nothing_touches_the_registers_of_a_product(kernel):
    assert "HGMMA" in kernel
    assert sass.early_accesses(kernel) == []
    assert sass.late_writes(kernel) == []
