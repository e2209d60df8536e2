"""The names in annotations exist at run time. tests/typing tests what type checkers see."""

import inspect
from typing import get_args

from fastattn import functional, scores
from fastattn.backends import registry
from fastattn.problem import validate


def keywords(*functions):
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def test_attention_takes_what_the_functions_that_it_calls_take():
    functions = functional.scaled_dot_product_attention, functional.additive_attention
    assert keywords(scores.attention) == keywords(*functions) | {"score", "bandwidth"}


def test_names():
    assert get_args(functional.Backend) == ("auto", *registry.BACKENDS)
    assert {None, *get_args(functional.Returned)} == set(validate.RETURN_WEIGHTS)
