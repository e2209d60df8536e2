"""The recipes of CONTRIBUTING name every file with what they add, and no file that is missing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTION = "A score option (a curve: a function of the score)"
MODULES = {"fastattn/modules/decoder/location.py", "fastattn/modules/multihead/inputs.py"}
# Tiles are masked where common_range holds nothing. A dense mask alone has lists of others.
LISTS = {f"csrc/cuda/dot/{x}" for x in ("wgmma_tiles.cuh", "forward_wgmma.cu", "backward_wgmma.cu")}
# Neighbours that stand for all of their kind, and where one is only used.
NEIGHBOURS = [
    ("A mask", "kv_begin", {"fastattn/problem/jagged.py"}),
    ("A mask", "has_dense", LISTS),
    ("A mask", "mask.keep", MODULES),
    (OPTION, "softcap", {"fastattn/backends/registry.py"}),
]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPES = re.findall(r"^### (.+)$", GUIDE, re.MULTILINE)


def expand(name: str) -> list[str]:
    """The names that a shell makes of ``a/{b,c}``."""
    if (found := re.search(r"\{([^{}]*)\}", name)) is None:
        return [name]
    ends = name[: found.start()], name[found.end() :]
    return [x for part in found[1].split(",") for x in expand(part.join(ends))]


def named(recipe: str) -> set[str]:
    """The files and folders that a recipe names."""
    section = GUIDE.partition(f"### {recipe}\n")[2]
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    return {x for name in re.findall(r"`(\w+/[^`\s]*)`", section) for x in expand(name)}


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
    has = re.compile(rf"{re.escape(word)}(?![a-z])").search
    files = (x for folder in ("fastattn", "kernels", "csrc") for x in (ROOT / folder).rglob("*.*"))
    kinds = (".py", ".h", ".cpp", ".cu", ".cuh")
    texts = {str(x.relative_to(ROOT)): code(x) for x in files if x.suffix in kinds}
    names = {x for x, text in texts.items() if has(x) or has(text)}
    # The link to kernels/, and adapters of other packages' functions.
    return {x for x in names if not x.startswith(("fastattn/kernels/", "fastattn/integrations/"))}


@pytest.mark.parametrize(("recipe", "word", "used"), NEIGHBOURS)
def test_it_names_every_file_with_its_neighbour(recipe, word, used):
    having = sources_with(word)
    assert len(having) > 4
    assert sorted(having - named(recipe) - used) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_it_names_exists(recipe):
    assert named(recipe)
    assert [x for x in sorted(named(recipe)) if not list(ROOT.glob(x))] == []
