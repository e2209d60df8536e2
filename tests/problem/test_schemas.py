"""The operands are listed once in Python and once in C++; the fields of Mask are as well."""

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fastattn import Mask
from fastattn.problem.schemas import COMPILED, Call, Saved

ROOT = Path(__file__).resolve().parents[2]
IN_CPP, IN_PYTHON = "csrc/binding/operands.h", "fastattn/problem/schemas.py"


@pytest.mark.parametrize("record", [Call, Saved])
def test_c_plus_plus_takes_them_in_the_order_of_the_schema(record):
    struct = {Call: "Operands", Saved: "Saved"}[record]
    body = re.search(rf"inline {struct} take_\w+\(.*?\n}}", (ROOT / IN_CPP).read_text(), re.DOTALL)
    taken = re.findall(r"from\.take<([\w:<>]+?)>\(\)", body[0])
    named = re.findall(r"in\.(\w+) = from\.take", body[0])
    assert len(taken) == len(record._fields)
    assert record._fields[3:] == tuple(named)
    assert record._fields[:3] in (("q", "k", "v"), ("out", "stats", "grad_out"))


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


def listing(names: tuple[str, ...], apart: int = 60) -> set[str]:
    """The sources in which these names follow each other."""
    between = rf"\b.{{1,{apart}}}?\b"
    pattern = re.compile(rf"\b{between.join(names)}\b", re.DOTALL)
    return {path for path, text in sources().items() if pattern.search(text)}


def test_nothing_else_lists_the_operands():
    n = Call._fields.index("kv_len")
    assert listing(Call._fields[n:]) == {IN_CPP, IN_PYTHON}
    assert listing(Call._fields[n : n + 5]) == {IN_CPP, IN_PYTHON}
    band = Call._fields.index("band_lo")
    assert listing(Call._fields[band : band + 4]) == {IN_CPP, IN_PYTHON}
    assert listing(Call._fields[-5:]) == {IN_CPP, IN_PYTHON}
    assert listing(Saved._fields[2:]) == {IN_CPP, IN_PYTHON}


def test_nothing_else_lists_the_fields_of_a_mask():
    """Except for the check of each field, and its handling in the tests' cases."""
    fields = tuple(field.name for field in dataclasses.fields(Mask))
    elsewhere = listing(fields[1:]) - {"fastattn/problem/mask.py"}
    assert elsewhere <= {
        "fastattn/problem/validate.py", "fastattn/testing/cases.py", "fastattn/testing/grid.py",
    }  # fmt: skip
