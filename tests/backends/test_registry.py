"""The choice of a backend: auto takes the first that can, a named one runs or says why not."""

import dataclasses
import importlib
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import backend
from helpers import ON_GPU, output_with

import fastattn
from fastattn import Mask, scaled_dot_product_attention
from fastattn.backends import _gpu, cpu, cuda, operators, registry, triton
from fastattn.problem import validate

PACKAGE = Path(fastattn.__file__).parent


def problem(dtype=torch.float32, device="cpu"):
    q = torch.zeros(1, 2, 3, 4, dtype=dtype, device=device)
    return validate.build("dot", q, q, q).p


@pytest.fixture
def table(monkeypatch):
    """A registry with one able and two unable backends before eager."""
    fakes = {
        "broken": backend(reasons=("it rains", "it is Monday")),
        "first": backend(),
        "last": backend(reasons=("not today",)),
        "eager": registry.BACKENDS["eager"],
    }
    monkeypatch.setattr(registry, "BACKENDS", fakes)
    return fakes


def test_auto_takes_the_first_with_no_reason_against(table):
    assert registry.select(problem()) == "first"
    q = torch.randn(1, 2, 3, 4)
    scaled_dot_product_attention(q, q, q)
    assert (table["first"].calls, table["broken"].calls, table["last"].calls) == (1, 0, 0)


def test_a_named_backend_never_falls_back(table):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"'broken' cannot do this.*it rains; it is Monday"):
        scaled_dot_product_attention(q, q, q, backend="broken")
    assert table["first"].calls == 0
    assert registry.select(problem(), "eager") == "eager"


def test_unknown_names_list_the_known(table):
    with pytest.raises(ValueError, match="'auto' or one of 'broken', 'first', 'last', 'eager'"):
        registry.select(problem(), "cuda-graphs")


def test_nothing_able_raises_with_all_reasons(table):
    del table["first"], table["eager"]
    with pytest.raises(ValueError, match=r"(?s)no backend.*it rains.*not today"):
        registry.select(problem())


def test_explain_says_chosen_available_and_why_not(table):
    lines = str(registry.explain(problem())).splitlines()[1:]
    verdicts = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert verdicts == {
        "broken": "no: it rains; it is Monday",
        "first": "chosen",
        "last": "no: not today",
        "eager": "available",
    }


def test_the_backward_runs_on_the_backend_of_the_forward(table):
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    out = scaled_dot_product_attention(q, q, q)
    table["first"].backward = lambda *args: (_ for _ in ()).throw(RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine"):
        out.sum().backward()


# ---- the real backends ----


def test_eager_does_everything():
    for dtype in validate.DTYPES:
        assert registry.select(problem(dtype), "eager") == "eager"


def test_float64_is_left_to_eager():
    assert registry.select(problem(torch.float64)) == "eager"
    with pytest.raises(ValueError, match="'cpu' cannot do this problem: float64 is left to eager"):
        registry.select(problem(torch.float64), "cpu")


def test_cpu_wants_cpu_tensors():
    assert "tensors are on meta" in str(registry.explain(problem(device="meta")))


def test_cpu_is_preferred_where_it_runs(extension):
    assert registry.select(problem()) == "cpu"


def on_a_gpu(p):
    return dataclasses.replace(p, device=torch.device("cuda", 0))


def test_explain_says_why_triton_is_not_chosen_without_a_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(triton, "_interpreted", lambda: False)  # in case tests/triton ran
    reason = "tensors are on cpu; torch sees no CUDA device"
    assert f"  triton  no: {reason}" in str(fastattn.explain())
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=reason):
        scaled_dot_product_attention(q, q, q, backend="triton")


def test_a_folder_named_triton_is_not_triton(monkeypatch, tmp_path):
    """Programs in tests/ have one beside them."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    (tmp_path / "triton").mkdir()
    assert not triton._is_installed()
    (tmp_path / "triton/__init__.py").touch()
    importlib.invalidate_caches()
    assert triton._is_installed()


def test_a_gpu_without_triton_is_served_by_eager(monkeypatch, capability):
    capability(9, 0)
    monkeypatch.setattr(triton, "INSTALLED", False)
    p = on_a_gpu(problem())
    assert registry.select(p) == "eager"
    assert "  triton  no: Triton is not installed: pip install triton\n" in str(registry.explain(p))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_has_its_backends(name):
    """Without such a backend its tests are skipped. This test fails instead, and says why."""
    if name == "cuda" and torch.version.hip:
        pytest.skip("an AMD GPU")
    p = dataclasses.replace(problem(torch.float16), device=torch.device("cuda", 0))
    assert registry.get(name).unsupported(p) == []


def test_an_old_gpu_is_served_by_eager(capability):
    capability(7, 5)
    p = on_a_gpu(problem())
    assert registry.select(p) == "eager"
    assert "  triton  no: compute capability 7.5: 8.0 or newer is needed\n" in str(
        registry.explain(p)
    )


def test_triton_is_preferred_for_the_dot_product_on_a_gpu_that_can(capability):
    capability(9, 0)
    half = on_a_gpu(problem(torch.float16))
    assert registry.select(half) == registry.select(on_a_gpu(problem())) == "triton"
    assert registry.select(on_a_gpu(problem(torch.float64))) == "eager"
    lines = str(registry.explain(half)).splitlines()
    assert lines[2:] == ["  triton  chosen", "  cuda    available", "  eager   available",
                         f"  {registry.WHY['dot']}"]  # fmt: skip


def test_cuda_is_preferred_for_the_additive_score(capability):
    capability(8, 0)
    q = torch.zeros(1, 2, 17, 4)
    p = on_a_gpu(validate.build("additive", q, q, q, torch.zeros(2, 4)).p)
    assert registry.select(p) == "cuda"
    assert registry.faster_forward(p, "auto", "cuda") is None
    assert str(registry.explain(p)).endswith(registry.WHY["additive"])


@pytest.mark.parametrize("M", [1, 16])
def test_gradients_of_few_additive_queries_come_from_triton(monkeypatch, capability, M):
    capability(8, 0)
    q, k = torch.zeros(1, 2, M, 4), torch.zeros(1, 2, 40, 4)
    p = on_a_gpu(validate.build("additive", q, k, k, torch.zeros(2, 4)).p)
    assert registry.select(p) == "triton"
    assert registry.faster_forward(p, "auto", "triton") == "cuda"
    assert registry.faster_forward(p, "triton", "triton") is None
    found = registry.explain(p)
    assert found.backend == "triton"
    assert str(found).endswith(registry.FEW_WAITS)
    found = registry.explain(p, grad=False)
    assert found.backend == "cuda"
    assert str(found).endswith(registry.WHY["additive"])
    for weights in ("none", "full"):
        q = dataclasses.replace(p, weights=weights)
        assert [registry.takes(q, grad) for grad in (False, True)] == [True, False]
    with monkeypatch.context() as missing:
        missing.setattr(cuda, "LIBRARY_ERROR", "the CUDA library is missing (no nvcc)")
        assert registry.faster_forward(p, "auto", "triton") is None
    monkeypatch.setattr(triton, "INSTALLED", False)
    assert registry.select(p) == "cuda"


def test_odd_strides_change_nothing_for_few_additive_queries(monkeypatch, table):
    """They matter to the path of warpgroups alone."""
    monkeypatch.setattr(registry, "faster_forward", lambda *args: "eager")
    q, k, w = torch.randn(1, 3, 5), torch.randn(1, 5, 7).mT, torch.randn(5)
    fastattn.additive_attention(q, k, k, w)
    assert table["first"].calls == 0


def test_cuda_says_what_it_cannot_do(monkeypatch, capability):
    capability(8, 0)
    assert cuda.unsupported(on_a_gpu(problem(torch.float16))) == []
    capped = dataclasses.replace(problem(torch.float16), softcap=2.0)
    assert cuda.unsupported(on_a_gpu(capped)) == []
    [reason] = cuda.unsupported(on_a_gpu(problem()))
    assert "float16 and bfloat16" in reason
    wide = dataclasses.replace(on_a_gpu(problem(torch.float16)), D=257)
    assert cuda.unsupported(wide) == ["D ends at 256 and E at 256, here they are 257 and 4"]
    [reason] = registry.against("cuda", dataclasses.replace(wide, D=129))
    assert "gradients have D and E up to 128" in reason
    monkeypatch.setattr(cuda, "LIBRARY_ERROR", "the CUDA library is missing (no nvcc)")
    reasons = cuda.unsupported(on_a_gpu(problem(torch.float16)))
    assert reasons == ["the CUDA library is missing (no nvcc)"]


@pytest.fixture
def capability(monkeypatch):
    """Gives the GPU a compute capability, and its backends, even without a GPU."""

    def pretend(*version):
        monkeypatch.setattr(triton, "INSTALLED", True)
        monkeypatch.setattr(cuda, "LIBRARY_ERROR", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
        _gpu.capability_reasons.cache_clear()

    yield pretend
    _gpu.capability_reasons.cache_clear()


def test_choosing_a_backend_is_a_constant_to_the_compiler(capability):
    """Code that queries the machine cannot be traced."""
    capability(9, 0)
    p = on_a_gpu(problem())

    @torch.compile(fullgraph=True, backend="eager")
    def add(x):
        return x + len(registry.select(p))

    assert add(torch.zeros(1)) == len(registry.select(p))


def test_public_explain():
    q = torch.zeros(2, 2, 3, 4)
    found = fastattn.explain(q, mask=Mask(causal="top_left"), return_weights="mean")
    assert isinstance(found, fastattn.Explanation)
    assert found.backend == registry.select(problem())
    assert found.reasons[found.backend] == []
    assert list(found.reasons) == registry.in_order(problem())
    text = str(found)
    assert text.startswith("dot attention: B=2 H=2 Hkv=2 M=3 N=3 D=4 E=4, float32 on cpu")
    assert "mask top_left, weights mean" in text
    assert "chosen" in text
    assert str(fastattn.explain(q, q, q, torch.zeros(4))).startswith("additive")
    assert " N=5 D=4 E=4," in str(fastattn.explain(q, torch.zeros(2, 2, 5, 4)))
    assert " N=5 D=4 E=6," in str(fastattn.explain(q, *(torch.zeros(2, 2, 5, n) for n in (4, 6))))
    refused = fastattn.explain(q.double(), backend="cpu")
    assert (refused.backend, refused.path) == (None, None)
    assert refused.reasons["cpu"] == ["float64 is left to eager"]


def test_explain_says_the_path(extension, monkeypatch):
    monkeypatch.setattr(cpu, "path", lambda p, bias, keys: f"tiles of {p.M}, bias {bias}")
    q = torch.zeros(2, 2, 3, 4)
    found = fastattn.explain(q)
    assert found.path == "tiles of 3, bias False"
    assert "  cpu: path tiles of 3, bias False" in str(found).splitlines()
    assert fastattn.explain(q, bias=torch.zeros(3, 3)).path == "tiles of 3, bias True"
    assert fastattn.explain(q, backend="eager").path is None


# ---- without the compiled extension ----

# What a new interpreter does with a copy of the package.
PROGRAM = """
import os, sys, warnings, torch
sys.path.insert(0, os.environ["FOLDER"])
warnings.simplefilter("error")
import fastattn
assert fastattn.__file__.startswith(os.environ["FOLDER"])
assert not {"triton", "transformers", "fastattn.kernels"} & set(sys.modules)
fastattn.integrations.transformers, fastattn.integrations.flash_attn  # no import by name
assert "fastattn.distributed" not in sys.modules and "fastattn.testing" not in sys.modules
fastattn.distributed.Layout, fastattn.testing.GRID
q = torch.randn(1, 2, 3, 4, requires_grad=True)
fastattn.scaled_dot_product_attention(q, q, q, backend="eager")
fastattn.scaled_dot_product_attention(q.double(), q.double(), q.double())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fastattn.scaled_dot_product_attention(q, q, q, is_causal=True)
    fastattn.MultiheadAttention(4, 2)(q[0], q[0], q[0])
for warning in caught:
    print("warned:", warning.category.__name__, warning.message)
fastattn.scaled_dot_product_attention(q, q, q).sum().backward()
assert q.grad.isfinite().all()
print(fastattn.explain(q))
try:
    fastattn.scaled_dot_product_attention(q, q, q, backend="cpu")
except ValueError as error:
    print("raised:", error)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What PROGRAM prints, by the file that is added to a package without extension."""
    files = {
        "none": "", "_build_info.json": '{"reason": "no C++ compiler was found"}',
        "_C.abi3.so": "not a library",
    }  # fmt: skip
    ignore = shutil.ignore_patterns("*.so", "_build_info.json", "kernels", "__pycache__")
    folders = {name: str(tmp_path_factory.mktemp("package")) for name in files}
    for name, content in files.items():
        copy = shutil.copytree(PACKAGE, Path(folders[name], "fastattn"), ignore=ignore)
        Path(copy, name).write_text(content)
    found = output_with("FOLDER", list(folders.values()), PROGRAM, tmp_path_factory.getbasetemp())
    return {name: "\n".join(found[folder]) for name, folder in folders.items()}


INSTALL = "pip install --no-cache-dir --force-reinstall --no-deps ."
HAS_KERNELS = platform.machine() in ("x86_64", "aarch64")


@pytest.mark.slow
def test_package_works_without_the_extension(printed):
    output = printed["none"]
    assert "eager   chosen" in output
    reason = "the compiled extension is missing (it was never built: run `make build`)"
    assert output.count(reason) == 2 + HAS_KERNELS
    assert "raised: backend 'cpu' cannot do this problem: " in output


@pytest.mark.slow
def test_a_package_without_kernels_says_once_how_to_get_them(printed):
    output = printed["_build_info.json"]
    reason = "the compiled extension is missing (no C++ compiler was found)"
    assert output.count(reason) == 2 + HAS_KERNELS
    warnings = [line for line in output.splitlines() if line.startswith("warned: ")]
    assert [line.startswith(f"warned: RuntimeWarning {reason}") for line in warnings] == (
        [True] * HAS_KERNELS
    )
    assert output.count(INSTALL) == 2 * HAS_KERNELS  # explain() too


@pytest.mark.slow
def test_an_extension_that_does_not_load_is_a_reason(printed):
    output = printed["_C.abi3.so"]
    assert output.count("the compiled extension does not load: ") == 2 + HAS_KERNELS


@pytest.fixture
def without_kernels(monkeypatch, tmp_path):
    """An installed package without kernels that it could have; it has not warned yet."""
    monkeypatch.setattr(operators, "EXTENSION_ERROR", "the compiled extension is missing (a test)")
    monkeypatch.setattr(operators, "EXTENSION_LEFT_OUT", False)
    monkeypatch.setattr(operators, "__file__", str(tmp_path / "fastattn/backends/operators.py"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(triton, "_interpreted", lambda: False)  # another test may interpret them
    cpu._warn_once.cache_clear()
    yield monkeypatch
    cpu._warn_once.cache_clear()


def test_how_to_get_the_kernels(without_kernels, tmp_path):
    assert cpu._remedy().endswith(INSTALL)
    (tmp_path / "setup.py").touch()
    assert cpu._remedy() == "`make build` compiles the kernels"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (operators, "EXTENSION_ERROR", None),
        (operators, "EXTENSION_LEFT_OUT", True),
        (platform, "machine", lambda: "riscv64"),
        (sys, "platform", "darwin"),
    ],
)
def test_kernels_are_not_missed(without_kernels, recwarn, owner, name, value):
    """If they are there, or were left out on purpose, or cannot be had."""
    without_kernels.setattr(owner, name, value)
    assert cpu._remedy() is None
    without_kernels.setattr(cpu, "REMEDY", None)
    assert registry.select(problem()) == ("cpu" if operators.EXTENSION_ERROR is None else "eager")
    assert not recwarn.list


def test_missing_kernels_are_told_of_under_the_compiler_too(without_kernels):
    without_kernels.setattr(cpu, "REMEDY", cpu._remedy())

    @torch.compile(fullgraph=True, backend="eager")
    def add(x):
        return x + len(registry.select(problem()))

    with pytest.warns(RuntimeWarning, match=INSTALL):
        assert add(torch.zeros(1)) == len("eager")
    assert str(registry.explain(problem())).endswith(f"  cpu: {cpu.REMEDY}")


def test_the_reason_is_none_exactly_when_the_kernels_are_there():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("fastattn::forward", "CPU")
    assert has_kernel == (operators.EXTENSION_ERROR is None)


# ---- conftest.py with a broken GPU context ----


@pytest.mark.parametrize("worker", [None, "gw0"])
def test_a_lost_gpu_ends_the_process_and_spares_the_tests_that_follow(request, monkeypatch, worker):
    plugins = request.config.pluginmanager.get_plugins()
    [leave] = [p._leave_if_broken for p in plugins if hasattr(p, "_leave_if_broken")]

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Ended(BaseException):
        pass

    def end(status):
        raise Ended

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    with pytest.raises(Ended if worker else pytest.exit.Exception):
        leave()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    leave()
