"""Hard attention: picks one key for each query instead of averaging."""

# torch declares the static methods of a Function with *args.
# pyright: reportIncompatibleMethodOverride=false

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from fastattn.autograd import either, levels
from fastattn.modules import single_head
from fastattn.modules.decoder.alignment import Alignment, Method
from fastattn.modules.jagged import takes_jagged
from fastattn.modules.single_head import Masks
from fastattn.problem import Mask


class HardChoice(NamedTuple):
    """What :class:`HardAttention` chose. A query without keys has indices 0 and log_prob 0.

    Attributes:
        output: (B, M, Dv), the chosen values.
        indices: (B, M), int64, the chosen keys.
        log_prob: (B, M), the logarithms of their probabilities, differentiable.
        probabilities: (B, M, N), those of all keys, differentiable.
    """

    output: Tensor
    indices: Tensor
    log_prob: Tensor
    probabilities: Tensor


class HardAttention(nn.Module):
    r"""Attention that picks one value for each query.

    .. math::
        p_{ij} = \mathrm{softmax}_j(\mathrm{score}(q_i, k_j)), \qquad \mathrm{out}_i = v_{s_i},
        \qquad s_i = \arg\max_j p_{ij} \text{ at evaluation, } s_i \sim p_i \text{ in training}

    A pick has no derivative. There are two substitutes for training:

    - Straight-through, in training mode: derivatives by query, keys and the score's parameters are
      those of the soft attention :math:`\sum_j p_{ij} v_j`. Derivatives by values are those of the
      pick. This holds for backward and for forward mode.
    - REINFORCE: ``return_choice=True`` also gives ``log_prob``, for a loss like
      ``(reward.detach() - baseline) * -log_prob``. To use REINFORCE alone, detach query and keys
      from the output: train on ``choice.output.detach()``.

    Args:
        query_dim (int): features of a query.
        key_dim (int, optional): features of a key. Default ``query_dim``.
        method (str): ``"concat"`` (the additive score, the paper's), ``"general"`` or ``"dot"``, as
            in :class:`LuongAttention`. Default ``"concat"``.
        hidden_dim (int, optional): of ``concat``. Default ``query_dim``.
        device (torch.device, optional): of the parameters.
        dtype (torch.dtype, optional): of the parameters.

    Raises:
        TypeError: a size is no int.
        ValueError: an unknown method, or sizes that it does not take.

    Hooks of ``w_v``, which ``concat`` has, do not run, because only its weight is read.

    A query without keys has output 0. Evaluation picks the first key with the largest probability,
    as rounded to the dtype of the query. Training draws from torch's generator.

    Source: Xu et al., "Show, Attend and Tell", 2015, https://arxiv.org/abs/1502.03044; REINFORCE:
    Williams, 1992; straight-through: Bengio, Léonard, Courville, 2013,
    https://arxiv.org/abs/1308.3432.

    Example::

        >>> attention = HardAttention(query_dim=32, key_dim=48, hidden_dim=16)
        >>> queries, regions = torch.randn(2, 7, 32), torch.randn(2, 196, 48)
        >>> choice = attention(queries, regions, return_choice=True)
        >>> reward = -(choice.output - 1).square().mean(dim=-1).detach()  # of what was chosen
        >>> loss = (reward * -choice.log_prob).mean()
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        method: Method = "concat",
        *,
        hidden_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.score = Alignment(query_dim, key_dim, method, hidden_dim, device=device, dtype=dtype)

    def project_keys(self, keys: Tensor) -> Tensor:
        """A cache for ``forward``: the work that depends on ``keys`` alone."""
        return self.score.project_keys(keys)

    if TYPE_CHECKING:  # nn.Module hides from type checkers what a call returns.

        @overload
        def __call__(
            self, *args: Any, return_choice: Literal[False] = ..., **options: Any
        ) -> Tensor: ...
        @overload
        def __call__(
            self, *args: Any, return_choice: Literal[True], **options: Any
        ) -> HardChoice: ...
        def __call__(self, *args: Any, **options: Any) -> Any: ...  # noqa: D102

    @takes_jagged(packs=False)
    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None = None,
        valid_lens: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        mask: Mask | None = None,
        return_choice: bool = False,
        cache: Tensor | None = None,
    ) -> Tensor | HardChoice:
        """Pick a value for each query.

        Args:
            queries: (B, M, query_dim), or one step, (B, query_dim), whose results have no dim M.
            keys: (B, N, key_dim). With ``cache`` and ``values``, not read and may be None.
            values: (B, N, Dv). Default None: the keys.
            valid_lens: integers (B,) or (B, M) in [0, N]: how many of the first keys take part.
                Default None: all.
            attn_mask: broadcastable to (B, M, N): boolean with True = take part, or float, added to
                the scores. Default None.
            mask: a :class:`fastattn.Mask` with further constraints. Default None.
            return_choice: return a :class:`HardChoice` instead of its output. Default False.
            cache: what ``project_keys(keys)`` returned. Default None.

        Returns:
            output (B, M, Dv), or the :class:`HardChoice`.

        Raises:
            TypeError: dtypes differ.
            ValueError: shapes or lengths do not fit.
        """
        queries, one_step = single_head.as_steps(queries)
        keys, values = self.score.keys_and_values(keys, values, cache)
        # Values are detached: the soft output only serves the gradient of the scores.
        soft, probabilities = self.score.attend(
            self.score.project_queries(queries),
            keys,
            values.detach(),
            Masks(valid_lens, attn_mask, mask),
            need_weights=True,
        )
        assert probabilities is not None
        indices, chosen = _choose(probabilities, sample=self.training)
        output = _picked(values, indices, chosen)
        if self.training and levels("Jvp") > 1:  # see autograd.attend; infinite values become NaN
            output = output + (soft - soft.detach())
        elif self.training:
            output = either(_StraightThrough, _ForwardMode).apply(output, soft)
        log_prob = torch.where(chosen == 0, 1.0, chosen).log()
        choice = HardChoice(output, indices, log_prob, probabilities)
        if one_step:
            choice = HardChoice(*(x.squeeze(1) for x in choice))
        return choice if return_choice else choice.output


def _choose(probabilities: Tensor, sample: bool) -> tuple[Tensor, Tensor]:
    """Index and probability of the chosen keys, (B, M) each; 0 and 0 without a key."""
    if probabilities.shape[-1] == 0:
        probabilities = nn.functional.pad(probabilities, (0, 1))
    likely = probabilities.detach()
    if sample:
        # With exponential e_j, the largest p_j / e_j is at j with probability p_j. Unlike
        # torch.multinomial, this takes rows of zeros, of any length, and never waits for a GPU.
        likely = likely.float() if likely.dtype in (torch.float16, torch.bfloat16) else likely
        noise = torch.empty_like(likely).exponential_()
        likely = likely / noise.clamp_min(torch.finfo(noise.dtype).tiny)
    indices = likely.argmax(-1)
    return indices, probabilities.gather(-1, indices[..., None]).squeeze(-1)


def _picked(values: Tensor, indices: Tensor, chosen: Tensor) -> Tensor:
    """values[b, indices[b, i]]; 0 for a row without keys, NaN for a row with a NaN query or key."""
    if values.shape[1] == 0:
        values = nn.functional.pad(values, (0, 0, 0, 1))
    samples = torch.arange(values.shape[0], device=values.device)[:, None]
    chosen = chosen.detach()[..., None]
    return torch.where(chosen > 0, values[samples, indices], chosen)


class _StraightThrough(torch.autograd.Function):
    """``hard`` forward; its derivative is as if both arguments were the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hard: Tensor, soft: Tensor) -> Tensor:
        return hard.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _ForwardMode(_StraightThrough):
    """The same, with a Jacobian-vector product."""

    @staticmethod
    def jvp(ctx: Any, hard: Tensor, soft: Tensor) -> Tensor:
        return hard + soft
