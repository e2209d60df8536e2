"""First launches without a GPU: what is compiled beside what, and what is launched after it.

    python tests/triton/first_launch.py         prints JSON, which test_together.py reads

A stand-in compiles: it waits until as many kernels are in work as a launch has. Another stand-in is
launched. It does not work in the interpreter: run it in its own process.
"""

import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import aot
import torch
import triton
from triton import compiler
from triton.runtime import driver

TENSORS = dict(M=64, N=64, B=1, H=2, Hkv=2)


class Machine:
    """Compiles and launches nothing, and remembers what it was asked for."""

    def __init__(self):
        self.compiled, self.launched, self.broken = [], [], set()
        self.beside = threading.Barrier(1)
        self.meanwhile = {}  # what happens while a kernel is compiled

    def compile(self, src, target=None, options=None, _env_vars=None):
        self.compiled.append((src.name, threading.get_ident()))
        self.beside.wait(30)
        self.meanwhile.get(src.name, lambda: None)()
        if src.name in self.broken:
            raise RuntimeError(f"no {src.name}")

        def run(*args):
            self.launched.append(src.name)

        return types.SimpleNamespace(
            run=run, launch_metadata=lambda *args: None, function=None, packed_metadata=None
        )

    def expect(self, kernels: int) -> None:
        """The next launch has to compile so many kernels at once."""
        self.compiled, self.launched = [], []
        self.beside = threading.Barrier(kernels)

    def report(self) -> dict:
        own = threading.get_ident()
        return {
            "compiled": sorted(name for name, _ in self.compiled),
            "here": sum(thread == own for _, thread in self.compiled),
            "launched": self.launched,
        }


def raised(function, *args) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def main() -> None:
    machine, found = Machine(), {}
    compiler.compile = machine.compile
    driver.set_active(aot.Driver("sm_90"))
    from fastattn.kernels.host import config, launch, together

    config.architecture = launch.architecture = lambda device: "sm_90"

    def passes(head_size: int, **features):
        problem = aot.call(torch.bfloat16, head_size, "dot", **{**TENSORS, **features})
        forward, backward = aot.launchers(problem)
        out, _, _, stats = launch.empty_forward(problem)
        saved = launch.Saved(out, stats, torch.empty_like(out))
        return lambda: forward(problem), lambda: backward(problem, saved)

    def first(name: str, run, kernels: int) -> None:
        machine.expect(kernels)
        found[name] = {"raised": raised(together.run, run)} | machine.report()

    forward, backward = passes(64)
    first("forward", forward, 1)
    first("backward", backward, 3)
    first("again", backward, 1)

    # Launches of other threads go on.
    masked = passes(64, keep=(1, 1, 64, 64))[0]
    other = threading.Thread(target=together.run, args=(forward,))
    machine.meanwhile["classify_kernel"] = lambda: (other.start(), other.join(30))
    first("others", masked, 3)
    machine.meanwhile.clear()

    # What fails is tried again, and raised where it was asked for.
    forward, backward = passes(128)
    machine.broken = {"sdpa_bwd_dq_kernel"}
    machine.expect(3)
    machine.beside = threading.Barrier(1)
    found["broken"] = {"raised": raised(together.run, backward)} | machine.report()
    machine.broken = set()
    first("mended", backward, 1)

    # A thread may come to another device meanwhile.
    has_failed = together._has_failed

    def come_to_another_device(compiled) -> bool:
        for kernel in together._kernels():
            kernel.device_caches[1]
        return has_failed(compiled)

    together._has_failed = come_to_another_device
    first("devices", passes(32)[0], 1)
    together._has_failed = has_failed

    # A caller may compile so as well.
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        first("within", passes(256)[1], 4)

    # Nothing is compiled in a capture.
    torch.cuda.is_available = torch.cuda.is_current_stream_capturing = lambda: True
    first("capture", passes(16)[1], 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
