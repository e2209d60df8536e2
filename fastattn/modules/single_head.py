"""What batch-first modules with one head share: (B, M, features) in, (B, M, Dv) out.

They take ``valid_lens``, ``attn_mask`` and ``mask`` as :class:`AdditiveAttention` documents them.
Modules for decoding also take one query for each sample, (B, features). Their results then have no
dim M either.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from fastattn import scores
from fastattn.modules import linear
from fastattn.problem import Mask, arguments, validate


class Attention(nn.Module):
    """A module that returns the output, or with ``need_weights`` the tuple (output, weights)."""

    if TYPE_CHECKING:  # nn.Module hides from type checkers what a call returns.

        @overload
        def __call__(
            self, queries: Tensor, keys: Tensor | None, values: Tensor | None = ...,
            valid_lens: Tensor | None = ..., *, need_weights: Literal[False] = ..., **options: Any,
        ) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(
            self, queries: Tensor, keys: Tensor | None, values: Tensor | None = ...,
            valid_lens: Tensor | None = ..., *, need_weights: Literal[True], **options: Any,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        def __call__(self, *args: Any, **options: Any) -> Any: ...  # noqa: D102


class Masks(NamedTuple):
    """Three ways to say which query sees which key."""

    valid_lens: Tensor | None = None
    attn_mask: Tensor | None = None
    mask: Mask | None = None

    def merged(self) -> Mask | None:
        """``mask`` with ``valid_lens`` in it."""
        validate.check_mask(self.mask)
        if self.valid_lens is None:
            return self.mask
        if self.mask is not None and self.mask.kv_len is not None:
            raise ValueError(
                "valid_lens and mask.kv_len say the same thing: expected at most one of them"
            )
        return dataclasses.replace(self.mask or Mask(), kv_len=self.valid_lens)

    def call(self, function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
        """``function(*tensors, **options)``. Errors about ``mask.kv_len`` name ``valid_lens``."""
        try:
            return function(*tensors, **options)
        except (TypeError, ValueError) as error:
            if self.valid_lens is not None:
                error.args = tuple(str(x).replace("mask.kv_len", "valid_lens") for x in error.args)
            raise

    def over_heads(self) -> dict[str, Any]:
        """Keywords for a function over [B, H, M, D]; masks (B, M, N) get a dim H."""
        mask = self.merged()
        if mask is not None and mask.keep is not None:
            mask = dataclasses.replace(mask, keep=_with_head_dim(mask.keep))
        return {"attn_mask": _with_head_dim(self.attn_mask), "mask": mask}


def attend(
    score: Any,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    masks: Masks,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``scores.attention`` over (B, M, D): output (B, M, Dv), and weights (B, M, N) or None."""
    check_dims(queries=queries, keys=keys, values=values)
    arguments.check_bool("need_weights", need_weights)
    tensors = [queries, keys, values]
    if score == "additive":
        given: dict[str, Any] = {"attn_mask": masks.attn_mask, "mask": masks.merged()}
    else:  # dim -3 is the heads; the additive score has them in its weight
        check_features("keys", keys, queries.shape[-1])
        tensors, given = [x.unsqueeze(1) for x in tensors], masks.over_heads()
    results = masks.call(
        scores.attention,
        *tensors,
        score=score,
        dropout_p=dropout_p,
        return_weights="mean" if need_weights else None,
        **given,
        **options,
    )
    out, weights = results if need_weights else (results, None)
    return out if score == "additive" else out.squeeze(1), weights


def _with_head_dim(mask: Tensor | None) -> Tensor | None:
    return mask.unsqueeze(1) if isinstance(mask, Tensor) and mask.dim() == 3 else mask


def as_steps(queries: Tensor) -> tuple[Tensor, bool]:
    """Queries as (B, M, features), and whether they were one step, (B, features)."""
    check_tensors(queries=queries)
    one = queries.dim() == 2
    queries = queries.unsqueeze(1) if one else queries
    check_dims(queries=queries)
    return queries, one


def results(out: Tensor, weights: Tensor | None, need_weights: bool, one_step: bool) -> Any:
    """What a forward returns: the output, or (output, weights); a step without dim M."""
    if one_step:
        out = out.squeeze(1)
        weights = None if weights is None else weights.squeeze(1)
    return (out, weights) if need_weights else out


def check_tensors(**tensors: object) -> None:
    """Raises TypeError unless all are tensors."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise arguments.no_tensor(name, x)


def check_dims(**tensors: Tensor) -> None:
    """Raises TypeError or ValueError unless all are (batch, length, features)."""
    check_tensors(**tensors)
    for name, x in tensors.items():
        if x.dim() != 3:
            raise ValueError(
                f"{name}: expected 3 dims, (batch, length, features), got {list(x.shape)}"
            )


def check_features(name: str, x: Tensor, features: int) -> None:
    """Raises TypeError or ValueError unless ``x`` is a tensor of so many features; 0 for any."""
    check_tensors(**{name: x})
    # Compared one by one: compiled for dynamic shapes, `in` a tuple finds no size.
    if x.dim() == 0 or (features and features != x.shape[-1]):
        expected = f"{features} features" if features else "features in its last dim"
        raise ValueError(f"{name}: expected {expected}, got {list(x.shape)}")


def project(name: str, x: Tensor, layer: nn.Module) -> Tensor:
    """``layer(x)``, for a linear layer or for any in its place.

    Raises:
        TypeError: ``x`` is no tensor, or the layer fails and has another dtype.
        ValueError: the features are not those of the layer, if it says how many it takes.
    """
    check_features(name, x, getattr(layer, "in_features", 0))
    try:
        return linear.call(layer, x)
    except RuntimeError as error:  # The call comes first: a layer may cast, and autocast does.
        dtype = getattr(getattr(layer, "weight", None), "dtype", x.dtype)
        if dtype == x.dtype or arguments.autocasts(x.device.type):
            raise
        raise TypeError(f"{name}: expected {dtype} as of the parameters, got {x.dtype}") from error


def weight_of(name: str, layer: nn.Module) -> Tensor:
    """The weight of a layer that is read and never called."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"{name}: expected a layer with a Tensor as its weight, which is read, "
            f"got {type(layer).__name__}: leave {name} a linear layer"
        )
    return weight


def check_fit(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raises unless all have the same batch size, and keys and values the same length."""
    check_dims(queries=queries, keys=keys, values=values)
    for name, x in (("keys", keys), ("values", values)):
        if x.shape[0] != queries.shape[0]:
            raise ValueError(
                f"{name}: expected the batch of queries {list(queries.shape)}, got {list(x.shape)}"
            )
    if keys.shape[1] != values.shape[1]:
        raise ValueError(
            "keys and values: expected the same length, "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )


def check_dropout(dropout: float) -> None:
    """Raises TypeError or ValueError unless ``dropout`` is a probability."""
    arguments.check_real("dropout", dropout)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout must be in [0, 1], but got {dropout}")


def check_sizes(**sizes: int | None) -> None:
    """Raises TypeError or ValueError unless all are positive ints, or None."""
    for name, size in sizes.items():
        if size is not None:
            arguments.check_int(name, size, 1)


def check_cache(cache: Tensor, values: Tensor, features: int) -> None:
    """Raises unless ``cache`` is a tensor from ``project_keys`` whose sizes fit ``values``."""
    if not isinstance(cache, torch.Tensor):
        raise TypeError(
            f"cache: expected the tensor project_keys returned, got {type(cache).__name__}"
        )
    expected = (*values.shape[:2], features)
    if tuple(cache.shape) != expected:
        raise ValueError(
            f"cache: expected {list(expected)} to go with values {list(values.shape)}, "
            f"got {list(cache.shape)}"
        )


class DenseMasks(NamedTuple):
    """Checked masks, for a module that picks keys itself."""

    kv_len: Tensor | None  # int32 [B, 1] or [B, M]
    keep: Tensor | None  # bool, broadcastable to [B, M, N]
    bias: Tensor | None  # float, broadcastable to [B, M, N]


def dense_masks(
    queries: Tensor, N: int, valid_lens: Tensor | None, attn_mask: Tensor | None
) -> DenseMasks:
    """``valid_lens`` and ``attn_mask`` of queries (B, M, features), checked by ``validate``."""
    B, M, _ = queries.shape
    lead = validate.Lead((B,), False, (1, M, N))
    keep, bias = validate.split_attn_mask(lead, queries, attn_mask)
    keep, bias = (None if x is None else x.squeeze(1) for x in (keep, bias))
    kv_len = validate.check_limit("valid_lens", lead, queries, valid_lens)
    return DenseMasks(kv_len, keep, bias)
