"""The host side that launchers share: the operator's arguments, and its outputs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.problem import Weights, schemas
from fastattn.problem.record import (
    empty_gradient,
    empty_out,
    is_curved,
    natural_scale,
    score_of,
    weights_of,
    weights_shape,
)
from fastattn.problem.schemas import Saved as Saved

from ..tile.dropout import Dropout, dropout_args
from ..tile.masking import scans_bias, varies_within_tiles
from ..tile.softmax import LOG2E
from ..tile.strided import Dims, Spec
from . import check
from .config import Kind, architecture, choose, padded, row_name, speaks_ptx

# No more than these have kernels of their own: a tile has as many rows, and keys are split.
FEW_QUERIES = 16
LEAST_UNIT = 2.0**-126  # of an exponent: the least normal number


class Call(schemas.Call):
    """The operands, and what launchers derive from them."""

    @classmethod
    def of(cls, *args) -> Call:
        """From an operator's arguments, unchecked so far: users may call operators directly."""
        call = cls(*args)
        check.operands(call)
        weights_of(call.weights)  # raises for a number that is none
        if not 0 <= call.dropout_p <= 1:
            raise ValueError(f"dropout_p: expected 0 to 1, got {call.dropout_p}")
        if call.dropout_p and call.seed is None:
            raise ValueError(f"dropout_p: expected a seed with {call.dropout_p}, got none")
        if call.dropout_p and call.origin_j % 4:
            raise ValueError(f"origin_j: expected a multiple of 4, got {call.origin_j}")
        return call

    @property
    def weights_mode(self) -> Weights:
        """Which weights are returned, by name."""
        return weights_of(self.weights)

    @property
    def dropout(self) -> Dropout:
        """What kernels are given of dropout."""
        origin = self.origin_b, self.origin_h, self.origin_i, self.origin_j
        return dropout_args(self.dropout_p, self.seed, origin)

    # The letters of DESIGN.md.
    B = property(lambda self: self.q.shape[0])
    H = property(lambda self: self.q.shape[1])
    M = property(lambda self: self.q.shape[2])
    D = property(lambda self: self.q.shape[3])
    Hkv = property(lambda self: self.k.shape[1])
    N = property(lambda self: self.k.shape[2])
    E = property(lambda self: self.v.shape[3])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.M, self.N

    @property
    def dims(self) -> Dims:
        return Dims(self.H, self.H // max(self.Hkv, 1), self.M, self.N)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(band_lo, band_hi), None where every pair is within: a decoding step has no mask."""
        lo = None if self.band_lo is None or self.band_lo <= 1 - self.M else self.band_lo
        hi = None if self.band_hi is None or self.band_hi >= self.N - 1 else self.band_hi
        return lo, hi

    @property
    def folds_scale(self) -> bool:
        """Whether logits stay scores, and only differences of them are multiplied by the scale."""
        return self.bias is None and natural_scale(self, self.scale) > 0

    @property
    def logit_scale(self) -> float:
        """The scale that kernels take: see mask_scores and unit_of."""
        scale = natural_scale(self, self.scale)
        # In fp32 a smaller one is 0, which makes NaN of a masked -inf.
        return max(LEAST_UNIT, scale * LOG2E.value) if self.folds_scale else scale

    @property
    def natural(self) -> float:
        """The natural logit of a logit of 1, as kernels have logits."""
        return natural_scale(self, self.scale) if self.folds_scale else 1.0

    @property
    def kind(self) -> Kind:
        """What its kernels need besides what masks need: which configurations they take."""
        if self.bias is not None and self.bias.element_size() > self.q.element_size():
            return "wide_bias"
        features = (self.bias is not None) + bool(self.dropout_p) + bool(self.weights)
        if features:
            return "rich" if features + is_curved(self) > 1 else "single"
        return "curved" if is_curved(self) else "plain"

    @property
    def rich(self) -> bool:
        """Whether a kernel needs more registers than for masks."""
        return self.kind not in ("plain", "curved")


def heads_as_rows(call: Call) -> Call:
    """The call with heads of one query, which share keys, as rows of one head, where it can be.

    All these heads then read the keys once, instead of once each, and fill more of a tile's rows.
    It is made of views. ``as_rows`` makes views of results. Statistics of rows stay where they are.
    """
    together = max(n for n in range(1, FEW_QUERIES + 1) if call.dims.group % n == 0)
    # The bits of dropout, the returned weights and the scores' terms belong to a head.
    if call.M != 1 or together == 1 or call.dropout_p or call.weights or call.w is not None:
        return call
    first, end = 0, call.N
    if call.band != (None, None):  # rows of one head would have bands of their own
        first = max(first, call.band_lo if call.band_lo is not None else first)
        end = min(end, call.band_hi + 1 if call.band_hi is not None else end)
        if first >= end or call.kv_len is not None or call.kv_begin is not None:
            return call

    def pairs(x: Tensor | None) -> Tensor | None:
        x = x if x is None or x.shape[3] == 1 else x[..., first:end]
        return x if x is None or x.shape[1] == 1 else _rows(x, together)

    return call._replace(
        q=_rows(call.q, together), k=call.k[:, :, first:end], v=call.v[:, :, first:end],
        bias=pairs(call.bias), keep=pairs(call.keep), band_lo=None, band_hi=None,
    )  # fmt: skip


def as_rows(x: Tensor, call: Call) -> Tensor:
    """``x``, [B, H, M, size], with the heads and rows that ``call`` has."""
    return x if x.shape[1] == call.H else _rows(x, call.M)


def _rows(x: Tensor, together: int) -> Tensor:
    return x.squeeze(2).unflatten(1, (-1, together))


KERNELS = __name__.removesuffix("host.launch")


def refuse_while_capturing(hook):
    """A hook before Triton compiles: inside a CUDA graph's capture, an error for these kernels.

    CUDA cannot load code then, and its own error does not say what to do. ``hook``: the one that
    was there before.
    """

    def before_compiling(*args, **about):
        ours = about["fn"].module.startswith(KERNELS)
        if ours and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the Triton kernel {about['fn'].name} is not compiled for this problem yet, and a "
                "CUDA graph cannot load it while it is captured: make the same call, and its "
                "backward pass, once before the capture"
            )
        return hook(*args, **about) if hook is not None else None

    return before_compiling


triton.knobs.runtime.jit_cache_hook = refuse_while_capturing(triton.knobs.runtime.jit_cache_hook)


def empty_forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, weights, stats), uninitialised."""
    B, H, M, N = call.shape
    out = empty_out(call.q, call.E, torch.float32 if call.wide else call.q.dtype)
    lse, stats = (call.q.new_empty(B, H, M, *end, dtype=torch.float32) for end in ((), (2,)))
    return out, lse, call.q.new_empty(weights_shape(call.weights_mode, B, H, M, N)), stats


def empty_gradients(call: Call) -> list[Tensor]:
    """Of q, k and v, uninitialised."""
    return [empty_gradient(x, call.wide) for x in (call.q, call.k, call.v)]


def per_head_weights(call: Call, weights: Tensor | None) -> Tensor | None:
    """Returned weights or their gradient as [B, H, M, N]; a mean over heads broadcasts."""
    if weights is None or call.weights_mode == "full":
        return weights
    return weights.unsqueeze(1).expand(call.shape)


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies fp32: exactly, unless torch's own setting allows TF32."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def spec(call: Call, kernel: str) -> tuple[Spec, dict[str, Any]]:
    """What ``kernel`` is compiled for, and Triton's options for launching it.

    FP fusion is an explicit option, because Triton's default is about to change.
    """
    kernel = row_name(score_of(call.score), kernel)
    config = choose(kernel, call.q.device, call.q.dtype, call.D, call.E, call.kind)
    fp32, products = call.q.dtype == torch.float32, precision(call.q.dtype)
    stream = fp32 and max(call.D, call.E) > 128  # which leaves no registers for sums apart
    fields = Spec(
        D=call.D, E=call.E, BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N,
        BLOCK_D=padded(call.D), BLOCK_E=padded(call.E), STAGES=config.num_stages,
        PRECISION=products, APART=fp32 and products == "ieee" and not stream, STREAM=stream,
        FOLD_SCALE=call.folds_scale,
        BIAS_IN_FULL=call.bias is not None and not scans_bias(call),
        MASKS_WITHIN_TILES=varies_within_tiles(call), REVERSE=call.band[1] is not None,
        PTX=speaks_ptx(call.q.device), FLAT=architecture(call.q.device) == "sm_100",
    )  # fmt: skip
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True)
    crowded = fp32 and ("dkdv" in kernel or config.num_warps == 4)
    if (call.w is not None or crowded) and speaks_ptx(call.q.device):
        # Unasked, ptxas spills a few registers to have 80, 96, 128 or 168.
        options["maxnreg"] = min(255, 2048 // config.num_warps)
    return Spec(*map(tl.constexpr, fields)), options
