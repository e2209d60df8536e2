"""Every rank of a mesh finds what one device finds: calls, DTensors and modules."""

import time

import context_cases
import context_promises
import dtensor_cases
import equality
import parallel_cases
import parallel_promises
import pytest
from ranks import by_name, on_ranks

# What each part checks, by name, and the function that checks it on a rank.
PARTS = {
    "call": (context_cases.CASES, lambda: context_cases.check_all(context_cases.CASES)),
    "promise": (context_promises.PROMISES, context_promises.keep_all),
    "row": (equality.NAMES, equality.check_rows),
    "dtensor": (dtensor_cases.CASES, dtensor_cases.check_all),
    "module": ([f"{x}-{way}" for x, way in parallel_cases.CASES], parallel_cases.check_all),
    "parallelize": (parallel_promises.PROMISES, parallel_promises.keep_all),
}
NAMES = [
    f"{part}-{getattr(x, '__name__', x)}" for part, (checks, _) in PARTS.items() for x in checks
]


def run_all():
    return [error for _, check in PARTS.values() for error in check()]


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    assert len(set(NAMES)) == len(NAMES)
    return by_name(NAMES, run_all)


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]


def test_a_rank_that_is_gone_is_an_error_and_no_hang():
    begin = time.monotonic()
    *others, gone = on_ranks(context_promises.the_last_rank_leaves, timeout=10)
    assert gone is None
    assert all(others)
    assert not any("Traceback" in error for error in others), others
    assert time.monotonic() - begin < 60
