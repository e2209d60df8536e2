"""A module as one rank of a mesh computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.distributed import agree, comm, context, heads
from fastattn.distributed.comm import Group
from fastattn.distributed.heads import move, same
from fastattn.distributed.layout import Layout
from fastattn.modules import linear
from fastattn.modules.multihead import attention, inputs, interop, projection
from fastattn.modules.multihead.additive import MultiheadAdditiveAttention
from fastattn.modules.multihead.attention import MultiheadAttention
from fastattn.modules.multihead.kv_cache import KVCache, Step
from fastattn.problem import Origin
from fastattn.problem.validate import DTYPES

if TYPE_CHECKING:
    from fastattn.distributed.parallel import Shared

Points = tuple[Tensor, Tensor, Tensor]  # query, key, value
Masks = tuple[Tensor | None, Tensor | None]  # key_padding_mask, attn_mask
# What is the same on every rank, beside the lengths: see Part.step_of_rows.
ALIKE = ("samples", "key_padding_mask is given", "attn_mask is given", "dtype")


def check_out_proj(module: MultiheadAttention) -> None:
    """Raises ValueError where ranks share heads, but not what follows them."""
    if not linear.is_only_linear(module.out_proj):
        raise ValueError(
            "out_proj: expected a plain linear layer where ranks share heads, got hooks or "
            f"{type(module.out_proj).__name__}: write context= alone, or merge what was added"
        )


def check_call(part: Part, tensors: tuple, cache: KVCache | None) -> None:
    """Raises for tensors of other types, and for a cache of a sequence that ranks share."""
    reason = interop.foreign(cast(Any, part), *tensors)
    if reason is not None or any(x is not None and x.is_nested for x in tensors):
        raise TypeError(
            f"a shared module takes plain tensors, but {reason or 'one is nested'}: write "
            "x.full_tensor() of a DTensor; of nested tensors to_padded_tensor() and a padding mask"
        )
    if cache is not None and part.shared.context is not None:
        raise ValueError(
            "cache: keys of a shared sequence are on several ranks: write parallelize(..., heads=) "
            "alone, or fastattn.merge_attention"
        )


def summed(x: Tensor, group: Group) -> Any:
    """The sum over ranks, rounded once, of parts that no rank has whole; in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return move(wide, lambda x: comm.total(x, group), same)


class Part:
    """A module as one rank computes it: some of its heads, its parts of the parameters.

    For the functions of ``fastattn.modules.multihead`` this is the module.
    """

    def __init__(self, module: MultiheadAttention, shared: Shared) -> None:
        self.module, self.shared = module, shared
        if shared.heads is None:
            return
        from fastattn.distributed import parameters

        found = parameters.own(module, shared.heads)
        self.num_heads = module.num_heads // shared.heads.size
        self.out_proj = _OutProj(module, found, shared.heads)
        self._parameters = found
        for name, x in found.items():  # torch 2.11 cannot compile an update of __dict__
            setattr(self, name, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def step(self, call: inputs.Inputs) -> Step:
        """A checked call, and its heads."""
        part = cast(Any, self)
        q, k, v = projection.to_heads(part, call.query, call.key, call.value, call.batch_first)
        return Step(call, q, k, v)

    def step_of_rows(
        self, given: Callable[[], tuple[Points, Masks]], need_weights: bool, is_causal: bool
    ) -> Step:
        """The same of this rank's rows, with masks over all keys. ``given`` may raise.

        Where ranks tell each other their lengths, what one rank refuses all refuse.
        """
        made: list[Any] = []

        def own() -> list[int]:
            points, masks = given()
            call = inputs.canonical(cast(Any, self), *points, None, None, need_weights, False)
            made.extend((points, masks, call))
            dim = 1 if call.batch_first else 0
            shape = [call.query.shape[dim], call.key.shape[dim], call.query.shape[1 - dim]]
            return [*shape, *(x is not None for x in masks), DTYPES.index(call.query.dtype)]

        self.layouts = self.shared.layouts(own)
        points, masks, call = made

        def covering() -> tuple[()]:
            made.append(self._covering(points, masks, need_weights, is_causal))
            return ()

        if isinstance(self.shared.layout, Layout) or all(x is None for x in masks):
            covering()
        else:
            agree.every(covering, 0, cast(Group, self.shared.context))
        return self.step(call._replace(masks=made[-1]))

    def _covering(
        self, points: Points, masks: Masks, need_weights: bool, is_causal: bool
    ) -> dict[str, object]:
        """Masks over all keys as keywords."""
        part, (rows, keys) = cast(Any, self), self.layouts
        own, N = keys.sizes[cast(Group, self.shared.context).rank], keys.length
        if max(rows.sizes) == rows.length and rows.ranks > 1:
            # The hint may be torch's, which compares a mask with a rank's own rows: ranks would not
            # agree. The mask says the same.
            is_causal = is_causal and masks[1] is None
        for name, mask in zip(("key_padding_mask", "attn_mask"), masks, strict=True):
            if mask is not None and not is_causal and mask.shape[-1] == own != N:
                raise ValueError(
                    f"{name}: expected all {N} keys, in the order of positions, got the {own} of "
                    "this rank: write the mask of the whole sequence"
                )
        padding, pairs = masks
        if pairs is not None and pairs.is_floating_point():
            # Their sum has rows. A bias without rows gets the sum over ranks in context.attend.
            padding = heads.replicated(padding, cast(Group, self.shared.context))
        like = inputs.keys_like(part, points[0], N)
        given = inputs.canonical(part, points[0], *like, padding, pairs, need_weights, is_causal)
        of_pairs = "attn_mask" if pairs is None or pairs.dtype == torch.bool else "bias"
        dropped = pairs is None or given.masks[of_pairs] is None
        self.rows = () if dropped else (of_pairs,)
        return given.masks

    def attend_heads(
        self, step: Step, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """From heads to the results of forward. Weights are those of this rank's heads."""
        part = cast(Any, self)
        return attention.attend_heads(part, self._attend, *step, need_weights, average)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Attention over this rank's heads, with the dropout bits of all."""
        groups = [x for x in (self.shared.heads, self.shared.context) if x is not None]
        if options["dropout_p"]:
            options["seed"] = comm.seed(q.device, groups)
        first = 0 if self.shared.heads is None else self.shared.heads.rank * q.shape[1]
        weight = self._score_weight()
        score = "dot" if weight is None else "additive"
        tensors, origin = (q, k, v, weight), Origin(h=first)
        if self.shared.context is None:
            return context.alone(score, tensors, origin, None, False, "auto", options)
        how = (self.shared.method, *self.layouts, None)
        return context.attend(
            score, tensors, self.shared.context, origin, how, None, False, "auto", options,
            self.rows,
        )  # fmt: skip

    def _score_weight(self) -> Any:
        """The weight of the additive score. Each rank has a part of its gradient."""
        if not isinstance(self.module, MultiheadAdditiveAttention):
            return None
        if self.shared.context is None:
            return self.score_weight
        ranks = self.shared.context.size  # context.attend gives each the sum
        return move(self.score_weight, same, lambda grad: grad / ranks)


class _OutProj:
    """out_proj over the heads of all ranks. Each rank has the columns of its heads."""

    def __init__(self, module: MultiheadAttention, own: dict[str, Any], group: Group) -> None:
        check_out_proj(module)  # again: hooks may have come since
        self.weight, self.bias, self.group = own["out_proj.weight"], own["out_proj.bias"], group
        self._parameters: dict[str, Any] = {"weight": self.weight, "bias": self.bias}

    def __call__(self, x: Tensor) -> Tensor:
        part = F.linear(x, self.weight)
        out = summed(part, self.group)
        return (out if self.bias is None else out + self.bias).to(part.dtype)
