"""Models of transformers whose heads several ranks share."""

import pytest

pytest.importorskip("transformers", "5", reason="make test-integrations has it")

from ranks import by_name
from tensor_parallel import CASES

CALLS = {case.__name__: case for case in CASES}


@pytest.fixture(scope="module")
def outcomes():
    return by_name(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
