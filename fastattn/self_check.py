"""The self-check: a few tiny problems on a backend, against the reference under the one budget.

``backends/health.py`` decides when it runs and keeps what it finds. ``python -m fastattn`` makes
the checks of everyday calls in a child process, which may hang or crash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fastattn import testing
from fastattn.backends import registry, wgmma
from fastattn.backends.health import Check, Verdict
from fastattn.problem import Problem
from fastattn.testing import runners

HOW_ELSE = "FASTATTN_SELF_CHECK=0 turns the self-check off, FASTATTN_SELF_CHECK=force repeats it"


def run(check: Check, device: torch.device) -> Verdict:
    """Makes a check on a device. The reference is computed on the CPU, in float64.

    Nothing waits for the device before all problems have been launched.

    Raises:
        torch.OutOfMemoryError: there is no memory for the problems.
    """
    cases = cases_of(check)
    drawn = [testing.make(case) for case in cases]
    oracles = [testing.oracle(case, t) for case, t in zip(cases, drawn, strict=True)]
    try:
        with wgmma.tried(device, check):
            there = [_moved(t, device) for t in drawn]
            found = [_compute(check, c, t) for c, t in zip(cases, there, strict=True)]
            results = [{name: x.cpu() for name, x in each.items()} for each in found]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of which the next process may be free: no compiler, a lost GPU
        return Verdict(f"it raises {_in_short(error)}; {HOW_ELSE}", lasting=False)
    ratios = [
        (testing.error_ratio(each[name], *_expected(oracle, name)), f"{name} of {case}")
        for case, each, oracle in zip(cases, results, oracles, strict=True)
        for name in oracle.truth
    ]
    worst, name = max(ratios)
    if worst <= 1:
        return Verdict(None)
    return Verdict(f"its error is {worst:.3g} times what is allowed, {name}; {HOW_ELSE}")


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _expected(oracle: testing.Oracle, name: str) -> tuple[Tensor, Tensor, float]:
    truth, peer, scale = oracle[name]
    return peer, truth, scale


# ---- the problems ----

SIZES: dict[str, Any] = dict(B=2, H=2, Hkv=1, D=40, E=64)
TAILS: dict[str, Any] = dict(SIZES, M=33, N=65)
FEW: dict[str, Any] = dict(SIZES, N=130, kv_len="batch")
PROBLEMS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        dict(TAILS, causal="bottom_right", kv_len="batch", lse=True),
        dict(B=1, H=1, Hkv=1, M=128, N=128, D=64, E=64),  # no mask, whole tiles
    ],
    "rich": [dict(TAILS, keep="mn", bias="hmn", dropout_p=0.2, weights="mean", lse=True)],
    "plain decoding": [dict(FEW, M=1)],
    "rich decoding": [dict(FEW, M=3, bias="hmn", dropout_p=0.2, weights="full")],
}


def cases_of(check: Check) -> list[testing.Case]:
    """The problems of a check. A check without a kind has those of all kinds."""
    kinds = [check.kind] if check.kind else [*PROBLEMS]
    score: Any = check.score
    fewer = {} if score == "dot" else {"D": 16}  # the reference takes memory times D
    return [
        testing.Case(f"{kind.replace(' ', '-')}-{n}", score, dtype=dtype, **options | fewer)
        for dtype in map(_drawn_in, check.dtype.split(" and "))
        for kind in kinds
        for n, options in enumerate(PROBLEMS[kind])
    ]


def _drawn_in(name: str) -> torch.dtype:
    """The dtype whose digits count: TF32, where torch allows it, has those of float16."""
    return torch.float16 if name == "float32" and _uses_tf32() else getattr(torch, name)


def _uses_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _moved(t: testing.Tensors, device: torch.device) -> testing.Tensors:
    fields = {field.name: getattr(t, field.name) for field in dataclasses.fields(t)}
    moved = {name: x.to(device) for name, x in fields.items() if x is not None}
    return dataclasses.replace(t, **moved)


def _compute(check: Check, case: testing.Case, t: testing.Tensors) -> dict[str, Tensor]:
    """Outputs and gradients, by the backend's own functions: those of users make checks."""
    backend = registry.get(check.backend)

    def compute(p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Any, bias: Any) -> tuple:
        out, lse, weights, stats = backend.forward(p, q, k, v, w, bias)
        pairs = (t.grad_out, out), (t.grad_lse, lse), (t.grad_weights, weights)
        upstream = [None if grad is None else grad.to(x.dtype) for grad, x in pairs]
        *pulled, grad_w, grad_bias = backend.backward(
            p, q, k, v, w, bias, out, stats, *upstream, bias is not None
        )
        grad_w = None if grad_w is None else grad_w.to(w.dtype)
        return (out, lse, weights), (*pulled, grad_w, grad_bias)

    dtype = getattr(torch, check.dtype) if check.dtype == "float32" else None
    return runners.explicit(case, t, dtype, compute)
