"""The operands are listed once, and so are the fields of Mask."""

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

from fastattn import Mask
from fastattn.problem.schemas import COMPILED, GENERATED, Call, Saved

ROOT = Path(__file__).resolve().parents[2]
BINDING, IN_PYTHON = ("attention.cpp", "problem.h", "memory.h"), "fastattn/problem/schemas.py"


def test_c_plus_plus_gets_the_operands_with_their_defaults():
    made = GENERATED["operands.inc"]
    structs = re.findall(r"struct \w+ \{\n(.*?)\n\};", made, re.DOTALL)
    for record, members in zip((Call, Saved), structs, strict=True):
        assert re.findall(r"(\w+)(?: = .*)?;", members) == list(record._fields)
        assert members.count(" = ") == len(record._field_defaults)
    taken = re.findall(r"from\.take<.*>\(\),  // (\w+)", made)
    assert taken == [*Call._fields, *Saved._fields]
    assert "double scale = {1.0};" in made
    assert "OptTensor bias = {};" in made
    assert "bool wide = {false};" in made


def test_the_binding_reads_every_operand():
    text = "".join((ROOT / "csrc/binding" / name).read_text("utf-8") for name in BINDING)
    read = {(struct, name) for struct, name in re.findall(r"\b(in|saved)\.(\w+)", text)}
    wanted = {("in", name) for name in Call._fields} | {("saved", name) for name in Saved._fields}
    assert wanted <= read


def test_a_build_reads_the_schemas_without_torch():
    code = f"import runpy, sys; runpy.run_path({IN_PYTHON!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    assert runpy.run_path(str(ROOT / IN_PYTHON))["COMPILED"] == COMPILED


def sources() -> dict[str, str]:
    """All files except tests, by path."""
    folders = ("fastattn", "kernels", "csrc", "bench", "examples")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    kinds = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
    found = (path for path in files if path.suffix in kinds)
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


def listing(names: tuple[str, ...]) -> set[str]:
    """The sources in which these names follow each other."""
    between = r"\b.{1,60}?\b"
    pattern = re.compile(rf"\b{between.join(names)}\b", re.DOTALL)
    return {path for path, text in sources().items() if pattern.search(text)}


def test_nothing_else_lists_the_operands():
    n = Call._fields.index("kv_len")
    assert listing(Call._fields[n:]) == {IN_PYTHON}
    assert listing(Call._fields[n : n + 5]) == {IN_PYTHON}
    band = Call._fields.index("band_lo")
    assert listing(Call._fields[band : band + 4]) == {IN_PYTHON}
    assert listing(Call._fields[-5:]) == {IN_PYTHON}
    assert listing(Saved._fields[2:]) == {IN_PYTHON}


def test_nothing_else_lists_the_fields_of_a_mask():
    """Except for the check of each field, and its handling in the tests' cases."""
    fields = tuple(field.name for field in dataclasses.fields(Mask))
    elsewhere = listing(fields[1:]) - {"fastattn/problem/mask.py"}
    assert elsewhere <= {
        "fastattn/problem/validate.py", "fastattn/testing/cases.py", "fastattn/testing/grid.py",
    }  # fmt: skip
