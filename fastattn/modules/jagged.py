"""Jagged nested tensors (B, j, features) as inputs of modules: sequences of different lengths.

A module's forward sees dense tensors only. The sequences are packed, one after the other, where
intervals of keys say which query sees which key. Otherwise they are padded to the longest.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastattn.problem import Mask, jagged
from fastattn.problem.jagged import is_jagged

Forward = TypeVar("Forward", bound=Callable[..., Any])


def takes_jagged(packs: bool, steps: bool = True) -> Callable[[Forward], Forward]:
    """Makes a forward of queries and keys (B, j, features) take jagged tensors too.

    Results are jagged if the queries are, with the offsets of the queries. Weights are padded to
    the longest sequence of keys.

    Args:
        packs: whether ``mask`` alone may keep sequences apart that stand one after the other.
        steps: whether dense queries may be (B, features), one for each sequence.
    """

    def decorate(forward: Forward) -> Forward:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def run(module: Any, *args: Any, **options: Any) -> Any:
            if not any(map(is_jagged, args)) and not any(map(is_jagged, options.values())):
                return forward(module, *args, **options)
            bound = signature.bind(module, *args, **options)
            bound.apply_defaults()
            _, *names = bound.arguments
            call = {name: bound.arguments[name] for name in names}
            _check(call, steps)
            way = _packed if packs and _may_pack(module, call) else _padded
            return way(functools.partial(forward, module), call)

        # A code object of its own: torch.compile limits how often it compiles the same one.
        own: Any = run
        own.__code__ = own.__code__.replace(co_name=forward.__qualname__)
        return own

    return decorate


def longest(x: Any) -> int:
    """The length that ``x`` (B, j, features) is padded to."""
    return int(x.offsets().diff().max()) if x.shape[0] else 0


def _may_pack(module: Any, call: dict[str, Any]) -> bool:
    """Whether intervals of keys are the whole mask, and no weights are wanted."""
    weights = call["need_weights"] or getattr(module, "store_weights", False)
    dense = call["attn_mask"] is not None or isinstance(call.get("bias"), Tensor)
    if weights or dense or not is_jagged(_keys(call)):
        return False
    mask = call["mask"]
    if not isinstance(mask, Mask):
        return mask is None
    others = (f.name for f in dataclasses.fields(mask) if f.name not in ("causal", "window"))
    return mask.causal is not None and all(getattr(mask, name) is None for name in others)


def _packed(forward: Callable[..., Any], call: dict[str, Any]) -> Any:
    """The call over one sample, in which each query sees the keys of its own sequence."""
    rows, mask, keys = next(iter(call)), call["mask"], _keys(call)
    queries = call[rows]
    if is_jagged(queries):
        offsets, call[rows] = queries.offsets(), queries.values()[None]
    else:
        B, M = queries.shape[0], 1 if queries.dim() == 2 else queries.shape[1]
        offsets = torch.arange(B + 1, device=queries.device) * M
        call[rows] = queries.reshape(1, B * M, queries.shape[-1])
    causal, window = (False, None) if mask is None else (mask.causal, mask.window)
    call["mask"] = jagged.documents(offsets, keys.offsets(), call[rows].shape[1], causal, window)

    def restored(x: Tensor) -> Tensor:
        if is_jagged(queries):
            return jagged.from_values(x[0], queries)
        return x[0].reshape(*queries.shape[:-1], *x.shape[2:])

    return _each(restored, forward(**_values(call)))


def _padded(forward: Callable[..., Any], call: dict[str, Any]) -> Any:
    """The call over sequences with padding, whose results are without it."""
    if isinstance(call.get("mask"), Mask) and call["mask"].causal == "bottom_right":
        raise ValueError(
            "mask.causal: 'bottom_right' and jagged tensors go with need_weights=False, and with "
            "no mask but a window"
        )
    queries, keys = call[next(iter(call))], _keys(call)
    if is_jagged(keys):
        call["valid_lens"] = keys.offsets().diff()
    dense = {name: _with_padding(x) if is_jagged(x) else x for name, x in call.items()}
    results = forward(**dense)
    if not is_jagged(queries):
        return results
    places = _places(queries.offsets(), queries.values().shape[0], longest(queries))

    def restored(x: Tensor) -> Tensor:
        by_head = x.dim() == 4  # weights (B, H, M, N)
        x = x.transpose(1, 2) if by_head else x
        rows = x.flatten(0, 1)
        past = rows.new_zeros(1, *rows.shape[1:])  # what is past the last sequence
        made = jagged.from_values(torch.cat([rows, past])[places], queries)
        return made.transpose(1, 2) if by_head else made

    return _each(restored, results)


def _with_padding(x: Any) -> Tensor:
    return x.to_padded_tensor(0.0, (x.shape[0], longest(x), *x.shape[2:]))


def _places(offsets: Tensor, T: int, length: int) -> Tensor:
    """Where each of T rows stands in sequences that are padded to ``length``.

    Rows past the last sequence stand behind all of them.
    """
    t, B = torch.arange(T, device=offsets.device), offsets.shape[0] - 1
    sample = torch.searchsorted(offsets[1:].contiguous(), t, right=True)
    return torch.where(sample < B, sample * length + t - offsets[sample], B * length)


def _values(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.values()[None] if is_jagged(x) else x for name, x in call.items()}


def _keys(call: dict[str, Any]) -> Any:
    """The tensor whose sequences are the keys': a jagged one if there is any."""
    rows, *others = call
    jagged_keys = [call[name] for name in others if is_jagged(call[name])]
    return jagged_keys[0] if jagged_keys else call.get("keys", call[rows])


def _check(call: dict[str, Any], steps: bool) -> None:
    """Raises ValueError unless the jagged tensors of a call fit each other."""
    tensors = {name: x for name, x in call.items() if is_jagged(x)}
    for name, x in tensors.items():
        dims = (2, 3) if name == "values" else (3,)
        if x.dim() not in dims or x._ragged_idx != 1:
            raise ValueError(
                f"{name}: expected (B, j, features), jagged in dim 1, got {list(x.shape)}"
            )
    jagged.check_whole(tensors.items())
    if call["valid_lens"] is not None:
        raise ValueError("valid_lens: expected None, as jagged tensors have lengths of their own")
    rows, *others = call
    if call[rows].dim() != 3 and not (steps and call[rows].dim() == 2):
        expected = "(B, M, features) or (B, features)" if steps else "(B, M, features)"
        raise ValueError(f"{rows}: expected {expected}, got {list(call[rows].shape)}")
    keys = {name: call[name] for name in others if name in ("keys", "values", "cache")}
    keys = {name: x for name, x in keys.items() if isinstance(x, Tensor)}
    (first, like), *rest = keys.items() or [(rows, call[rows])]
    for name, x in rest:
        if is_jagged(x) != is_jagged(like) or (is_jagged(x) and not jagged.same_lengths(like, x)):
            raise ValueError(
                f"{name}: expected the offsets of {first}: write "
                f"torch.nested.nested_tensor_from_jagged(values, {first}.offsets())"
            )
    if like.shape[0] != call[rows].shape[0]:
        raise ValueError(
            f"{first}: expected as many sequences as {rows}, {call[rows].shape[0]}, "
            f"got {like.shape[0]}"
        )


def _each(function: Callable[[Tensor], Tensor], results: Any) -> Any:
    """``function`` of every tensor of a forward's results."""
    if isinstance(results, Tensor):
        return function(results)
    made = (None if x is None else _each(function, x) for x in results)
    return type(results)(*made) if hasattr(results, "_fields") else tuple(made)
