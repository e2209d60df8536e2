"""Helpers that several test files share, beyond ``fastattn.testing``."""

import copy
import dataclasses
import functools
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn import testing
from fastattn.problem import Problem

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16")
SCORES = ("dot", "additive")
ON_GPU = ("triton", "cuda")
BACKENDS = ("cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPU), "eager")


def inputs(score="dot", B=2, H=2, Hkv=None, M=5, N=7, D=4, E=3, dtype=torch.float32, grad=False):
    """{q, k, v[, weight]} from torch's generator, which every test seeds."""
    Hkv = H if Hkv is None else Hkv
    shapes = {"query": (B, H, M, D), "key": (B, Hkv, N, D), "value": (B, Hkv, N, E)}
    if score == "additive":
        shapes["weight"] = (H, D)
    return {
        name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for name, shape in shapes.items()
    }


def attend(query, key, value, weight=None, **options):
    """Either score: additive if there is a weight."""
    if weight is not None:
        return fastattn.additive_attention(query, key, value, weight, **options)
    return fastattn.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


def everything(call: dict, grad_out=None, **options) -> dict[str, torch.Tensor]:
    """Output, weights, log-sum-exp, and all gradients of a fixed random function of these three."""
    leaves = {name: x.detach().requires_grad_() for name, x in call.items()}
    bias = options.get("bias")
    if bias is not None:
        leaves["bias"] = options["bias"] = bias.detach().requires_grad_()
    named = {name: leaves[name] for name in call}
    out, weights, lse = attend(**named, return_weights="full", return_lse=True, **options)
    rng = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=rng).to(x.dtype) for x in (out, weights, lse)]
    grads[0] = grads[0] if grad_out is None else grad_out
    pulled = torch.autograd.grad([out, weights, lse], list(leaves.values()), grads)
    results = {"out": out.detach(), "weights": weights.detach(), "lse": lse.detach()}
    return results | {f"grad_{n}": g for n, g in zip(leaves, pulled, strict=True)}


def spied(monkeypatch, module, name: str, seen: list | None = None) -> list:
    """A list, ``seen`` if given, that gets the keyword arguments of every call of a function."""
    real, seen = getattr(module, name), [] if seen is None else seen

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return seen


assert_same_bits = testing.assert_same_bits
HUGE = 2**31  # bytes of a storage, few of which are touched


FORKS = """
import os, sys, torch
program, variable, *values = sys.argv[1:]
for value in values:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.environ[variable] = value
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, value
    print(end="\\0")
"""


def output_with(variable: str, values: list[str], program: str, cwd) -> dict[str, list[str]]:
    """The lines that a program prints with each value of a variable of the environment.

    Each time it is a new process, which has imported torch and nothing else.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKS, program, variable, *values],
        cwd=cwd, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *printed, rest = done.stdout.split("\0")
    assert not rest
    return {value: x.splitlines() for value, x in zip(values, printed, strict=True)}


FIELDS = [field.name for field in dataclasses.fields(Problem) if field.init]


class Carrier:
    """A backend for CPU tensors that runs another device's backend on copies.

    Every backend's tests then run unchanged on a GPU. Whole storages are copied, so strides and the
    memory between elements stay the same.
    """

    def __init__(self, backend, device: torch.device):
        self.backend, self.device = backend, device

    def unsupported(self, p):
        """Skips the test, with the reasons, if the backend does not support a problem."""
        reasons = self.backend.unsupported(self._moved(p))
        if reasons and p.dtype != torch.float64:  # tests expect that float64 is left to eager
            pytest.skip("; ".join(reasons))
        return reasons

    def shift_unit(self, p, biased):
        return self.backend.shift_unit(p, biased)

    def forward(self, p, *args):
        return self._run(self.backend.forward, p, args)

    def backward(self, p, *args):
        return self._run(self.backend.backward, p, args)

    def _run(self, function, p, args):
        self.unsupported(p)  # nobody has asked yet, if a test calls the backend itself
        p = self._moved(p).with_tensors(*map(self._there, p.tensors()))
        results = function(p, *map(self._there, args))
        results = tuple(x if x is None else x.cpu() for x in results)
        if not torch.compiler.is_compiling() and torch.cuda.memory_reserved() > HUGE:
            torch.cuda.empty_cache()  # other processes also test on this GPU
        return results

    def _moved(self, p):
        """The problem on the device. Not dataclasses.replace: torch 2.11 does not trace it."""
        fields = {name: getattr(p, name) for name in FIELDS}
        return Problem(**fields | {"device": self.device})

    def _there(self, x):
        if not isinstance(x, torch.Tensor) or torch.compiler.is_compiling():
            return x.to(self.device) if isinstance(x, torch.Tensor) else x
        storage, layout = x.untyped_storage(), (x.shape, x.stride(), x.storage_offset())
        if storage.nbytes() > HUGE:  # its elements are only meant to be far apart
            length = storage.nbytes() // x.element_size()
            there = torch.empty(length, dtype=x.dtype, device=self.device)
            return there.as_strided(*layout).copy_(x)
        there = torch.empty(0, dtype=x.dtype, device=self.device)
        storage = storage.to(device=self.device)
        return there.set_(storage, x.storage_offset(), x.shape, x.stride())


def assert_close(ours, f32, truth) -> None:
    """The error budget over sequences: ours, a float32 peer (plain PyTorch), the float64 truth."""
    assert len(ours) == len(f32) == len(truth)
    for n, results in enumerate(zip(ours, f32, truth, strict=True)):
        testing.assert_within_budget(*results, name=f"result {n}")


def assert_module_close(module, formula, tensors: list, terms: float = 0.0, **options) -> None:
    """Results and gradients of ``module(*tensors, **options)``, within the budget of a formula.

    ``formula(module, *tensors)`` computes the same in plain PyTorch, from the parameters of its
    module. In the module's dtype it is the peer, in float64 the truth. Tensors that are not
    floating point stay as they are.
    """
    exact = copy.deepcopy(module).double()
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    dtype = tensors[0].dtype
    ours, our_grads = with_gradients(functools.partial(module, **options), module, tensors, dtype)
    peer, peer_grads = with_gradients(functools.partial(formula, module), module, tensors, dtype)
    truth, true_grads = with_gradients(functools.partial(formula, exact), exact, wide, dtype)
    assert_close(ours, peer, truth)
    # A parameter may be wider than the tensors, whose rounding its gradient has all the same.
    found, plain = ({n: g.to(dtype) for n, g in x.items()} for x in (our_grads, peer_grads))
    assert_gradients_close(found, plain, true_grads, terms)


def assert_gradients_close(ours: dict, peer: dict, truth: dict, terms: float = 0.0) -> None:
    """Gradients of one call by name, within the budget.

    The ulp of a gradient is that of the largest gradient, since some cancel, or of ``terms``, the
    root-sum-square of the summed terms.
    """
    scale = max(terms, *map(testing.largest, truth.values()))
    for name, grad in truth.items():
        testing.assert_within_budget(ours[name], peer[name], grad, name, scale)


def assert_tools_keep(module, other, *tensors) -> None:
    """A copy, ``other`` with the module's state, and compiled code compute what it computes."""
    expected = module(*tensors)
    other.load_state_dict(module.state_dict())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for twin in (copy.deepcopy(module), other, compiled):
        torch.testing.assert_close(twin(*tensors), expected)


def with_gradients(call, owner, tensors: list, dtype) -> tuple[tuple, dict[str, torch.Tensor]]:
    """The results of ``call(*tensors)``, and gradients of a fixed function of them by name.

    The function's coefficients are numbers of ``dtype``, in whichever dtype the call computes.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    rng = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=rng).to(dtype).to(r.dtype) for r in results]
    wanted = {f"input {n}": x for n, x in enumerate(leaves) if x.requires_grad}
    wanted |= {name: x for name, x in owner.named_parameters() if x.requires_grad}
    pulled = torch.autograd.grad(results, list(wanted.values()), upstream, allow_unused=True)
    grads = zip(wanted.items(), pulled, strict=True)
    return results, {name: torch.zeros_like(x) if g is None else g for (name, x), g in grads}
