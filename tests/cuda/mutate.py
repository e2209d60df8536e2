"""Plants mistakes in the CUDA kernels and shows that the tests on the CPU find them.

    python tests/cuda/mutate.py [words of the names of mistakes]

Each mistake goes into a copy of csrc. Only the changed source is compiled again. The corner cases,
or the tests that a mistake names, then run on that library. Exits with 1 if a mistake is not found.
Takes half an hour.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import host_build
from mistakes import TESTS, Mistake
from mistakes_additive import ADDITIVE
from mistakes_dot import DOT
from mistakes_wgmma import WARPGROUPS

MISTAKES = [*DOT, *WARPGROUPS, *ADDITIVE]


def build(mistake: Mistake, folder: Path) -> Path:
    """The library with the mistake."""
    csrc = folder / "csrc"
    shutil.copytree(host_build.ROOT / "csrc", csrc)
    text = (csrc / "cuda" / mistake.file).read_text()
    assert text.count(mistake.right) == 1, f"{mistake.name}: not found once in {mistake.file}"
    (csrc / "cuda" / mistake.file).write_text(text.replace(mistake.right, mistake.wrong))
    planted = folder / "planted.o"
    flags = f"{host_build.FLAGS} {host_build.KINDS[mistake.kind]}".split()
    include = [f"-I{host_build.SHIM}", f"-I{csrc}"]
    source = csrc / "cuda" / mistake.source
    compiler = host_build.compiler()
    host_build.run(
        [*compiler, *flags, *include, "-x", "c++", "-c", str(source), "-o", str(planted)]
    )
    replaced = host_build.target_of(source, mistake.kind)
    return host_build.link(
        [planted, *(x for x in host_build.objects(mistake.kind) if x != replaced)],
        mistake.kind, folder / "libplanted.so",
    )  # fmt: skip


def run_tests(mistake: Mistake, library: Path) -> subprocess.CompletedProcess:
    environment = dict(os.environ)
    if mistake.kind == "sanitized":
        environment = host_build.sanitizer_environment()
    environment |= {"FASTATTN_TEST_SHIM": mistake.kind, "FASTATTN_TEST_LIBRARY": str(library)}
    test = mistake.test or TESTS[mistake.source]
    return host_build.run_tests(f"tests/cuda/{test}", mistake.tests, environment)


def main() -> int:
    missed = 0
    for mistake in MISTAKES:
        if not all(word in mistake.name for word in sys.argv[1:]):
            continue
        host_build.library("kernels", mistake.kind)
        with tempfile.TemporaryDirectory() as folder:
            done = run_tests(mistake, build(mistake, Path(folder)))
        said = done.stdout + done.stderr
        found = done.returncode != 0 and mistake.found_by in said
        reports = [x for x in said.splitlines() if x.startswith(("E  ", "=="))]
        lines = [x for x in reports if mistake.found_by in x] or said.splitlines()[-3:]
        print(f"{'found ' if found else 'MISSED'}  {mistake.name}\n        {lines[0].strip()}")
        missed += not found
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
