"""Attention over the ranks of a mesh is attention on one device."""

import time
from functools import partial

import equality
import pytest
import torch
from context_cases import CASES, check
from context_compiled import COMPILED
from context_promises import PROMISES
from context_refusals import REFUSALS, two_ranks_leave
from ranks import by_name, on_ranks

from fastattn.distributed import Layout, shard

CALLS = {str(case): partial(check, case) for case in CASES}
CALLS |= {call.__name__: call for call in PROMISES + REFUSALS + COMPILED} | equality.CALLS


@pytest.fixture(scope="module")
def outcomes():
    return by_name(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]
    if name in equality.CALLS and (reason := equality.why_not()):
        pytest.skip(reason)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="no process group"):
        shard(torch.zeros(4), 0, Layout.contiguous(4, 1), None)


def test_a_rank_that_is_gone_is_an_error_and_no_hang():
    begin = time.monotonic()
    first, *gone = on_ranks(two_ranks_leave, size=3, timeout=10)
    assert gone == [None] * 2
    assert isinstance(first, list), first
    assert all(first)
    assert time.monotonic() - begin < 60
