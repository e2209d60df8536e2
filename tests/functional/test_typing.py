"""functional.pyi says what functional.py does; what checkers make of it is in tests/typing."""

import ast
import inspect
from pathlib import Path

import pytest

from fastattn import functional
from fastattn.backends import registry
from fastattn.problem import validate

STUB = ast.parse(Path(functional.__file__).with_suffix(".pyi").read_text())
NAMES = {
    node.targets[0].id: ast.literal_eval(node.value.slice)
    for node in STUB.body
    if isinstance(node, ast.Assign)
}
KEYWORDS = {
    node.name: [field.target.id for field in node.body]
    for node in STUB.body
    if isinstance(node, ast.ClassDef)
}
KEYWORDS["_ScoreOptions"] += KEYWORDS["_Options"]


def overloads(function: str) -> list[ast.arguments]:
    return [n.args for n in STUB.body if isinstance(n, ast.FunctionDef) and n.name == function]


def keywords(arguments: ast.arguments) -> set[str]:
    """Names that go by keyword only, those of a TypedDict included."""
    return {a.arg for a in arguments.kwonlyargs} | set(
        KEYWORDS[arguments.kwarg.annotation.slice.id]
    )


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "additive_attention"])
def test_signatures(name):
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(overloads(name)) == 5
    for arguments in overloads(name):
        assert [a.arg for a in arguments.args] == [p.name for p in positional]
        assert len(arguments.defaults) == sum(p.default is not p.empty for p in positional)
        assert keywords(arguments) == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_attention_takes_what_the_functions_that_it_calls_take():
    functions = (functional.attention, functional.scaled_dot_product_attention)
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    expected = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for arguments in overloads("attention"):
        assert {a.arg for a in arguments.args} | keywords(arguments) == expected


def test_names():
    assert NAMES["_Backend"] == ("auto", *registry.BACKENDS)
    assert NAMES["_Score"] == functional.SCORES
    assert {None, *NAMES["_Weights"]} == set(validate.RETURN_WEIGHTS)
