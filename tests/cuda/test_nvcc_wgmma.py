"""The machine code of the passes by products of warpgroups: slots, waits, registers.

A forward tile has 64 x 128 scores a warpgroup, which is 64 a thread. A backward tile has 64 x 64.
"""

import re
from dataclasses import dataclass

import pytest
import sass
from machine_code import cuobjdump, kernel_name, listings, object_of
from toolkit import find_nvcc

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


@dataclass(frozen=True)
class Loop:
    """The loop over tiles without a mask: issue slots while no maximum grows, and at most."""

    source: str
    kernel: str
    size: int  # of heads
    scores: int  # a thread
    steady_slots: int
    slots: int
    products: int
    rare_mufu: int = 0  # for each of two rows whose maximum rises
    waits: int = 2
    capped: bool = False

    @property
    def special(self) -> int:
        """An exponential a score; under a softcap a reciprocal as well."""
        return 2 * self.scores if self.capped else self.scores


FORWARD = "dot/forward_wgmma.cu", "sdpa_wgmma_kernel"
KEYS = "dot/backward_wgmma.cu", "sdpa_wgmma_dkdv_kernel"
QUERIES = "dot/backward_wgmma.cu", "sdpa_wgmma_dq_kernel"
LOOPS = [
    Loop(*FORWARD, 64, 64, 444, 504, 12, rare_mufu=2),
    Loop(*FORWARD, 128, 64, 462, 554, 16, rare_mufu=2),
    Loop(*FORWARD, 256, 40, 373, 523, 21, rare_mufu=2),
    Loop(*FORWARD, 128, 64, 1798, 1890, 16, rare_mufu=2, capped=True),
    Loop(*FORWARD, 256, 40, 1215, 1365, 21, rare_mufu=2, capped=True),
    Loop(*KEYS, 64, 32, 366, 366, 16, waits=3),
    Loop(*KEYS, 128, 32, 417, 417, 24, waits=3),
    Loop(*QUERIES, 64, 32, 325, 333, 12),
    Loop(*QUERIES, 128, 32, 378, 386, 20),
]

every_loop = pytest.mark.parametrize(
    "loop", LOOPS, ids=lambda x: f"{x.kernel}-{x.size}{'-capped' * x.capped}"
)


@pytest.fixture(params=["1", "2"], ids=["bf16", "fp16"])
def kernel(request, loop):
    """The machine code of a kernel for a dtype, by the numbers in its mangled name."""
    cap = f"Lb{loop.capped:d}E" if loop.source == FORWARD[0] else ""
    wanted = re.compile(rf"\d{loop.kernel}\w*DTypeE{request.param}ELi{loop.size}E{cap}")
    [found] = [x for x in listings(loop.source, "sm_90a") if wanted.search(x.partition("\n")[0])]
    return found


@pytest.mark.parametrize("source", sorted({loop.source for loop in LOOPS}))
def test_the_table_has_all_kernels(source):
    known = [loop for loop in LOOPS if loop.source == source]
    assert len(listings(source, "sm_90a")) == 2 * len(known)


@every_loop
def test_the_loop_without_masks(loop, kernel):
    found = min(sass.product_loops(kernel), key=lambda x: x["slots"])
    assert found["steady_slots"] <= loop.steady_slots, found
    assert found["slots"] <= loop.slots, found
    assert found["products"] == loop.products, found
    assert found["steady_mufu"] == loop.special, found
    assert found["mufu"] == loop.special + loop.rare_mufu, found
    assert found["local"] == 0, found


@every_loop
def test_products_run_beside_each_other(loop, kernel):
    """ptxas waits after each product where it cannot tell what they depend on."""
    found = min(sass.product_loops(kernel), key=lambda x: x["slots"])
    assert found["waits"] == loop.waits, found
    for other in sass.product_loops(kernel):
        same = loop.source == FORWARD[0]
        assert other["waits"] == loop.waits if same else other["waits"] <= loop.waits, other


@every_loop
def test_the_softmax_runs_beside_a_product(loop, kernel):
    """Of its own warpgroup, as of the other one: ptxas likes to move a wait up (0034)."""
    loops = sorted(sass.product_loops(kernel), key=lambda x: x["slots"])
    for found in loops if loop.source == FORWARD[0] else loops[:1]:
        assert found["beside"] >= loop.special, found


@every_loop
def test_nothing_touches_the_registers_of_a_product(loop, kernel):
    assert "HGMMA" in kernel
    assert sass.early_accesses(kernel) == []
    assert sass.late_writes(kernel) == []


@every_loop
def test_each_role_has_the_registers_that_it_uses(loop, kernel):
    """ptxas is not told which code runs with how many."""
    before = kernel.partition("USETMAXREG.TRY_ALLOC")[0]
    assert most_registers(before) <= launched(loop.kernel, loop.size)
    for change, work in (("USETMAXREG.TRY_ALLOC", "HGMMA"), ("USETMAXREG.DEALLOC", "UTMALDG")):
        code = "\n".join(sass.reached(kernel, change))
        assert work in code
        assert most_registers(code) <= int(re.search(rf"{change}.*?(0x[0-9a-f]+)", code)[1], 16)


def most_registers(code: str) -> int:
    return max(int(x) + 1 for x in re.findall(r"\bR(\d+)\b", code))


def launched(kernel: str, size: int) -> int:
    """Registers a thread of a block: the roles share them out, and wait for more for ever."""
    return 128 if (kernel, size) == (FORWARD[1], 64) else 168


@pytest.mark.parametrize("source", sorted({loop.source for loop in LOOPS}))
def test_blocks_are_launched_with_the_registers_that_their_roles_share_out(source):
    text = cuobjdump("-arch", "sm_90a", "-res-usage", object_of(source))
    found = re.findall(r"Function (\w+_wgmma_\w+):\s*\n.*?REG:(\d+)", text)
    assert len(found) > 7
    for name, registers in found:
        size = int(re.search(r"ELi(\d+)E", name)[1])
        assert int(registers) == launched(kernel_name(name), size), name
