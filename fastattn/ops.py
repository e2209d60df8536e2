"""The torch.library operators: schemas, fake kernels, and the extension that implements them.

Two operators cover both scores (``w`` is None for the dot product). They have no autograd of their
own: ``autograd.py`` wraps backends, and operators with registered autograd break ``torch.func``.
The extension (csrc/ops.cpp) registers the CPU kernels; without it the operators exist and have no
kernel, and ``EXTENSION_ERROR`` says why.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from fastattn.problem import Problem

_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor? w, Tensor? bias, "
    "Tensor? kv_len, Tensor? keep, Tensor? seed, "
    "SymInt? band_lo, SymInt? band_hi, float scale, float dropout_p, str weights"
)
_SCHEMAS = (
    f"forward({_PROBLEM}) -> (Tensor out, Tensor lse, Tensor weights, Tensor stats)",
    f"backward({_PROBLEM}, Tensor out, Tensor stats, Tensor grad_out, Tensor? grad_lse, "
    "Tensor? grad_weights, bool bias_needs_grad) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_bias)",
    # Which instruction set the CPU kernels use, and forcing one that this machine has ("auto": the
    # widest).
    "cpu_isa() -> str",
    "select_cpu_isa(str name) -> bool",
)
_LIBRARY = torch.library.Library("fastattn", "DEF")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def scalars(p: Problem) -> tuple:
    """The non-tensor arguments that both operators share: (band_lo, band_hi, scale, dropout_p)."""
    return (*p.mask.band(p.M, p.N), p.scale, p.dropout_p)


def empty_bmhe(p: Problem, like: Tensor) -> Tensor:
    """``[B, H, M, E]`` laid out as ``[B, M, H, E]``: merging the heads after it is a view."""
    return like.new_empty(p.B, p.M, p.H, p.E).transpose(1, 2)


@torch.library.register_fake("fastattn::forward", lib=_LIBRARY)
def _forward_fake(
    q, k, v, w, bias, kv_len, keep, seed, band_lo, band_hi, scale, dropout_p, weights
):
    B, H, M, _ = q.shape
    N, E = v.shape[-2:]
    out = q.new_empty(B, M, H, E).transpose(1, 2)
    shape = {"none": (0,), "full": (B, H, M, N), "mean": (B, M, N)}[weights]
    lse, stats = (q.new_empty(B, H, M, *end, dtype=torch.float32) for end in ((), (2,)))
    return out, lse, q.new_empty(shape), stats


@torch.library.register_fake("fastattn::backward", lib=_LIBRARY)
def _backward_fake(
    q, k, v, w, bias, kv_len, keep, seed, band_lo, band_hi, scale, dropout_p, weights,
    out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad,
):  # fmt: skip
    B, H, _, D = q.shape
    grad_w = q.new_empty((0,) if w is None else (B, H, D), dtype=torch.float32)
    grad_bias = bias.new_empty(bias.shape) if bias_needs_grad else q.new_empty(0)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    return *grads, grad_w, grad_bias


def _load_extension() -> str | None:
    """Loads fastattn/_C.abi3.so; returns why it is missing, or None."""
    here = Path(__file__).parent
    libraries = sorted(here.glob("_C*.so"))
    if not libraries:
        return f"the compiled extension is missing ({_build_failure(here)})"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return f"the compiled extension does not load: {error}"
    return None


def _build_failure(here: Path) -> str:
    try:
        return json.loads((here / "_build_info.json").read_text())["reason"]
    except (OSError, KeyError, ValueError):
        return "it was never built: run `make build`"


EXTENSION_ERROR = _load_extension()
