"""The self-check: a few tiny problems on a backend, against the reference under the one budget.

``backends/health.py`` decides when it runs and keeps what it finds. ``python -m fastattn`` makes
the checks of everyday calls in child processes, which may hang or crash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastattn import testing
from fastattn.backends import registry, wgmma
from fastattn.backends.health import Check, Verdict
from fastattn.problem import Problem
from fastattn.testing.runners import _canonical, _leaves, explicit

HOW_ELSE = "FASTATTN_SELF_CHECK=0 turns the self-check off, FASTATTN_SELF_CHECK=force repeats it"


def run(check: Check, device: torch.device) -> Verdict:
    """Makes a check on a device. All else than the backend runs on the CPU, in this thread.

    Nothing waits for the device before all problems have been launched.

    Raises:
        torch.OutOfMemoryError: there is no memory for the problems.
    """
    cases = cases_of(check, device)
    drawn = [testing.make(case) for case in cases]
    oracles = [testing.oracle(case, t) for case, t in zip(cases, drawn, strict=True)]
    try:
        with wgmma.tried(device, check):
            there = [_launch(check, c, t, device) for c, t in zip(cases, drawn, strict=True)]
            back = [_moved(results, "cpu") for results in there]
        worst, name = max(
            oracle.worst(case, _named(check, case, t, raw))
            for case, t, oracle, raw in zip(cases, drawn, oracles, back, strict=True)
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of which the next process may be free: no compiler, a lost GPU
        return Verdict(f"it raises {_in_short(error)}; {HOW_ELSE}", lasting=False)
    if worst <= 1:
        return Verdict(None)
    return Verdict(f"its error is {worst:.3g} times what is allowed, {name}; {HOW_ELSE}")


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# ---- the problems ----

SIZES: dict[str, Any] = dict(B=2, H=2, Hkv=1, D=40, E=64)
TAILS: dict[str, Any] = dict(SIZES, M=33, N=65)
FEW: dict[str, Any] = dict(SIZES, N=130, kv_len="batch")
RICH: dict[str, Any] = dict(dropout_p=0.2, weights="mean", lse=True)
RICH_FEW: dict[str, Any] = dict(FEW, M=3, bias="hmn", dropout_p=0.2, weights="full")
# A float32 bias of half types has tiles of its own. Other types leave its problems out.
PROBLEMS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        dict(TAILS, causal="bottom_right", kv_len="batch", lse=True),
        dict(B=1, H=1, Hkv=1, M=128, N=128, D=64, E=64),  # no mask, whole tiles
        dict(TAILS, causal="bottom_right", kv_len="batch", sink=0.0),
    ],
    "rich": [dict(TAILS | RICH, keep="mn")],
    "rich bias": [
        dict(TAILS | RICH, keep="mn", bias="hmn"),
        dict(TAILS | RICH, bias="hmn", bias_dtype=torch.float32),
    ],
    "bias": [
        dict(TAILS, keep="mn", bias="hmn", lse=True),
        dict(TAILS, bias="hmn", bias_dtype=torch.float32),
    ],
    "dropout": [dict(TAILS, keep="mn", dropout_p=0.2, lse=True)],
    "weights": [dict(TAILS, keep="mn", weights="mean", lse=True)],
    "keep": [dict(TAILS, keep="mn", lse=True)],
    "curved": [dict(TAILS, keep="mn", softcap=2.0, lse=True)],
    "plain decoding": [dict(FEW, M=1)],
    "rich decoding": [RICH_FEW],
    "bias decoding": [RICH_FEW, dict(FEW, M=3, bias="hmn", bias_dtype=torch.float32)],
}
# For dot products of backends that compile nothing at the first call: more than one tile, for each
# head size that has kernels of its own.
LONG: dict[str, Any] = dict(B=1, H=1, Hkv=1, M=200, N=700, lse=True)
WHOLE = [dict(LONG, D=64, E=64), dict(LONG, D=128, E=128, causal="bottom_right", sink=0.0)]
# For products of warpgroups alone: heads over 128, kernels with a softcap, masks that leave tiles
# out, limits of rows, and rows that its copies cannot read, which the usual kernels take.
WARPGROUPS = [
    dict(LONG, D=256, E=256, causal="bottom_right"),
    dict(LONG, D=256, E=136, softcap=2.0),
    dict(LONG, D=72, E=128, softcap=2.0, causal="bottom_right", keep="n"),
    dict(LONG, D=72, E=64, keep="n", keep_run=True),
    dict(LONG, D=64, E=64, keep="mn"),
    *(dict(LONG, B=2, D=n, E=n, kv_len="sorted") for n in (64, 128)),  # the first has no keys
    dict(TAILS, D=36, E=36),
]


def many_tiles(device: torch.device) -> list[dict[str, Any]]:
    """More tiles than there are multiprocessors: blocks of warpgroups take one after the other."""
    cuda = device.type == "cuda"
    n = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
    small: dict[str, Any] = dict(B=1, N=24, E=8, lse=True)
    return [
        dict(small, H=2 * n + 1, Hkv=2 * n + 1, M=20, D=16),
        dict(small, H=2 * n + 1, Hkv=2 * n + 1, M=20, D=136),
        dict(small, H=2 * n, Hkv=2 * n, M=130, D=72, causal="top_left"),
        dict(small, H=2 * n, Hkv=2 * n, M=20, N=140, D=16, causal="bottom_right"),
    ]


def cases_of(check: Check, device: torch.device) -> list[testing.Case]:
    """The problems of a check; those of all kinds if its kind is not in ``PROBLEMS``.

    Kinds with a head size at the end have larger heads.
    """
    kind, _, size = check.kind.partition(" D<=")
    kinds = [kind] if kind in PROBLEMS else [*PROBLEMS]
    sizes = [(f"{k.replace(' ', '-')}-{n}", x) for k in kinds for n, x in enumerate(PROBLEMS[k])]
    if len(kinds) > 1 and check.score == "dot":
        whole = WHOLE + (WARPGROUPS + many_tiles(device) if check.kind == wgmma.NAME else [])
        sizes += [(f"whole-{n}", x) for n, x in enumerate(whole)]
    score: Any = check.score
    more = int(size) - SIZES["E"] if size else 0
    # The reference of other scores takes memory times D.
    small: dict[str, Any] = {} if score == "dot" else {"D": 16}
    return [
        testing.Case(name, score, dtype=dtype, **x | {n: x[n] + more for n in "DE"} | small)
        for dtype in map(_drawn_in, check.dtype.split(" and "))
        for name, x in sizes
        if "bias_dtype" not in x or (_dtype(check) is None and dtype.itemsize == 2)
    ]


def _drawn_in(name: str) -> torch.dtype:
    """The dtype whose digits count: TF32 has those of float16."""
    return torch.float16 if name == "TF32" else getattr(torch, name)


# ---- on the backend ----

Raw = tuple[Any, ...]  # (out, lse, weights), and the gradients of q, k, v, w, bias and sink


def _launch(check: Check, case: testing.Case, t: testing.Tensors, device: torch.device) -> Raw:
    """What the backend's own functions return on a device.

    The public functions would make checks themselves. Autograd would not run either: torch has one
    backward thread a device, which may be waiting for this check, as when a checkpoint recomputes.
    """
    # Triton's first call compiles, its second is watched, its third is launched from a plan. The
    # results of all stay alive: in memory of the first, a launch of nothing would seem right.
    times = 3 if check.backend in registry.COMPILING and device.type != "cpu" else 1
    with torch.no_grad():
        p, *tensors = _canonical(case, t, _leaves(case, t, _dtype(check)))
        p = dataclasses.replace(p, device=device).with_tensors(*_moved(p.tensors(), device))
        moved = _moved(tensors, device)
        return [_passes(check, t, p, *moved) for _ in range(times)][-1]


def _passes(
    check: Check, t: testing.Tensors, p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Any,
    bias: Any, sink: Any,
) -> Raw:  # fmt: skip
    """Forward and backward."""
    backend = registry.get(check.backend)
    out, lse, weights, stats = backend.forward(p, q, k, v, w, bias, sink)
    pairs = (t.grad_out, out), (t.grad_lse, lse), (t.grad_weights, weights)
    upstream = [None if x is None else x.to(y.device, y.dtype) for x, y in pairs]
    if check.backend == "cuda" and wgmma.against_large_heads(p, grad=True):
        # What is checked is a forward pass alone. Its maxima get eager's unit, which is 1.
        stats = torch.stack(
            [stats[..., 0] * backend.shift_unit(p, bias is not None), stats[..., 1]], -1
        )
        backend = registry.get("eager")
    saved = (out, stats, *upstream, bias is not None, sink)
    *grads, grad_w, grad_bias, grad_sink = backend.backward(p, q, k, v, w, bias, *saved)
    grad_w = None if grad_w is None else grad_w.to(w.dtype)
    grad_sink = None if grad_sink is None else grad_sink.to(sink.dtype)
    return (out, lse, weights, *grads, grad_w, grad_bias, grad_sink)


def _named(check: Check, case: testing.Case, t: testing.Tensors, raw: Raw) -> dict[str, Tensor]:
    """The results by their names in an oracle."""
    return explicit(case, t, _dtype(check), lambda *_: (raw[:3], raw[3:]))


def _dtype(check: Check) -> torch.dtype | None:
    """Of the backend's tensors, where it is not that of the case."""
    return torch.float32 if check.dtype == "TF32" else None


def _moved(tensors: Iterable[Tensor | None], device: torch.device | str) -> Raw:
    return tuple(None if x is None else x.detach().to(device) for x in tensors)
