"""The instruction set of the CPU kernels: what CPUID shows, or what the user names."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import ISAS, output_with

import fastattn

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "fastattn/_build_info.json"
CXX = shlex.split(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.usefixtures("extension")
needs_compiler = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="needs a C++ compiler")


def run_cpp(tmp_path, source: str) -> str:
    """The output of a C++ program."""
    (tmp_path / "program.cpp").write_text(source)
    program = str(tmp_path / "program")
    command = [*CXX, "-std=c++17", "-O2", f"-I{ROOT}/csrc", f"{program}.cpp", "-o", program]
    subprocess.run(command, check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def widest_shown() -> str:
    """The set that "auto" selects."""
    before = torch.ops.fastattn.cpu_isa()
    assert torch.ops.fastattn.select_cpu_isa("auto")
    widest = torch.ops.fastattn.cpu_isa()
    assert torch.ops.fastattn.select_cpu_isa(before)
    return widest


# ---- by name ----


def test_what_is_taken_is_listed_and_explained(isa):
    assert torch.ops.fastattn.cpu_isa() == isa
    assert isa in torch.ops.fastattn.cpu_isas()
    assert (
        f"  cpu: instruction set {isa}"
        in str(fastattn.explain(torch.zeros(1, 2, 3, 4))).splitlines()
    )


def test_listed_are_the_widest_first_and_the_rest_is_refused():
    select, names = torch.ops.fastattn.select_cpu_isa, torch.ops.fastattn.cpu_isas()
    before = torch.ops.fastattn.cpu_isa()
    assert names == [name for name in reversed(ISAS) if name in names]
    for name in set(ISAS) - set(names):
        assert not select(name)
        assert torch.ops.fastattn.cpu_isa() == before
    assert widest_shown() in names


# ---- by CPUID ----

CPUID = """
#include <cpuid.h>
#include <cstdio>
int main() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const bool avx512_fp16 = d >> 23 & 1;
  a = 0;
  __get_cpuid_count(7, 1, &a, &b, &c, &d);
  std::puts(avx512_fp16 && (a >> 21 & 1) ? "shown" : "hidden");
}
"""


@needs_compiler
def test_auto_takes_amx_fp16_only_where_cpuid_shows_it(tmp_path):
    if "amx_fp16" not in json.loads(BUILT.read_text())["isas"]:
        pytest.skip("this build has no amx_fp16")
    shown = run_cpp(tmp_path, CPUID).strip() == "shown" and "amx" in torch.ops.fastattn.cpu_isas()
    assert (widest_shown() == "amx_fp16") == shown


def test_auto_takes_avx512_bf16_on_amd_alone():
    """Intel's instruction is slower than two conversions and FMA."""
    if "avx512_bf16" not in torch.ops.fastattn.cpu_isas():
        pytest.skip("this machine, or this build, has no avx512_bf16")
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert amd or widest_shown() != "avx512_bf16"


# A program whose own handling of signals and children could interfere.
TRIAL = """
#include <sys/time.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "cpu/isa_trial.h"

using fastattn::cpu::true_in_child;

static int ended = 0, interrupted = 0, changed = 0;
static void end(int) { ++ended; }
static void interrupt(int) { ++interrupted; }
static void report(int) { std::puts("handled"), std::exit(0); }

static bool good() { return ++changed == 1; }
static bool slow() { return usleep(20000) == 0; }
static bool wrong() { return false; }
static bool illegal() {
  asm volatile("ud2");
  return true;
}
static bool unmapped() {
  asm volatile("movb 8, %%al" ::: "al");
  return true;
}
static bool dumps() {
  rlimit limit;
  return getrlimit(RLIMIT_CORE, &limit) != 0 || limit.rlim_cur != 0 || prctl(PR_GET_DUMPABLE) != 0;
}

static void try_all() {
  for (auto code : {good, slow, wrong, illegal, unmapped, dumps})
    std::printf("%d", true_in_child(code));
  std::printf(" ");
}

int main() {
  signal(SIGILL, report);
  signal(SIGSEGV, report);
  struct sigaction action = {};
  action.sa_handler = interrupt;  // without SA_RESTART
  sigaction(SIGALRM, &action, nullptr);
  const itimerval often = {{0, 5000}, {0, 5000}};
  setitimer(ITIMER_REAL, &often, nullptr);
  signal(SIGCHLD, end);
  try_all();
  signal(SIGCHLD, SIG_IGN);
  try_all();
  std::printf("%d %d %d %d", ended, interrupted > 0, changed, prctl(PR_GET_DUMPABLE));
}
"""


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="ud2 is an instruction of x86-64")
def test_a_child_dies_of_an_instruction_and_nobody_else_notices(tmp_path):
    assert run_cpp(tmp_path, TRIAL) == "110000 110000 0 1 0 1"


# ---- by the environment variable ----

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastattn, torch
for warning in caught:
    if "FASTATTN_CPU_ISA" in str(warning.message):
        print("warned:", warning.category.__name__, warning.message)
q = torch.randn(1, 2, 40, 8)
out = fastattn.scaled_dot_product_attention(q, q, q, backend="cpu")
peer = torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert torch.allclose(out, peer, rtol=1.3e-6, atol=1e-5)  # assert_close would import sympy
print(fastattn.explain(q))
print("used:", torch.ops.fastattn.cpu_isa())
"""


NAMED = ("baseline", "amx_fp16")
AUTO = ("", "auto")
UNKNOWN = ("avx1024", "\udcff")


@pytest.fixture(scope="module")
def lines():
    """What PROGRAM prints, by what FASTATTN_CPU_ISA is."""
    return output_with("FASTATTN_CPU_ISA", [*NAMED, *AUTO, *UNKNOWN], PROGRAM, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_the_environment_names_an_instruction_set(name, lines):
    if name not in torch.ops.fastattn.cpu_isas():
        pytest.skip(f"this machine, or this build, has no {name}")
    assert lines[name][-1] == f"used: {name}"
    assert f"  cpu: instruction set {name}" in lines[name]
    assert not any(line.startswith("warned:") for line in lines[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", AUTO)
def test_the_environment_may_leave_it_to_cpuid(name, lines):
    assert lines[name][-1] == f"used: {widest_shown()}"
    assert not any(line.startswith("warned:") for line in lines[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_cannot_be_followed_is_said(name, lines):
    widest, names = widest_shown(), torch.ops.fastattn.cpu_isas()
    error = (
        "FASTATTN_CPU_ISA: expected 'auto' or what was built and runs here, "
        f"{', '.join(map(repr, names))}, got {name!r}"
    )
    assert lines[name][0] == f"warned: RuntimeWarning {error}; taking {widest!r}"
    assert f"  cpu: instruction set {widest} ({error})" in lines[name]
    assert lines[name][-1] == f"used: {widest}"
