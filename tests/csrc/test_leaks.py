"""Memory after many calls of every compiled operator: what a call took, it gives back.

But for cpu_isa and cpu_isas: torch's stable ABI never frees a str that an operator returns, and
these are asked once or twice in the life of a process.
"""

import os

import pytest
import torch

from fastattn.problem import WEIGHTS

pytestmark = pytest.mark.usefixtures("extension")

operators = torch.ops.fastattn
CALLS = int(os.environ.get("FASTATTN_TEST_CALLS", "100000"))  # fewer where a sanitizer counts
MOST = 1 << 20  # bytes: ten a call


def problem():
    """The arguments of forward: as small as they can be, with one of each kind."""
    x, one = torch.randn(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.int32)
    return (x, x, x, None, None, one, None, torch.tensor(1), None, 0, 1.0, 0.5, WEIGHTS["full"])


def gradients():
    out, lse, weights, stats = operators.forward(*problem())
    return (*problem(), out, stats, out, lse, weights, False)


def module():
    x, in_weight, out_weight = torch.randn(1, 1, 1), torch.randn(3, 1), torch.randn(1, 1)
    return (x, in_weight, None, out_weight, None, 1, 1.0, WEIGHTS["mean"], True)


CASES = {
    "forward": problem,
    "backward": gradients,
    "self_attention": module,
    "linear": lambda: (torch.randn(1, 1, 1), torch.randn(1, 1), torch.randn(1)),
    "select_cpu_isa": lambda: ("no instruction set has a name of so many letters",),
}


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", CASES)
def test_calls_leave_nothing_behind(name):
    call, arguments = getattr(operators, name).default, CASES[name]()
    for _ in range(CALLS // 10):  # allocators reach their size
        call(*arguments)
    before = resident()
    for _ in range(CALLS):
        call(*arguments)
    assert resident() - before < MOST
