"""DTensors at the public functions: the same results, whatever is sharded."""

import pytest
from dtensor_cases import CASES, check_all
from ranks import by_name

NAMES = [case.__name__ for case in CASES]


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    return by_name(NAMES, check_all)


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
