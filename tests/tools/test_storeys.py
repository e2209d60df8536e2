"""The storeys of the sources: a file uses its own storey and those below, and none above."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fastattn.backends import registry

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 450  # lines of a file

# From the lowest storey up. A folder belongs to the longest name that is its beginning.
CPP = [
    "problem", "cpu/base cuda/base", "cpu/tile cuda/tile", "cpu/score cuda/dot cuda/additive",
    "cpu/loop", "cpu/entry", "cpu cuda", "binding",
]  # fmt: skip
PYTHON = [
    "fastattn.problem fastattn.plotting fastattn.cache_file", "fastattn.blocks",
    "fastattn.kernels.tile", "fastattn.kernels.score fastattn.kernels.host",
    "fastattn.kernels.loop fastattn.kernels", "fastattn.backends",
    "fastattn.autograd fastattn.sinks fastattn.repeated", "fastattn.functional",
    "fastattn.scores fastattn.tuning", "fastattn.varlen", "fastattn.modules fastattn.testing",
    "fastattn.distributed", "fastattn.integrations", "fastattn",
]  # fmt: skip

# csrc/problem/mask.h defines masks; no other file reads these fields. Two files of the binding
# write them, from operands of the same names.
MASK_FIELD = r"\b(band_lo|band_hi|kv_len|kv_begin|keep_stride_\w|mask\.keep)\b"
WRITTEN = r"\bmask\.\w+ =(?!=)|\bin\.\w+"


def code() -> dict[str, str]:
    """The C++ sources by their paths below csrc, without comments."""
    files = (path for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".inc")
    text = {str(path.relative_to(ROOT / "csrc")): path.read_text("utf-8") for path in files}
    return {name: re.sub(r"//.*", "", x) for name, x in text.items()}


def storey(storeys: list[str], name: str) -> int:
    """The number of a file's storey, or of a module's."""
    begins = {part: n for n, parts in enumerate(storeys) for part in parts.split()}
    found = [x for x in begins if re.match(rf"{re.escape(x)}([./]|$)", name)]
    assert found, f"{name} stands in none of {storeys}"
    return begins[max(found, key=len)]


def imports(module: str, path: Path) -> list[str]:
    """The modules of the package that a module imports anywhere."""
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*outer, *filter(None, [node.module])])
            found += [f"{origin}.{alias.name}" for alias in node.names]
    return [name for name in found if re.match(r"fastattn(\.|$)", name)]


def test_includes_point_down():
    for name, text in code().items():
        for bracket, used in re.findall(r'#\s*include\s*(["<])(.+)[">]', text):
            if bracket == "<" or used.endswith(".inc"):  # the build writes those
                assert not (ROOT / "csrc" / used).exists(), f"{name}: {used}"
                continue
            assert re.fullmatch(r"\w+(/\w+)+\.\w+", used), f"{name}: no path from csrc: {used}"
            assert storey(CPP, used) <= storey(CPP, name), f"{name} includes {used}"
            if name.startswith(("cpu/", "cuda/")):
                assert used.split("/")[0] in (name.split("/")[0], "problem"), f"{name}: {used}"


def test_imports_point_down():
    for folder, package in (("fastattn", "fastattn"), ("kernels", "fastattn.kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *(x for x in inner if x != "__init__")])
            for used in imports(module, path):
                above = storey(PYTHON, used) > storey(PYTHON, module)
                assert not above, f"{module} imports {used}"


def test_backends_do_not_import_each_other():
    """Except for wgmma, a path of cuda, whose verdict of the self-check it reads."""
    for name in (*registry.BACKENDS, "wgmma"):
        used = imports(f"fastattn.backends.{name}", ROOT / f"fastattn/backends/{name}.py")
        inner = {"".join(x.split(".")[2:3]) for x in used if x.startswith("fastattn.backends")}
        assert inner <= {"operators", "_gpu", *(("cuda", "health") if name == "wgmma" else ())}


def test_torch_is_known_to_the_binding_alone():
    users = [x for x, text in code().items() if re.search(r"#include <(torch|ATen|c10)/", text)]
    assert users
    assert all(name.startswith("binding/") for name in users), users


def test_masks_are_read_where_they_are_defined():
    texts = code()
    assert all(texts.pop(f"problem/{name}.h") for name in ("mask", "params"))
    for name in ("problem.h", "path.h"):
        text = re.sub(WRITTEN, "", texts.pop(f"binding/{name}"))
        assert not re.search(rf"[.>]{MASK_FIELD}", text), name
    assert not {name for name, text in texts.items() if re.search(MASK_FIELD, text)}


def test_no_test_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.findall(r"^(?:from|import) (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        assert set(found) <= {path.stem}, f"{path.name} imports {found}"


def test_no_file_is_long():
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git checkout")
    names = re.findall(r".*\.(?:py|pyi|h|cu|cuh|cpp)$", git.stdout, re.MULTILINE)
    lines = {x: (ROOT / x).read_text("utf-8").count("\n") for x in names if (ROOT / x).exists()}
    assert {name: n for name, n in lines.items() if n > LONGEST} == {}
