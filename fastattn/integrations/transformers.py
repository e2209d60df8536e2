"""fastattn as an attention implementation of Hugging Face's transformers, 5 or newer.

A model finds two functions by the name of its implementation. It calls one for the mask, once a
forward pass, and the other for attention, once a layer. A mask is a :class:`fastattn.Mask` wherever
each query keeps an interval of keys. So causal masks, windows, chunks and padding take O(M + N)
memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastattn.functional import scaled_dot_product_attention
from fastattn.integrations import intervals
from fastattn.problem import Mask, arguments
from fastattn.problem.intervals import segments

# What changes the scores, or which keys there are, in ways that fastattn does not compute.
_UNKNOWN = ("cache", "block_indices", "sinks")
_CAN_SET = "_can_set_attn_implementation"


def register(name: str = "fastattn") -> None:
    """Makes ``model.set_attn_implementation(name)`` possible for the models of transformers.

    Args:
        name: what the implementation is called from now on.

    Raises:
        ImportError: transformers is missing, or older than version 5.
        ValueError: the name is one that transformers gives a meaning of its own.

    Example:
        >>> from fastattn.integrations.transformers import register
        >>> register()
        >>> model = AutoModel.from_pretrained(path, attn_implementation="fastattn")
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        mask_interface = importlib.import_module(
            "transformers.masking_utils"
        ).AttentionMaskInterface
    except ImportError as error:
        message = "expected transformers 5 or newer: pip install 'transformers>=5'"
        raise ImportError(message) from error
    if name in ("eager", "sdpa", "flex_attention") or "flash" in name or "|" in name:
        raise ValueError(f"name: expected one that transformers leaves free, got {name!r}")
    transformers.AttentionInterface.register(name, attention)
    mask_interface.register(name, mask)


# ---- attention ----


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What an attention layer of transformers calls, whatever the model.

    Args:
        module: the layer. Where ``is_causal`` is None, its attribute of that name counts, False
            without one.
        query: ``[B, H, M, D]``.
        key: ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        value: ``[B, Hkv, N, E]``.
        attention_mask: a mask that :func:`mask` made, or a tensor ``[B|1, H|1, M, N]``, bool (True
            keeps) or float (added). Its keys past N are left out.
        dropout: probability of dropping a weight; 0 in evaluation.
        scaling: factor on the scores, ``1 / sqrt(D)`` by default.
        is_causal: keeps ``j <= i`` where there is no mask, and more than one query.
        position_bias: added to the scores, with a gradient; broadcasts to ``[B, H, M, N]``.
        s_aux: attention sinks ``[H]``, one more logit a head in the denominator; with a gradient.
        softcap: makes ``softcap * tanh(score / softcap)`` of a score, before the mask.
        indices: ``[B, M, K]``, the only keys that a query may see, as DeepSeek-V3.2 picks them.
        block_indices: ``[B, h, M, K]``, the only blocks of keys that a query may see, as MiniMax-M3
            picks them for each of h groups of heads, of ``module.indexer.block_size``. -1 is none.
        output_attentions: whether to return the weights.
        **options: whatever else a layer says. A sliding window is in the mask already.

    Returns:
        The output ``[B, M, H, E]``, contiguous, and the weights ``[B, H, M, N]`` or None.

    Raises:
        ValueError: the model changes the scores in a way that fastattn does not compute.
    """
    size: Any = getattr(getattr(module, "indexer", None), "block_size", None)
    _refuse(options if size else options | {"block_indices": block_indices})
    N, own, dense = key.shape[-2], None, None
    if isinstance(attention_mask, Mask):
        own = attention_mask
    elif attention_mask is not None:
        dense = attention_mask[..., :N]
    if indices is not None:
        dense = _without(_named(indices, N).unsqueeze(1), dense)
    if block_indices is not None:
        blocks = _named(block_indices, -(-N // size)).repeat_interleave(size, -1)[..., :N]
        dense = _without(blocks.repeat_interleave(query.shape[1] // blocks.shape[1], 1), dense)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    results = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, mask=own,
        attn_mask=dense,
        is_causal=bool(causal) and attention_mask is None and query.shape[-2] > 1,
        bias=position_bias, return_weights="full" if output_attentions else None,
        softcap=softcap, sink=None if s_aux is None else s_aux.reshape(-1),
    )  # fmt: skip
    out, weights = results if isinstance(results, tuple) else (results, None)
    return out.transpose(1, 2).contiguous(), weights


def _named(indices: Tensor, count: int) -> Tensor:
    """Which of ``count`` are among the indices: [..., K] to bools [..., count]; -1 names none."""
    named = indices.new_zeros((*indices.shape[:-1], count + 1), dtype=torch.bool)
    return named.scatter(-1, indices.long().remainder(count + 1), True)[..., :count]


def _without(named: Tensor, mask: Tensor | None) -> Tensor:
    """A dense mask, or none, without what is not named."""
    if mask is None:
        return named
    return named & mask if mask.dtype == torch.bool else mask.masked_fill(~named, -math.inf)


def _refuse(options: dict[str, Any]) -> None:
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: this model passes one, which fastattn does not compute: use "
                "model.set_attn_implementation('eager')"
            )


# ---- masks ----


@dataclass(frozen=True, eq=False)
class ModelMask(Mask):
    """A mask that passes for a bool tensor of this shape where models of transformers take it.

    Those that pass it on get the mask itself. All else that a tensor can do makes the tensor.
    """

    shape: tuple[int, ...] = ()
    device: Any = None
    ndim, dtype = 4, torch.bool

    def contiguous(self) -> ModelMask:
        """The mask itself."""
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """As of a bool tensor: the mask on another device, or a tensor of another dtype."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **options)
        if like.dtype != torch.bool:
            return self[:].to(*args, **options)
        return dataclasses.replace(Mask.to(self, like.device), device=like.device)

    def __getitem__(self, index: Any) -> Tensor:
        B, H, M, N = self.shape
        return self.to_dense(M, N, B, H).to(self.device)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self[:], name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """What a function makes of the tensor; a model that adds it, as BEiT does, masks scores."""
        if function in (Tensor.add, Tensor.add_, Tensor.__iadd__, Tensor.__radd__, torch.add):
            scores, own = reversed(args) if isinstance(args[0], ModelMask) else args
            return scores.masked_fill(~own, torch.finfo(scores.dtype).min)
        dense = tree_map_only(ModelMask, lambda x: x[:], (args, kwargs or {}))
        return function(*dense[0], **dense[1])


def _of_the_tensor(operator: str) -> Callable[..., Tensor]:
    return lambda self, *other: getattr(self[:], operator)(*other)


for _name in ("invert", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "mul", "rmul"):
    setattr(ModelMask, f"__{_name}__", _of_the_tensor(f"__{_name}__"))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | Mask | None = None,
    **options: Any,
) -> Tensor | Mask | None:
    """The mask of a forward pass: see transformers' ``AttentionMaskInterface``.

    Row i is the query at position ``q_offset + i``, and column j the key at ``kv_offset + j``.

    Returns:
        A :class:`fastattn.Mask` of O(M + N) numbers a sample, if each query keeps an interval of
        keys. None if no key is masked. A bool tensor ``[B, 1, M, N]`` for a mask rule of the
        model's own, for one query, under tracing, and if the model requests one. A float tensor
        in any case for models of eager attention alone: they may add it, or append columns to it.

    Raises:
        ValueError: the model would add the mask to scores of its own.
    """
    from transformers.masking_utils import (  # pyright: ignore[reportMissingImports]
        eager_mask,
        sdpa_mask,
    )

    kind = type(options.get("config"))
    configuration = kind.__module__, kind.__name__
    if _attends_itself(*configuration):
        raise ValueError(
            "attn_implementation: this model computes attention itself, and never calls fastattn: "
            "load it with attn_implementation='eager'"
        )
    if isinstance(attention_mask, Mask):  # made before, as generate() does for a static cache
        return attention_mask
    eager = _takes_floats(*configuration)
    structured = not eager and _may_be_structured(q_length, attention_mask)
    rule = _rule(mask_function) if structured else None
    if rule is None or not _may_be_no_tensor(rule, options):
        if q_length > 1:  # layers that do not say that they are causal need it
            options["allow_is_causal_skip"] = False
        return (eager_mask if eager else sdpa_mask)(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **options,
        )  # fmt: skip
    device, shape = options["device"], (batch_size, 1, q_length, kv_length)
    made = _fields(rule, q_length, kv_length, q_offset, kv_offset, device)
    if attention_mask is not None:
        made["keep"] = _padding(attention_mask, kv_length, kv_offset)
    return ModelMask(**made, shape=shape, device=device) if made else None


@arguments.traced_as_constant
def _attends_itself(module: str, configuration: str) -> bool:
    """Whether ``set_attn_implementation`` refuses the models of a configuration.

    ``from_pretrained`` does not ask. Where transformers lacks the question, nothing is refused.
    """
    return not getattr(_model(module, configuration), _CAN_SET, lambda: True)()


@arguments.traced_as_constant
def _takes_floats(module: str, configuration: str) -> bool:
    """Whether its models may add the mask, or append to it: BEiT, and those of eager attention."""
    kinds = "_supports_sdpa", "_supports_flex_attn"
    model = _model(module, configuration)
    return module.endswith(".configuration_beit") or not any(getattr(model, x, True) for x in kinds)


def _model(module: str, configuration: str) -> Any:
    """The first class of models of a configuration, else that of its module; None without one."""
    modeling = module.replace(".configuration_", ".modeling_")
    found = vars(sys.modules.get(modeling, object)).values()
    own = [x for x in found if getattr(x, "__module__", None) == modeling and hasattr(x, _CAN_SET)]
    of = (x for x in own if getattr(x.config_class, "__name__", None) == configuration)
    return next(of, own[0] if own else None)


def _may_be_structured(q_length: int, padding: Tensor | None) -> bool:
    """Whether to look at the rule at all: a closure has no cells while it is traced."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore
        return False
    return q_length > 1 and (padding is None or padding.ndim == 2)


def _may_be_no_tensor(rule: _Rule, options: dict[str, Any]) -> bool:
    """Whether a model that calls with these options does without a tensor.

    Packed sequences turn the causal option off too, and so does a step of decoding.
    """
    if rule.right == 0:
        return rule.segments is not None or options.get("allow_is_causal_skip", True)
    return options.get("allow_is_bidirectional_skip", False)


class _Rule(NamedTuple):
    """Which keys a query sees: ``i - left <= j <= i + right``, in its chunk, in its segment."""

    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None  # its size, and how many positions precede the first
    segments: Tensor | None = None  # numbers [B, M] of the packed sequences

    def __and__(self, other: _Rule) -> _Rule | None:
        """Both at once; None where each has a chunk, or each has segments."""
        pairs = zip(self[2:], other[2:], strict=True)
        if any(x is not None and y is not None for x, y in pairs):
            return None
        left, right = (
            min((n for n in pair if n is not None), default=None)
            for pair in zip(self[:2], other[:2], strict=True)
        )
        packed = other.segments if self.segments is None else self.segments
        return _Rule(left, right, self.chunk or other.chunk, packed)


def _rule(function: Any) -> _Rule | None:
    """What a mask function of transformers says, read off the variables that it closes over.

    None for a function of anybody else, and for what is no interval.
    """
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    cells = inspect.getclosurevars(function).nonlocals
    kind = function.__qualname__.partition(".")[0]
    if kind == "and_masks":
        return _all_of(cells["mask_functions"])
    if kind == "remap_positions_for_packed_sequence":  # which count from 0 in each sequence
        inner = _rule(cells["mask_function"])
        return inner if inner is not None and inner.chunk is None else None
    simple = {
        "causal_mask_function": lambda: _Rule(right=0),
        "bidirectional_mask_function": lambda: _Rule(),
        "sliding_window_overlay": lambda: _Rule(left=cells["sliding_window"] - 1),
        "sliding_window_bidirectional_overlay": lambda: _Rule(*[cells["sliding_window"]] * 2),
        "chunked_overlay": lambda: _Rule(chunk=(cells["chunk_size"], cells["left_padding"])),
        "packed_sequence_mask_function": lambda: _Rule(segments=cells["packed_sequence_mask"]),
    }
    return simple[kind]() if kind in simple else None


def _all_of(functions: tuple[Callable, ...]) -> _Rule | None:
    total: _Rule | None = _Rule()
    for rule in map(_rule, functions):
        total = None if total is None or rule is None else total & rule
    return total


def _fields(
    rule: _Rule, M: int, N: int, q_offset: Any, kv_offset: int, device: Any
) -> dict[str, Any]:
    """What a Mask has to hold for a rule; empty where every query sees every key."""
    diagonal = q_offset - kv_offset  # a tensor for a static cache
    if rule.chunk is rule.segments is None and not isinstance(diagonal, Tensor):
        left, right = (-1 if n is None else n for n in (rule.left, rule.right))
        if left == right == -1:
            return {}
        window = {} if left == -1 and right < 1 else {"window": (left, right or -1)}
        if diagonal == 0:
            return ({"causal": "top_left"} if right == 0 else {}) | window
        if diagonal == N - M and right == 0:
            return {"causal": "bottom_right"} | window
    i = (torch.arange(M, device=device) + diagonal)[None]
    begin = None if rule.left is None else i - rule.left
    end = None if rule.right is None else i + rule.right + 1
    if rule.chunk is not None:
        size, before = rule.chunk
        before = before[:, None] - kv_offset
        start = (i - before) // size * size + before
        begin, end = intervals.largest(begin, start), intervals.smallest(end, start + size)
    if rule.segments is not None:
        first, last = segments(rule.segments, False, None, None)
        begin, end = intervals.largest(begin, first), intervals.smallest(end, last)
    return intervals.fields(begin, end, N)


def _padding(attention_mask: Tensor, N: int, kv_offset: int) -> Tensor:
    """``[B, 1, 1, N]``, True where a key is one; what attention_mask does not reach is none."""
    missing = max(0, N + kv_offset - attention_mask.shape[-1])
    padded = nn.functional.pad(attention_mask.bool(), (0, missing))
    return padded[:, None, None, kv_offset : kv_offset + N]
