"""Nadaraya-Watson kernel regression with a Gaussian kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.jagged import longest, takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask
from fastattn.problem.jagged import is_jagged


class NadarayaWatson(single_head.Attention):
    r"""Nadaraya-Watson kernel regression: attention with a Gaussian score.

    .. math::
        \hat y(x) = \sum_j \frac{K_h(x - x_j)}{\sum_l K_h(x - x_l)}\, y_j, \qquad
        K_h(u) = e^{-\sum_d u_d^2 / 2 h_d^2}

    Queries are the points x, keys the x_j and values the y_j. This is
    ``fastattn.attention(score="gaussian", bandwidth=h)``.

    Args:
        bandwidth (float | sequence of floats | Tensor): h, positive: one number, or one a feature.
            Default 1.0.
        learnable (bool): learn it, as its logarithm ``log_bandwidth``, so that it stays positive.
            Default False. Train on :meth:`leave_one_out`: if a point's estimate may use the point
            itself, the best bandwidth is 0.
        dropout (float): probability of dropping a weight in training. Default 0.0.
        device (torch.device, optional): of the parameter.
        dtype (torch.dtype, optional): of the parameter. For half types it is float32, also after
            ``.half()``, ``.bfloat16()`` or ``.to(dtype)``. A rounded logarithm would move the
            bandwidth by some percent.

    Raises:
        TypeError: a bandwidth is no number.
        ValueError: a bandwidth is not positive, or ``dropout`` is not in [0, 1].

    A query without keys has output 0, and so has one that is farther than 1e19 bandwidths from all
    of them. Differences are taken before they are squared: a small bandwidth costs no digits.

    Source: Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.

    Example::

        >>> x, y = torch.rand(50), torch.rand(50)
        >>> model = NadarayaWatson(bandwidth=0.5, learnable=True)
        >>> loss = (model.leave_one_out(x, y) - y).square().mean()
        >>> fit = model(torch.linspace(0, 1, 200), x, y)  # (200,)
    """

    def __init__(
        self,
        bandwidth: float | Sequence[float] | Tensor = 1.0,
        *,
        learnable: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        single_head.check_dropout(dropout)
        self.dropout = dropout
        _check_numbers(bandwidth)
        wide = _wide(dtype or torch.get_default_dtype())
        start = torch.as_tensor(bandwidth, dtype=wide, device=device)
        if start.dim() > 1 or not start.numel() or not (start.is_meta or (start > 0).all()):
            raise ValueError(
                f"bandwidth: expected a positive number, or one for each feature, got {bandwidth}"
            )
        if learnable and not (start.is_meta or start.isfinite().all()):  # no step could change it
            raise ValueError(f"bandwidth: expected finite numbers to learn, got {bandwidth}")
        self.log_bandwidth = nn.Parameter(start.log(), requires_grad=learnable)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What ``Module.to`` and its like call."""

        def keeping(x: Tensor) -> Tensor:
            made = fn(x)
            wide = _wide(made.dtype)
            return made if made.dtype == wide else x.to(made.device, wide)

        return super()._apply(keeping, recurse)

    @property
    def bandwidth(self) -> Tensor:
        """The bandwidth h, [] or [D]."""
        return self.log_bandwidth.exp()

    @takes_jagged(packs=True, steps=False)
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Estimate the values at ``queries`` from those at ``keys``.

        Args:
            queries: (B, M, D), (M, D), or (M,) for one feature.
            keys: (B, N, D), (N, D) or (N,).
            values: (B, N, E) or (N, E); or without the last dim, which the result then lacks.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part.
                Default None: all.
            attn_mask: broadcastable to (B, M, N): boolean with True = take part, or float, added to
                the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            need_weights: return the weights too. Default False.

        Returns:
            output (B, M, E); with ``need_weights`` the tuple (output, weights (B, M, N)). Dims that
            the arguments lack, the results lack too.

        Raises:
            TypeError: an argument is not a tensor, or dtypes differ.
            ValueError: shapes or lengths do not fit.
        """
        single_head.check_tensors(queries=queries, keys=keys, values=values)
        if keys.dim() != queries.dim():
            raise ValueError(
                f"queries: expected dims like keys {list(keys.shape)}, got {list(queries.shape)}"
            )
        if keys.dim() == 1:
            queries, keys = queries.unsqueeze(-1), keys.unsqueeze(-1)
        scalar = values.dim() == keys.dim() - 1
        values = values.unsqueeze(-1) if scalar else values
        unbatched = keys.dim() == 2
        if unbatched:
            queries, keys, values = (x.unsqueeze(0) for x in (queries, keys, values))
        if self.log_bandwidth.dim() and self.log_bandwidth.shape[0] != keys.shape[-1]:
            raise ValueError(
                f"keys: expected {self.log_bandwidth.shape[0]} features, as many as bandwidths, "
                f"got {list(keys.shape)}"
            )
        out, weights = single_head.attend(
            "gaussian",
            queries,
            keys,
            values,
            Masks(valid_lens, attn_mask, mask),
            self.dropout if self.training else 0.0,
            need_weights,
            bandwidth=self.bandwidth,
        )
        out = out.squeeze(-1) if scalar else out
        if unbatched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        return single_head.results(out, weights, need_weights, one_step=False)

    def leave_one_out(self, x: Tensor, y: Tensor) -> Tensor:
        """Estimates at the points ``x``, each from all other points. Train on these.

        Args:
            x: (B, N, D), (N, D) or (N,).
            y: (B, N, E) or (N, E), or without the last dim.

        Returns:
            The estimates, in the shape of ``y``.

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: shapes do not fit.
        """
        single_head.check_tensors(x=x, y=y)
        N = longest(x) if is_jagged(x) else x.shape[-2] if x.dim() > 1 else x.shape[0]
        others = ~torch.eye(N, dtype=torch.bool, device=x.device)
        return self(x, x, y, attn_mask=others)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        h = self.bandwidth.detach()
        return f"bandwidth={h if h.is_meta else h.tolist()}, dropout={self.dropout}"


def _check_numbers(bandwidth: Any) -> None:
    """Raises TypeError for what is no number and no sequence of numbers. A bool is no number."""
    expected = "bandwidth: expected a number, or one for each feature"
    x = bandwidth
    if not isinstance(x, Tensor):
        try:  # on a CPU, where errors are of values alone
            x = torch.as_tensor(x, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{expected}, got {bandwidth!r}") from error
    if x.dtype == torch.bool or x.is_complex():
        raise TypeError(f"{expected}, got {str(x.dtype).removeprefix('torch.')}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
