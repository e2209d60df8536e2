"""The alignment scores of Luong et al. (2015), section 3.1, shared by several modules."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.single_head import Masks

Method = Literal["dot", "general", "concat"]
METHODS = get_args(Method)


class Alignment(nn.Module):
    r"""Scores between decoder states h and encoder states s, and attention with these scores.

    ============ ================================================= ==========================
    method       score(h, s)                                       parameters
    ============ ================================================= ==========================
    ``dot``      :math:`h^\top s`                                  none
    ``general``  :math:`h^\top W_a s`                              ``W_a``
    ``concat``   :math:`w_v^\top \tanh(W_q h + W_k s)`             ``W_q``, ``W_k``, ``w_v``
    ============ ================================================= ==========================

    In ``concat``, the two halves of the paper's matrix over [h; s] are separate. In ``general``,
    the matrix is applied to h, which leaves no work per key. The weight of ``w_v`` is read, so its
    hooks do not run.

    Args:
        query_dim (int): features of h.
        key_dim (int, optional): features of s. Default ``query_dim``, which ``dot`` requires.
        method (str): one of the table.
        hidden_dim (int, optional): of ``concat``. Default ``query_dim``.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        TypeError: a size is no int.
        ValueError: an unknown method, or sizes that it does not take.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        method: Method = "dot",
        hidden_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_sizes(query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim)
        key_dim = query_dim if key_dim is None else key_dim
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        if method == "dot" and query_dim != key_dim:
            raise ValueError(
                f"method 'dot' needs query_dim and key_dim to be equal, got {query_dim}, {key_dim}"
            )
        if method != "concat" and hidden_dim is not None:
            raise ValueError(f"hidden_dim: only method 'concat' has one, method is {method!r}")
        self.method = method
        # The features of what project_keys returns.
        self.features = key_dim if method != "concat" else hidden_dim or query_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        if method == "general":
            self.W_a = linear(query_dim, key_dim)
        elif method == "concat":
            self.W_q = linear(query_dim, self.features)
            self.W_k = linear(key_dim, self.features)
            self.w_v = linear(self.features, 1)

    def project_queries(self, queries: Tensor) -> Tensor:
        """(B, M, query_dim) to (B, M, features)."""
        if self.method == "dot":
            single_head.check_features("queries", queries, self.features)
            return queries
        layer = self.W_a if self.method == "general" else self.W_q
        return single_head.project("queries", queries, layer)

    def project_keys(self, keys: Tensor) -> Tensor:
        """(B, N, key_dim) to (B, N, features). Unless ``concat``, these are the keys themselves."""
        if self.method == "concat":
            return single_head.project("keys", keys, self.W_k)
        single_head.check_features("keys", keys, self.features)
        return keys

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        masks: Masks,
        dropout_p: float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Contexts (B, M, Dv), and weights (B, M, N) or None, from projected queries and keys."""
        score, options = "dot", {}
        if self.method == "concat":
            weight = single_head.weight_of("w_v", self.w_v)
            score, options = "additive", {"weight": weight.squeeze(0)}
        args = (queries, keys, values, masks, dropout_p, need_weights)
        return single_head.attend(score, *args, **options)

    def keys_and_values(
        self, keys: Tensor | None, values: Tensor | None, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Projected keys (``cache`` if given), and the values (the keys by default)."""
        name, values = ("keys", keys) if values is None else ("values", values)
        if values is None:
            raise ValueError("keys and values: expected at least one of them")
        single_head.check_tensors(**{name: values})
        if cache is not None:
            single_head.check_cache(cache, values, self.features)
            return cache, values
        if keys is None:
            raise ValueError("keys: expected a tensor, or cache=project_keys(keys)")
        return self.project_keys(keys), values

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the linear layers."""
        return f"method={self.method!r}"
