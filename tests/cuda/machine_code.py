"""What nvcc made of the CUDA kernels in `make build`: resources and instructions."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from toolkit import find_tool

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def up_to_date() -> bool:
    """Whether ninja, which knows all includes, finds nothing to do."""
    command = [sys.executable, "-m", "ninja", "-f", "build/cuda/build.ninja", "-n"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "no work to do" in done.stdout


def object_of(source: str) -> Path:
    """The object that `make build` made from a source."""
    target = ROOT / "build/cuda" / Path(source).with_suffix(".o")
    if not target.exists() or not up_to_date():
        pytest.fail("the CUDA objects are missing or older than csrc/cuda: run `make build`")
    return target


def cuobjdump(*arguments, folder=ROOT) -> str:
    tool = find_tool("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump, neither beside nvcc nor in a Triton wheel")
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernel_name(mangled: str) -> str:
    """The part of a mangled name that ends in _kernel. Names follow their lengths.

    nvcc's number of the file comes before it, and may look like a length and a name with digits.
    """
    parts = re.findall(r"(?=(\d\d)([a-z]\w*))", mangled)
    return next(x[: int(n)] for n, x in parts if re.fullmatch("[a-z_]+_kernel", x[: int(n)]))


@functools.cache
def usage(source: str, arch: str) -> dict[str, dict[str, int]]:
    """{kernel: registers, stack, local memory (for spilled registers), shared memory}."""
    found = {}
    text = cuobjdump("-arch", arch, "-res-usage", object_of(source))
    for name, line in re.findall(r"Function (\w+):\s*\n(.*)", text):
        if "_kernel" not in name:
            continue
        numbers = {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", line)}
        used = {
            "registers": numbers["REG"],
            "spills": numbers["STACK"] + numbers["LOCAL"],
            "shared": numbers["SHARED"],
        }
        worst = found.setdefault(kernel_name(name), used)  # of all kernels of a template
        worst.update({n: max(x, worst[n]) for n, x in used.items()})
    return found


@functools.cache
def listings(source: str, arch: str) -> list[str]:
    """The machine code of each kernel of a source, from the line with its name on."""
    tool = find_tool("nvdisasm")
    if tool is None:
        pytest.skip("no nvdisasm, neither beside nvcc nor in a Triton wheel")
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-arch", arch, "-xelf", "all", object_of(source), folder=folder)
        [cubin] = Path(folder).glob("*.cubin")
        text = subprocess.run(
            [tool, "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    sections = re.split(r"^(?=\t\.section\t)", text, flags=re.MULTILINE)
    return [x for x in sections if re.match(r"\t\.section\t\.text\..*_kernel", x)]


def instructions(source: str, arch: str) -> dict[str, str]:
    """{kernel: its listing}, of all of a template's."""
    found: dict[str, list[str]] = {}
    for listing in listings(source, arch):
        found.setdefault(kernel_name(listing.partition("\n")[0]), []).append(listing)
    return {kernel: "".join(all_of_it) for kernel, all_of_it in found.items()}
