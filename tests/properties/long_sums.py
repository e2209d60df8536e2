"""Sums of thousands of terms. Their rounding must not grow as if each term followed the last."""

import pytest
from helpers import SCORES

from fastattn import testing
from fastattn.testing import Case

LONG = {
    "queries": dict(B=1, H=1, Hkv=1, M=200_000, N=8, bias="n"),
    "keys": dict(B=1, H=1, Hkv=1, M=20, N=8000),
    "unsplit keys": dict(B=1, H=1, Hkv=1, M=256, N=8000),  # a task of the CPU takes all of them
    "samples": dict(B=3000, H=4, Hkv=1, M=4, N=4, bias="hmn"),
}


def assert_long_sums(backend, score, **sizes):
    case = Case("long", score=score, **sizes)
    t = testing.make(case)
    # Sums of gradients have terms of one sign then.
    t.v.data += 1.0
    t.v.data[:, :, : case.N // 4] += 3.0
    t.grad_out += 1.0
    testing.oracle(case, t).check(case, testing.run(case, t, backend))


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("score", [*SCORES, "gaussian"])
def test_long_sums(backend, score, name):
    assert_long_sums(backend, score, **LONG[name])
