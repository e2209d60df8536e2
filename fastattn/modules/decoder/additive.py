"""Modules around the additive score of Bahdanau et al., ``score(q, k) = w . tanh(q + k)``."""

import torch
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask


class AdditiveAttention(single_head.Attention):
    r"""Additive attention with learned projections, the textbook module.

    .. math::
        \mathrm{out}_i = \sum_j \mathrm{softmax}_j\left(
            w_v^\top \tanh(W_q q_i + W_k k_j)\right) v_j

    Parameters have the textbook's names and order of initialisation, ``W_k``, ``W_q``, ``w_v``. The
    textbook's ``state_dict`` therefore loads, and its seeds give the same weights. No tensor of
    size M * N * hidden_dim is ever made. Hooks of ``w_v`` do not run, because only its weight is
    read.

    Args:
        query_dim (int): features of a query.
        key_dim (int): features of a key.
        hidden_dim (int): size of the space in which query and key are added.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        bias (bool): biases in the three linear layers. The bias of ``w_v`` has no effect: softmax
            ignores a number added to all scores. Default False.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Attributes:
        store_weights (bool): if True, each forward keeps its weights in ``attention_weights``.
            Default False: they cost M * N numbers per call.
        attention_weights (Tensor | None): (B, M, N), the weights of the last call with
            ``store_weights``, detached.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is not positive, or ``dropout`` is not in [0, 1].

    This differs from the textbook on purpose. A query with ``valid_lens`` 0 gets output 0, not the
    average of the padding's values. Returned weights are those that multiplied the values, after
    dropout.

    Source: Bahdanau, Cho, Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015, https://arxiv.org/abs/1409.0473. The textbook is "Dive into Deep Learning",
    section 11.3, https://d2l.ai.

    Example::

        >>> attention = AdditiveAttention(query_dim=20, key_dim=2, hidden_dim=8)
        >>> queries, keys = torch.randn(2, 1, 20), torch.ones(2, 10, 2)
        >>> values = torch.randn(2, 10, 4)
        >>> attention(queries, keys, values, valid_lens=torch.tensor([2, 6])).shape
        torch.Size([2, 1, 4])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        dropout: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_dropout(dropout)
        single_head.check_sizes(query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim)
        self.W_k = nn.Linear(key_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.W_q = nn.Linear(query_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.w_v = nn.Linear(hidden_dim, 1, bias=bias, device=device, dtype=dtype)
        self.dropout = dropout
        self.store_weights = False
        self.attention_weights: Tensor | None = None

    def project_keys(self, keys: Tensor) -> Tensor:
        """A cache (B, N, hidden_dim) for ``forward``: the work that depends on ``keys`` alone.

        A decoding step then projects its query only. The cache is a plain tensor with gradient:
        select, repeat or reorder its samples like those of ``values``.
        """
        return single_head.project("keys", keys, self.W_k)

    @takes_jagged(packs=True)
    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
        cache: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from ``queries`` to ``keys`` and ``values``.

        Args:
            queries: (B, M, query_dim), floating point; or one step, (B, query_dim), whose results
                have no dim M.
            keys: (B, N, key_dim), of the same dtype. With ``cache``, not read and may be None.
            values: (B, N, Dv), of the same dtype; Dv is free.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part,
                for each sample or for each query. Default None: all.
            attn_mask: broadcastable to (B, M, N), as in ``scaled_dot_product_attention``: boolean
                with True = take part, or float, added to the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            need_weights: return the weights too. Default False.
            cache: what ``project_keys(keys)`` returned. Default None: project ``keys`` now.

        Returns:
            output (B, M, Dv); with ``need_weights`` the tuple (output, weights (B, M, N)).

        Raises:
            TypeError: dtypes differ.
            ValueError: shapes or lengths do not fit, or ``valid_lens`` and ``mask.kv_len`` are both
                given.
        """
        queries, one_step = single_head.as_steps(queries)
        out, weights = single_head.attend(
            "additive",
            single_head.project("queries", queries, self.W_q),
            self._projected(keys, values, cache),
            values,
            Masks(valid_lens, attn_mask, mask),
            self.dropout if self.training else 0.0,
            self.store_weights or need_weights,
            **self._score(),
        )
        if self.store_weights and weights is not None:
            self.attention_weights = weights.detach()
        return single_head.results(out, weights, need_weights, one_step)

    def _score(self) -> dict[str, Tensor | None]:
        weight, bias = single_head.weight_of("w_v", self.w_v), self.w_v.bias
        return {"weight": weight.squeeze(0), "bias": None if bias is None else bias[:, None]}

    def _projected(self, keys: Tensor | None, values: Tensor, cache: Tensor | None) -> Tensor:
        if cache is not None:
            single_head.check_cache(cache, values, single_head.weight_of("w_v", self.w_v).shape[-1])
            return cache
        if keys is None:
            raise ValueError("keys: expected a tensor, or cache=project_keys(keys)")
        return self.project_keys(keys)

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the linear layers."""
        return f"dropout={self.dropout}"
