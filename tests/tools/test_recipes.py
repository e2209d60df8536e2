"""The recipes of CONTRIBUTING name every source file that has what they tell how to add."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The neighbour that stands for all of its kind, and where it is only used.
NEIGHBOURS = {
    "A mask": ("kv_begin", {"fastattn/varlen.py", "fastattn/problem/jagged.py"}),
    "A score option (a transform of the logit)": ("softcap", set()),
}
recipes = pytest.mark.parametrize("recipe", NEIGHBOURS)


def expand(name: str) -> list[str]:
    """The names that a shell makes of ``a/{b,c}``."""
    if (found := re.search(r"\{([^{}]*)\}", name)) is None:
        return [name]
    ends = name[: found.start()], name[found.end() :]
    return [x for part in found[1].split(",") for x in expand(part.join(ends))]


def named(recipe: str) -> set[str]:
    """The files that a recipe names."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition(f"### {recipe}\n")[2].partition("\n### ")[0]
    return {x for name in re.findall(r"`(\w+/[^`\s]+\.[^`\s]+)`", section) for x in expand(name)}


def code(path: Path) -> str:
    """A source without comments and docstrings."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return re.sub(r"//.*", "", text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.unparse(tree)


def sources_with(word: str) -> set[str]:
    files = (x for folder in ("fastattn", "kernels", "csrc") for x in (ROOT / folder).rglob("*.*"))
    kinds = (".py", ".h", ".cpp", ".cu", ".cuh")
    texts = {str(x.relative_to(ROOT)): code(x) for x in files if x.suffix in kinds}
    names = {x for x, text in texts.items() if word in x or word in text}
    # The link to kernels/, and adapters of other packages' functions.
    return {x for x in names if not x.startswith(("fastattn/kernels/", "fastattn/integrations/"))}


@recipes
def test_it_names_every_file_with_its_neighbour(recipe):
    word, used = NEIGHBOURS[recipe]
    having = sources_with(word)
    assert len(having) > 9
    assert sorted(having - named(recipe) - used) == []


@recipes
def test_the_files_that_it_names_exist(recipe):
    assert [x for x in sorted(named(recipe)) if not (ROOT / x).is_file()] == []
