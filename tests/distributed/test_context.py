"""Attention over the ranks of a mesh is attention on one device."""

import pytest
from context_cases import CASES, check_all
from ranks import on_ranks


@pytest.fixture(scope="module")
def outcomes():
    """Of each case, on all ranks; processes start once."""
    found = on_ranks(check_all, CASES)
    return dict(zip(map(str, CASES), zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", list(map(str, CASES)))
def test_case(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
