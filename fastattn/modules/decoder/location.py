"""Additive attention that uses its own past weights: location-sensitive attention and coverage."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.modules import single_head
from fastattn.modules.decoder.additive import AdditiveAttention
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask, arguments, validate

Location = Literal["cumulative", "previous", "both"]
LOCATIONS = get_args(Location)


class AlignmentState(NamedTuple):
    """The state from one decoding step to the next. Sums are kept in float32 at least.

    Attributes:
        previous: (B, N), the weights of the last step; with a window, of the last that had any.
        cumulative: (B, N), the sum of the weights of all steps: See et al.'s coverage vector.
    """

    previous: Tensor
    cumulative: Tensor

    def reorder(self, indices: Tensor) -> "AlignmentState":
        """The state of samples ``indices`` [B'], for beam search."""
        return AlignmentState(*(x.index_select(0, indices) for x in self))


class LocationSensitiveAttention(AdditiveAttention):
    r"""Additive attention, step by step. Past weights are features of the keys.

    .. math::
        e_{ij} = w_v^\top \tanh\left(W_q q_i + W_k k_j + U f_{ij} + w_c c_{ij}\right), \qquad
        f_i = F * c_i, \qquad c_i = \sum_{l<i} a_l, \qquad a_i = \mathrm{softmax}(e_i)

    The location features f are a 1-d convolution over the cumulative weights (Tacotron 2), over the
    previous weights (Chorowski et al.), or over both. ``coverage=True`` adds the coverage term
    :math:`w_c c_{ij}` (See et al.); its loss is :func:`coverage_loss`. Both are added to the
    projected key, so a step uses the ordinary additive kernel. Hooks of ``w_v`` do not run, because
    only its weight is read.

    Args:
        query_dim (int): features of a query, the decoder's state.
        key_dim (int): features of a key.
        hidden_dim (int): size of the space in which all terms are added.
        filters (int): output channels of the convolution F; 0 leaves the location features out.
            Default 32.
        kernel_size (int): width of F, odd. Default 31.
        location (str): ``"cumulative"`` (default), ``"previous"`` or ``"both"``.
        coverage (bool): the coverage term. Default False.
        window (tuple of two ints, optional): ``(back, ahead)``: only keys from ``p - back`` to
            ``p + ahead`` take part. p is the key of the largest previous weight, 0 at first.
            ``(0, ahead)`` moves forward only: monotonic alignment. Default None.
        dropout (float): probability of dropping an attention weight in training. Default 0.0.
        bias (bool): biases in ``W_q``, ``W_k`` and ``w_v``. Default False.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        TypeError: a number or the window of another type.
        ValueError: an even kernel, an unknown location, a negative size, or a dropout outside
            [0, 1].

    Source: Chorowski et al., "Attention-Based Models for Speech Recognition", 2015,
    https://arxiv.org/abs/1506.07503; Shen et al., "Tacotron 2", 2018,
    https://arxiv.org/abs/1712.05884; See, Liu, Manning, "Get To The Point", 2017,
    https://arxiv.org/abs/1704.04368.

    Example::

        >>> attention = LocationSensitiveAttention(query_dim=32, key_dim=48, hidden_dim=16)
        >>> memory, cache, state = (m := torch.randn(2, 60, 48)), attention.project_keys(m), None
        >>> for query in torch.randn(5, 2, 32):  # five steps of a decoder
        ...     context, weights, state = attention(query, None, memory, state=state, cache=cache)
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        filters: int = 32,
        kernel_size: int = 31,
        location: Location = "cumulative",
        coverage: bool = False,
        window: tuple[int, int] | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(query_dim, key_dim, hidden_dim, dropout, bias, device, dtype)
        if location not in LOCATIONS:
            raise ValueError(f"location: expected one of {', '.join(LOCATIONS)}, got {location!r}")
        filters = arguments.check_int("filters", filters, 0)
        kernel_size = arguments.check_int("kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd number, got {kernel_size}")
        if window is not None:
            if not isinstance(window, (tuple, list)):
                raise TypeError(f"window: expected (back, ahead), got {type(window).__name__}")
            if len(window) != 2:
                raise ValueError(f"window: expected (back, ahead), got {window}")
            back, ahead = (arguments.check_int("window", size, 0) for size in window)
            window = back, ahead
        factory = {"bias": False, "device": device, "dtype": dtype}
        self.location, self.window = location, window
        self.location_conv = self.location_proj = self.W_c = None
        if filters:
            channels = 2 if location == "both" else 1
            self.location_conv = nn.Conv1d(
                channels, filters, kernel_size, padding=kernel_size // 2, **factory
            )
            self.location_proj = nn.Linear(filters, hidden_dim, **factory)
        if coverage:
            self.W_c = nn.Linear(1, hidden_dim, **factory)

    if TYPE_CHECKING:
        __call__: Callable[  # pyright: ignore[reportIncompatibleMethodOverride]
            ..., tuple[Tensor, Tensor, AlignmentState]
        ]

    @takes_jagged(packs=False)
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor,
        valid_lens: Tensor | None = None,
        *,
        state: AlignmentState | None = None,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, AlignmentState]:
        """One step of a decoder.

        Args:
            query: (B, query_dim).
            keys: (B, N, key_dim). With ``cache``, not read and may be None.
            values: (B, N, Dv).
            valid_lens: integers (B,) in [0, N]: how many of the first keys take part. Default None:
                all.
            state: the state that the previous step returned. Default None: this is the first step.
            attn_mask: broadcastable to (B, 1, N): boolean with True = take part, or float, added to
                the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            cache: what ``project_keys(keys)`` returned. Without it, each step projects all keys.
                Default None.

        Returns:
            ``(context (B, Dv), weights (B, N), state)``.

        Raises:
            TypeError: an argument is not a tensor, or dtypes differ.
            ValueError: shapes or lengths do not fit.
        """
        single_head.check_tensors(query=query)
        if query.dim() != 2:
            raise ValueError(f"query: expected one step, (B, query_dim), got {list(query.shape)}")
        single_head.check_dims(values=values)
        B, N = values.shape[:2]
        if state is None:
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            state = AlignmentState(*(values.new_zeros(B, N, dtype=wide) for _ in range(2)))
        elif not isinstance(state, AlignmentState):
            raise TypeError(f"state: expected an AlignmentState, got {type(state).__name__}")
        for name, x in zip(state._fields, state, strict=True):
            _check_state(f"state.{name}", x, values)
        out, weights = single_head.attend(
            "additive",
            single_head.project("query", query, self.W_q)[:, None],
            self._with_location(self._projected(keys, values, cache), state),
            values,
            Masks(valid_lens, attn_mask, self._near(mask, state)),
            self.dropout if self.training else 0.0,
            need_weights=True,
            **self._score(),
        )
        assert weights is not None
        weights = weights.squeeze(1)
        if self.store_weights:
            self.attention_weights = weights.detach()
        last = weights.to(state.previous.dtype)
        if self.window is not None:  # dropout and masks may leave nothing in it: it stays there
            last = torch.where((last == 0).all(1, keepdim=True), state.previous, last)
        return out.squeeze(1), weights, AlignmentState(last, state.cumulative + weights)

    def _with_location(self, keys: Tensor, state: AlignmentState) -> Tensor:
        """Projected keys plus the terms of past weights, (B, N, hidden_dim)."""
        single_head.check_dims(keys=keys)
        if keys.shape[1] != (N := state.previous.shape[1]):
            raise ValueError(
                f"keys and values: expected the same length, got {keys.shape[1]} and {N}"
            )
        if keys.shape[1] == 0:  # a convolution refuses this
            return keys
        if self.location_conv is not None and self.location_proj is not None:
            past: Any = {
                "cumulative": [state.cumulative],
                "previous": [state.previous],
                "both": [state.previous, state.cumulative],
            }[self.location]
            past = torch.stack(past, dim=1).to(keys.dtype)
            features = single_head.project("keys or cache", past, self.location_conv)
            keys = keys + self.location_proj(features.transpose(1, 2))
        if self.W_c is not None:
            past = state.cumulative[..., None].to(keys.dtype)
            keys = keys + single_head.project("keys or cache", past, self.W_c)
        return keys

    def _near(self, mask: Mask | None, state: AlignmentState) -> Mask | None:
        """``mask``, restricted to the window around the key of the largest previous weight."""
        if self.window is None or state.previous.shape[1] == 0:
            return mask
        validate.check_mask(mask)
        back, ahead = self.window
        peak = state.previous.detach().argmax(1)[:, None, None]
        j = torch.arange(state.previous.shape[1], device=peak.device)
        keep = (j >= peak - back) & (j <= peak + ahead)
        if mask is None:
            return Mask(keep=keep)
        return dataclasses.replace(mask, keep=keep if mask.keep is None else keep & mask.keep)

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the layers."""
        return f"location={self.location!r}, window={self.window}, {super().extra_repr()}"


def _check_state(name: str, x: object, values: Tensor) -> None:
    """Raises unless ``x`` may be a tensor of the state that goes with these values."""
    if not isinstance(x, Tensor):
        raise arguments.no_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}: write x.float()")
    if x.shape != values.shape[:2] or x.device != values.device:
        raise ValueError(
            f"{name}: expected (B, N) = {list(values.shape[:2])} on {values.device} to go with "
            f"values {list(values.shape)}, got {list(x.shape)} on {x.device}"
        )


def coverage_loss(weights: Tensor) -> Tensor:
    r"""The loss of See et al. (2017) for attending to the same place again.

    .. math:: \mathrm{covloss}_i = \sum_j \min(a_{ij}, c_{ij}), \qquad c_i = \sum_{l<i} a_l

    Args:
        weights: (B, M, N), the weights of all decoder steps.

    Returns:
        (B, M), in [0, 1]; 0 for the first step.

    Raises:
        TypeError: ``weights`` is no tensor.
        ValueError: it does not have 3 dims.

    Example::

        >>> steps = [torch.rand(2, 9).softmax(dim=-1) for _ in range(5)]  # weights (B, N)
        >>> loss = coverage_loss(torch.stack(steps, dim=1)).mean()
    """
    single_head.check_tensors(weights=weights)
    if weights.dim() != 3:
        raise ValueError(f"weights: expected (B, M, N), got {list(weights.shape)}")
    before = F.pad(weights, (0, 0, 1, 0)).cumsum(1)[:, :-1]
    return torch.minimum(weights, before).sum(-1)
