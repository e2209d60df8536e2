"""Calls seen before: the record and the backend of a call without masks, by what these depend on.

Checking such a call again, and choosing again, would take longer than a small problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.problem import Mask, Problem, record


class Known(NamedTuple):
    """What was found out about a call whose tensors are 4-D, or lack the head dim alone."""

    p: Problem
    backend: str
    has_head_dim: bool

    def tensors(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors of another such call, with a head dim."""
        if self.has_head_dim:
            return query, key, value, weight
        weight = None if weight is None else weight.unsqueeze(0)
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), weight


# By description: that which _describe makes of a function's call, or that of a module's.
_KNOWN: dict[tuple | None, Any] = {}
_MOST_KNOWN = 1024
_paused = False


def recall(*call: Any) -> Known | None:
    """What is known of a call like this one, if any was seen.

    ``call`` is (query, key, value, weight, dropout_p, is_causal, enable_gqa, scale, return_weights,
    backend); the weight is None for the dot product.
    """
    try:
        return look_up(_describe(*call))
    except TypeError:  # sizes are symbols, as under a tracer of torch's, or an argument is no good
        return None


def remember(known: Known, canonical: tuple, *call: Any) -> None:
    """Keeps what ``recall`` is to give for such a call, if that makes ``canonical`` of tensors."""
    described = _describe(*call)
    if described is None or (not known.has_head_dim and any(x.dim() != 3 for x in call[:3])):
        return
    for x, y in zip(known.tensors(*call[:4]), canonical, strict=True):
        if x is not y and (x is None or y is None or x.shape != y.shape):
            return
    try:
        keep(described, known)
    except TypeError:  # as in recall
        return


def look_up(description: tuple | None) -> Any:
    """What was kept of the calls that a tuple describes."""
    return _KNOWN.get(description)


def keep(description: tuple, found: Any) -> None:
    """Keeps what ``look_up`` is to give; the tuple must hold all that it depends on."""
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    if not _paused:
        _KNOWN[description] = found


def forget() -> None:
    """Forgets all calls: for who has changed the backends."""
    _KNOWN.clear()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is remembered meanwhile: every call finds out everything."""
    global _paused
    _paused, before = True, _paused
    forget()
    try:
        yield
    finally:
        _paused = before


def says_nothing(mask: Mask | None) -> bool:
    """Whether a mask keeps every pair whatever the sizes are."""
    return mask is None or (type(mask) is Mask and not record.kinds(mask))


def _describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
    *others: object,
) -> tuple | None:
    """All that the record of a call depends on; None where that cannot be told."""
    # While compiling, sizes may be symbols; under autocast, the tensors will be others.
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return None
    if not type(query) is type(key) is type(value) is Tensor:
        return None
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    if not query.layout is key.layout is value.layout is torch.strided:
        return None
    # 1 == True, but only one of them is a bool. Dropout draws a seed for each call.
    if not type(is_causal) is type(enable_gqa) is bool or type(dropout_p) is not float or dropout_p:
        return None
    if scale is True or scale is False:
        return None
    weighed = None
    if weight is not None:
        if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout is not torch.strided:
            return None
        if weight.is_nested:
            return None
        weighed = weight.shape, weight.dtype, weight.device
    return (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device,
        key.device, value.device, is_causal, enable_gqa, weighed, scale, others,
    )  # fmt: skip
