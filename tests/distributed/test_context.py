"""Attention over the ranks of a mesh is attention on one device."""

import time

import equality
import pytest
from context_cases import CASES, check_all
from context_compiled import COMPILED
from context_promises import PROMISES, two_ranks_leave
from context_refusals import REFUSALS
from ranks import by_name, errors_of, on_ranks

KEPT = PROMISES + REFUSALS + COMPILED
NAMES = [*map(str, CASES), *(promise.__name__ for promise in KEPT), *equality.NAMES]


def run_all():
    return check_all(CASES) + errors_of(KEPT) + equality.check_rows()


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    return by_name(NAMES, run_all)


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
    if name in equality.NAMES and (reason := equality.why_not()):
        pytest.skip(reason)


def test_a_rank_that_is_gone_is_an_error_and_no_hang():
    begin = time.monotonic()
    first, *gone = on_ranks(two_ranks_leave, size=3, timeout=10)
    assert gone == [None] * 2
    assert isinstance(first, list), first
    assert all(first)
    assert time.monotonic() - begin < 60
