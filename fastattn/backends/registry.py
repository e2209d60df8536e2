"""Which backend computes a problem, and why the others do not.

Each backend says why it cannot compute a problem (``unsupported``). ``select`` takes the first one
that can. A backend that the user names never falls back to another: its reasons are raised.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastattn.backends import cpu, cuda, eager, health, triton, wgmma
from fastattn.problem import Problem, arguments
from fastattn.problem.record import Grads


class Backend(Protocol):
    """The interface of a module in ``fastattn/backends/``, over ``Problem``'s canonical shapes."""

    __name__: str

    def unsupported(self, p: Problem) -> list[str]:
        """Reasons against this problem, in words for the user; empty if there are none."""
        ...

    def forward(
        self, p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """(out ``[B, H, M, E]``, laid out as ``record.out_dims`` says, lse, weights, stats).

        lse is the natural logarithm, in ``p.acc_dtype``. stats ``[B, ...]`` is what the backend's
        own backward needs for each row, (shift, factor) in ``[B, H, M, 2]``: the weight of a score
        s is ``e^(s - shift * shift_unit(p, bias is not None)) * factor``. A row without keys has
        factor 0. The tensors are new: ``sinks.fold`` writes into them.
        sink: one more natural logit of every row, ``[H]`` or ``[B, H]``, which has no value.
        """
        ...

    def shift_unit(self, p: Problem, biased: bool) -> float:
        """The natural logit that a saved shift of 1 is, at least 0."""
        ...

    def backward(
        self, p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None,
        *saved: Any,
    ) -> Grads:  # fmt: skip
        """Gradients of (q, k, v, w, bias, sink), of those that are there.

        The gradients of w, ``[B, H, D]``, and of the sink, ``[B, H]``, are in ``p.acc_dtype``.
        ``saved``: the fields of ``schemas.Saved``. Of a block of keys, out and stats may be those
        of all keys: see ``blocks.py``. Beside a sink they have it in them, whether the sink's own
        gradient is wanted or not.
        """
        ...


# In the order of preference of backend="auto". cpu is first, so its calls check no other one.
BACKENDS: dict[str, Backend] = {"cpu": cpu, "triton": triton, "cuda": cuda, "eager": eager}

# Why one GPU backend comes before another: bench/results/nvidia-h200, docs/gpu-kernels.md.
WHY = {
    "dot": "triton before cuda: its products use warpgroup instructions on Hopper, cuda's mma.sync",
    "additive": "cuda before triton: on an H200 its gradients take at most half of the time",
    "gaussian": "triton before cuda: nobody has compared them yet",
}
WGMMA_FIRST = "cuda before triton: its path of warpgroups overlaps products and softmax"
WGMMA_WAITS = (
    "triton before cuda: the backward pass of its path of warpgroups takes no softcap; without a "
    "gradient cuda would be first"
)
FEW_WAITS = (
    "triton before cuda: its backward pass has tiles of 16 queries where there are so few; "
    "without a gradient cuda would be first"
)
WGMMA_WEIGHTS = (
    "triton before cuda: without a gradient it returns weights sooner than cuda's path of "
    "warpgroups; with a gradient cuda would be first"
)
WGMMA_MASKS = "triton before cuda: its path of warpgroups was not found faster with {}"


def in_order(p: Problem) -> list[str]:
    """The names of the backends in order of preference, where a gradient may be needed."""
    if p.score != "additive" or _few_additive(p):
        return list(BACKENDS)
    return sorted(BACKENDS, key=lambda name: name not in ("cpu", "cuda"))


def _few_additive(p: Problem) -> bool:
    """Whether cuda's additive forward pass comes first, and not its backward pass.

    In that one, the tiles of csrc/cuda/additive/gradients.cu have 64 queries, and Triton's have 16.
    Compiled code gets no guard on the number of queries, which may be a symbol.
    """
    few = p.score == "additive" and not torch.compiler.is_compiling()
    return few and p.M <= wgmma.FEW_QUERIES


def get(name: str) -> Backend:
    """The backend module of that name."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(
            f"backend: expected 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {name!r}"
        )
    return BACKENDS[name]


def against(
    name: str, p: Problem, bias: bool = False, may_check: bool = True, grad: bool = True
) -> list[str]:
    """Why a backend cannot compute ``p`` here and now; empty if it can.

    ``bias``: whether there is one. ``may_check``: whether the backend's self-check may run, if
    there is no verdict yet. ``grad``: whether a gradient may be needed.
    """
    reasons = BACKENDS[name].unsupported(p)
    if name == "cuda" and not reasons and (large := wgmma.against_large_heads(p, grad)):
        reasons = [large]
    if name != "eager" and _exporting_to_onnx():
        return [*reasons, "ONNX has PyTorch's operators only, and eager is made of those"]
    if reasons or name == "eager" or p.device.type not in health.DEVICES:
        return reasons
    wrong = _found_wrong(name, p, bias, may_check and not torch.compiler.is_compiling())
    return [] if wrong is None else [wrong]


def _found_wrong(name: str, p: Problem, bias: bool, may_check: bool) -> str | None:
    """What the self-check of a backend found wrong, of calls like ``p``."""
    if name == "cuda" and p.score == "dot":
        wgmma.is_right(p.device)  # its kernels take the path then, whoever calls them
    check = check_of(name, p, bias)
    wrong = health.reason((*check,), p.device, may_check)
    if wrong is None:
        return None
    if check.kind == wgmma.NAME and wgmma.is_named():
        wrong = f"FASTATTN_CUDA_PATH={wgmma.NAME}: {wrong}"
    if may_check:
        health.warn_once(f"fastattn does not use its backend {name!r} for such calls: {wrong}")
    return wrong


# Backends that compile their kernels at the first call. A check must compile no others.
COMPILING = ("triton",)


def check_of(name: str, p: Problem, bias: bool) -> health.Check:
    """The check that calls like ``p`` need of a GPU backend."""
    only = wgmma.is_named() or wgmma.against_large_heads(p, grad=True) is not None
    if name == "cuda" and only and wgmma.why_not(p) is None:
        return wgmma.CHECK
    kinds = name in COMPILING and not torch.compiler.is_compiling()  # sizes may be symbols
    return health.Check(name, p.score, health.dtype_name(p.dtype), _kind(p, bias) if kinds else "")


def _kind(p: Problem, bias: bool) -> str:
    """Which kernels a backend that compiles them takes: see ``kernels/host/config.py``."""
    has = {"bias": bias, "dropout": p.dropout is not None, "weights": p.weights != "none"}
    given = [name for name in has if has[name]]
    width = max(p.D, p.E)
    size = "" if width <= 64 else " D<=128" if width <= 128 else " D<=256"
    if p.M <= wgmma.FEW_QUERIES:  # a curve, or one feature, has no tiles of its own
        return f"{'bias' if bias else 'rich' if given else 'plain'} decoding{size}"
    given += ["curved"] if p.softcap else []
    if not given and p.mask.keep is not None:
        given = ["keep"]
    rich = "rich bias" if bias else "rich"
    return f"{rich if len(given) > 1 else given[0] if given else 'plain'}{size}"


def may_remember(p: Problem, chosen: str) -> bool:
    """Whether the choice for a problem stands.

    It does not while nothing can be checked, nor where a gradient would change it.
    """
    if chosen == "cuda" and wgmma.against_large_heads(p, grad=True):
        return False
    return p.device.type not in health.DEVICES or not health.must_wait()


@arguments.traced_as_constant
def _exporting_to_onnx() -> bool:
    """Whether torch.onnx.export is running. torch.onnx is never imported here, as that is slow."""
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


@arguments.traced_as_constant
def _is_exporting() -> bool:
    """``torch.compiler.is_exporting``, which dynamo of torch 2.11 takes to be always true."""
    return torch.compiler.is_exporting()


def select(
    p: Problem,
    backend: str = "auto",
    bias: bool = False,
    grad: bool = True,
    may_check: bool = True,
) -> str:
    """The name of the backend that computes ``p``.

    ``bias`` says whether there is one, ``grad`` whether a gradient may be needed, ``may_check``
    whether a self-check may run.

    Raises:
        ValueError: an unknown name, or a named backend that cannot compute this problem, with its
            reasons.
    """
    if backend != "auto":
        get(backend)
        reasons = against(backend, p, bias, may_check, grad)
        if reasons:
            raise ValueError(f"backend {backend!r} cannot do this problem: {'; '.join(reasons)}")
        return backend
    for name in in_order(p):
        reasons = against(name, p, bias, may_check, grad)
        if not reasons:
            return name
        if reasons == [cpu.operators.EXTENSION_ERROR]:
            cpu.warn_of_missing_kernels()
    raise ValueError(f"no backend can do this problem: {explain(p, bias=bias, grad=grad)}")


def faster_forward(p: Problem, backend: str, chosen: str, bias: bool = False) -> str | None:
    """The backend that takes calls from the ``chosen`` one; None if none does.

    On Hopper that is cuda's path of warpgroups, where it is right and no mask is known to cut every
    tile. Everywhere it is cuda's additive score of few queries. ``takes`` says which calls.
    Gradients come from the backend of the forward pass.
    """
    if p.device.type not in health.DEVICES or backend != "auto" or chosen != "triton":
        return None
    # Compiled calls may need gradients later. An exported program has no process that chose.
    stays = _is_exporting() or not takes(p, grad=True)
    if torch.compiler.is_compiling() and stays:
        return None
    if not (takes(p, grad=True) or takes(p, grad=False)):
        return None
    if _few_additive(p):
        return None if against("cuda", p, bias) else "cuda"
    if not wgmma.suits(p) or (wgmma.not_found_faster(p, bias) and not wgmma.is_named()):
        return None
    return None if against("cuda", p, bias, may_check=False, grad=False) else "cuda"


def takes(p: Problem, grad: bool) -> bool:
    """Whether the backend of ``faster_forward`` takes calls with a gradient, or those without one.

    On an H200 the path of warpgroups takes 0.6 to 0.7 of Triton's time with a gradient. Without
    one, returned weights took 0.26 ms where Triton took 0.19. The additive score of few queries has
    gradients in tiles of 64 there.
    """
    if grad:
        return p.score == "dot" and wgmma.has_gradients(p)
    return p.score != "dot" or p.weights == "none" or wgmma.is_named()


def may_wait(p: Problem, backend: str, bias: bool, tensors: Sequence[Tensor], grad: bool) -> bool:
    """Whether Triton need not be checked yet, as ``faster_forward`` has another one for a call.

    Triton compiles kernels for its check. ``tensors`` are q, k and v.
    """
    if torch.compiler.is_compiling():  # which makes no check
        return False
    waits = takes(p, grad=True) and takes(p, grad)
    if not waits or faster_forward(p, backend, "triton", bias) is None:
        return False
    return not (wgmma.odd_strides(tensors) or against("triton", p, bias, may_check=False))


@dataclass(frozen=True)
class Explanation:
    """Which backend computes a call, and why the others would not; ``str()`` gives a table.

    Attributes:
        backend: the name of the chosen backend, or None if the call would raise.
        path: how the CPU kernels compute the call, or the CUDA kernels a dot product; None for
            others.
        reasons: for each backend, in order of preference, why it cannot compute the call. The list
            is empty if it can.
        title: the first line of the table.
        notes: the last lines of the table.
    """

    backend: str | None
    path: str | None
    reasons: dict[str, list[str]]
    title: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.title]
        for name, reasons in self.reasons.items():
            verdict = "chosen" if name == self.backend else "available"
            lines.append(f"{name:<8}{'no: ' + '; '.join(reasons) if reasons else verdict}")
        return "\n  ".join([*lines, *self.notes])


def explain(
    p: Problem,
    backend: str = "auto",
    bias: bool = False,
    tensors: Sequence[Tensor] = (),
    grad: bool = True,
) -> Explanation:
    """The backends in order of preference: chosen, available, or why not.

    If a named ``backend`` cannot compute the problem, none is chosen: the call raises. ``bias``
    says whether there is a bias, ``grad`` whether a gradient may be needed. ``tensors`` are q, k
    and v, whose strides decide on the path through the kernels.

    The notes name the CPU kernels' instruction set and path, or how to get missing kernels, and the
    path through the CUDA kernels. If both GPU backends can compute the problem, the notes say why
    the first is preferred.
    """
    if backend != "auto":
        get(backend)  # raises for an unknown name
    reasons, chosen = {}, None
    waits = bool(tensors) and may_wait(p, backend, bias, tensors, grad)
    for name in in_order(p):
        wanted = chosen is None and backend in ("auto", name)
        reasons[name] = against(name, p, bias, wanted and not waits, grad)
        chosen = name if wanted and not reasons[name] else chosen
    notes = _cpu_notes(p, reasons)
    path, path_notes, why = None, [], WHY[p.score]
    if chosen == "cpu":
        path = cpu.path(p, bias, not tensors or tensors[1].stride(-1) == 1)
        path_notes = [f"cpu: path {path}"]
    elif _few_additive(p) and faster_forward(p, backend, str(chosen), bias) is not None:
        chosen, why = (chosen, FEW_WAITS) if grad else ("cuda", why)
    elif tensors and p.score == "dot" and reasons.get("cuda") == []:
        cuda_path, reason = wgmma.path(p, tensors)
        path_notes = [f"cuda: path {cuda_path}: {reason}"]
        if cuda_path == wgmma.NAME and faster_forward(p, backend, str(chosen), bias) is not None:
            if takes(p, grad):
                chosen, why = "cuda", WGMMA_FIRST
            else:
                why = WGMMA_WAITS if grad else WGMMA_WEIGHTS
        elif cuda_path == wgmma.NAME and (masks := wgmma.not_found_faster(p, bias)) is not None:
            why = WGMMA_MASKS.format(masks)
        path = cuda_path if chosen == "cuda" else None
    if reasons.get("triton") == reasons.get("cuda") == []:
        path_notes.append(why)
    return Explanation(chosen, path, reasons, str(p), (*notes, *path_notes))


def _cpu_notes(p: Problem, reasons: dict[str, list[str]]) -> list[str]:
    if reasons.get("cpu") == []:
        return [f"cpu: instruction set {cpu.instruction_set()}"]
    return [f"cpu: {cpu.REMEDY}"] if p.device.type == "cpu" and cpu.REMEDY is not None else []
