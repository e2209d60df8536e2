"""Attention by cosine similarity of query and key."""

import torch
from torch import Tensor, nn

from fastattn import scores
from fastattn.modules import single_head
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask, arguments


class CosineAttention(single_head.Attention):
    r"""Content-based addressing: softmax over the cosine between query and key.

    .. math::
        \mathrm{out}_i = \sum_j \mathrm{softmax}_j\left(
            \beta\, \frac{q_i \cdot k_j}{|q_i|\, |k_j|}\right) v_j

    Args:
        scale (float): :math:`\beta`, the key strength, the factor of a cosine in [-1, 1]. A larger
            scale gives sharper weights. Default 1.0.
        learnable (bool): make ``scale`` a parameter. Default False.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        device (torch.device, optional): of the parameter.
        dtype (torch.dtype, optional): of the parameter.

    Raises:
        TypeError: ``scale`` or ``dropout`` is no number.
        ValueError: ``scale`` is beyond 1e30, or ``dropout`` is not in [0, 1].

    A query or key of norm 0 has cosine 0 with every vector. A query without keys has output 0.

    Source: Graves, Wayne, Danihelka, "Neural Turing Machines", 2014, section 3.3.1,
    https://arxiv.org/abs/1410.5401.

    Example::

        >>> attention = CosineAttention(scale=10.0, learnable=True)
        >>> queries, keys = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
        >>> attention(queries, keys, torch.randn(2, 9, 4)).shape
        torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        scale: float = 1.0,
        *,
        learnable: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_dropout(dropout)
        self.dropout = dropout
        arguments.check_real("scale", scale)
        start = torch.full((), arguments.scale(scale, 0), device=device, dtype=dtype)
        self.scale = nn.Parameter(start, requires_grad=learnable)

    @takes_jagged(packs=True)
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from ``queries`` to ``keys`` and ``values``.

        Args:
            queries: (B, M, D), or one step, (B, D), whose results have no dim M.
            keys: (B, N, D).
            values: (B, N, Dv). Default None: the keys.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part.
                Default None: all.
            attn_mask: broadcastable to (B, M, N): boolean with True = take part, or float, added to
                the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            need_weights: return the weights too. Default False.

        Returns:
            output (B, M, Dv); with ``need_weights`` the tuple (output, weights (B, M, N)).

        Raises:
            TypeError: dtypes differ.
            ValueError: shapes or lengths do not fit.
        """
        queries, one_step = single_head.as_steps(queries)
        single_head.check_dims(queries=queries, keys=keys)
        # The scale multiplies the query: the kernels' own scale is a number without gradient.
        scaled = scores.where_finite(torch.mul, scores.normalize(queries), self.scale)
        out, weights = single_head.attend(
            "dot",
            scaled,
            scores.normalize(keys),
            keys if values is None else values,
            Masks(valid_lens, attn_mask, mask),
            self.dropout if self.training else 0.0,
            need_weights,
        )
        return single_head.results(out, weights, need_weights, one_step)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        scale = self.scale.detach()
        return f"scale={scale if scale.is_meta else scale.tolist()}, dropout={self.dropout}"
