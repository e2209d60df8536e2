"""Programs exported by torch run with torch and the library alone, without fastattn."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import attend

import fastattn
from fastattn.problem import schemas

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.slow]

LIBRARY = Path(fastattn.__file__).parent / "_C.abi3.so"
RUN = """
import sys, torch
library, program, arguments, expected = sys.argv[1:]
torch.ops.load_library(library)
if program.endswith(".pt2"):
    run = torch._inductor.aoti_load_package(program)
else:
    run = torch.export.load(program).module()
results = run(*torch.load(arguments))
for found, wanted in zip(results, torch.load(expected), strict=True):
    assert torch.equal(found, wanted), (found - wanted).abs().max()
assert "fastattn" not in sys.modules
"""


class Block(torch.nn.Module):
    """Both scores, with a mask and weights."""

    def forward(self, q, k, v, w, bias):
        mask = fastattn.Mask(causal="top_left")
        out, weights = attend(q, k, v, mask=mask, bias=bias, return_weights="mean")
        return out, weights, attend(q, k, v, w)


def arguments():
    q, k, v = (torch.randn(2, h, n, 8) for h, n in ((4, 6), (2, 9), (2, 9)))
    return q, k, v, torch.randn(4, 8), torch.randn(6, 9)


def as_program(exported, folder: Path) -> Path:
    torch.export.save(exported, folder / "program.ep")
    return folder / "program.ep"


def as_package(exported, folder: Path) -> Path:
    path = str(folder / "package.pt2")
    once = {"compile_threads": 1, "aot_inductor.precompile_headers": False}  # only one file
    torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=once)
    return Path(path)


@pytest.mark.parametrize("write", [as_program, as_package])
def test_a_program_needs_the_library_alone(write, tmp_path):
    if write is as_package and shutil.which("g++") is None:
        pytest.skip("no g++, with which AOTInductor compiles")
    args = arguments()
    with torch.no_grad():
        program = write(torch.export.export(Block(), args), tmp_path)
        torch.save(Block()(*args), tmp_path / "expected.pt")
    torch.save(args, tmp_path / "arguments.pt")
    command = [sys.executable, "-c", RUN, LIBRARY, program]
    command += [tmp_path / "arguments.pt", tmp_path / "expected.pt"]
    environment = {n: x for n, x in os.environ.items() if n != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_library_loads_without_python():
    torch_libraries = Path(torch.__file__).parent / "lib"
    environment = os.environ | {"LD_PRELOAD": str(LIBRARY), "LD_LIBRARY_PATH": str(torch_libraries)}
    done = subprocess.run(["/bin/true"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # of ld.so, which ignores what it does not find


@pytest.mark.parametrize("name", schemas.COMPILED)
def test_the_library_has_the_schemas_and_the_tag(name):
    """A library of an older build would lack them."""
    operator = getattr(torch.ops.fastattn, name).default
    text = f"fastattn::{name}{schemas.COMPILED[name]}"
    assert operator._schema == torch._C.parse_schema(text)
    assert torch.Tag.pt2_compliant_tag in operator.tags
