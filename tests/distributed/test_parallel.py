"""Modules on a mesh compute what they compute in one process."""

import pytest
from parallel_cases import CASES, check_all
from parallel_promises import PROMISES
from parallel_refusals import REFUSALS
from ranks import by_name, errors_of

NAMES = [*(f"{case}-{way}" for case, way in CASES), *(x.__name__ for x in PROMISES + REFUSALS)]


def run_all():
    return check_all() + errors_of(PROMISES + REFUSALS)


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    return by_name(NAMES, run_all)


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
