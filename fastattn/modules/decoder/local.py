"""Luong et al.'s local attention: each query sees a window of keys, and no other key is read."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.decoder.alignment import Method
from fastattn.modules.decoder.luong import LuongAttention
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import DenseMasks, Masks
from fastattn.problem import Mask, arguments


class LocalAttention(LuongAttention):
    r"""Attention to the keys within ``window`` of a position :math:`p_i`, for a decoder.

    .. math::
        a_{ij} = \mathrm{softmax}_{|j - p_i| \le D}(\mathrm{score}(h_i, s_j))\, g_{ij}, \qquad
        c_i = \sum_j a_{ij} v_j, \qquad \tilde h_i = \tanh(W_c [c_i; h_i])

    ============== ============================================ ===================================
    alignment      :math:`p_i`                                  :math:`g_{ij}`
    ============== ============================================ ===================================
    ``monotonic``  :math:`i`, the step                          1
    ``predictive`` :math:`S\,\sigma(v_p^\top \tanh(W_p h_i))`   :math:`e^{-(j-p_i)^2 / 2\sigma^2}`,
                                                                :math:`\sigma = D / 2`
    ============== ============================================ ===================================

    D is ``window`` and S the length of the sample: ``valid_lens``, or else N. As in the paper, the
    Gaussian multiplies the weights after softmax. They do not sum to 1. Gradients reach ``W_p`` and
    ``v_p`` through the Gaussian.

    Monotonic attention is a band in a view of the keys. Predictive attention gathers the 2 D + 1
    keys of each query. Both cost O(D) a step, not O(N). With ``concat``, use a cache: otherwise
    each step applies ``W_k`` to all keys.

    Args:
        query_dim (int): features of a decoder state h, and of the result.
        key_dim (int, optional): features of an encoder state s. Default ``query_dim``.
        method (str): the score, as in :class:`LuongAttention`. Default ``"dot"``.
        window (int): D, at least 1. Default 10, the paper's.
        alignment (str): ``"predictive"`` (default) or ``"monotonic"``.
        **options: ``hidden_dim``, ``value_dim``, ``dropout``, ``attentional``, ``device`` and
            ``dtype`` of :class:`LuongAttention`.

    Raises:
        TypeError: a size is no int, or ``dropout`` no number.
        ValueError: as in :class:`LuongAttention`; or an unknown alignment, or a window below 1.

    Hooks of ``w_v``, ``W_p`` and ``v_p`` do not run, because only the weights of these layers are
    read.

    A query whose window holds no key has context 0. There is no ``mask=`` as in
    :class:`LuongAttention`: write ``valid_lens`` or ``attn_mask``.

    Source: Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine
    Translation", 2015, section 3.2, https://arxiv.org/abs/1508.04025.

    Example::

        >>> attention = LocalAttention(32, method="general", window=3)
        >>> states, memory = torch.randn(2, 7, 32), torch.randn(2, 500, 32)
        >>> attention(states, memory, valid_lens=torch.tensor([500, 320])).shape
        torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        method: Method = "dot",
        *,
        window: int = 10,
        alignment: Literal["predictive", "monotonic"] = "predictive",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(query_dim, key_dim, method, device=device, dtype=dtype, **options)
        if alignment not in ("predictive", "monotonic"):
            raise ValueError(f"alignment: expected 'predictive' or 'monotonic', got {alignment!r}")
        self.window = arguments.check_int("window", window, 1)
        self.alignment = alignment
        if alignment == "predictive":
            self.W_p = nn.Linear(query_dim, query_dim, bias=False, device=device, dtype=dtype)
            self.v_p = nn.Linear(query_dim, 1, bias=False, device=device, dtype=dtype)

    @takes_jagged(packs=False)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
        cache: Tensor | None = None,
        step: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from decoder states to a window of the encoder states.

        Args:
            queries: (B, M, query_dim), or one step, (B, query_dim).
            keys: (B, N, key_dim). With ``cache`` and ``values``, not read and may be None.
            values: (B, N, value_dim). Default None: the keys.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part.
                Default None: all.
            attn_mask: broadcastable to (B, M, N): boolean with True = take part, or float, added to
                the scores. Default None.
            need_weights: also return the weights, over all N keys. Default False.
            cache: what ``project_keys(keys)`` returned. Default None.
            step: the position of the first query, for ``monotonic``. Default 0.

        Returns:
            As in :class:`LuongAttention`.

        Raises:
            TypeError: dtypes differ.
            ValueError: shapes or lengths do not fit, or ``step`` is negative.
        """
        step = arguments.check_int("step", step, 0)
        queries, one_step = single_head.as_steps(queries)
        keys, values = self.score.keys_and_values(keys, values, cache)
        single_head.check_fit(queries, keys, values)
        masks = single_head.dense_masks(queries, values.shape[1], valid_lens, attn_mask)
        attend = self._predictive if self.alignment == "predictive" else self._monotonic
        context, weights = attend(queries, keys, values, masks, need_weights, step)
        return single_head.results(self._combine(context, queries), weights, need_weights, one_step)

    def _monotonic(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        masks: DenseMasks,
        need_weights: bool,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        """A band around the diagonal, over the slice of the keys that it crosses."""
        M, N, D = queries.shape[1], values.shape[1], self.window
        lo = min(max(step - D, 0), N)
        hi = min(step + M + D, N)
        shift = step - lo  # from a query's index to its position in the slice
        lens = masks.kv_len
        if lens is not None and lens.shape[1] == 1:
            lens = lens.squeeze(1)  # of the sample
        inside = Mask(
            window=(max(D - shift, 0), D + shift),
            kv_len=None if lens is None else (lens - lo).clamp(0, hi - lo),
            keep=_columns(masks.keep, lo, hi),
        )
        context, weights = self.score.attend(
            self.score.project_queries(queries),
            keys[:, lo:hi],
            values[:, lo:hi],
            Masks(None, _columns(masks.bias, lo, hi), inside),
            self.dropout if self.training else 0.0,
            need_weights,
        )
        return context, None if weights is None else F.pad(weights, (lo, N - hi))

    def _predictive(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        masks: DenseMasks,
        need_weights: bool,
        step: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Turns each query into a sample of its own, with the keys of its window."""
        near = self._near(queries, values.shape[1], masks)
        B, M, W = near.indices.shape

        def own(x: Tensor) -> Tensor:  # [B, N, d] to [B * M, W, d]
            samples = torch.arange(B, device=x.device)[:, None, None]
            return x[samples, near.indices].flatten(0, 1)

        keep = near.keep.flatten(0, 1)
        gauss = near.gauss.to(values.dtype).flatten(0, 1)
        # Values that the mask drops may be NaN, which must not reach the gradient of the Gaussian.
        kept_values = own(values).masked_fill(~keep[..., None], 0.0)
        context, weights = self.score.attend(
            self.score.project_queries(queries).flatten(0, 1)[:, None],
            own(keys),
            kept_values * gauss[..., None],
            Masks(
                attn_mask=None if near.bias is None else near.bias.flatten(0, 1)[:, None],
                mask=Mask(keep=keep[:, None]),
            ),
            self.dropout if self.training else 0.0,
            need_weights,
        )
        if weights is not None:
            spread = weights.new_zeros(B, M, values.shape[1])
            inside = (weights.squeeze(1) * gauss).to(weights.dtype)
            weights = spread.scatter(-1, near.indices, inside.unflatten(0, (B, M)))
        return context.squeeze(1).unflatten(0, (B, M)), weights

    def _predicted(self, queries: Tensor) -> Tensor:
        """The position as a fraction of the length, (B, M, 1).

        In float64: the length multiplies the rounding of this fraction, the Gaussian once more.
        """
        W_p, v_p = (single_head.weight_of(name, getattr(self, name)) for name in ("W_p", "v_p"))
        single_head.check_features("queries", queries, W_p.shape[-1])
        with arguments.no_autocast(queries.device.type):
            hidden = torch.tanh(F.linear(queries.double(), W_p.double()))
            return torch.sigmoid(F.linear(hidden, v_p.double()))

    def _near(self, queries: Tensor, N: int, masks: DenseMasks) -> "_Window":
        B, M, _ = queries.shape
        D, W = self.window, min(2 * self.window + 1, N)
        length = N if masks.kv_len is None else masks.kv_len[..., None]
        centre = length * self._predicted(queries)  # [B, M, 1]
        first = torch.ceil(centre.detach() - D).nan_to_num().long().clamp(0, N - W)
        index = first + torch.arange(W, device=queries.device)
        # Kept unless too far away. A NaN position keeps its keys, so that NaN shows in the result.
        keep = ~((index - centre.detach()).abs() > D)
        if masks.kv_len is not None:
            keep = keep & (index < masks.kv_len[..., None])
        if masks.keep is not None:
            keep = keep & masks.keep.expand(B, M, N).gather(-1, index)
        bias = None
        if masks.bias is not None:
            bias = masks.bias.expand(B, M, N).gather(-1, index)
            keep = keep & (bias != -torch.inf)
        gauss = torch.exp(-2.0 * ((index - centre) / D).square())  # sigma = D / 2
        return _Window(index, keep, bias, gauss)

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the layers."""
        return f"window={self.window}, alignment={self.alignment!r}, {super().extra_repr()}"


class _Window(NamedTuple):
    """The keys near each query's position, all [B, M, W]."""

    indices: Tensor
    keep: Tensor
    bias: Tensor | None
    gauss: Tensor


def _columns(mask: Tensor | None, lo: int, hi: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., lo:hi]
