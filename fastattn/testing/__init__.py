"""What tests and benchmarks share: the case grid, the error budget, and NaN poisoning.

A :class:`Case` names a problem, and four functions serve it::

    make      draws its tensors, from the case's own seed
    run       outputs and gradients by one of our backends
    exact     the same by the float64 reference
    plain     the same by ordinary PyTorch, in the case's dtype

:func:`assert_within_budget` compares the three results::

    error(ours) <= 2 * error(plain PyTorch, same dtype) + a few ulp of the largest value.

No other tolerance compares a result with the reference.
"""

from fastattn.testing.budget import (
    ULPS,
    Oracle,
    assert_within_budget,
    budget,
    error,
    error_ratio,
    largest,
    oracle,
    poisoned,
)
from fastattn.testing.cases import INPUTS, Case, Tensors, given_bias, make
from fastattn.testing.checks import assert_invariants, assert_same_bits, check, check_blocks, spoil
from fastattn.testing.grid import GRID
from fastattn.testing.runners import DROPOUT_SEED, exact, plain, run

__all__ = [
    "DROPOUT_SEED",
    "GRID",
    "INPUTS",
    "ULPS",
    "Case",
    "Oracle",
    "Tensors",
    "assert_invariants",
    "assert_same_bits",
    "assert_within_budget",
    "budget",
    "check",
    "check_blocks",
    "error",
    "error_ratio",
    "exact",
    "given_bias",
    "largest",
    "make",
    "oracle",
    "plain",
    "poisoned",
    "run",
    "spoil",
]
