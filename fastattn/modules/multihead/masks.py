"""Masks in nn.MultiheadAttention's convention, turned into the functional API's.

nn.MultiheadAttention takes two masks in which True means "not allowed": ``attn_mask`` over
(query, key) pairs and ``key_padding_mask`` over keys. It turns both into floats, adds them and
expands the sum to [B * H, M, N]. Here each keeps its kind and its small shape. A boolean mask
becomes a keep mask (True keeps), and a float mask becomes a bias.

Dims as everywhere in the package: B batch, H heads, M queries, N keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.problem import Mask, validate


class Sizes(NamedTuple):
    """The sizes of one call. ``extra`` counts the keys appended after the N given ones."""

    B: int
    H: int
    M: int
    N: int
    extra: int


def check_kinds(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise and warn like nn.MultiheadAttention about the masks' dtypes.

    torch's own helper raises, so that type and text are torch's. But the helper also builds a float
    copy of a boolean mask. So it is called only if it will raise or warn, with an empty tensor.
    """
    masks = [m for m in (attn_mask, key_padding_mask) if m is not None]
    known = all(m.dtype == torch.bool or m.is_floating_point() for m in masks)
    if known and len({m.dtype for m in masks}) <= 1:
        return
    for mask, name, other in (
        (key_padding_mask, "key_padding_mask", attn_mask),
        (attn_mask, "attn_mask", None),
    ):
        F._canonical_mask(
            mask=None if mask is None else mask.new_empty(0),
            mask_name=name,
            other_type=F._none_or_dtype(other),
            other_name="attn_mask",
            target_type=dtype,
        )


def to_keywords(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: Sizes,
    dtype: torch.dtype,
) -> dict[str, object]:
    """The masks of a batched call as ``attn_mask=``, ``mask=`` and ``bias=`` of the functional API.

    ``dtype`` is that of the query.

    ``attn_mask`` is (M, N) or (B * H, M, N), ``key_padding_mask`` (B, N), each boolean (True = not
    allowed) or float (added to the scores). Appended keys are visible to every query.

    Two masks of one kind become one in their broadcast shape, [B, 1, M, N]; torch adds any two as
    [B * H, M, N]. No value of a mask is read. nn.TransformerEncoder turns a boolean mask into a
    float mask of 0 and -inf. Here that stays a bias: a bias costs the kernels no more than a
    boolean mask, and they skip tiles of all -inf.
    """
    pairs = _pairs_4d(attn_mask, sizes)
    padding = _padding_4d(key_padding_mask, sizes)
    keep_pairs = bias = mask = None
    if (both := joined(pairs, padding)) is not None:
        pairs, padding = both, None
    if pairs is not None and pairs.dtype == torch.bool:
        keep_pairs = ~pairs
    else:
        bias = pairs
    if padding is not None:
        if padding.dtype == torch.bool:
            mask = Mask(keep=~padding)
        else:
            bias = padding if bias is None else validate.sum_of_biases(bias, padding, dtype)
    if pairs is not None and padding is not None and bias is not None:
        bias = bias.to(torch.promote_types(bias.dtype, dtype))
    return {"attn_mask": keep_pairs, "mask": mask, "bias": bias}


def joined(pairs: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Two boolean masks of four dims as one; None where there are not two."""
    if pairs is None or padding is None or not pairs.dtype == padding.dtype == torch.bool:
        return None
    return pairs | padding


def heads_apart(mask: Tensor, B: int, H: int) -> Tensor:
    """An attn_mask (M, N) or (B * H, M, N) as a view [1, 1, M, N] or [B, H, M, N]."""
    # Index n * H + h. unflatten is a view for any strides, also those of an expanded mask.
    return mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (B, H))


def check_float_dtypes(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, need_weights: bool
) -> None:
    """Raises unless the sum of the masks has the query's dtype, as in torch.

    As there, a boolean mask counts as one of that dtype. float32 also passes if no weights are
    wanted, and any dtype under autocast.
    """
    allowed = {torch.bool, query.dtype}
    if not need_weights:
        allowed.add(torch.float32)
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    kinds = {name: mask.dtype for name, mask in masks.items() if mask is not None}
    wrong = [name for name, kind in kinds.items() if kind not in allowed]
    if not wrong or torch.is_autocast_enabled(query.device.type):
        return
    added = [query.dtype if kind == torch.bool else kind for kind in kinds.values()]
    if len(added) == 2 and torch.promote_types(added[0], added[1]) in allowed:
        return
    name = wrong[0]
    raise RuntimeError(
        f"Expected {name} dtype to be bool or to match query dtype, "
        f"but got {name}.dtype: {kinds[name]} and query.dtype: {query.dtype} instead."
    )


def _pairs_4d(mask: Tensor | None, s: Sizes) -> Tensor | None:
    """attn_mask as a view [1, 1, M, N] or [B, H, M, N]. The errors are torch's."""
    if mask is None:
        return None
    expected = (s.M, s.N) if mask.dim() == 2 else (s.B * s.H, s.M, s.N)
    if mask.shape != expected:
        raise RuntimeError(
            f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {expected}."
        )
    return _append_columns(heads_apart(mask, s.B, s.H), s.extra)


def _padding_4d(mask: Tensor | None, s: Sizes) -> Tensor | None:
    """key_padding_mask as [B, 1, 1, N + extra]; as in torch, errors count appended columns."""
    if mask is None:
        return None
    for dim, want in ((0, s.B), (1, s.N + s.extra)):
        got = mask.shape[dim] + dim * s.extra
        if got != want:
            raise AssertionError(
                f"Expected key_padded_mask.shape[{dim}] to be {want}, but got {got}"
            )
    return _append_columns(mask, s.extra)[:, None, None, :]


def _append_columns(mask: Tensor, extra: int) -> Tensor:
    """``extra`` more columns of False or 0: appended keys are never masked."""
    return F.pad(mask, (0, extra)) if extra else mask
