"""What tests of warpgroups share: the simulator, and a fake of Triton on what counts as Hopper."""

import ctypes
import types

import pytest
import shim_backend
import torch

import fastattn
from fastattn import scaled_dot_product_attention, self_check
from fastattn.backends import cuda, health, registry, wgmma
from fastattn.backends.health import Check

CPU = torch.device("cpu")
EAGER = registry.BACKENDS["eager"]


class Simulator:
    """What the simulator offers to tests. On a GPU there is one schedule, and nothing to count."""

    def __init__(self) -> None:
        self.library = None if shim_backend.ON_GPU else ctypes.CDLL(str(shim_backend.library()))
        if self.library:
            self.library.shim_products.restype = ctypes.c_uint64
            self.library.shim_visited.restype = ctypes.c_uint64

    def set_schedule(self, number: int) -> None:
        if self.library:
            self.library.shim_schedule(number)

    def products(self) -> int | None:
        return self.library.shim_products() if self.library else None

    def usual_tiles(self) -> int | None:
        """Tiles that the kernels for compute capability 8.0 have taken so far."""
        return sum(map(self.library.shim_visited, (0, 1))) if self.library else None


@pytest.fixture
def simulator():
    simulator = Simulator()
    yield simulator
    simulator.set_schedule(0)


@pytest.fixture
def by_warpgroups(monkeypatch):
    """The backend of the simulator, or of a GPU, with the path of warpgroups by name."""
    name = shim_backend.install(monkeypatch)
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    if shim_backend.ON_GPU and not wgmma.has_capability(torch.device("cuda")):
        pytest.skip("wgmma needs compute capability 9.0")
    monkeypatch.setattr(wgmma, "has_capability", lambda device: True)  # tensors are on the CPU
    return name


@pytest.fixture
def triton(monkeypatch, tmp_path):
    """A fake of Triton that counts, on what counts as a GPU of compute capability 9.0."""
    shim_backend.install(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FASTATTN_SELF_CHECK", raising=False)
    monkeypatch.setattr(health, "DEVICES", ("cpu",))
    monkeypatch.setattr(health, "machine", lambda device: "Hopper")
    monkeypatch.setattr(health, "runner", self_check.run)  # a child has not this GPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fake = types.SimpleNamespace(calls=0, unsupported=lambda p: [], backward=EAGER.backward)

    def forward(*args):
        fake.calls += 1
        return EAGER.forward(*args)

    fake.forward = forward
    monkeypatch.setattr(registry, "BACKENDS", {"triton": fake, "cuda": cuda, "eager": EAGER})
    health.forget()
    for kind in (*self_check.PROBLEMS, "plain D<=256"):
        health.keep(Check("triton", "dot", "float16", kind), CPU, None)
    health.keep(Check("cuda", "dot", "float16", ""), CPU, None)
    yield fake
    wgmma.choose(CPU, False)
    health.forget()


def found_right():
    health.keep(wgmma.CHECK, CPU, None)


def products():
    return Simulator().products()


def heads(M=40, D=64):
    return torch.randn(1, 2, M, D).half()


def takes_wgmma(triton, q, k=None, v=None, **options):
    """Whether a call takes the path of warpgroups; a call that takes no products is Triton's."""
    k = q if k is None else k
    v = k if v is None else v
    before, calls = products(), triton.calls
    scaled_dot_product_attention(q, k, v, **options)
    taken = products() > before
    assert triton.calls - calls == (0 if taken else 1) or options.get("backend") == "cuda"
    return taken


def explained(*tensors, **options):
    found = fastattn.explain(*tensors, **options)
    assert all(len(line) < 200 for line in str(found).splitlines())
    return found
