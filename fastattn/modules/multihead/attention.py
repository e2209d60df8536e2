"""MultiheadAttention: torch.nn.MultiheadAttention on fastattn's kernels."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastattn import functional
from fastattn.backends import watch
from fastattn.functional import Bias
from fastattn.modules import linear
from fastattn.modules.multihead import inference, inputs, interop, kv_cache, nested, projection
from fastattn.modules.multihead.inputs import Inputs
from fastattn.modules.multihead.kv_cache import KVCache
from fastattn.problem import Mask, jagged


class MultiheadAttention(nn.MultiheadAttention):
    r"""Multi-head scaled dot-product attention, a drop-in for :class:`torch.nn.MultiheadAttention`.

    .. math::
        \mathrm{head}_h &= \mathrm{softmax}\left(
            (Q W^Q_h) (K W^K_h)^\top / \sqrt{d} + \mathrm{mask}\right) V W^V_h \\
        \mathrm{out} &= [\mathrm{head}_1, \dots, \mathrm{head}_H]\, W^O + b^O,
            \qquad d = \mathrm{embed\_dim} / H

    This is a subclass. Constructor, attributes, parameters and their initialisation are inherited,
    so ``isinstance`` checks, ``state_dict`` in both directions and seeds carry over. Only
    ``forward`` is new. It computes the same numbers without the [B * H, M, N] tensors that torch
    makes for masks and for ``need_weights=True``.

    Args:
        embed_dim (int): features E of the query and of the output.
        num_heads (int): heads H; must divide ``embed_dim``.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        bias (bool): biases on the input and output projections. Default True.
        add_bias_kv (bool): append one learned key and value. Default False.
        add_zero_attn (bool): append one key and value of zeros, after the learned ones.
            Default False.
        kdim (int, optional): features of ``key``. Default ``embed_dim``.
        vdim (int, optional): features of ``value``. Default ``embed_dim``.
        batch_first (bool): inputs are (B, N, E) rather than (N, B, E). Default False.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        ValueError: ``embed_dim`` or ``num_heads`` is not positive.
        AssertionError: ``num_heads`` does not divide ``embed_dim``.

    Where it differs from torch on purpose:

    - A query with no key left has weights 0, output ``out_proj.bias`` and finite gradients. torch
      gives NaN with ``need_weights=True``, and in eval mode without gradients.
    - ``out_proj`` is called if it is more than a linear layer: hooks, pruning and adapters such as
      LoRA take part. torch only reads its parameters.
    - NaN or infinity in a masked key or value reaches neither the output nor the gradients of the
      projected tensors; in torch it does. (The projections are plain matrix products: a NaN in an
      input row reaches the gradient of the weights that multiply it, as in any nn.Linear.)
    - Dropout draws other random bits; their statistics are the same.
    - A float32 mask beside float64 inputs is added as it is. On a CPU, torch 2.13 adds other
      numbers if there are 8 keys or more and no weights are wanted.

    Note:
        nn.TransformerEncoderLayer in eval mode without gradients never calls the ``forward`` of its
        ``self_attn``: one C++ operator of torch reads the parameters. To use this class there as
        well, pass the model through :func:`replace_attention` once, even if its attention already
        is of this class.

        Some calls go to torch's own ``forward``: tensor subclasses, strided nested tensors outside
        plain self-attention, dtypes other than float16, bfloat16, float32 and float64, and
        ``torch.jit.trace``. With ``mask`` or ``bias`` they are a TypeError. ``torch.jit.script``
        compiles a plain nn.MultiheadAttention that shares the parameters.

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762.

    Example::

        >>> attention = MultiheadAttention(embed_dim=64, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = attention(x, x, x)  # (2, 10, 64), (2, 10, 10)
        >>> out, _ = attention(x, x, x, need_weights=False)
    """

    # What computes on the ranks of a mesh: fastattn.distributed.parallelize puts it here.
    _shared: Any = None

    if TYPE_CHECKING:  # nn.Module hides from type checkers what a call returns.
        __call__: Callable[..., tuple[Tensor, Tensor | None]]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        M queries, N keys, batch B. Unbatched inputs drop B and ignore ``batch_first``.

        Args:
            query: (M, B, E), or (B, M, E) with ``batch_first``, or (M, E). Of the parameters'
                dtype. With ``batch_first``, all three may be jagged nested tensors (B, j, E). Then
                the output is jagged, ``need_weights`` must be False, and ``is_causal`` is the only
                mask. It needs no ``attn_mask`` there.
            key: (N, B, kdim), (B, N, kdim) or (N, kdim).
            value: (N, B, vdim), (B, N, vdim) or (N, vdim).
            key_padding_mask: (B, N) or, unbatched, (N). Boolean: True = this key is padding,
                ignored by all queries. Float, of the query's dtype: added to the scores of this
                key, with gradient. Default None.
            need_weights: also return the attention weights. The fused kernel computes them, and
                their mean over heads without a tensor per head. Default True.
            attn_mask: (M, N), or (B * H, M, N) with entry b * H + h for head h of sample b, or
                unbatched (H, M, N). Boolean: True = this pair is not allowed. Float, of the query's
                dtype: added to the scores, with gradient. Default None.
            average_attn_weights: return the mean of the weights over heads instead of each head's.
                Default True.
            is_causal: a promise that ``attn_mask`` is causal. Without weights and without a padding
                mask, query i then sees keys 0..i and ``attn_mask`` is not read. Otherwise
                ``attn_mask`` is read as always. Default False.
            cache: a :class:`fastattn.KVCache`, for decoding step by step. Keys and values of
                earlier calls take part without being projected again. :class:`fastattn.KVCache`
                says which keys a mask then covers. ``is_causal`` is not read. Default None.
            mask: a :class:`fastattn.Mask`. A pair takes part if every mask keeps it. A ``keep`` of
                3 dims is (B, M, N). Its keys include those of ``cache``. A growing cache is causal
                at the bottom right, and a window is then around that diagonal. Default None.
            bias: added to the scores beside the masks. A tensor that broadcasts to (B, H, M, N),
                of the query's dtype or float32, with a gradient of its shape. Or an
                :class:`ALiBi`, or a :class:`RelativeBias`. N counts the keys of ``cache``. The
                offset of an :class:`ALiBi` is then ``cache.length`` before the call. Default None.

        Returns:
            ``(output, weights)``. The output has the query's shape and dtype. The weights are None
            without ``need_weights``. Averaged, they are (B, M, N') or (M, N'); per head,
            (B, H, M, N') or (H, M, N'). The batch comes first in every layout. N' includes appended
            keys. These weights multiplied the values: in training, after dropout.

        Raises:
            AssertionError: shapes of query, key, value and padding mask do not fit, or a mask is
                neither bool nor float.
            RuntimeError: a dtype differs from the parameters', ``attn_mask`` has the wrong shape,
                or ``is_causal`` comes without ``attn_mask``.
            TypeError, ValueError: an argument is no tensor, or the call does not fit ``cache``,
                ``mask``, ``bias`` or jagged tensors. A call that raises leaves the cache as it was.
        """
        if self._shared is not None:
            _check_none_of_ours(mask, bias, "ranks share the module")
            masks = (key_padding_mask, attn_mask)
            hints = (need_weights, average_attn_weights, is_causal)
            with kv_cache.unless_it_raises(cache):
                return self._shared.forward(self, query, key, value, masks, hints, cache)
        if cache is None:
            plain = mask is bias is None and not (is_causal and attn_mask is None)
        else:
            plain = attn_mask is mask is bias is None
        if plain and isinstance(query, Tensor) and _scores_by_dot(self._attend):
            whole = inference.attend(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal, cache,
            )  # fmt: skip
            if whole is not None:
                return whole
        inputs.check_tensors(query, key, value, key_padding_mask, attn_mask, cache)
        if cache is not None:
            masks = (key_padding_mask, attn_mask)
            points = query, key, value
            with kv_cache.unless_it_raises(cache):
                step = kv_cache.step(self, cache, *points, masks, need_weights, mask, bias)
                return attend_heads(self, self._attend, *step, need_weights, average_attn_weights)
        args = (
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
        if any(map(jagged.is_jagged, (query, key, value))):
            attend = partial(attend_heads, self, self._attend)
            return nested.attend_sequences(self, args, mask, bias, attend)
        foreign = interop.foreign(self, query, key, value, key_padding_mask, attn_mask)
        if foreign is not None:
            _check_none_of_ours(mask, bias, foreign)
            leaf = interop.fx_leaf(self, args)
            return self._not_ours(foreign, *args) if leaf is None else leaf
        if query.is_nested or key.is_nested or value.is_nested:
            _check_none_of_ours(mask, bias, nested.TAKEN)
            if not nested.takes(self, args):
                return self._not_ours(nested.TAKEN, *args)
            return nested.attend(self, query, self._attend)
        query, key, value = inputs.that_autograd_saves(query, key, value)
        call = inputs.canonical(
            self, query, key, value, key_padding_mask, attn_mask, need_weights, is_causal
        )
        call = inputs.with_own(self, call, mask, bias)
        q, k, v = projection.to_heads(self, call.query, call.key, call.value, call.batch_first)
        return attend_heads(self, self._attend, call, q, k, v, need_weights, average_attn_weights)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Attention over heads [B, H, M, D]: the only step that depends on the score."""
        return functional.scaled_dot_product_attention(q, k, v, **options)

    # Subclasses and patches lack this attribute. Only this method may become part of an operator.
    _attend.score = "dot"  # pyright: ignore[reportFunctionMemberAccess]

    def _not_ours(self, reason: str, *args: Any) -> tuple[Tensor, Tensor | None]:
        """A call that our operators do not support."""
        watch.call_of_torch(reason)
        return super().forward(*args)

    def __prepare_scriptable__(self) -> nn.Module:
        if self._shared is not None:
            raise NotImplementedError("a shared module cannot be scripted")
        return interop.as_plain(self)


def attend_heads(
    module: nn.MultiheadAttention,
    attend: Callable[..., Any],
    call: Inputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """From heads [B, H, M, D], to which ``attend`` attends, to the results of forward."""
    attended = attend(
        q,
        k,
        v,
        dropout_p=module.dropout if module.training else 0.0,
        return_weights=("mean" if average else "full") if need_weights else None,
        **call.masks,
    )
    out, weights = attended if need_weights else (attended, None)
    out = linear.call(module.out_proj, projection.merge_heads(out, call.batch_first))
    if call.batched:
        return out, weights
    return out.squeeze(0), None if weights is None else weights.squeeze(0)


def _check_none_of_ours(mask: Mask | None, bias: Bias | None, reason: str) -> None:
    """Raises where the call is not computed here: torch has no such arguments."""
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            raise TypeError(f"{name}: expected None in a call like this: {reason}")


def _scores_by_dot(attend: object) -> bool:
    """Whether ``attend`` is this class's own method, which scores by the dot product."""
    return getattr(attend, "score", None) == "dot"


interop.register_with_torch_ao(MultiheadAttention)
