"""The torch.library operators: fake kernels, and the libraries that implement them.

Two operators cover all scores (``w`` is None for the dot product). Every fused backend has such a
pair: ``fastattn::forward`` and ``backward`` for CPUs, ``fastattn::cuda_forward`` and so on. They
have no autograd: ``autograd.py`` wraps backends, and operators with registered autograd break
``torch.func``. csrc/binding/attention.cpp defines and implements the compiled ones. So an exported
program needs only the library. Without the library they are defined here without a kernel, and
``EXTENSION_ERROR`` says why. ``schemas.py`` has the schemas of both.

``fastattn::multi_head_attention`` serves modules on CPUs at inference:
``modules/multihead/inference.py`` has the conditions.

The CPU kernels use the widest instruction set that the machine shows. The environment variable
``FASTATTN_CPU_ISA``, read at import, names another one; ``ISA_ERROR`` says why that cannot be used.
``FASTATTN_EXTENSION`` names a library to load instead of the package's own, such as one built with
sanitizers (``make sanitize-cpu``).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.problem import Problem, schemas
from fastattn.problem.record import Grads, empty_gradient, empty_out, weights_of, weights_shape
from fastattn.problem.schemas import Saved

# ---- the compiled libraries ----

PACKAGE = Path(__file__).parents[1]  # where setup.py puts them


def load(name: str, *reason: str) -> str | None:
    """Loads a library that setup.py builds into the package. Returns why it is missing, or None.

    ``reason``: the keys of _build_info.json that say why it was not built.
    """
    if not (PACKAGE / name).exists():
        return f"is missing ({build_info(*reason) or 'it was never built: run `make build`'})"
    return _load(PACKAGE / name)


def _load(library: str | Path) -> str | None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"does not load: {error}"
    return None


def build_info(*keys: str) -> Any:
    """An entry of setup.py's notes in _build_info.json; None if there is none."""
    try:
        info = json.loads((PACKAGE / "_build_info.json").read_text())
        for key in keys:
            info = info[key]
        return info
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _load_extension() -> str | None:
    named = os.environ.get("FASTATTN_EXTENSION")
    error = _load(named) if named else load("_C.abi3.so", "reason")
    return error and f"the compiled extension {error}"


def module() -> Any:
    """The extension as a module of Python, whose functions ``direct.py`` calls."""
    library = os.environ.get("FASTATTN_EXTENSION") or PACKAGE / "_C.abi3.so"
    loader = ExtensionFileLoader("_C", str(library))
    return module_from_spec(spec_from_loader("_C", loader))  # pyright: ignore[reportArgumentType]


EXTENSION_ERROR = _load_extension()
EXTENSION_LEFT_OUT = build_info("left_out") is True  # on purpose
LIBRARY = torch.library.Library("fastattn", "FRAGMENT")


def _complete(name: str, schema: str, fake: Callable | None) -> None:
    """Defines an operator unless the library has, and adds its fake kernel.

    The fake kernel is registered for meta tensors, and fake tensors use it. register_fake() would
    require that C++ operators name their Python module. The stable ABI can do that from torch 2.13
    on.
    """
    if not hasattr(torch.ops.fastattn, name):
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    if fake is not None:
        LIBRARY.impl(name, fake, "Meta")


# ---- fake kernels ----


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, _ = schemas.split_forward(args)
    B, H, M, _ = call.q.shape
    N, E = call.v.shape[-2:]
    shape = weights_shape(weights_of(call.weights), B, H, M, N)
    dtype = torch.float32 if call.wide else call.q.dtype
    out = empty_out(call.q, E, dtype)
    lse, stats = (call.q.new_empty(B, H, M, *end, dtype=torch.float32) for end in ((), (2,)))
    return out, lse, call.q.new_empty(shape), stats


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    call, saved = schemas.split_backward(args)
    B, H, _, D = call.q.shape
    grad_w = call.q.new_empty((0,) if call.w is None else (B, H, D), dtype=torch.float32)
    bias = call.bias if saved.bias_needs_grad else None
    grad_bias = call.q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    grad_sink = call.q.new_empty((0,) if saved.sink is None else (B, H), dtype=torch.float32)
    grads = (empty_gradient(x, call.wide) for x in (call.q, call.k, call.v))
    return *grads, grad_w, grad_bias, grad_sink


# ---- a pair of operators a backend ----


class Operators:
    """``fastattn::<prefix>forward`` and ``<prefix>backward``, as ``registry.Backend`` calls them.

    The caller implements them, in Python or by loading a library.
    """

    def __init__(self, prefix: str) -> None:
        pair = schemas.pair(prefix)
        self._names = tuple(pair)
        for (name, schema), fake in zip(pair.items(), (_forward_fake, _backward_fake), strict=True):
            _complete(name, schema, fake)
        # The overload, not the packet, whose choice of an overload takes microseconds.
        self._forward, self._backward = (
            getattr(torch.ops.fastattn, n).default for n in self._names
        )

    def implement(self, key: str, forward: Callable, backward: Callable) -> None:
        """Registers Python functions for a dispatch key, ``"CUDA"`` or ``"CPU"``."""
        for name, function in zip(self._names, (forward, backward), strict=True):
            LIBRARY.impl(name, function, key)

    def forward(
        self, p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``registry.Backend``."""
        return self._forward(q, k, v, w, bias, *p.operands, sink)

    def backward(
        self,
        p: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        bias: Tensor | None,
        *saved: Any,
    ) -> Grads:
        """See ``registry.Backend``."""
        *grads, grad_w, grad_bias, grad_sink = self._backward(q, k, v, w, bias, *p.operands, *saved)
        given = Saved(*saved)
        grad_bias = grad_bias if given.bias_needs_grad else None
        grad_sink = None if given.sink is None else grad_sink
        return (*grads, None if w is None else grad_w, grad_bias, grad_sink)


# ---- attention between its projections, at inference on CPUs ----


def _multi_head_attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = schemas.ModuleCall(*args)
    x, first = call.x, call.batch_first
    B, M = x.shape[:2] if first else x.shape[1::-1]
    N = (0 if call.keys is None else call.past) + (M if call.adds else 0)
    if call.key is not None:
        N = call.key.shape[1 if first else 0]
    shape = weights_shape(weights_of(call.weights), B, call.num_heads, M, N)
    return x.new_empty(*x.shape[:2], call.out_weight.shape[0]), x.new_empty(shape)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# ---- the operators that are no pair of passes ----

_FAKES = {"multi_head_attention": _multi_head_attention_fake, "linear": _linear_fake}
for _name, _schema in (schemas.SINGLE | schemas.OF_THE_MACHINE | schemas.CUDA_CHOOSE).items():
    _complete(_name, _schema, _FAKES.get(_name))
CPU = Operators("")
multi_head_attention = torch.ops.fastattn.multi_head_attention.default
linear = torch.ops.fastattn.linear.default
choose_wgmma = torch.ops.fastattn.cuda_choose_wgmma.default


def _choose_isa() -> str | None:
    """Uses the set in FASTATTN_CPU_ISA. If that is not possible, warns and returns the warning."""
    name = os.environ.get("FASTATTN_CPU_ISA") or "auto"
    if name.isascii() and torch.ops.fastattn.select_cpu_isa(name):
        return None
    runs = ", ".join(map(repr, torch.ops.fastattn.cpu_isas()))
    error = (
        f"FASTATTN_CPU_ISA: expected 'auto' or what was built and runs here, {runs}, got {name!r}"
    )
    warnings.warn(f"{error}; taking {torch.ops.fastattn.cpu_isa()!r}", RuntimeWarning, stacklevel=2)
    return error


ISA_ERROR = _choose_isa() if EXTENSION_ERROR is None else None
