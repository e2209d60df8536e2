"""A wheel must run on CPUs older than the one that built it.

Kernel files are compiled once per instruction set (ISA). The linker keeps one copy of a function
that several objects define (an inline function, a template of std::). If that copy came from an
AVX-512 object, an older CPU would crash in it. So such an object may only define names of its own
ISA.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build/native"


def load_setup():
    spec = importlib.util.spec_from_file_location("fastattn_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def foreign_symbols(nm_output: str, isa: str) -> list[str]:
    """The symbols in `nm -C --defined-only --extern-only` outside `fastattn::<isa>`.

    A name that contains the namespace anywhere belongs to the ISA:
    std::vector<fastattn::avx2::Tile> as well. DW.ref. symbols are pointers for exception handling,
    the same in every object.
    """
    names = [line.split(maxsplit=2)[2] for line in nm_output.splitlines() if line.strip()]
    own = re.compile(rf"\bfastattn::{isa}::|^DW\.ref\.")
    return [name for name in names if not own.search(name)]


def wide_objects() -> list[Path]:
    """Objects of this checkout's build, relative to it. Baseline code runs everywhere."""
    wide = [isa for isa in load_setup().isa_flags("x86_64") if isa != "baseline"]
    found = (path for isa in wide for path in OBJECTS.glob(f"{isa}/**/*.o"))
    return sorted(path.relative_to(OBJECTS) for path in found)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("path", wide_objects(), ids=str)
def test_object_defines_only_names_of_its_isa(path):
    command = ["nm", "-C", "--defined-only", "--extern-only", str(OBJECTS / path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert foreign_symbols(listing, isa=path.parts[0]) == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.skipif(not list(OBJECTS.glob("**/dispatch.o")), reason="nothing was built here")
def test_dispatch_chooses_among_all_that_was_built():
    """Each set has its own macro: if one were missing, every machine would use a narrower set."""
    command = ["nm", "-C", "--undefined-only", *map(str, OBJECTS.glob("**/dispatch.o"))]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    built = json.loads((ROOT / "fastattn/_build_info.json").read_text())["isas"]
    assert set(re.findall(r"fastattn::(\w+)::run_loop", listing)) == set(built)


def test_foreign_symbols_are_found():
    listing = """
0000000000000000 T fastattn::avx2::sdpa_forward(fastattn::ForwardParams const&)
0000000000000000 W void std::vector<fastattn::avx2::Tile>::push_back(fastattn::avx2::Tile&&)
0000000000000000 V DW.ref.__gxx_personality_v0
0000000000000000 W std::vector<float, std::allocator<float> >::push_back(float&&)
0000000000000010 W fastattn::keeps(fastattn::MaskParams const&, long)
0000000000000020 T fastattn::avx512::sdpa_forward(fastattn::ForwardParams const&)
"""
    names = [name.split("(")[0] for name in foreign_symbols(listing, isa="avx2")]
    assert names == [
        "std::vector<float, std::allocator<float> >::push_back",
        "fastattn::keeps",
        "fastattn::avx512::sdpa_forward",
    ]


@pytest.mark.parametrize("target", ["x86_64-linux-gnu", "x86_64-pc-linux-gnu"])
def test_x86_isas_go_from_narrow_to_wide(target):
    table = load_setup().isa_flags(target)
    assert list(table) == ["baseline", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16"]
    assert table["baseline"] == []
    # Not what orders instructions for a processor, and adds none.
    flags = [{flag for flag in isa if not flag.startswith("-mtune=")} for isa in table.values()]
    assert all(narrow < wide for narrow, wide in pairwise(flags))


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "riscv64-linux-gnu", "i686-linux-gnu"])
def test_other_targets_have_baseline_alone(target):
    assert load_setup().isa_flags(target) == {"baseline": []}
