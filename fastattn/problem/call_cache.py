"""Calls seen before: the record and the backend of a call, by what these depend on.

Checking such a call again, and choosing again, would take longer than a small problem. Values of
masks are checked at every call, and lines of biases are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.problem import Mask, Problem, arguments, parameter, seeds, validate
from fastattn.problem.record import MASK_TENSORS
from fastattn.problem.relative import Relative

_KEEP, _BIAS = MASK_TENSORS.index("keep"), len(MASK_TENSORS)  # of what masks() lists
_NO_MASK = tuple(Mask().__dict__.values())
_PLAIN = {Tensor, torch.nn.Parameter}
_HALF = {torch.float16, torch.bfloat16}


class Call(NamedTuple):
    """What a record depends on, and dropout's seed, which each call draws."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | float | None = None  # or bandwidth, a number too
    attn_mask: Tensor | None = None
    mask: Mask | None = None
    bias: Tensor | Relative | None = None
    sink: Tensor | None = None  # no part of the record, but checked beside it
    seed: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    return_weights: str | None = None
    backend: str = "auto"
    score: str = "dot"
    numbers: tuple[float | None, ...] = ()  # the scale, and other options of a score

    def ready(self) -> Call:
        """The same with what torch's autocast makes of ordinary tensors, and with a seed."""
        if not _PLAIN.issuperset(map(type, self[:3])):
            return self
        p, seed = self.dropout_p, None
        if type(p) is float and 0 < p <= 1 and not torch.compiler.is_compiling():
            seed = seeds.draw(self.query.device)
        q, k, v, weight = arguments.autocast(self.score, *self[:4])
        return self._replace(query=q, key=k, value=v, weight=weight, seed=seed)

    def masks(self) -> list[Any] | None:
        """The tensors that become ``MASK_TENSORS`` and the bias; None where two become one."""
        mask = self.mask
        found: list[Any] = [None if mask is None else getattr(mask, n) for n in MASK_TENSORS]
        found.append(self.bias)
        if self.attn_mask is not None:
            n = _KEEP if self.attn_mask.dtype is torch.bool else _BIAS
            if found[n] is not None:
                return None
            found[n] = self.attn_mask
        return found


_FLAGS = Call._fields.index("dropout_p")  # from here on there are no tensors


class Known(NamedTuple):
    """What was found out about a call whose tensors have the same dims before their rows.

    ``batch`` are the call's batch dims. ``p`` has no tensors. ``masks`` are those that there are,
    and the bias: their numbers in ``Call.masks()``, and their shapes in a record. They are None
    for a record without tensors.
    ``forward`` is the backend that takes calls from ``backend``, where ``registry.takes`` says so.
    ``waits``: ``backend`` needs a check before it takes others.
    """

    p: Problem
    backend: str
    has_head_dim: bool
    batch: tuple[int, ...]
    masks: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    forward: str | None = None
    waits: bool = False

    def tensors(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors of another such call, with a batch dim and a head dim."""
        p = self.p
        if p.score == "gaussian":
            w = parameter.bandwidth_tensor(weight, query)
            per_head = validate.Lead(self.batch, self.has_head_dim, (p.H, 1, p.D))
            weight = parameter.match_bandwidth(per_head.to_4d("bandwidth", w), p.H, p.D)
        elif not (self.has_head_dim or weight is None):
            weight = weight.unsqueeze(0)
        if self.has_head_dim and len(self.batch) == 1:
            return query, key, value, weight
        q = query.reshape(p.B, p.H, p.M, p.D)
        k, v = key.reshape(p.B, p.Hkv, p.N, p.D), value.reshape(p.B, p.Hkv, p.N, p.E)
        return q, k, v, weight

    def at(self, M: int, N: int) -> Known:
        """The same for other lengths. On a CPU the choice of a backend does not depend on them."""
        return self._replace(p=dataclasses.replace(self.p, M=M, N=N))

    def around(self, given: list[Any] | None, seed: Tensor | None) -> tuple[Known, Tensor | None]:
        """The same with the seed of another such call and what its ``masks()`` list; its bias."""
        if self.masks is None or given is None:
            return self, None
        own: list[Tensor | None] = [None] * (_BIAS + 1)
        for n, shape in self.masks:
            x = given[n]
            if isinstance(x, Relative):
                x = x.line(self.p.B, self.p.H, self.p.M, self.p.N, self.p.dtype)
            if n in (_KEEP, _BIAS):
                shape = (*shape[:2], *x.shape[-2:]) if x.dim() > 1 else shape
            else:
                x = validate.within(f"mask.{MASK_TENSORS[n]}", x, self.p.N)
            own[n] = x if x.shape == shape else x.reshape(shape)
        bias = own.pop()
        p = self.p.with_tensors(*own, seed)
        return self._replace(p=p, masks=None), bias


# Keys are descriptions: _describe makes that of a function's call, inference.py a module's, and
# direct.py one of bytes.
_KNOWN: dict[tuple | bytes, Any] = {}
_MOST_KNOWN = 1024
_paused = False


def recall(call: Call) -> tuple[Known, Tensor | None] | None:
    """What is known of a call like this one, around its masks, and its bias; None if nothing is."""
    known = known_of(call)
    if known is None or known.masks is None:
        return known and (known, None)
    return known.around(call.masks(), call.seed)


def known_of(call: Call) -> Known | None:
    """What is known of a call like this one, without its tensors."""
    try:
        return look_up(_describe(call))
    except TypeError:  # sizes are symbols, as under a tracer of torch's, or an argument is no good
        return None


def remember(known: Known, canonical: tuple, bias: Tensor | None, call: Call) -> bool:
    """Keeps what ``recall`` is to give for such a call, if that makes ``canonical`` of tensors.

    Returns whether it does.
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False  # sizes are tensors, which no other call has
    described = _describe(call)
    if described is None:
        return False
    for x, y in zip(call[:3], canonical[:3], strict=True):
        if x.numel() != y.numel():  # it broadcasts
            return False
    for x, y in zip(known.tensors(*call[:4]), canonical, strict=True):
        if x is not y and (x is None or y is None or x.shape != y.shape):
            return False
    given = call.masks()
    if given is None:
        return False
    if known.p.dropout is not None or any(x is not None for x in given):
        own = (*known.p.tensors()[:-1], bias)
        if any(map(_differs, given, own)):
            return False
        shapes = tuple((n, tuple(x.shape)) for n, x in enumerate(own) if x is not None)
        known = known._replace(p=known.p.with_tensors(*[None] * len(own)), masks=shapes)
    try:
        keep(described, known)
    except TypeError:  # as in recall
        return False
    return True


def _differs(given: object, own: Tensor | None) -> bool:
    """Whether ``own`` is more than another shape of ``given``, or the line that it means."""
    if isinstance(given, Relative):
        return own is None
    if not isinstance(given, Tensor) or own is None:
        return given is not own
    return given.numel() != own.numel()


def look_up(description: tuple | None) -> Any:
    """What was kept for the calls that a tuple describes."""
    # A compiler never gets to the table: compiled code would depend on all that is in it.
    return None if description is None else _KNOWN.get(description)


def table() -> dict:
    """What ``keep`` keeps."""
    return _KNOWN


def keep(description: tuple | bytes, found: Any) -> None:
    """Keeps what ``look_up`` returns. The description holds all that ``found`` depends on."""
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    if not _paused:
        _KNOWN[description] = found


def forget() -> None:
    """Forgets all calls, for callers that change the backends."""
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


def _describe(call: Call) -> tuple | None:
    """All that the record of a call depends on; None where that cannot be told."""
    (
        query, key, value, weight, attn_mask, mask, bias, sink, seed, dropout_p, is_causal,
        enable_gqa, _, _, _, numbers,
    ) = call  # fmt: skip
    if torch.compiler.is_compiling():  # sizes may be symbols
        return None
    if not _PLAIN.issuperset(map(type, call[:3])):
        return None
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    if not query.layout is key.layout is value.layout is torch.strided:
        return None
    # 1 == True, but only True is a bool.
    if not type(is_causal) is type(enable_gqa) is bool or type(dropout_p) is not float:
        return None
    if (seed is None) != (dropout_p == 0):  # not drawn: ready()
        return None
    for x in numbers:  # others may be equal to a float, and are refused
        if x is not None and type(x) not in (int, float):
            return None
    masks = ()
    if not (weight is attn_mask is mask is bias is sink is None):
        if mask is not None and type(mask) is not Mask:
            return None
        own = _NO_MASK if mask is None else mask.__dict__.values()
        given = weight, attn_mask, bias, sink, *own
        masks = tuple([x if x is None else _describe_one(x) for x in given])
        if any(x is NotImplemented for x in masks) or _only_autocast_takes(query, *given):
            return None
    return (
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device,
        key.device, value.device, call[_FLAGS:], masks,
    )  # fmt: skip


def _only_autocast_takes(query: Tensor, *given: Any) -> bool:
    """Whether one is of another half type than the query: an error without autocast."""
    if not torch._C._is_any_autocast_enabled():
        return False
    parts = [y for x in given for y in (vars(x).values() if isinstance(x, Relative) else (x,))]
    return any(
        isinstance(x, Tensor) and x.dtype in _HALF and x.dtype is not query.dtype for x in parts
    )


def _describe_one(x: Any) -> Any:
    """A weight, a mask, a bias or a field; NotImplemented where its shape does not tell enough."""
    if type(x) in _PLAIN:
        plain = x.layout is torch.strided and not x.is_nested
        return (x.shape, x.dtype, x.device) if plain else NotImplemented
    if isinstance(x, Relative):
        parts = [_describe_one(part) for part in x.__dict__.values()]
        return NotImplemented if any(n is NotImplemented for n in parts) else (type(x), *parts)
    if isinstance(x, Tensor) or (type(x) is tuple and any(type(n) is not int for n in x)):
        return NotImplemented
    return x
