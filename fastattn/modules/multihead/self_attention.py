"""Self-attention in one module with a free head size."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.functional import Bias
from fastattn.modules import linear, single_head
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.multihead import projection
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask, arguments


class SelfAttention(nn.Module):
    r"""Scaled dot-product attention of a sequence over itself, single- or multi-head.

    .. math::
        [q_h, k_h, v_h] = x\, W_{qkv,h} + b, \qquad
        A_h = \mathrm{softmax}(q_h k_h^\top / \sqrt{\mathrm{head\_dim}}), \qquad
        \mathrm{out} = [A_1 v_1, \dots, A_H v_H]\, W_o + b_o

    Unlike nn.MultiheadAttention, it lets ``num_heads * head_dim`` differ from ``hidden_dim``, takes
    one input, and returns the weights first. Its masks are those of
    ``scaled_dot_product_attention``, where True means take part.

    Args:
        hidden_dim (int): features of the input and of the output.
        num_heads (int): heads H. Default 1.
        head_dim (int, optional): features of a head. Default ``hidden_dim / num_heads``.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        bias (bool): biases on both projections. Default True.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        TypeError: a size is no int, or ``dropout`` no number.
        ValueError: a size is not positive, ``num_heads`` does not divide ``hidden_dim`` and no
            ``head_dim`` is given, or ``dropout`` is not in [0, 1].

    A position that sees no key has weights 0 and output ``out_proj.bias``.

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762.

    Example::

        >>> attention = SelfAttention(hidden_dim=100, num_heads=3, head_dim=32)
        >>> x, lens = torch.randn(2, 10, 100), torch.tensor([10, 6])
        >>> weights, out = attention(x, lens)  # (2, 10, 10), (2, 10, 100)
        >>> _, out = attention(x, lens, need_weights=False)  # faster
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int = 1,
        head_dim: int | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_dropout(dropout)
        hidden_dim = arguments.check_int("hidden_dim", hidden_dim, 1)
        num_heads = arguments.check_int("num_heads", num_heads, 1)
        if head_dim is None:
            if hidden_dim % num_heads:
                raise ValueError(
                    f"head_dim: needed, as num_heads {num_heads} does not divide "
                    f"hidden_dim {hidden_dim}"
                )
            head_dim = hidden_dim // num_heads
        self.num_heads = num_heads
        self.head_dim = head_dim = arguments.check_int("head_dim", head_dim, 1)
        self.dropout = dropout
        inner = num_heads * head_dim
        self.in_proj = nn.Linear(hidden_dim, 3 * inner, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, hidden_dim, bias=bias, device=device, dtype=dtype)

    if TYPE_CHECKING:  # nn.Module hides from type checkers what a call returns.
        __call__: Callable[..., tuple[Tensor | None, Tensor]]

    @takes_jagged(packs=True)
    def forward(
        self,
        x: Tensor,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """Attend from every position of ``x`` to every other.

        Args:
            x: (B, N, hidden_dim), of the parameters' dtype.
            valid_lens: integers (B,) or (B, N) in [0, N]: how many of the first keys take part, for
                each sample or for each position. Default None: all.
            attn_mask: (B, H, N, N), (B, N, N) or broadcastable to them: boolean with True = take
                part, or float, added to the scores. Default None.
            mask: a :class:`fastattn.Mask`, such as ``Mask(causal="top_left")``. Default None.
            bias: added to the scores: a tensor that broadcasts to (B, H, N, N), with a gradient of
                its shape, an :class:`ALiBi` or a :class:`RelativeBias`. Default None.
            need_weights: return the weights; they cost (B, N, N) numbers. Default True.
            average_attn_weights: return their mean over heads instead of each head's. Default True.

        Returns:
            ``(weights, output)``, in this order: weights (B, N, N), or per head (B, H, N, N), or
            None; output (B, N, hidden_dim).

        Raises:
            TypeError: ``x``, a mask or a bias of another dtype.
            ValueError: shapes or lengths do not fit.
        """
        single_head.check_dims(x=x)
        arguments.check_bool("need_weights", need_weights)
        arguments.check_bool("average_attn_weights", average_attn_weights)
        packed = single_head.project("x", x, self.in_proj).chunk(3, dim=-1)
        q, k, v = (projection.split_heads(t, self.num_heads, batch_first=True) for t in packed)
        masks, weights_of = Masks(valid_lens, attn_mask, mask), None
        if need_weights:
            weights_of = "mean" if average_attn_weights else "full"
        attended = masks.call(
            functional.scaled_dot_product_attention,
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            bias=bias,
            return_weights=weights_of,
            **masks.over_heads(),
        )
        out, weights = attended if need_weights else (attended, None)
        return weights, linear.call(self.out_proj, projection.merge_heads(out, batch_first=True))

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the linear layers."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, dropout={self.dropout}"
