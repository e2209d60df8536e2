"""Numbers of any size in any row: where products split numbers into parts, none may get lost."""

import pytest
import torch
from helpers import everything, inputs

from fastattn import testing

pytestmark = pytest.mark.usefixtures("extension")

# Factors of (query, key), whose scores stay moderate, of value and of grad_out.
FACTORS = {
    "tiny values": (1, 1, 1e-33, 1),
    "huge values": (1, 1, 1e30, 1e-10),
    "tiny gradients": (1, 1, 1, 1e-30),
    "huge gradients": (1, 1, 1e-5, 1e30),
    "tiny queries": (1e-33, 1e33, 1, 1),
    "huge queries": (1e33, 1e-33, 1, 1),
    "tiny scores": (1e-30, 1, 1, 1),
    "small": (1e-8, 1e8, 1e-8, 1e-8),
}


def check(call, grad_out):
    """Our results and gradients against float64's, with plain float32 as the peer."""
    ours = everything(call, grad_out, backend="cpu")
    plain = everything(call, grad_out, backend="eager")
    double = {name: x.double() for name, x in call.items()}
    truth = everything(double, grad_out.double(), backend="eager")
    for name, x in ours.items():
        testing.assert_within_budget(x, plain[name], truth[name], name)


def scaled(call, query, key, value, grad_out):
    call["query"], call["key"] = call["query"] * query, call["key"] * key
    call["value"] = call["value"] * value
    return call, torch.randn(call["query"].shape[:-1] + call["value"].shape[-1:]) * grad_out


@pytest.mark.parametrize("name", FACTORS)
def test_all_of_one_magnitude(isa, name):
    call, grad_out = scaled(inputs(M=70, N=140, D=40, E=24), *FACTORS[name])
    check(call, grad_out)


@pytest.mark.parametrize("name", FACTORS)
def test_some_rows_of_another_magnitude(isa, name):
    """Rows that are treated apart stand among others, in the same tile."""
    call, grad_out = scaled(inputs(M=70, N=140, D=40, E=24), 1, 1, 1, 1)
    other, other_grad = scaled({k: x.clone() for k, x in call.items()}, *FACTORS[name])
    query, key, value, grad = FACTORS[name]
    if query == 1:
        call["value"][:, :, ::7] = other["value"][:, :, ::7]
        grad_out[:, :, ::5] = other_grad[:, :, ::5]
    else:  # large scores of small queries with large keys would leave nothing else
        call["query"][:, :, ::5] *= min(query, 1)
        call["key"][:, :, ::7] *= min(key, 1)
    check(call, grad_out)
