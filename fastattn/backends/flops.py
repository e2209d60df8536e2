"""Operations of our operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They are counted as torch counts its own attention: matrix products alone, of all M * N pairs,
whatever a mask keeps. The backward pass counts the scores once more. Every score counts as a
product.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fastattn.problem.schemas import ModuleCall

Shape = Sequence[int]
PREFIXES = ("", "triton_", "cuda_")


def forward(q: Shape, k: Shape, v: Shape, *_: Any, out_shape: Any = None) -> int:
    """Scores and their product with v. Arguments are shapes, as everywhere in this file."""
    (B, H, M, D), (N, E) = q, v[-2:]
    return 2 * B * H * M * N * (D + E)


def backward(q: Shape, k: Shape, v: Shape, *_: Any, out_shape: Any = None) -> int:
    """Scores again, and the gradients of q, k, the weights and v."""
    (B, H, M, D), (N, E) = q, v[-2:]
    return 2 * B * H * M * N * (3 * D + 2 * E)


def linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """x ``[..., E]`` times weight ``[F, E]``."""
    return 2 * math.prod(x) * weight[0]


def multi_head_attention(*args: Any, out_shape: Any = None, **others: Any) -> int:
    """Two projections around the dot product."""
    call: Any = ModuleCall(*args, **others)
    x, H = call.x, call.num_heads
    B, M = x[:2] if call.batch_first else x[1::-1]
    N, projected = call.past, [x]
    if call.adds:
        N += M if call.key is None else call.key[1 if call.batch_first else 0]
        projected += [call.key or x, call.value or call.key or x]
    q, k = (B, H, M, x[2] // H), (B, H, N, x[2] // H)
    packed = sum(linear(y, call.in_weight) for y in projected) // 3
    return packed + forward(q, k, k) + linear(x, call.out_weight)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    operators = torch.ops.fastattn
    for name, formula in (("forward", forward), ("backward", backward)):
        register_flop_formula([getattr(operators, p + name) for p in PREFIXES])(formula)
    register_flop_formula(operators.multi_head_attention)(multi_head_attention)
    register_flop_formula(operators.linear)(linear)


class _WhenImported(MetaPathFinder):
    """Calls a function as soon as a module was imported.

    torch's counter imports Triton, which takes a third of a second. Few programs need that.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that ends by calling the function."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then()

            setattr(loader, "exec_module", exec_module)  # noqa: B010, a method to checkers
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Calls a function: now if a module is imported, else when it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _WhenImported(name, then))


def register() -> None:
    """Gives torch's counter these formulas."""
    when_imported("torch.utils.flop_counter", _register)
