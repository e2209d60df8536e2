"""Modules on a mesh compute what they compute in one process."""

from functools import partial

import pytest
from parallel_cases import CASES, compare
from parallel_promises import PROMISES
from parallel_refusals import REFUSALS
from ranks import by_name

CALLS = {f"{case}-{way}": partial(compare, case, way) for case, way in CASES}
CALLS |= {call.__name__: call for call in PROMISES + REFUSALS}


@pytest.fixture(scope="module")
def outcomes():
    return by_name(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
