"""DTensors at the public functions: the same results, whatever is sharded."""

import pytest
from dtensor_cases import CASES, check_all
from ranks import on_ranks

NAMES = [case.__name__ for case in CASES]


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    found = on_ranks(check_all)
    assert all(isinstance(x, list) for x in found), found
    return dict(zip(NAMES, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
