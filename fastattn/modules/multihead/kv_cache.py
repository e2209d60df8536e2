"""Incremental decoding: projected keys and values kept from one call to the next."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastattn.modules.linear import PLAIN
from fastattn.modules.multihead import inputs, interop, projection
from fastattn.modules.multihead.inputs import Inputs
from fastattn.problem import Mask, arguments

_MIN_CAPACITY = 16
_Masks = tuple[Tensor | None, Tensor | None]  # (key_padding_mask, attn_mask)


class Step(NamedTuple):
    """A checked call, its queries [B, H, M, D], and all keys and values [B, H, N, D]."""

    call: Inputs
    q: Tensor
    k: Tensor
    v: Tensor


class KVCache:
    """Keys and values that a :class:`MultiheadAttention` has projected, for decoding step by step.

    One cache belongs to one attention module and one batch of sequences. There are two kinds:

    - Growing (the default), for causal self-attention. Each call appends the keys and values of its
      M new positions. Query i of the call is at position ``past + i``, and sees the keys up to its
      own position. All steps together thus equal one causal forward, without any mask. A given mask
      covers all keys, past and new: ``attn_mask`` (M, past + M), ``key_padding_mask``
      (B, past + M).
    - ``static=True``, for cross-attention to a memory. The first call projects key and value. Later
      calls do not read them, and they may be None. Nothing is causal.

    Decode under ``torch.no_grad()`` or ``torch.inference_mode()``. New rows are then written after
    the others, into memory that doubles when it is full. With grad mode on, gradients are right,
    but each step copies all rows into a new tensor.

    Args:
        static (bool): project once, as above. Default False.
        capacity (int): initial room, in positions. Default 0: as needed.

    Raises:
        TypeError: ``capacity`` is no int, or ``static`` no bool.
        ValueError: a negative capacity. From the module: new positions do not fit the cache in
            batch, heads, dtype or device. Or the module has ``add_bias_kv`` or ``add_zero_attn``:
            a cache cannot hold their keys.

    Example::

        >>> attention = MultiheadAttention(64, 4, batch_first=True).eval()
        >>> cache, x = KVCache(), torch.randn(2, 10, 64)
        >>> with torch.no_grad():
        ...     steps = [attention(t, t, t, cache=cache)[0] for t in x.split(1, dim=1)]
    """

    def __init__(self, static: bool = False, capacity: int = 0) -> None:
        self.static = arguments.check_bool("static", static)
        self.capacity = arguments.check_int("capacity", capacity, 0)
        self.reset()

    def reset(self) -> None:
        """Forget all keys and values."""
        self.length = 0
        self._key: Tensor | None = None  # [B, H, room for keys, D]
        self._value: Tensor | None = None
        self._owned = False  # whether the memory was made here: no other is ever written to
        self._spare: tuple[Tensor, Tensor] | None = None  # owned, of the same kind, for reorder

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been stored yet."""
        return self._key is None

    @property
    def key(self) -> Tensor | None:
        """The projected keys, a view [B, H, length, D] until the next change; None at first."""
        return None if self._key is None else self._key[:, :, : self.length]

    @property
    def value(self) -> Tensor | None:
        """The projected values, a view [B, H, length, D] until the next change; None at first."""
        return None if self._value is None else self._value[:, :, : self.length]

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append key [B, H, M, D] and value [B, H, M, E]. Returns all, [B, H, length, D and E].

        Raises:
            TypeError: key or value is not a tensor.
            ValueError: key and value do not fit each other or the stored ones, in batch, heads,
                length, dtype, device or size. Or the cache is static and has its keys.
        """
        _check_pair(key, value)
        if is_complete(self):
            raise ValueError("a static KVCache takes keys and values once; reset() empties it")
        if self.static:
            self._key, self._value = key, value
        else:
            _check_fits("keys", self._key, key)
            _check_fits("values", self._value, value)
            self._key = self._append(self._key, key)
            self._value = self._append(self._value, value)
            self._owned = not torch.is_grad_enabled()
        self.length += key.shape[2]
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def _append(self, held: Tensor | None, new: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # autograd may still need the old memory
            return new if held is None else torch.cat([held[:, :, : self.length], new], dim=2)
        room = self._room(held, new, *new.shape)
        room[:, :, self.length : self.length + new.shape[2]] = new
        return room

    def written_by(
        self, write: Callable[..., Any], x: Tensor, sizes: tuple[int, int, int, int]
    ) -> Any:
        """What ``write`` returns, which adds keys and values [B, H, M, D], projected from ``x``.

        It gets memory for keys and for values, how many are there, and False if there are no others
        to add. None where only ``update`` knows what to do or to say.

        :meta private:
        """
        B, H, M, D = sizes
        kind = B, H, D, x.dtype, x.device
        held = self._key, self._value
        fits = all(type(y) in PLAIN and (y is None or _kind(y) == kind) for y in held)
        if torch.is_grad_enabled() or not fits or (self.static and self.is_empty):
            return None
        if self.static:
            return write(*held, self.length, False)
        room = [self._room(y, x, *sizes) for y in held]
        found = write(*room, self.length)
        torch.autograd.graph.increment_version(room)  # the operator writes through views
        (self._key, self._value), self._owned = room, True
        self.length += M
        return found

    def _room(self, held: Tensor | None, like: Tensor, B: int, H: int, M: int, D: int) -> Tensor:
        """Memory that begins with the held keys and has room for M more: the same, or a larger."""
        needed = self.length + M
        if held is not None and needed <= held.shape[2] and self._owned and _is_writable(held):
            return held
        grown = like.new_empty(B, H, max(needed, 2 * self.length, self.capacity, _MIN_CAPACITY), D)
        if held is not None:
            grown[:, :, : self.length] = held[:, :, : self.length]
        return grown

    def reorder(self, indices: Tensor) -> None:
        """Make sample ``indices[b]`` sample b, as beam search does: [B'] integers in [0, B).

        An index may occur several times or not at all, and B' may differ from B. So ``reorder`` can
        also copy a prompt's cache to all beams. It costs a copy of keys and values.

        Raises:
            TypeError: ``indices`` is not a tensor.
            ValueError: ``indices`` is not a vector of integers, or on another device.
            IndexError: an index is out of range.
        """
        if not isinstance(indices, Tensor):
            raise TypeError(f"indices: expected a Tensor [B'], got {type(indices).__name__}")
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices: expected int32 or int64 [B'], got {indices.dtype} {list(indices.shape)}"
            )
        if self._key is None or self._value is None:
            return
        if indices.device != self._key.device:
            raise ValueError(f"indices: expected device {self._key.device}, got {indices.device}")
        held = self._key, self._value
        if torch.is_grad_enabled():
            self._key, self._value = (x.index_select(0, indices) for x in held)
            self._owned = False  # but the graph's
            return
        taken = self._other_memory(indices.shape[0], *held)
        for x, y in zip(held, taken, strict=True):
            torch.index_select(x[:, :, : self.length], 0, indices, out=y[:, :, : self.length])
        (self._key, self._value), self._spare = taken, held if self._owned else None
        self._owned = True

    def _other_memory(self, batch: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Room for ``batch`` samples: the memory that the last reorder left, if it still fits.

        New memory costs four times as much as the copy, because of page faults.
        """
        shapes = [(batch, *x.shape[1:]) for x in (key, value)]
        spare = self._spare
        if spare is not None and all(
            tuple(x.shape) == shape and _is_writable(x)
            for x, shape in zip(spare, shapes, strict=True)
        ):
            return spare
        return key.new_empty(shapes[0]), value.new_empty(shapes[1])

    def crop(self, length: int) -> None:
        """Forget all positions from ``length`` on, for speculative decoding.

        Raises:
            TypeError: ``length`` is no int.
            ValueError: ``length`` is not between 0 and the cache's length.
        """
        length = arguments.check_int("length", length, 0)
        if length > self.length:
            raise ValueError(f"length: expected 0 to {self.length}, got {length}")
        self.length = length

    def __copy__(self) -> "KVCache":
        """A cache of the same memory, which from now on neither of them writes to."""
        made = type(self).__new__(type(self))
        self._owned = False
        vars(made).update(vars(self), _spare=None)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache with memory of its own. Its keys may be part of a graph, and so is their copy."""
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, x in (vars(self) | {"_spare": None}).items():
            setattr(made, name, x.clone() if isinstance(x, Tensor) else copy.deepcopy(x, memo))
        return made

    def __repr__(self) -> str:
        held = "empty" if self._key is None else _describe(self._key)
        return f"KVCache(length={self.length}, static={self.static}, {held})"


def is_complete(cache: KVCache) -> bool:
    """Whether a cache is static and has its keys. A call then projects its queries only."""
    return cache.static and not cache.is_empty


def _check_pair(key: Tensor, value: Tensor) -> None:
    """Checks a pair. With fewer values than keys, memory that was never written would be read."""
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, length, dim], got {list(x.shape)}")
    if (*key.shape[:3], key.dtype, key.device) != (*value.shape[:3], value.dtype, value.device):
        raise ValueError(
            "key and value: expected the same batch, heads, length, dtype and device, got "
            f"{list(key.shape)} {key.dtype} on {key.device} and "
            f"{list(value.shape)} {value.dtype} on {value.device}"
        )


def _check_fits(name: str, held: Tensor | None, new: Tensor) -> None:
    if held is not None and _kind(held) != _kind(new):
        raise ValueError(f"cache: holds {_describe(held)}, but the new {name} are {_describe(new)}")


def _kind(x: Tensor) -> tuple:
    B, H, _, D = x.shape
    return B, H, D, x.dtype, x.device


def _describe(x: Tensor) -> str:
    return "batch {}, {} heads of {}, {} on {}".format(*_kind(x))


def _is_writable(held: Tensor) -> bool:
    """Inference tensors may be written only in inference mode, tensors in a graph never."""
    if held.requires_grad or torch.compiler.is_compiling():  # the rest cannot be traced
        return not held.requires_grad
    return torch.is_inference_mode_enabled() or not held.is_inference()


@contextlib.contextmanager
def unless_it_raises(cache: Any) -> Iterator[None]:
    """A call inside that raises leaves the cache as it was, whatever does not fit."""
    # Compiled code changes it at its end, and torch 2.11 cannot compile the copy.
    if not isinstance(cache, KVCache) or torch.compiler.is_compiling():
        yield
        return
    held = dict(vars(cache))
    try:
        yield
    except BaseException:
        vars(cache).update(held)
        raise


def step(
    module: nn.MultiheadAttention,
    cache: KVCache,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    masks: _Masks,
    need_weights: bool,
    mask: Any = None,
    bias: Any = None,
) -> Step:
    """One call of ``module`` with a cache, which takes the new keys."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: expected a fastattn.KVCache, got {type(cache).__name__}")
    _check_plain(module, query, key, value, *masks)
    if is_complete(cache):
        return _static_step(module, cache, query, masks, need_weights, mask, bias)
    if key is None or value is None:
        raise ValueError("key and value: expected tensors, as the cache does not hold them yet")
    if cache.static:
        call = inputs.canonical(module, query, key, value, *masks, need_weights, False)
        call = inputs.with_own(module, call, mask, bias)
        q, k, v = projection.to_heads(module, call.query, call.key, call.value, call.batch_first)
        return Step(call, q, *cache.update(k, v))
    return _growing_step(module, cache, query, key, value, masks, need_weights, mask, bias)


def _check_plain(module: nn.MultiheadAttention, query: Tensor, *others: Tensor | None) -> None:
    if projection.extra_keys(module):
        raise ValueError("a KVCache excludes add_bias_kv and add_zero_attn")
    nested = any(t is not None and t.is_nested for t in (query, *others))
    if interop.foreign(module, query, *others) is not None or nested:
        raise TypeError(
            "a KVCache takes plain float16, bfloat16, float32 or float64 tensors: no subclasses, "
            "no nested tensors, no torch.jit.trace, no torch.fx"
        )


def _static_step(
    module: nn.MultiheadAttention,
    cache: KVCache,
    query: Tensor,
    masks: _Masks,
    need_weights: bool,
    mask: Any,
    bias: Any,
) -> Step:
    """A call with a static cache that has its keys: projects the queries only."""
    like = query, query  # whose shapes always fit
    if not (masks[0] is masks[1] is mask is bias is None):
        like = inputs.keys_like(module, query, cache.length)
    call = inputs.canonical(module, query, *like, *masks, need_weights, False)
    call = inputs.with_own(module, call, mask, bias)
    q = projection.queries_to_heads(module, call.query, call.batch_first)
    k, v = cache.key, cache.value
    assert k is not None
    assert v is not None
    like_held = k[:, :, :0]  # whose heads would broadcast
    if arguments.autocasts(q.device.type):  # casts keys that were projected without it
        like_held = like_held.to(q.dtype)
    _check_fits("queries", like_held, q)
    return Step(call, *inputs.that_autograd_saves(q, k, v))


def _growing_step(
    module: nn.MultiheadAttention,
    cache: KVCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: _Masks,
    need_weights: bool,
    mask: Any,
    bias: Any,
) -> Step:
    """A call that adds positions after the others. Each sees the keys up to its own position."""
    call = inputs.canonical(module, query, key, value, None, None, need_weights, False)
    M, new = (x.shape[1 if call.batch_first else 0] for x in (call.query, call.key))
    if M != new:
        raise ValueError(
            f"query and key: with a growing cache expected as many new keys as queries, got {M} "
            f"queries and {new} keys (KVCache(static=True) is for cross-attention)"
        )
    if not (masks[0] is masks[1] is None):  # ``!=`` would compare a tensor, which takes 20 us
        like = inputs.keys_like(module, query, cache.length + new)
        covering = inputs.canonical(module, query, *like, *masks, need_weights, False)
        call = call._replace(masks=covering.masks)
    if M > 1 or mask is not None:  # one new query sees every key; a window is around its place
        made: Any = call.masks["mask"] or Mask()
        call.masks["mask"] = dataclasses.replace(made, causal="bottom_right")
    call = inputs.with_own(module, call, mask, bias, cache.length)
    q, k, v = projection.to_heads(module, call.query, call.key, call.value, call.batch_first)
    return Step(call, q, *cache.update(k, v))
