"""Luong et al.'s global attention: three scores, and the attentional vector."""

import torch
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.decoder.alignment import Alignment, Method
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask


class LuongAttention(single_head.Attention):
    r"""Global attention of a decoder over encoder states, and the attentional vector.

    .. math::
        c_i = \sum_j \mathrm{softmax}_j(\mathrm{score}(h_i, s_j))\, v_j, \qquad
        \tilde h_i = \tanh(W_c [c_i; h_i])

    ============ ==============================================================================
    method       score(h, s)
    ============ ==============================================================================
    ``dot``      :math:`h^\top s`
    ``general``  :math:`h^\top W_a s`
    ``concat``   :math:`w_v^\top \tanh(W_q h + W_k s)`, Bahdanau's: the matrix over [h; s] in two
                 halves
    ============ ==============================================================================

    Args:
        query_dim (int): features of a decoder state h, and of the result.
        key_dim (int, optional): features of an encoder state s. Default ``query_dim``.
        method (str): the score. Default ``"dot"``, which needs ``key_dim == query_dim``.
        hidden_dim (int, optional): of ``concat``. Default ``query_dim``.
        value_dim (int, optional): features of a value. Default ``key_dim``.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        attentional (bool): return :math:`\tilde h`. If False, return the context c, without
            ``W_c``. Default True.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        TypeError: a size is no int.
        ValueError: an unknown method, sizes that it does not take, or a dropout outside [0, 1].

    A query without keys has context 0. Hooks of ``w_v``, which ``concat`` has, do not run, because
    only its weight is read.

    Source: Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine
    Translation", 2015, https://arxiv.org/abs/1508.04025.

    Example::

        >>> attention = LuongAttention(query_dim=32, key_dim=48, method="general")
        >>> states, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 48)
        >>> attention(states, memory).shape  # all steps at once
        torch.Size([2, 7, 32])
        >>> attention(states[:, 0], memory).shape  # one
        torch.Size([2, 32])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        method: Method = "dot",
        *,
        hidden_dim: int | None = None,
        value_dim: int | None = None,
        dropout: float = 0.0,
        attentional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_dropout(dropout)
        single_head.check_sizes(value_dim=value_dim)
        self.score = Alignment(query_dim, key_dim, method, hidden_dim, device=device, dtype=dtype)
        self.dropout = dropout
        self.W_c = None
        if attentional:
            inputs = query_dim + (value_dim or key_dim or query_dim)
            self.W_c = nn.Linear(inputs, query_dim, bias=False, device=device, dtype=dtype)

    def project_keys(self, keys: Tensor) -> Tensor:
        """A cache for ``forward``, (B, N, features): the work that depends on ``keys`` alone.

        For ``concat`` the cache is W_k s. For the other methods it is the keys themselves.
        """
        return self.score.project_keys(keys)

    @takes_jagged(packs=True)
    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
        cache: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from decoder states to encoder states.

        Args:
            queries: (B, M, query_dim), all steps; or one step, (B, query_dim), whose results have
                no dim M.
            keys: (B, N, key_dim). With ``cache`` and ``values``, not read and may be None.
            values: (B, N, value_dim). Default None: the keys.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part.
                Default None: all.
            attn_mask: broadcastable to (B, M, N): boolean with True = take part, or float, added to
                the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            need_weights: return the weights too. Default False.
            cache: what ``project_keys(keys)`` returned. Default None.

        Returns:
            The attentional vectors (B, M, query_dim), or the contexts (B, M, value_dim). With
            ``need_weights``, the tuple (vectors, weights (B, M, N)).

        Raises:
            TypeError: dtypes differ.
            ValueError: shapes or lengths do not fit.
        """
        queries, one_step = single_head.as_steps(queries)
        keys, values = self.score.keys_and_values(keys, values, cache)
        context, weights = self.score.attend(
            self.score.project_queries(queries),
            keys,
            values,
            Masks(valid_lens, attn_mask, mask),
            self.dropout if self.training else 0.0,
            need_weights,
        )
        return single_head.results(self._combine(context, queries), weights, need_weights, one_step)

    def _combine(self, context: Tensor, queries: Tensor) -> Tensor:
        """The attentional vector, or the context if ``attentional`` is False."""
        if self.W_c is None:
            return context
        both = torch.cat([context, queries.expand(*context.shape[:-1], -1)], dim=-1)
        return torch.tanh(single_head.project("values and queries", both, self.W_c))

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the layers."""
        return f"dropout={self.dropout}"
