"""What tests and benchmarks share: the case grid, the error budget, and NaN poisoning.

A :class:`Case` names a problem; :func:`make` draws its tensors from the case's own seed;
:func:`run` computes outputs and gradients with one of our backends, :func:`exact` with the float64
reference, :func:`plain` with ordinary PyTorch in the case's dtype. :func:`assert_within_budget`
compares the three:

    error(ours) <= 2 * error(plain PyTorch, same dtype) + a few ulp of the largest value.

There is no other tolerance in the project.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import functional, reference, validate
from fastattn.problem import Mask, Problem

ULPS = 4  # of the largest exact value: what rounding the result, and one more operation, may cost


@dataclass(frozen=True)
class Case:
    """One point of the grid: sizes by the letters of ``Problem``, and features switched on."""

    name: str
    score: Literal["dot", "additive", "cosine", "gaussian"] = "dot"
    B: int = 2
    H: int = 2
    Hkv: int = 2
    M: int = 15
    N: int = 17
    D: int = 8
    E: int = 8
    dtype: torch.dtype = torch.float32
    causal: str | None = None
    window: tuple[int, int] | None = None
    kv_len: str | None = None  # "batch" | "rows"; the first entry of the batch gets 0 keys
    keep: str | None = (
        None  # one letter a dim of [B, H, M, N] that the mask really has: "bhmn", "mn", "n" ...
    )
    keep_rate: float = 0.7
    empty_rows: bool = False  # keep and bias mask every third row completely
    bias: str | None = None  # like keep
    bias_inf: bool = False  # some bias entries are -inf
    bias_grad: bool = True
    bias_dtype: torch.dtype | None = None  # dtype's by default
    attn_mask: str | None = None  # like keep; some entries of a float one are -inf
    attn_mask_dtype: torch.dtype = torch.bool
    scale: float | None = None  # of the dot product and the cosine
    dropout_p: float = 0.0
    weights: str | None = None
    lse: bool = False
    # "bmhd": heads transposed; "bhdm": columns; "sliced": every other element; "expanded": batch
    # stride 0; "unaligned": one element past where memory begins
    layout: str = "bhmd"
    mask_layout: str = "bhmd"  # of keep, bias, attn_mask and the weights' gradient
    magnitude: float = 1.0  # of query and key
    opposite: float = 0.0  # query + this, key - this
    garbage: float | None = None  # check() also puts this wherever a mask excludes what stands
    # At random: the budget also has the condition of the scores, as plain PyTorch may be right by
    # luck where numbers are few, and what the docs say is not exact.
    drawn: bool = False

    def __str__(self) -> str:
        return f"{self.score}-{self.name}-{str(self.dtype).removeprefix('torch.')}"

    def __repr__(self) -> str:
        """Python, but for what is as usual."""
        told = [
            f"{f.name}={_spelled(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Case({', '.join(told)})"

    @property
    def seed(self) -> int:
        """Fixed by the case, so that a failure is reproduced by its name."""
        return zlib.crc32(str(self).encode())


_with = dataclasses.replace


def _spelled(value) -> str:
    """Python for a field of a case."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{'-' if value < 0 else ''}math.{'nan' if math.isnan(value) else 'inf'}"
    return repr(value)


@dataclass
class Tensors:
    """The drawn tensors of a case. ``grads`` are upstream gradients, one for each result."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    bias: Tensor | None
    mask: Mask
    grad_out: Tensor
    grad_weights: Tensor | None
    grad_lse: Tensor | None
    attn_mask: Tensor | None = None
    bandwidth: Tensor | None = None  # of the gaussian score, [H, 1, 1]


# Those that may have gradients.
INPUTS = ("q", "k", "v", "w", "bias", "attn_mask", "bandwidth")


def make(case: Case, device: str = "cpu") -> Tensors:
    """Draws the tensors of a case, in its dtype and layout; other numbers on another device."""
    rng = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64, device=device)

    c = case
    q = normal(c.B, c.H, c.M, c.D) * c.magnitude + c.opposite
    k = normal(c.B, c.Hkv, c.N, c.D) * c.magnitude - c.opposite
    v = normal(c.B, c.Hkv, c.N, c.E)
    w = (normal(c.H, c.D) / math.sqrt(max(c.D, 1))).to(c.dtype) if c.score == "additive" else None
    grad_weights = None
    if c.weights is not None:
        shape = (c.B, c.H, c.M, c.N) if c.weights == "full" else (c.B, c.M, c.N)
        grad_weights = normal(*shape).to(c.dtype)
    t = Tensors(
        q.to(c.dtype), k.to(c.dtype), v.to(c.dtype), w, _bias(c, normal, rng), _mask(c, rng),
        grad_out=normal(c.B, c.H, c.M, c.E).to(c.dtype),
        grad_weights=grad_weights,
        grad_lse=normal(c.B, c.H, c.M) if c.lse else None,
        attn_mask=_attn_mask(c, normal, rng),
        bandwidth=(1 + _uniform((c.H, 1, 1), rng)).to(c.dtype) if c.score == "gaussian" else None,
    )  # fmt: skip
    return _laid_out(c, t)


def spoil(case: Case, t: Tensors) -> Tensors:
    """The same problem with garbage in every place that a mask excludes: no result may change.

    So are upstream gradients of rows without keys and of masked weights. What a bias masks by -inf
    stays -inf, and what stands beside it is excluded.
    """
    p, kept = _kept(case, t)
    structural = p.mask.materialize(p).expand(kept.shape)
    by_key, by_query = _used_keys(p, kept), kept.any(-1)

    def fill(x: Tensor | None, used: Tensor, layout: str) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        most, value = torch.finfo(x.dtype).max, case.garbage
        assert value is not None
        value = max(-most, min(value, most)) if math.isfinite(value) else value
        used = used.any(0, keepdim=True) if layout == "expanded" else used  # all entries are one
        for d, n in enumerate(x.shape):  # a place is used where one of those it stands for is
            used = used if n != 1 else used.any(d, keepdim=True)
        return x.masked_fill(~used, value)

    beside = structural
    if t.attn_mask is not None and t.attn_mask.is_floating_point():
        beside = structural & (t.attn_mask != -math.inf)
    rows, keys, weights = (by_query[..., None], by_key[..., None], kept)
    if case.weights == "mean":
        weights = kept.any(1)
    how, masks = case.layout, case.mask_layout
    spoilt = _with(
        t,
        q=fill(t.q, rows, how),
        k=fill(t.k, keys, how),
        v=fill(t.v, keys, how),
        grad_out=fill(t.grad_out, rows, how),
        bias=fill(t.bias, beside, masks),
        attn_mask=fill(t.attn_mask, structural, masks),
        grad_weights=fill(t.grad_weights, weights, masks),
        grad_lse=fill(t.grad_lse, by_query, "bhmd"),
    )
    return _laid_out(case, spoilt)


def _uniform(shape, rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device)


def _shape(case: Case, letters: str) -> list[int]:
    sizes = {"b": case.B, "h": case.H, "m": case.M, "n": case.N}
    return [size if letter in letters else 1 for letter, size in sizes.items()]


_TRANSPOSED = {"bmhd": (1, 2), "bhdm": (-2, -1)}


def _laid_out(case: Case, t: Tensors) -> Tensors:
    """The same values behind the strides of the case."""

    def each(layout: str, *names: str) -> dict[str, Any]:
        return {n: x if (x := getattr(t, n)) is None else _layout(layout, x) for n in names}

    keep = t.mask.keep
    mask = t.mask if keep is None else _with(t.mask, keep=_layout(case.mask_layout, keep))
    plain, masks = ("q", "k", "v", "grad_out"), ("bias", "attn_mask", "grad_weights")
    return _with(t, mask=mask, **each(case.layout, *plain), **each(case.mask_layout, *masks))


def _layout(layout: str, x: Tensor) -> Tensor:
    if layout in _TRANSPOSED:
        dims = _TRANSPOSED[layout]
        return x.transpose(*dims).contiguous().transpose(*dims)
    if layout == "sliced":  # what lies between must never be read
        filler = math.nan if x.is_floating_point() else True
        padded = x.new_full([2 * s + 1 for s in x.shape], filler)
        return padded[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)
    if layout == "unaligned":
        return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def _empty_rows(case: Case, x: Tensor, value) -> Tensor:
    if case.empty_rows and x.shape[2] == case.M:
        x[:, :, ::3] = value
    return x


def _bias(case: Case, normal, rng) -> Tensor | None:
    if case.bias is None:
        return None
    bias = normal(*_shape(case, case.bias))
    if case.bias_inf:
        bias = bias.masked_fill(_uniform(bias.shape, rng) < 0.3, -math.inf)
        bias = _empty_rows(case, bias, -math.inf)
    return bias.to(case.bias_dtype or case.dtype)


def _attn_mask(case: Case, normal, rng) -> Tensor | None:
    if case.attn_mask is None:
        return None
    shape = _shape(case, case.attn_mask)
    keep = _uniform(shape, rng) < case.keep_rate
    if case.attn_mask_dtype == torch.bool:
        return _empty_rows(case, keep, False)
    added = normal(*shape).masked_fill(~keep, -math.inf)
    return _empty_rows(case, added, -math.inf).to(case.attn_mask_dtype)


def _mask(case: Case, rng) -> Mask:
    kv_len = keep = None
    if case.kv_len is not None:
        shape = (case.B,) if case.kv_len == "batch" else (case.B, case.M)
        kv_len = torch.randint(0, case.N + 1, shape, generator=rng, device=rng.device)
        kv_len[:1] = 0
    if case.keep is not None:
        keep = _uniform(_shape(case, case.keep), rng) < case.keep_rate
        keep = _empty_rows(case, keep, False)
    return Mask(case.causal, case.window, kv_len, keep)  # pyright: ignore[reportArgumentType]


# ---- three ways to compute a case: {"out": ..., "weights": ..., "lse": ..., "grad_q": ...} ----


def _leaf(x: Tensor | None, dtype: torch.dtype | None = None, grad: bool = True) -> Tensor | None:
    """A leaf with x's strides; what has no gradient stays as it is."""
    if x is None or not x.is_floating_point():
        return x
    return (x if dtype is None else x.to(dtype)).detach().requires_grad_(grad)


def _leaves(case: Case, t: Tensors, dtype: torch.dtype | None) -> dict[str, Any]:
    added = ("bias", "attn_mask")
    return {n: _leaf(getattr(t, n), dtype, n not in added or case.bias_grad) for n in INPUTS}


def _results(case: Case, t: Tensors, call, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Runs call(q, k, v, ...), of all INPUTS, to (out[, weights][, lse]), and its backward."""
    leaves = _leaves(case, t, dtype)
    outputs = call(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = ["out", *(["weights"] if case.weights else []), *(["lse"] if case.lse else [])]
    results = dict(zip(names, outputs, strict=True))
    upstream: dict[str, Any] = {"out": t.grad_out, "weights": t.grad_weights, "lse": t.grad_lse}
    grads = [upstream[name].to(x.dtype) for name, x in results.items()]
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    pulled = torch.autograd.grad(
        list(results.values()), list(wanted.values()), grads, allow_unused=True
    )
    for (name, leaf), grad in zip(wanted.items(), pulled, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


DROPOUT_SEED = 0x1234_5678_9ABC_DEF0


def run(
    case: Case, t: Tensors, backend: str = "auto", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Our result on a backend."""

    def call(q, k, v, w, bias, attn_mask, bandwidth):
        options: dict[str, Any] = dict(bias=bias, attn_mask=attn_mask, backend=backend)
        options |= dict(return_weights=case.weights, return_lse=case.lse)
        if t.mask.kinds:
            options |= dict(mask=t.mask)
        if case.dropout_p:
            options |= dict(dropout_p=case.dropout_p, seed=DROPOUT_SEED)
        if case.score == "additive":
            return functional.additive_attention(q, k, v, w, **options)
        options |= dict(enable_gqa=True, scale=case.scale)
        if case.score == "dot":
            return functional.scaled_dot_product_attention(q, k, v, **options)
        return functional.attention(q, k, v, score=case.score, bandwidth=bandwidth, **options)

    return _results(case, t, call, dtype)


def _build(case: Case, t: Tensors, q, k, v, w, bias, attn_mask, scale) -> validate.Inputs:
    return validate.build(
        "dot" if w is None else "additive", q, k, v, w, mask=t.mask, bias=bias,
        attn_mask=attn_mask, scale=scale, enable_gqa=True, dropout_p=case.dropout_p,
        seed=DROPOUT_SEED, return_weights=case.weights,
    )  # fmt: skip


def _kept(case: Case, t: Tensors) -> tuple[Problem, Tensor]:
    """The record of a case, and the pairs that masks and biases keep, ``[B, H, M, N]``."""
    p, *_, added, _, _ = _build(case, t, t.q, t.k, t.v, t.w, t.bias, t.attn_mask, case.scale)
    kept = p.mask.materialize(p).expand(p.B, p.H, p.M, p.N)
    return p, kept if added is None else kept & (added != -math.inf)


def _used_keys(p: Problem, kept: Tensor) -> Tensor:
    """``[B, Hkv, N]``: keys that some row of some head keeps."""
    return (kept.unflatten(1, (p.Hkv, -1)) if p.Hkv else kept[:, :, None]).any(2).any(2)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _features(case: Case, q: Tensor, k: Tensor, bandwidth: Tensor | None):
    """(q', k', scale) such that the score is q' . k' * scale, or what is added for q' + k'."""
    if case.score == "cosine":
        return _unit(q), _unit(k), 1.0 if case.scale is None else case.scale
    if case.score == "gaussian":  # -|q - k|^2 / 2h^2 = (q . k - |k|^2 / 2 - |q|^2 / 2) / h^2
        assert bandwidth is not None
        one, squared = (q.new_ones(*q.shape[:-1], 1), q.square().sum(-1, keepdim=True))
        half = k.new_full((*k.shape[:-1], 1), -0.5)
        k = torch.cat([k, half * k.square().sum(-1, keepdim=True), half], -1)
        return torch.cat([q, one, squared], -1) / bandwidth.square(), k, 1.0
    return q, k, case.scale


def _canonical(case: Case, t: Tensors, leaves: dict[str, Any]) -> tuple:
    """(p, q, k, v, w, bias) of the dot product or the additive score, made of float64 leaves."""
    x = dict(leaves)
    q, k, scale = _features(case, x.pop("q"), x.pop("k"), x.pop("bandwidth"))
    return _build(case, t, q, k, scale=scale, **x)[:6]


def _upstream(t: Tensors) -> list[Any]:
    return [None if x is None else x.double() for x in (t.grad_out, t.grad_lse, t.grad_weights)]


def exact(case: Case, t: Tensors) -> dict[str, Tensor]:
    """The float64 reference and its explicit gradients."""
    leaves = _leaves(case, t, torch.float64)
    p, *made = _canonical(case, t, leaves)
    args: list[Any] = [None if x is None else x.detach() for x in made]
    out, lse, weights = reference.forward(p, *args)
    grads = list(reference.backward(p, *args, *_upstream(t)))
    grads[3] = None if grads[3] is None else grads[3].sum(0)
    results = {"out": out}
    if case.weights:
        results["weights"] = weights
    if case.lse:
        results["lse"] = lse
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    pairs = [(x, g) for x, g in zip(made, grads, strict=True) if x is not None and x.requires_grad]
    ends, grads = zip(*pairs, strict=True)
    pulled = torch.autograd.grad(ends, list(wanted.values()), grads)
    return results | {f"grad_{n}": g for n, g in zip(wanted, pulled, strict=True)}


def plain(case: Case, t: Tensors, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What a user would write in PyTorch, in the case's dtype: the peer of the error budget."""
    p, kept = _kept(case, t)
    has_key = kept.any(-1, keepdim=True)

    def call(q, k, v, w, bias, attn_mask, bandwidth):
        k, v = (x.repeat_interleave(case.H // case.Hkv, dim=1) if case.Hkv else x for x in (k, v))
        if case.score == "dot":
            scores = (q @ k.mT) * p.scale
        elif case.score == "cosine":
            scores = (_unit(q) @ _unit(k).mT) * (1.0 if case.scale is None else case.scale)
        elif case.score == "gaussian":
            between = (q[:, :, :, None] - k[:, :, None]) / bandwidth[..., None]
            scores = between.square().sum(-1) / -2
        else:
            scores = (torch.tanh(q[:, :, :, None] + k[:, :, None]) * w[:, None, None]).sum(-1)
        for x in (bias, attn_mask):
            if x is not None and x.is_floating_point():
                scores = scores + x.to(q.dtype)
        # Rows without a key are given all keys, then zeroed: plain PyTorch would give NaN.
        scores = scores.masked_fill(~kept & has_key, -math.inf)
        scores = torch.where(has_key, scores, 0.0)
        weights = torch.softmax(scores, -1) * has_key
        if p.dropout is not None:
            weights = weights * p.dropout.factors(p, q.dtype)
        lse = torch.where(has_key.squeeze(-1), torch.logsumexp(scores, -1), -math.inf)
        returned = {None: (), "full": (weights,), "mean": (weights.mean(1),)}[case.weights]
        return (weights @ v, *returned, *((lse,) if case.lse else ()))

    return _results(case, t, call, dtype or case.dtype)


# ---- the budget ----


def error(x: Tensor, truth: Tensor) -> float:
    """Largest absolute error; infinite where NaN or inf stand in other places than in truth."""
    x, truth = x.detach().double(), truth.detach().double()
    if x.shape != truth.shape:
        raise AssertionError(f"shape {list(x.shape)}, expected {list(truth.shape)}")
    if x.numel() == 0:
        return 0.0
    same = (x == truth) | (x.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (x - truth).abs())
    return torch.nan_to_num(difference, nan=math.inf).max().item()


def largest(truth: Tensor) -> float:
    """Largest finite magnitude."""
    finite = truth[truth.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def budget(plain_error: float, dtype: torch.dtype, scale: float) -> float:
    """The error allowed: twice plain PyTorch's, plus a few ulp of the largest value."""
    return (
        2 * (plain_error if math.isfinite(plain_error) else 0.0)
        + ULPS * torch.finfo(dtype).eps * scale
    )


def error_ratio(ours: Tensor, peer: Tensor, truth: Tensor, scale: float | None = None) -> float:
    """Our error over the budget: at most 1 where a result is right."""
    coarser = max(ours.dtype, peer.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    allowed = budget(error(peer, truth), coarser, largest(truth) if scale is None else scale)
    mine = error(ours, truth)
    return 0.0 if mine == 0 else math.inf if allowed == 0 else mine / allowed


def assert_within_budget(
    ours: Tensor, peer: Tensor, truth: Tensor, name: str = "result", scale: float | None = None
) -> None:
    """Raises AssertionError where ours is further from the float64 truth than the budget allows.

    ``scale`` is the magnitude whose ulp counts, the largest exact value by default. A sum that
    cancels to 0 is given the root-sum-square of its terms instead, since its rounding is
    proportional to that.
    """
    ratio = error_ratio(ours, peer, truth, scale)
    if not ratio <= 1:
        mine, theirs = error(ours, truth), error(peer, truth)
        raise AssertionError(
            f"{name}: error {mine:.3e} is {ratio:.2f} of the budget (plain PyTorch: {theirs:.3e})"
        )


def check(
    case: Case, backend: str = "auto", relayout: Callable[[Tensors], Tensors] | None = None
) -> None:
    """Compares every output and gradient of a case with the reference, within the budget.

    Beside it, what is known without one: :func:`assert_invariants`, and that garbage behind masks
    changes no bit. Ours runs in :func:`poisoned` memory, on the drawn tensors or on what
    ``relayout`` makes of them: the same values behind other strides.
    """
    t, oracle = _oracle_of_case(case)
    relayout = relayout or (lambda t: t)
    with poisoned():
        ours = run(case, relayout(t), backend)
    oracle.check(case, ours)
    assert_invariants(case, t, ours)
    if case.garbage is None:
        return
    with poisoned():
        spoilt = run(case, relayout(spoil(case, t)), backend)
    if backend in ("auto", "cpu", "eager"):
        assert_same_bits(spoilt, ours)
    else:  # kernels for GPUs take another way where garbage shows
        oracle.check(case, spoilt)


def assert_same_bits(a: dict, b: dict) -> None:
    """Equal everywhere, NaN in the same places; says which result is not."""
    assert a.keys() == b.keys()
    for name in a:
        same = (a[name] == b[name]) | (a[name].isnan() & b[name].isnan())
        assert same.all(), f"{name} differs in {(~same).sum()} of {same.numel()} places"


def assert_invariants(case: Case, t: Tensors, ours: dict[str, Tensor]) -> None:
    """What holds whatever the numbers are, in every row and key.

    Without dropout, a row's weights sum to 1, and the gradients of the values to the gradients of
    the outputs: a forward and a backward pass that weigh alike. Rows without keys, and keys that no
    row keeps, have results of exactly 0.
    """
    p, kept = _kept(case, t)
    empty, unused = ~kept.any(-1), ~_used_keys(p, kept)
    zero = {"out": empty, "grad_q": empty, "grad_k": unused, "grad_v": unused}
    for name, where in zero.items():
        assert not ours[name][where].any(), f"{case} {name}: not 0 where nothing is kept"
    if case.lse:
        assert (ours["lse"][empty] == -math.inf).all(), f"{case} lse: not -inf without keys"
    if case.weights == "full":
        assert not ours["weights"][~kept].any(), f"{case} weights: not 0 where masked"
    if case.dropout_p:
        return
    most = 8 * torch.finfo(case.dtype).eps
    if case.weights == "full":
        off = (ours["weights"].double().sum(-1) - (~empty).double()).abs()
        assert (off <= most).all(), f"{case} weights: a row sums to 1 + {off.max():.1e}"
    given = reference._sum_groups(p, t.grad_out.double() * ~empty[..., None])
    terms = reference._sum_groups(p, t.grad_out.double().abs() * ~empty[..., None]).sum(2)
    off = (ours["grad_v"].double().sum(2) - given.sum(2)).abs()
    assert (off <= most * terms).all(), (
        f"{case} grad_v: sums over the keys are off by {(off / (most / 8 * terms)).max():.1f} ulp"
    )


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What the results of a case are held to, by name."""

    truth: dict[str, Tensor]  # float64
    plain: dict[str, Tensor]  # plain PyTorch in the dtype of the case
    scales: dict[str, float]  # the magnitudes whose ulp count

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor, float]:
        return self.truth[name], self.plain[name], self.scales[name]

    def check(self, case: Case, ours: dict[str, Tensor]) -> None:
        """Raises AssertionError where a result of ours is outside the budget."""
        assert ours.keys() == self.truth.keys() == self.plain.keys()
        for name in self.truth:
            truth, peer, scale = self[name]
            assert_within_budget(ours[name], peer, truth, f"{case} {name}", scale)


def oracle(case: Case, t: Tensors) -> Oracle:
    """The truth, the peer, and how large the rounding of a right result may be."""
    truth = exact(case, t)
    of_sums, of_scores = _term_norms(case, t), _moved(case, t, truth) if case.drawn else {}
    scales = {
        n: max(
            largest(x), 0.0, *(largest(norms[n]) for norms in (of_sums, of_scores) if n in norms)
        )
        for n, x in truth.items()
    }
    return Oracle(truth, plain(case, t), scales)


@functools.lru_cache(maxsize=4)  # every backend and instruction set asks for the same one in turn
def _oracle_of_case(case: Case) -> tuple[Tensors, Oracle]:
    t = make(case)
    return t, oracle(case, t)


@contextlib.contextmanager
def poisoned():
    """Every new uninitialised tensor holds NaN: what a kernel leaves unwritten, or reads, shows."""
    memory: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _term_norms(case: Case, t: Tensors) -> dict[str, Tensor]:
    """Root-sum-square of the terms of every gradient, in float64: what its rounding grows with.

    A gradient may cancel to 0, with one key in each row or a bias that broadcasts over the keys,
    and its rounding does not. The two parts of dS = P dP - P delta are terms of their own; what
    delta_i multiplies in a sum over j is one term.
    """
    leaves: dict[str, Any] = _leaves(case, t, torch.float64)
    leaves = {n: x if x is None else x.detach() for n, x in leaves.items()}
    p, q, k, v, w, bias = _canonical(case, t, leaves)
    grad_out, grad_lse, grad_weights = _upstream(t)
    kept = reference._kept(p, bias)
    probs, _, dropped, factors = reference._probabilities(p, q, k, w, bias, kept)
    k, v = reference._per_head(p, k), reference._per_head(p, v)
    grad_probs = grad_out @ v.mT
    if grad_weights is not None:
        grad_probs = grad_probs + (
            grad_weights if case.weights == "full" else grad_weights[:, None] / case.H
        )
    grad_probs = grad_probs if factors is None else grad_probs * factors
    delta = (probs * grad_probs).sum(-1, keepdim=True)
    delta = delta if grad_lse is None else delta - grad_lse[..., None]

    direct = (probs * grad_probs).square()
    both = direct + (probs * delta).square()
    squares = {"grad_v": reference._sum_groups(p, dropped.square().mT @ grad_out.square())}
    for name in ("bias", "attn_mask"):
        if leaves[name] is not None:
            squares[f"grad_{name}"] = both.sum_to_size(leaves[name].shape)
    if w is None:
        in_rows = direct @ k.square() + (delta * (probs @ k)).square()
        squares["grad_q"] = in_rows * p.scale**2
        in_columns = both.mT @ q.square()
    else:
        tanh = torch.tanh(q[:, :, :, None] + k[:, :, None])  # [B, H, M, N, D]
        # A slope that 1 - tanh^2 has no digits of, in the dtype, is known as well as the 1 is.
        lost = 1 - tanh.to(case.dtype).square() == 0
        slope = w[:, None, None] * torch.where(lost & case.drawn, 1.0, 1 - tanh.square())

        def rows(x: Tensor) -> Tensor:
            own = torch.einsum("bhmn,bhmnd->bhmd", direct, x.square())
            return own + (delta * torch.einsum("bhmn,bhmnd->bhmd", probs, x)).square()

        squares["grad_q"] = rows(slope)
        squares["grad_w"] = rows(tanh).sum((0, 2))
        if case.drawn:  # the kernels' tanh is as right beside 0 as beside 1: see additive_attention
            squares["grad_w"] = rows(torch.ones_like(tanh)).sum((0, 2))
            squares["lse"] = w.square().sum(-1)
        in_columns = torch.einsum("bhmn,bhmnd->bhnd", both, slope.square())
    scale = p.scale**2 if w is None else 1.0
    squares["grad_k"] = reference._sum_groups(p, in_columns * scale)
    if case.score == "cosine":
        squares |= {f"grad_{n}": _square_unit(leaves[n], squares[f"grad_{n}"]) for n in ("q", "k")}
    if case.score == "gaussian":
        squares |= _square_gaussian(leaves, q, squares)
    return {name: x.sqrt() for name, x in squares.items()}


def _moved(case: Case, t: Tensors, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far one ulp in the scale, and in each key, moves the results of the dot product, in ulp.

    A large logit has a large rounding, which softmax makes that of the result; a peer of few
    numbers may have none by luck. That a row is weighed alike throughout is for invariants to see.
    """
    if case.score != "dot":
        return {}
    eps = torch.finfo(case.dtype).eps
    rng = torch.Generator(t.k.device).manual_seed(case.seed)
    sign = torch.randint(0, 2, t.k.shape, generator=rng, device=t.k.device) * 2 - 1
    q, k = t.q.double() * (1 + eps), t.k.double() * (1 + eps * sign)
    moved = exact(case, _with(t, q=q, k=k))
    return {name: (moved[name] - x) / eps for name, x in truth.items()}


def _square_unit(x: Tensor, squares: Tensor) -> Tensor:
    """Squared terms of the gradient of x, from those of x / |x|."""
    unit = _unit(x).square()
    return (squares + unit * (unit * squares).sum(-1, keepdim=True)) / x.square().sum(-1, True)


def _square_gaussian(leaves: dict[str, Any], features: Tensor, squares) -> dict[str, Tensor]:
    """Squared terms of what the gaussian's features are made of: see :func:`_features`."""
    q, k, h = (leaves[name] for name in ("q", "k", "bandwidth"))
    of_q, of_k = squares["grad_q"], squares["grad_k"]
    of_h = ((2 * features / h).square() * of_q).sum(-1, keepdim=True).sum_to_size(h.shape)
    return {
        "lse": (q.square().sum(-1) / (2 * h.square()).squeeze(-1)).square(),
        "grad_q": (of_q[..., :-2] + 4 * q.square() * of_q[..., -1:]) / h**4,
        "grad_k": of_k[..., :-2] + k.square() * of_k[..., -2:-1],
        "grad_bandwidth": of_h,
    }


# ---- the grid ----

_f16, _bf16 = torch.float16, torch.bfloat16


def _grid() -> list[Case]:
    """Every size against every tile, every feature alone, and features together."""
    sizes = [Case(f"M{m}-N{n}", M=m, N=n, lse=True) for m, n in
             [(1, 1), (15, 63), (63, 15), (65, 127), (127, 65), (1, 1000), (1000, 1), (130, 300),
              (4, 257)]]  # fmt: skip
    sizes.append(Case("M1000-N1000", B=1, H=1, Hkv=1, M=1000, N=1000, lse=True))
    dims = [Case(f"D{d}-E{e}", D=d, E=e) for d, e in
            [(1, 1), (3, 5), (16, 33), (64, 64), (65, 8), (8, 127), (256, 40)]]  # fmt: skip
    zeros = [
        _with(Case(f"{name}0", bias="mn", weights="full", lse=True), **{name: 0})
        for name in ("M", "N", "D", "E", "B")
    ]
    zeros.append(Case("H0", H=0, Hkv=0, bias="mn", weights="full", lse=True))
    heads = [
        Case("gqa", H=6, Hkv=2, M=65),
        Case("mqa", H=3, Hkv=1, N=70),
        Case("gqa-decode", H=8, Hkv=2, M=1, N=300),
    ]
    layouts = [Case(f"layout-{x}", layout=x, M=33, N=65, D=20, weights="full", causal="top_left")
               for x in ("bmhd", "sliced", "expanded")]  # fmt: skip
    masks = [
        Case("causal", causal="top_left", M=130, N=130),
        Case("causal-wide", causal="top_left", M=40, N=100, lse=True),
        Case("causal-tall", causal="top_left", M=100, N=40, lse=True),
        Case("bottom-right", causal="bottom_right", M=40, N=100),
        Case(
            "bottom-right-tall", causal="bottom_right", M=100, N=40, lse=True
        ),  # the first 60 rows are empty
        Case("window", window=(5, 3), M=130, N=130),
        Case("window-causal", causal="bottom_right", window=(20, -1), M=70, N=150),
        Case("window-far", window=(2, 2), M=130, N=20, lse=True),
        Case("kv-len", kv_len="batch", N=150, lse=True, weights="mean"),
        Case("kv-len-rows", kv_len="rows", M=70, N=150, lse=True),
        *[Case(f"keep-{x}", keep=x, M=65, N=70) for x in ("bhmn", "mn", "bn", "h", "bm", "")],
        Case("keep-sparse", keep="bhmn", keep_rate=0.01, M=130, N=200, lse=True, weights="full"),
        Case("keep-empty-rows", keep="bmn", empty_rows=True, lse=True, weights="mean"),
        Case(
            "all-masks",
            causal="bottom_right",
            window=(60, -1),
            kv_len="batch",
            keep="hn",
            bias="bmn",
            M=65,
            N=130,
        ),
    ]
    biases = [
        *[
            Case(f"bias-{x}", bias=x, M=40, N=70)
            for x in ("bhmn", "hmn", "mn", "bn", "n", "bhm", "h", "")
        ],
        Case(
            "bias-inf",
            bias="bhmn",
            bias_inf=True,
            empty_rows=True,
            M=40,
            N=70,
            lse=True,
            weights="full",
        ),
        Case("bias-inf-n", bias="bn", bias_inf=True, N=200),
        Case("bias-no-grad", bias="mn", bias_grad=False),
        Case("bias-large", bias="hmn", M=100, N=300),
        Case("bias-gqa", bias="hmn", H=4, Hkv=2, M=33, N=70),
    ]
    weights = [
        Case(f"weights-{x}", weights=x, H=3, Hkv=3, M=65, N=130, causal="top_left")
        for x in ("full", "mean")
    ]
    dropout = [
        Case("dropout", dropout_p=0.3, M=65, N=130, weights="full"),
        Case("dropout-mean", dropout_p=0.5, M=33, N=67, weights="mean", keep="bhmn", lse=True),
        Case("dropout-all", dropout_p=1.0),
        Case("dropout-decode", dropout_p=0.3, M=1, N=300),
    ]
    large = [Case("large-logits", magnitude=60.0, M=40, N=70, lse=True)]
    # Whole tiles, which no mask code touches; as large as the logits of the dot product are named.
    plain = [Case(f"plain-N{n}", B=1, M=64, N=n, weights="full", lse=True) for n in (64, 128)]
    logits = [
        _with(c, name=f"{c.name}-logits-1e{power}", magnitude=10 ** (power / 2))
        for c in plain
        for power in (2, 4, 6, 10)
    ]
    both = [*sizes, *dims, *zeros, *layouts, *masks, *biases, *weights, *dropout, *heads, *large]
    both += plain
    # Additive sizes are cut where plain PyTorch's M * N * D, not ours, would take the time.
    extremes = [
        Case("huge", magnitude=1e4, M=40, N=70),
        Case("wide", magnitude=30.0, M=40, N=70),
        Case("opposite-60", opposite=60.0, M=40, N=70),
        Case("opposite-1e4", opposite=1e4, M=20, N=70),
        Case("opposite-25", opposite=25.0, magnitude=0.3, M=20, N=70, D=65),
    ]
    cases = [
        *both,
        *logits,
        *(_with(c, score="additive") for c in both),
        *(_with(c, score="additive") for c in extremes),
    ]
    half = {
        *("M65-N127", "M1-N1000", "D64-E64", "gqa", "layout-sliced", "all-masks", "bias-inf"),
        *("bias-hmn", "weights-mean", "dropout", "large-logits", "huge", "opposite-60"),
        "plain-N128-logits-1e4",
    }
    return cases + [_with(c, dtype=d) for c in cases if c.name in half for d in (_f16, _bf16)]


GRID = _grid()
