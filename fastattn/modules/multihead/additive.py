"""MultiheadAttention with the additive score."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastattn import functional
from fastattn.modules.multihead.attention import MultiheadAttention
from fastattn.modules.multihead.interop import off_fast_path


class MultiheadAdditiveAttention(MultiheadAttention):
    r"""Multi-head attention with the additive score and nn.MultiheadAttention's interface.

    .. math::
        \mathrm{head}_h = \mathrm{softmax}_j\left(
            w_h^\top \tanh(W^Q_h q_i + W^K_h k_j) + \mathrm{mask}\right) V W^V_h

    Constructor, ``forward``, masks, shapes, returned weights, dropout and queries without keys are
    as in :class:`MultiheadAttention`. The hidden size of a head is
    ``head_dim = embed_dim / num_heads``. There is no scale, since ``w`` is learned.

    There is one parameter more than in nn.MultiheadAttention: ``score_weight``
    [num_heads, head_dim]. It is initialised last, uniformly in ``+-1/sqrt(head_dim)``, like
    nn.Linear(head_dim, 1).

    A module can be the ``self_attn`` of nn.TransformerEncoderLayer and the like, also at inference.
    torch has no additive score. Calls that :class:`MultiheadAttention` passes to torch (tensor
    subclasses, other dtypes) are therefore a TypeError here.

    Source: Bahdanau, Cho, Bengio, 2015, https://arxiv.org/abs/1409.0473; heads as in Vaswani et
    al., 2017, https://arxiv.org/abs/1706.03762.

    Example::

        >>> attention = MultiheadAdditiveAttention(embed_dim=64, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = attention(x, x, x)  # (2, 10, 64), (2, 10, 10)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, device=device, dtype=dtype, **kwargs)
        shape = (self.num_heads, self.head_dim)
        self.score_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self._reset_score_weight()
        off_fast_path(self)

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        # The inherited constructor calls this before score_weight exists.
        if "score_weight" in self._parameters:
            self._reset_score_weight()

    def _reset_score_weight(self) -> None:
        bound = self.head_dim**-0.5
        nn.init.uniform_(self.score_weight, -bound, bound)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return functional.additive_attention(q, k, v, self.score_weight, **options)

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> NoReturn:
        """Always raises: torch would compute the dot product, which is another score."""
        raise RuntimeError(
            "torch's fused encoder layer cannot compute the additive score. It was reached because "
            "a forward pre-hook was removed: fastattn.replace_attention(model) puts it back."
        )

    def _not_ours(self, reason: str, *args: Any) -> NoReturn:
        raise TypeError(
            "the additive score takes plain float16, bfloat16, float32 or float64 tensors, and no "
            f"torch.jit.trace: {reason}"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            "MultiheadAdditiveAttention cannot be compiled by torch.jit.script"
        )
