"""Models of transformers whose heads several ranks share."""

import pytest

pytest.importorskip("transformers", "5", reason="make test-integrations has it")

from ranks import by_name
from tensor_parallel import CASES, check_all

NAMES = [case.__name__ for case in CASES]


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    return by_name(NAMES, check_all)


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
