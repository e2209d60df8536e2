"""Builds the two native libraries with ninja; what is declarative is in pyproject.toml.

fastattn/_C.abi3.so, the CPU kernels:
    csrc/binding/attention.cpp  once: the one file that includes torch (stable ABI, limited Python);
                                defines the operators of fastattn/problem/schemas.py
    csrc/cpu/*.cpp              once, baseline flags; FASTATTN_HAVE_<NAME> tells which ISAs exist
    csrc/cpu/entry/*.cpp        once per ISA that entries() says, in the namespace FASTATTN_ISA

fastattn/_cuda.so, the CUDA kernels, where there is an nvcc; a GPU is not needed:
    csrc/cuda/**/*.cu           machine code for every architecture of CUDA_CODE, in one object
    csrc/binding/attention.cpp  once more, with FASTATTN_FOR_CUDA

Where one cannot be built, one line says why. fastattn/_build_info.json keeps the reason for
fastattn.explain(). FASTATTN_REQUIRE_EXT=1 makes it an error of the first; =0 leaves both out, and
no warning follows. FASTATTN_CUDA=0 leaves the CUDA kernels out; FASTATTN_CUDA=sm_80,sm_90a and
FASTATTN_CPU_ISAS=avx2,avx512 build for those alone. CXX, NVCC, CXXFLAGS, LDFLAGS and MAX_JOBS are
honoured. `python setup.py native` builds in place without setuptools, `python setup.py cuda` the
second library alone. `python setup.py extension FOLDER` builds the first alone, into a folder that
the package does not look into: FASTATTN_EXTENSION names it.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BUILD = Path("build/native")  # relative, as all paths of sources: they end up in __FILE__
BUILD_CUDA = Path("build/cuda")
BINDING = Path("csrc/binding/attention.cpp")
EXTENSION = "_C.abi3.so"
LEFT_OUT = os.environ.get("FASTATTN_REQUIRE_EXT") == "0"  # on purpose: nobody is to be warned
CUDA_LIBRARY = "_cuda.so"
UNITS = ("avx512_bf16", "amx", "amx_fp16")  # multiply tiles, and take all else from avx512

# No -ffast-math: NaN, infinities and the order of sums are part of the semantics. These only give
# up errno, floating-point traps and the separate rounding of a * b + c.
FLAGS = (
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fPIC "
    "-fvisibility=hidden -fvisibility-inlines-hidden -falign-functions=64 -Wall -Wextra -Icsrc"
).split()
INLINING = ["--param", "max-inline-insns-single=70"]  # as -O2: a tenth less to compile
ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"]

# As for the host: no fast math. Symbols stay inside: attention.cpp alone calls the kernels.
CUDA_FLAGS = "-std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -Icsrc".split()
# (compile for, keep): sm_80 also runs on 8.6 and 8.9, sm_100 on 10.3 and sm_120 on 12.1; GPUs that
# come later compile the PTX at first use, for minutes.
CUDA_CODE = (
    ("compute_80", "sm_80"),
    ("compute_90a", "sm_90a"),
    ("compute_90", "compute_90"),
    ("compute_100", "sm_100"),
    ("compute_120", "sm_120"),
)
# What on_cuda.h takes from libtorch_cuda. The stub has its name, so that the library can be linked
# beside a torch without CUDA; where it runs, the loader finds torch's own.
STUB = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }'

# -fno-lto, whatever CXXFLAGS say: link-time optimisation may move code from one ISA into another.
RULES = """\
ninja_required_version = 1.5
builddir = {build}
rule cxx
  command = {cxx} $flags {user} -fno-lto -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = CXX $out
rule link
  command = {cxx} {user} -fno-lto -shared $in -o $out {ldflags}
  description = LINK $out
"""
CUDA_RULES = """\
rule nvcc
  command = {nvcc} {flags} --threads {threads} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = NVCC $out
rule stub
  command = echo '{stub}' | {cxx} -shared -fPIC -Wl,-soname,libtorch_cuda.so -x c++ - -o $out
  description = LINK $out
"""


class Unavailable(Exception):
    """Why a library cannot be built."""


def wanted(variable: str, known: list[str]) -> list[str]:
    """Those of `known` that an environment variable names; all of them if it is not set."""
    named = os.environ.get(variable, "").replace(",", " ").split()
    unknown = sorted(set(named) - set(known))
    if unknown:
        raise SystemExit(f"{variable} names {', '.join(unknown)}; known are {', '.join(known)}")
    return [name for name in known if name in named] if named else known


def isa_flags(target: str) -> dict[str, list[str]]:
    """The flags of a target triple by ISA. Each has the instructions of the one before."""
    table: dict[str, list[str]] = {"baseline": []}  # SSE2 on x86-64, NEON on aarch64
    if target.split("-")[0] in ("x86_64", "amd64"):
        avx2 = "-mavx2 -mfma -mf16c".split()
        avx512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()
        table["avx2"] = avx2
        table["avx512"] = avx2 + avx512
        bf16 = [*table["avx512"], "-mavx512bf16"]
        table["avx512_bf16"] = [*bf16, "-mtune=cooperlake"]  # docs/decisions/0032
        table["amx"] = [*bf16, "-mamx-tile", "-mamx-bf16"]
        # GCC knows no -mamx-fp16 before 13: the kernels write that instruction as bytes.
        table["amx_fp16"] = [*table["amx"], "-mavx512fp16", "-DFASTATTN_AMX_FP16=1"]
    return table


def output(command: list[str]) -> str:
    """What a command prints; Unavailable with the first line of its complaint if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise Unavailable(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        complaint = error.stderr.strip() or f"exit status {error.returncode}"
        raise Unavailable(f"{command[0]} fails: {complaint.splitlines()[0]}") from None
    return done.stdout.strip()


def compile_empty_file(cxx: list[str], flags: list[str]) -> None:
    """Raises Unavailable unless the compiler takes these flags."""
    BUILD.mkdir(parents=True, exist_ok=True)
    probe = BUILD / "probe.o"
    output([*cxx, *flags, "-Werror", "-x", "c++", "-c", os.devnull, "-o", str(probe)])
    if not probe.exists():
        raise Unavailable(f"{cxx[0]} is not a C++ compiler")
    probe.unlink()


def supported_isas(cxx: list[str], target: str) -> dict[str, list[str]]:
    """The ISAs whose flags the compiler knows; a line for each that it does not."""
    supported = {}
    table = isa_flags(target)
    names = {"baseline", *wanted("FASTATTN_CPU_ISAS", list(table))}  # it runs on every machine
    names |= set() if names.isdisjoint(UNITS) else {"avx512"}
    for isa in filter(names.__contains__, table):
        try:
            compile_empty_file(cxx, table[isa])
            supported[isa] = table[isa]
        except Unavailable as error:
            print(f"fastattn: without {isa}: {error}", file=sys.stderr)
    return supported


def find_ninja() -> str:
    scripts = sysconfig.get_path("scripts")  # where pip puts it; not on PATH unless activated
    ninja = shutil.which("ninja", path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
    if not ninja:
        raise Unavailable("no ninja: pip install ninja")
    return ninja


def find_torch() -> tuple[Path, str]:
    """The folder and the version of torch, which is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("no torch in the Python that builds: pip install torch")
    root = Path(spec.submodule_search_locations[0])
    version = runpy.run_path(str(root / "version.py"))["__version__"]
    if not (root / "include/torch/csrc/stable/library.h").exists():
        raise Unavailable(f"torch {version} has no headers of the stable ABI")
    return root, version


def entries(isa: str) -> list[Path]:
    """The sources that are compiled for an ISA."""
    has_unit, files = isa in UNITS, sorted(Path("csrc/cpu/entry").glob("*.cpp"))
    return [p for p in files if p.stem == "limits" or (p.stem == "unit") == has_unit]


def compilations(isas: dict[str, list[str]], torch: Path) -> list[tuple[Path, Path, list[str]]]:
    """(source, object, flags) of every compilation, in link order.

    Narrow objects come first. C++ lets several objects define one function, such as a template of
    std::, and the linker keeps the first. So no baseline object is bound to code of a newer CPU.
    tests/cpu/test_isa_symbols.py checks that kernel files define none to begin with.
    """
    have = [f"-DFASTATTN_HAVE_{isa.upper()}" for isa in isas]
    headers = [f"-I{BUILD}", f"-I{sysconfig.get_path('include')}"]
    headers += ["-isystem", str(torch / "include")]

    jobs = [(BINDING, "once", have + ABI_FLAGS + headers)]
    jobs += [(path, "once", have) for path in sorted(Path("csrc/cpu").glob("*.cpp"))]
    jobs += [(f, isa, [*isas[isa], f"-DFASTATTN_ISA={isa}"]) for isa in isas for f in entries(isa)]
    return [
        (path, BUILD / folder / path.relative_to("csrc").with_suffix(".o"), FLAGS + flags)
        for path, folder, flags in jobs
    ]


def quote(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")  # for a ninja file


def write_included(folder: Path) -> None:
    """Makes what BINDING includes."""
    runpy.run_path("fastattn/problem/schemas.py")["write"](folder)


def write_ninja_file(cxx: list[str], isas: dict[str, list[str]], torch: Path) -> Path:
    # libtorch_cpu is named, as Python loads torch with RTLD_LOCAL and an undefined symbol would not
    # be looked up there. No rpath: `import torch` comes first, and the loader knows it by soname.
    write_included(BUILD)
    exports = BUILD / "exports.map"
    exports.write_text("{ global: PyInit__C; local: *; };\n")
    link = ["-Wl,--as-needed", f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
    link += [f"-Wl,--version-script={exports}", *shlex.split(os.environ.get("LDFLAGS", ""))]
    own = [] if "clang" in output([*cxx, "--version"]) else INLINING
    user = quote([*own, *shlex.split(os.environ.get("CXXFLAGS", ""))])
    text = RULES.format(build=BUILD, cxx=quote(cxx), user=user, ldflags=quote(link))
    jobs = compilations(isas, torch)
    for source, target, flags in reversed(jobs):  # the long ones first
        text += f"build {target}: cxx {source}\n  flags = {quote(flags)}\n"
    text += f"build {BUILD / EXTENSION}: link {' '.join(str(job[1]) for job in jobs)}\n"
    path = BUILD / "build.ninja"
    path.write_text(text)
    return path


def find_nvcc() -> str:
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc", path=os.pathsep.join(folders))
    if not nvcc:
        raise Unavailable("no nvcc")
    return nvcc


def cuda_code(nvcc: str) -> list[tuple[str, str]]:
    """Those of CUDA_CODE that are wanted and that this nvcc knows."""
    known = output([nvcc, "--list-gpu-arch"]).split()
    # Variants such as 90a are not listed before CUDA 12.9; they came with their plain number.
    names = wanted("FASTATTN_CUDA", [code for _, code in CUDA_CODE])
    usable = [pair for pair in CUDA_CODE if pair[0].rstrip("a") in known and pair[1] in names]
    if not usable:
        raise Unavailable(f"{nvcc} compiles for none of {', '.join(code for _, code in CUDA_CODE)}")
    return usable


def code_flags(usable: list[tuple[str, str]]) -> list[str]:
    """FASTATTN_HAVE_<NAME> tells the host's code what there is."""
    have = [f"-DFASTATTN_HAVE_{code.upper()}" for _, code in usable]
    return [*(f"-gencode=arch={arch},code={code}" for arch, code in usable), *have]


def cuda_library_folders(nvcc: str) -> list[str]:
    """The flags by which nvcc itself finds its runtime: nvcc may be a wrapper from anywhere."""
    done = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("#$ LIBRARIES=")]
    if not lines:
        raise Unavailable(f"{nvcc} --dryrun names no folder of libraries")
    return shlex.split(lines[0].partition("=")[2])


def write_cuda_ninja_file(cxx: list[str], nvcc: str, torch: Path) -> Path:
    BUILD_CUDA.mkdir(parents=True, exist_ok=True)
    write_included(BUILD_CUDA)
    (BUILD_CUDA / "exports.map").write_text("{ local: *; };\n")  # loading it is all there is to do
    stub = BUILD_CUDA / "libtorch_cuda.so"
    link = ["-Wl,--as-needed", f"-L{torch}/lib", "-ltorch_cpu", f"-L{BUILD_CUDA}", "-ltorch_cuda"]
    link += [*cuda_library_folders(nvcc), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    link += [f"-Wl,--version-script={BUILD_CUDA / 'exports.map'}"]
    link += shlex.split(os.environ.get("LDFLAGS", ""))
    flags = [*CUDA_FLAGS, "-ccbin", shlex.join(cxx), *code_flags(cuda_code(nvcc))]
    user = quote(shlex.split(os.environ.get("CXXFLAGS", "")))
    text = RULES.format(build=BUILD_CUDA, cxx=quote(cxx), user=user, ldflags=quote(link))
    threads = min(len(CUDA_CODE), os.cpu_count() or 1)
    text += CUDA_RULES.format(
        nvcc=quote([nvcc]), flags=quote(flags), threads=threads, cxx=quote(cxx), stub=STUB
    )
    objects = []
    # Backwards: dot/*_wgmma.cu, for one GPU and thus in one thread, would run alone at the end.
    for source in sorted(Path("csrc/cuda").rglob("*.cu"), reverse=True):
        objects.append(BUILD_CUDA / source.relative_to("csrc/cuda").with_suffix(".o"))
        text += f"build {objects[-1]}: nvcc {source}\n"
    binding = [*FLAGS, "-DFASTATTN_FOR_CUDA", *ABI_FLAGS, f"-I{BUILD_CUDA}"]
    binding += ["-isystem", str(torch / "include")]
    text += f"build {BUILD_CUDA}/binding.o: cxx {BINDING}\n  flags = {quote(binding)}\n"
    text += f"build {stub}: stub\n"
    every = " ".join(map(str, [BUILD_CUDA / "binding.o", *objects]))
    text += f"build {BUILD_CUDA / CUDA_LIBRARY}: link {every} | {stub}\n"
    path = BUILD_CUDA / "build.ninja"
    path.write_text(text)
    return path


def run_ninja(ninja: str, file: Path) -> None:
    subprocess.run([ninja, "-f", str(file), "-t", "cleandead"], capture_output=True)
    jobs = os.environ.get("MAX_JOBS")
    command = [ninja, "-f", str(file), *(["-j", jobs] if jobs else [])]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.strip())
    if process.returncode:
        raise Unavailable(next((line for line in lines if "error:" in line), "ninja failed"))


def tools() -> tuple[tuple[Path, str], str, list[str]]:
    """(torch's folder and version, ninja, the C++ compiler) that both libraries need."""
    if LEFT_OUT:
        raise Unavailable("it was left out: FASTATTN_REQUIRE_EXT=0")
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"the compiled kernels are for Linux, not {sys.platform}")
    if not BINDING.exists():
        raise Unavailable(f"no {BINDING}")
    torch, ninja = find_torch(), find_ninja()
    cxx = shlex.split(os.environ.get("CXX") or "c++")
    compile_empty_file(cxx, FLAGS)
    return torch, ninja, cxx


def build_extension(info: dict) -> str:
    """Builds EXTENSION and returns what for."""
    (torch, info["torch"]), ninja, cxx = tools()
    info["compiler"] = output([*cxx, "--version"]).partition("\n")[0]
    info["target"] = output([*cxx, "-dumpmachine"])
    isas = supported_isas(cxx, info["target"])
    run_ninja(ninja, write_ninja_file(cxx, isas, torch))
    info["isas"] = list(isas)
    return f"{', '.join(isas)} ({info['compiler']})"


def build_cuda_library(info: dict) -> str:
    """Builds CUDA_LIBRARY and returns what for."""
    if os.environ.get("FASTATTN_CUDA") == "0":
        raise Unavailable("it was left out: FASTATTN_CUDA=0")
    (torch, _), ninja, cxx = tools()
    nvcc = find_nvcc()
    run_ninja(ninja, write_cuda_ninja_file(cxx, nvcc, torch))
    said = output([nvcc, "--version"])
    info["compiler"] = next((x for x in said.splitlines() if "release " in x), said)
    # The runtime is linked in: a driver of an older major version cannot serve it.
    info["runtime"] = info["compiler"].partition("release ")[2].partition(",")[0]
    return f"{', '.join(code for _, code in cuda_code(nvcc))} ({info['compiler']})"


def attempt(info: dict, name: str, build, otherwise: str) -> None:
    """Runs a build; one line says what came of it, and `info` keeps a reason."""
    try:
        built_for = build()
        info["success"] = True
        print(f"fastattn: {name} built for {built_for}")
    except (Unavailable, OSError) as error:
        info["reason"] = str(error)
        print(f"fastattn: no {name}, {otherwise}: {error}", file=sys.stderr)


def build(package: Path, cuda_alone: bool = False) -> bool:
    """Builds into `package`, or says in one line why not and leaves the reason there."""
    note = package / "_build_info.json"
    info: dict = dict(success=False, reason=None, compiler=None, target=None, isas=[], torch=None)
    info["left_out"] = LEFT_OUT
    if not cuda_alone:
        attempt(info, EXTENSION, lambda: build_extension(info), "pure Python only")
    elif note.exists():
        info = json.loads(note.read_text())
    cuda: dict = dict(success=False, reason=None, compiler=None, runtime=None)
    info["cuda"] = cuda
    without = "no CUDA C++ kernels (Triton's need no compiler)"
    attempt(cuda, CUDA_LIBRARY, lambda: build_cuda_library(cuda), without)
    package.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(info, indent=2) + "\n")
    install(BUILD_CUDA / CUDA_LIBRARY, package, cuda["success"])
    if cuda_alone:
        return cuda["success"]
    install(BUILD / EXTENSION, package, info["success"])
    if os.environ.get("FASTATTN_REQUIRE_EXT") == "1" and not info["success"]:
        raise SystemExit("fastattn: FASTATTN_REQUIRE_EXT=1 forbids that")
    return info["success"] or cuda["success"]


def install(built: Path, package: Path, success: bool) -> None:
    """Puts a result into the package; a stale library is worse than none."""
    placed = package / built.name
    if not success:
        placed.unlink(missing_ok=True)
    elif not placed.exists() or not filecmp.cmp(built, placed, shallow=False):
        # Renamed into place: overwriting would crash a process that has it mapped.
        os.replace(shutil.copy(built, f"{placed}.new"), placed)


def build_in_place(cuda_alone: bool = False) -> bool:
    """Makes the checkout importable as it is: the libraries, and kernels/ as fastattn.kernels."""
    link = Path("fastattn/kernels")
    if not os.path.lexists(link):
        link.symlink_to("../kernels")
    return build(Path("fastattn"), cuda_alone)


def run_setuptools() -> None:
    from setuptools import Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        built = False

        def run(self) -> None:
            in_place = self.inplace or self.editable_mode
            self.built = build_in_place() if in_place else build(Path(self.build_lib, "fastattn"))

    class BdistWheel(bdist_wheel):
        def run(self) -> None:
            # The extension first: whether there is one decides the wheel's tag.
            self.run_command("build_ext")
            if not self.get_finalized_command("build_ext").built:
                self.distribution.ext_modules, self.root_is_pure = [], True
            super().run()

    setup(
        # Without sources: it makes the wheel a platform's own and names the file.
        ext_modules=[Extension("fastattn._C", sources=[], py_limited_api=True, optional=True)],
        cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


if __name__ == "__main__":
    os.chdir(ROOT)
    if sys.platform.startswith("linux"):
        import fcntl  # a second build waits for the first, as both write the same files

        fcntl.flock(os.open("setup.py", os.O_RDONLY), fcntl.LOCK_EX)
    if sys.argv[1:] in (["native"], ["cuda"]):
        built = build_in_place(cuda_alone=sys.argv[1:] == ["cuda"])
        sys.exit(0 if built or sys.argv[1:] == ["native"] else 1)
    elif sys.argv[1:2] == ["extension"]:
        BUILD = Path(sys.argv[2])
        build_extension({})
    else:
        run_setuptools()
