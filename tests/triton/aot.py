"""Compiles launchers' kernels without a GPU, and says what the machine code uses.

    python tests/triton/aot.py sm_90 2 dot            every row of config.py that 2-byte elements
                                                       and a score can choose, as JSON
    python tests/triton/aot.py sm_90 2 dot "plain"    of these, what some of PROBLEMS need
    python tests/triton/aot.py sm_90 2 dot "plain/64" and of one head size
    python tests/triton/aot.py sm_90 2 dot "rich/64/dq|dkdv" and kernels of these names: no dV, if
                                                       dK has a launch of its own
    python tests/triton/aot.py sm_90 grid             whether Triton takes every case of the grid
    python tests/triton/aot.py sm_90 grid M1-N1       and those of that name
    python tests/triton/aot.py sm_90 cache            puts kernels for the grid into Triton's cache,
                                                       which a machine with a GPU can be given
    python tests/triton/aot.py sm_90 variants         how many kernels Triton compiles over a sweep
                                                       of sizes, and what it says in a capture
    python tests/triton/aot.py sm_90 copies           how the forward pass reads rows of a few sizes

A driver that only has an architecture's name replaces the real one, and launches compile instead of
run. Tensors are on the meta device. It does not work in the interpreter: run it in its own process.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sass

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Driver:
    """The part of a driver that compiling uses."""

    def __init__(self, arch: str):
        if arch.startswith("sm_"):
            self.target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        else:
            self.target = GPUTarget("hip", arch, 64)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(arch: str, wanted=lambda name, options: True) -> list:
    """Makes later launches only compile. Returns the list that collects the compiled kernels.

    ``wanted``: whether to compile the kernel of a name and options.
    """
    from fastattn.kernels.host import config, launch

    driver.set_active(Driver(arch))
    config.architecture = launch.architecture = lambda device: arch
    compiled = []
    run = JITFunction.run

    def warmup(self, *args, grid, warmup, **options):
        if not wanted(self.fn.__name__, options):
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    JITFunction.run = warmup
    return compiled


def output(tool: str, *args) -> str:
    """The output of a tool from Triton's package."""
    return subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout


def usage_amd(kernel) -> dict:
    """Registers, spills (bytes of scratch memory) and shared memory of a kernel for AMD."""

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", kernel.asm["amdgcn"])[1])

    return {
        "name": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": count("vgpr_count"),
        "spills": count("private_segment_fixed_size"),
        "shared": kernel.metadata.shared,
        "mfma": kernel.asm["amdgcn"].count("v_mfma"),
    }


def usage(kernel, folder: Path) -> dict:
    """Registers, spills, shared memory and inner loops of a compiled kernel.

    A stack alone is no spill. A 64-bit division is a call, which keeps its return address there,
    and the registers that it needs, even if the kernel has plenty.
    """
    if "cubin" not in kernel.asm:
        return usage_amd(kernel)
    path = folder / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", output("cuobjdump", "-res-usage", path)))
    stack = int(found["STACK"]) + int(found["LOCAL"])
    code = output("nvdisasm", "-c", path)
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code)) if stack and int(found["REG"]) > 64 else 0
    return {
        "name": kernel.metadata.name,
        "hash": kernel.hash,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": int(found["REG"]),
        "spills": spills,
        "shared": kernel.metadata.shared,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "mma": kernel.asm["ptx"].count("mma.sync"),
        "tensor_copies": kernel.asm["ptx"].count("cp.async.bulk.tensor"),
        "exponents": rounded_exponents(kernel.asm["ptx"]),
        "tcgen05": kernel.asm["ptx"].count("tcgen05.mma"),
        "tensor_memory": kernel.metadata.tmem_size,
        "paired_loops": sass.paired_loops(code),
        "gradient_loops": sass.paired_loops(code, gradients=True),
        "difference_loops": sass.difference_loops(code),
        "product_loops": sass.product_loops(code),
    }


def rounded_exponents(ptx: str) -> tuple[int, int]:
    """(exponentials, how many of them have a difference, or a multiple of one, as argument).

    A multiply-add that absorbed the difference does not count: c s - m, without rounding the
    product. In float64, as a sink has it, its rounding does not matter.
    """
    made = {
        name: (operation, re.findall(r"%\w+", operands))
        for operation, name, operands in re.findall(
            r"^\s+([a-z][\w.]*)\s+(%\w+), ([^;]*);", ptx, re.MULTILINE
        )
    }

    def is_difference(name: str) -> bool:
        full, operands = made.get(name, ("", []))
        factors = {"mul": operands, "fma": operands[:2], "min": operands[:1], "neg": operands}
        exact = full.startswith("sub.") or full.endswith(".f64")
        return exact or any(map(is_difference, factors.get(full.split(".")[0], [])))

    arguments = re.findall(r"ex2\.approx[\w.]*\s+%\w+, (%\w+);", ptx)
    return len(arguments), sum(map(is_difference, arguments))


def call(dtype, D, score, *, B=2, H=4, Hkv=4, M=1024, N=1024, causal=False, **features):
    """A launch.Call over meta tensors; bias, keep, kv_len and kv_begin by their shapes."""
    from fastattn.kernels.host.launch import Call
    from fastattn.problem.record import SCORES, WEIGHTS

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    tensors = {}
    if score != "dot":
        tensors["w"] = empty(H, D)
    if "bias" in features:
        tensors["bias"] = empty(*features["bias"], dtype=features.get("bias_dtype", dtype))
    if "keep" in features:
        tensors["keep"] = empty(*features["keep"], dtype=torch.bool)
    for name in {"kv_len", "kv_begin"} & features.keys():
        tensors[name] = empty(*features[name], dtype=torch.int32)
    dropout_p = features.get("dropout_p", 0.0)
    if dropout_p:
        tensors["seed"] = empty(dtype=torch.int64)
    return Call(
        empty(B, H, M, D), empty(B, Hkv, N, D), empty(B, Hkv, N, D), **tensors,
        band_hi=0 if causal else None, scale=D**-0.5, softcap=features.get("softcap", 0.0),
        dropout_p=dropout_p, weights=WEIGHTS[features.get("weights", "none")], score=SCORES[score],
    )  # fmt: skip


# The features whose code is largest: what compiles with all of them compiles with some of them.
# A plain and a rich problem use every row between them, but those for few queries.
MASKED = dict(causal=True, kv_len=(2, 1024), kv_begin=(2, 1024), keep=(2, 1, 1024, 1024), sink=True)
MORE = dict(Hkv=2, dropout_p=0.1, bias=(2, 4, 1024, 1024), weights="full")
DECODE = dict(M=1, N=4096, kv_len=(2, 1), keep=(2, 1, 1, 4096), sink=True)
PROBLEMS = {
    "plain": MASKED,
    "rich": MASKED | MORE,
    "line": MASKED | MORE | dict(bias=(2, 4, 1, 2047)),
    "plain decode": DECODE,
    "rich decode": DECODE | MORE | dict(bias=(2, 4, 1, 4096)),
}
WIDE = {f"{name} wide": PROBLEMS[name] | dict(bias_dtype=torch.float32) for name in PROBLEMS
        if name.startswith("rich")}  # fmt: skip
# A curve's slopes: of the dot product alone, whose tiles are large enough to spill them.
CURVED = {"curved": MASKED | dict(softcap=30.0)}
SINGLE = {
    "dropout": MASKED | dict(dropout_p=0.1),
    "bias": MASKED | dict(bias=(2, 4, 1024, 1024)),
    "weights": MASKED | dict(weights="full"),
}
# A few more queries: the additive score then has tiles, and gradients of few.
FEW = {
    "plain few": DECODE | dict(M=8),
    "rich few": DECODE | MORE | dict(M=8, bias=(2, 4, 8, 4096)),
}
OTHERS = {"dot": CURVED | SINGLE, "additive": FEW, "gaussian": {}}


def compile_problem(dtype, head_size: int, score: str, features: dict) -> None:
    """Forward and backward of one problem."""
    problem = call(dtype, head_size, score, **features)
    run_problem(problem, torch.empty(problem.H, device="meta") if features.get("sink") else None)


def launchers(call):
    """The launchers of a call's forward and of its backward."""
    from fastattn.kernels.loop.additive_backward import launch_additive_bwd
    from fastattn.kernels.loop.additive_forward import launch_additive_fwd
    from fastattn.kernels.loop.backward import launch_sdpa_bwd
    from fastattn.kernels.loop.forward import launch_sdpa_fwd

    if call.w is None:
        return launch_sdpa_fwd, launch_sdpa_bwd
    return launch_additive_fwd, launch_additive_bwd


def run_problem(problem, sink=None) -> None:
    """Launches forward and backward."""
    from fastattn.kernels.host.launch import Saved, empty_forward
    from fastattn.kernels.loop import additive_forward

    forward, backward = launchers(problem)
    if problem.w is not None and problem.weights_mode != "none":
        with unittest.mock.patch.object(additive_forward, "KEPT_BYTES", 0):
            forward(problem, sink)  # with scores that are computed again
    forward(problem, sink)
    out, _, weights, stats = empty_forward(problem)
    grad_weights = None if problem.weights_mode == "none" else weights
    grad_out, biased = torch.empty_like(out), problem.bias is not None
    backward(problem, Saved(out, stats, grad_out, None, grad_weights, biased, sink))


# ---- the grid of the tests: sizes of 1, which Triton makes constants, strides, heads ----


def stop_before_llvm() -> list[str]:
    """Makes compiling end at the GPU dialect's IR; returns a list of the kernels that got there.

    This stage refuses programs, and takes a tenth of the time.
    """
    from triton.compiler import compiler

    accepted = []

    def compile_part(self, key, signature, device, constexprs, options, attrs, warmup):
        kernels, _, target, backend, _ = self.device_caches[device]
        source, context, stages = self.ASTSource(self, signature, constexprs, attrs), None, {}
        context = compiler.ir.context()
        compiler.ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        backend.add_stages(stages, options, source.language)
        module = source.make_ir(target, options, functions, modules, context)
        for stage in ("ttir", "ttgir"):
            module = stages[stage](module, {})
        kernels[key] = self.fn.__name__
        accepted.append(self.fn.__name__)
        return kernels[key]

    JITFunction._do_compile = compile_part
    return accepted


def launch_case(case) -> None:
    """Launches forward and backward of a case of the grid, on meta tensors with its strides."""
    from fastattn import testing
    from fastattn.kernels.host.launch import Call, Saved, empty_forward
    from fastattn.problem import validate

    def meta(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    t = testing.make(case)
    p, *tensors = validate.build(
        case.score, t.q, t.k, t.v, t.w, mask=t.mask, bias=testing.given_bias(case, t.bias),
        enable_gqa=True, dropout_p=case.dropout_p, seed=1, return_weights=case.weights,
    )[:6]  # fmt: skip
    call = Call.of(*map(meta, (*tensors, *p.operands)))
    forward, backward = launchers(call)
    forward(call, meta(t.sink))
    out, lse, _, stats = empty_forward(call)
    saved = Saved(
        out, stats, meta(t.grad_out), lse if case.lse else None, meta(t.grad_weights),
        t.bias is not None and case.bias_grad, meta(t.sink),
    )  # fmt: skip
    backward(call, saved)


def grid(arch: str, *names: str) -> None:
    """Prints, as JSON, what Triton did with the cases: {"accepted": kernels, "refused": why}."""
    from fastattn.testing import GRID

    compile_only(arch)
    accepted, refused = stop_before_llvm(), {}
    for case in GRID:
        if names and case.name not in names:
            continue
        try:
            launch_case(case)
        except Exception as error:
            refused[str(case)] = f"{type(error).__name__}: {error}"[-1000:]
    print(json.dumps({"accepted": accepted, "refused": refused}))


def cache(arch: str, *names: str) -> None:
    """Compiles all kernels of the cases, in as many threads as there are cores."""
    from fastattn.testing import GRID

    compile_only(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        for case in GRID:
            if not names or case.name in names:
                launch_case(case)


# Sizes that differ in everything that Triton could specialise for.
SIZES = (2, 16, 17, 96, 128, 1000, 4096, 4097, 4100)
SWEEPS = {
    "plain": [dict(M=n, N=n) for n in SIZES if n > 16],
    "causal": [dict(M=n, N=n, causal=True) for n in SIZES if n > 16],
    "cross": [dict(M=100, N=n) for n in SIZES],
    "keep": [dict(M=n, N=n, keep=(2, 1, n, n)) for n in SIZES if n > 16],
    "lengths": [dict(M=n, N=n, kv_len=(2, n)) for n in SIZES if n > 16],
    "intervals": [dict(M=n, N=n, kv_len=(1, n), kv_begin=(1, n)) for n in SIZES if n > 16],
    "decode": [dict(M=1, N=n, band_hi=n - 1) for n in (2, 17, 511, 1024, 5000, 9000, 40_000)],
    "unaligned": [dict(M=n, N=n, offset=offset) for n in (128, 129) for offset in (0, 8, 1)],
}


def variants(arch: str) -> None:
    """Prints, as JSON, the most kernels of a function in a sweep, and an error in a capture."""
    compile_only(arch)

    def problem(score, band_hi=None, offset=0, **features):
        found = call(torch.bfloat16, 64, score, B=2, **features)
        q = torch.empty(found.q.numel() + offset, dtype=found.q.dtype, device="meta")
        return found._replace(
            q=q[offset:].view(found.q.shape), band_hi=found.band_hi if band_hi is None else band_hi
        )

    first = problem("dot", M=64, N=64)
    torch.cuda.is_available = torch.cuda.is_current_stream_capturing = lambda: True
    try:
        run_problem(first)
        error = None
    except RuntimeError as raised:
        error = str(raised)
    torch.cuda.is_available = torch.cuda.is_current_stream_capturing = lambda: False

    made: dict[str, set] = {}

    def record(self, key, signature, device, constexprs, options, attrs, warmup):
        made.setdefault(self.fn.__name__, set()).add(key)
        self.device_caches[device][0][key] = self.fn.__name__
        return self.fn.__name__

    JITFunction._do_compile = record
    functions = [x for x in gc.get_objects() if isinstance(x, JITFunction)]
    found = {}
    for score in ("dot", "additive", "gaussian"):
        for name, sweep in SWEEPS.items():
            made.clear()
            for function in functions:
                function.device_caches.clear()
            for features in sweep:
                run_problem(problem(score, **features))
            found[f"{score} {name}"] = {kernel: len(keys) for kernel, keys in made.items()}
    print(json.dumps({"variants": found, "error": error}))


def copies(arch: str) -> None:
    """Prints, as JSON, {head size: (copies of 16 bytes, loads of 2)} of the forward pass."""
    from fastattn.kernels.loop.forward import launch_sdpa_fwd

    compiled = compile_only(arch)
    for head_size in (64, 72, 76):
        launch_sdpa_fwd(call(torch.bfloat16, head_size, "dot"))
    found = {}
    for kernel, head_size in zip(compiled, (64, 72, 76), strict=True):
        ptx = kernel.asm["ptx"]
        wide = len(re.findall(r"cp\.async\.cg\S* .*, 0x10,", ptx))
        found[head_size] = wide, ptx.count("ld.global.b16")
    print(json.dumps(found))


def main(arch: str, size: str, score: str, *problems: str) -> None:
    part, seen, found = "", set(), []

    def wanted(name: str, options: dict) -> bool:
        """Of a part, the first launch of each form: that of dK needs more registers than dV's."""
        form = name, options.get("GARBAGE")
        again = part and form in seen
        seen.add(form)
        return re.search(part, name) is not None and not again

    compiled = compile_only(arch, wanted)
    dtype = {2: torch.bfloat16, 4: torch.float32}[int(size)]
    with tempfile.TemporaryDirectory() as folder:
        for head_size in (64, 128, 256):
            known = PROBLEMS | (WIDE if size == "2" else {}) | OTHERS[score]
            for problem in problems or known:
                name, only, part = (*problem.split("/"), "", "")[:3]
                if only and int(only) != head_size:
                    continue
                compiled.clear()
                seen.clear()
                compile_problem(dtype, head_size, score, known[name])
                for kernel in compiled:
                    entry = usage(kernel, Path(folder))
                    found.append(dict(entry, head_size=head_size, problem=name))
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[2] == "variants":
        variants(sys.argv[1])
    elif sys.argv[2] == "copies":
        copies(sys.argv[1])
    elif sys.argv[2] == "cache":
        cache(sys.argv[1], *sys.argv[3:])
    elif sys.argv[2] == "grid":
        grid(sys.argv[1], *sys.argv[3:])
    else:
        main(*sys.argv[1:])
