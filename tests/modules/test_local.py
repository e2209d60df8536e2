"""LocalAttention against the formulas of the paper over all keys, in float64."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from helpers import assert_module_close, assert_tools_keep
from plain import plain_scores

from fastattn import LocalAttention
from fastattn.testing import assert_within_budget

B, M, N, DQ, DV, D = 3, 7, 23, 8, 6, 3
METHODS = ("dot", "general", "concat")


@dataclasses.dataclass
class Plain:
    """All M x N weights, by the definition."""

    lens: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    step: int = 0

    def __call__(self, module, queries, keys, values):
        M, N = queries.shape[1], keys.shape[1]
        j = torch.arange(N)
        lens = torch.full((B,), N) if self.lens is None else self.lens
        lens = (lens[:, None] if lens.dim() == 1 else lens)[..., None]  # [B, 1 | M, 1]
        if module.alignment == "monotonic":
            p = torch.arange(M)[:, None] + self.step
            gauss = 1.0
        else:
            hidden = torch.tanh(queries @ module.W_p.weight.T) @ module.v_p.weight.T
            p = lens * torch.sigmoid(hidden)
            gauss = torch.exp(-((j - p) ** 2) / (2 * (D / 2) ** 2))
        keep = ((j - p).abs() <= D) & (j < lens)
        keep = keep if self.keep is None else keep & self.keep
        has_key = keep.any(-1, keepdim=True)
        scores = plain_scores(module, queries, keys).masked_fill(~keep & has_key, -torch.inf)
        weights = scores.softmax(-1) * has_key * gauss
        combined = torch.cat([weights @ values, queries], -1)
        return torch.tanh(combined @ module.W_c.weight.T), weights


@pytest.fixture
def tensors():
    return [torch.randn(s) for s in ((B, M, DQ), (B, N, DQ), (B, N, DV))]


@pytest.fixture(params=["monotonic", "predictive"])
def alignment(request):
    return request.param


def module_for(alignment, method="general", **options):
    return LocalAttention(DQ, method=method, window=D, alignment=alignment, value_dim=DV, **options)


@pytest.mark.parametrize("method", METHODS)
def test_formula(alignment, method, tensors):
    assert_module_close(module_for(alignment, method), Plain(), tensors, need_weights=True)


@pytest.mark.parametrize("size", [0, 1, 4, 2 * D + 1, 2 * D + 2])
def test_few_keys(alignment, size):
    shapes = ((B, M, DQ), (B, size, DQ), (B, size, DV))
    tensors = [torch.randn(s) for s in shapes]
    assert_module_close(module_for(alignment), Plain(), tensors, need_weights=True)


@pytest.mark.parametrize("per_query", [False, True])
def test_masks(alignment, per_query, tensors):
    """Lengths, including 0; a boolean mask; the same mask as floats."""
    lens = torch.tensor([N, 0, 9])
    lens = torch.randint(0, N + 1, (B, M)) if per_query else lens
    keep = torch.rand(B, M, N) < 0.6
    module, plain = module_for(alignment), Plain(lens, keep)
    options = dict(valid_lens=lens, attn_mask=keep)
    assert_module_close(module, plain, tensors, need_weights=True, **options)
    added = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(
        module(*tensors, lens, attn_mask=added), module(*tensors, lens, attn_mask=keep)
    )
    keep = torch.rand(M, 1) < 0.5
    assert_module_close(module, Plain(None, keep), tensors, need_weights=True, attn_mask=keep)


@pytest.mark.parametrize("step", [0, 2, 9, N - 2, N + D, N + 50])
def test_later_steps(step, tensors):
    """Also steps beyond the keys, for a target longer than its source."""
    module = module_for("monotonic")
    for keep in (torch.rand(M, N) < 0.6, torch.rand(M, 1) < 0.6):
        options = dict(step=step, attn_mask=keep, need_weights=True)
        assert_module_close(module, Plain(None, keep, step), tensors, **options)


def test_float_mask_has_a_gradient(alignment, tensors):
    module = module_for(alignment)
    bias = torch.randn(B, 1, N, requires_grad=True)
    (grad,) = torch.autograd.grad(module(*tensors, attn_mask=bias).sum(), bias)
    assert grad.abs().sum() > 0
    assert grad.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_step_by_step_with_a_cache(alignment, method, tensors):
    module = module_for(alignment, method)
    queries, keys, values = tensors
    lens = torch.tensor([N, 5, 14])
    expected = module(queries, keys, values, lens, need_weights=True)
    cache = module.project_keys(keys)
    steps = [
        module(q, None, values, lens, need_weights=True, cache=cache, step=i)
        for i, q in enumerate(queries.unbind(1))
    ]
    found = tuple(torch.stack(parts, 1) for parts in zip(*steps, strict=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["valid_lens", "attn_mask"])
def test_garbage_behind_a_mask(alignment, kind, tensors):
    """It reaches neither output nor gradients: those of the Gaussian would be 0 * NaN."""
    module = module_for(alignment)
    lens = torch.tensor([N, 6, 3])
    behind = torch.arange(N) >= lens[:, None, None]
    added = torch.zeros(behind.shape).masked_fill(behind, -torch.inf)
    options = {kind: {"valid_lens": lens, "attn_mask": added}[kind]}
    clean, spoilt = tensors, [t.clone() for t in tensors]
    for x in spoilt[1:]:
        x[1, 6:] = torch.nan
        x[2, 3:] = torch.inf
    results = []
    for inputs in (clean, spoilt):
        leaves = [x.requires_grad_() for x in inputs]
        out = module(*leaves, **options)
        results.append((out, torch.autograd.grad(out.sum(), [*leaves, *module.parameters()])))
    torch.testing.assert_close(results[1], results[0])


def test_nan_reaches_its_row(alignment, tensors):
    module = module_for(alignment, attentional=False)
    tensors[0][1, 2] = torch.nan
    rows = module(*tensors).isnan().any(-1)
    assert rows.sum() == 1
    assert rows[1, 2]


def test_only_the_window_is_read(alignment, tensors):
    """Garbage outside the window changes nothing, without any mask."""
    module = module_for(alignment)
    queries, keys, values = tensors
    one = queries[:, :1]
    expected, weights = module(one, keys, values, need_weights=True)
    outside = (weights == 0)[:, 0, :, None]
    assert outside.sum() >= B * (N - 2 * D - 1)
    spoilt = [x.masked_fill(outside, torch.nan) for x in (keys, values)]
    torch.testing.assert_close(module(one, *spoilt), expected)


def test_the_position_in_a_long_memory_is_exact():
    """Keys of zeros give equal weights, so that what is left is the error of the Gaussian."""
    module = module_for("predictive")
    tensors = torch.randn(B, 4, DQ), torch.zeros(B, 20_000, DQ), torch.zeros(B, 20_000, DV)
    weights = module(*tensors, need_weights=True)[1]
    exact = copy.deepcopy(module).double()(*(x.double() for x in tensors), need_weights=True)[1]
    # No plain PyTorch in float32 to compare with: it is wrong by a thousandth of a key.
    assert_within_budget(weights, exact, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_finds_the_same_window(alignment, dtype, autocast):
    """Also among 2001 keys."""
    module = module_for(alignment).to(dtype)
    tensors = [torch.randn(s).to(dtype) for s in ((B, 4, DQ), (B, 2001, DQ), (B, 2001, DV))]
    exact = copy.deepcopy(module).double()(*(x.double() for x in tensors), need_weights=True)[1]
    if autocast:
        module, tensors = module.float(), [x.float() for x in tensors]
    with torch.autocast("cpu", dtype, enabled=autocast):
        out, weights = module(*tensors, need_weights=True)
    assert out.dtype == weights.dtype == dtype
    assert torch.equal(weights > 0, exact.to(dtype) > 0)


@pytest.mark.slow
def test_tools(alignment, tensors):
    module = module_for(alignment, dropout=0.5)
    assert (module(*tensors) != module(*tensors)).any()
    module.eval()
    assert alignment in repr(module)
    assert_tools_keep(module, module_for(alignment).eval(), *tensors)


def test_meta_tensors(alignment, tensors):
    queries, keys, values = (x.to("meta") for x in tensors)
    out, weights = module_for(alignment).to("meta")(queries, keys, values, need_weights=True)
    assert out.shape == (B, M, DQ)
    assert weights.shape == (B, M, N)


def test_numbers_of_numpy(tensors):
    module = module_for("monotonic")
    assert torch.equal(module(*tensors, step=np.int64(2)), module(*tensors, step=2))
    assert type(LocalAttention(DQ, window=np.int64(D)).window) is int


def test_errors(tensors):
    with pytest.raises(ValueError, match="'predictive' or 'monotonic', got 'global'"):
        LocalAttention(DQ, alignment="global")
    with pytest.raises(ValueError, match="window"):
        LocalAttention(DQ, window=0)
    for alignment in ("monotonic", "predictive"):
        with pytest.raises(ValueError, match="step"):
            module_for(alignment)(*tensors, step=-1)
    module = module_for("monotonic")
    with pytest.raises(ValueError, match="valid_lens"):
        module(*tensors, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"values in \[0, 23\]"):
        module(*tensors, torch.tensor([1, 2, 24]))
    with pytest.raises(ValueError, match="attn_mask"):
        module(*tensors, attn_mask=torch.ones(M, 2, dtype=torch.bool))


@pytest.mark.parametrize("alignment", ["predictive", "monotonic"])
def test_keys_and_values_that_do_not_fit(tensors, alignment):
    """Keys and values are gathered or cut before the function that would check them."""
    queries, keys, values = tensors
    module = module_for(alignment)
    for less in (keys[:1], keys[:-1]):
        with pytest.raises(ValueError, match="keys: expected the batch of queries"):
            module(queries, less, values)
    with pytest.raises(ValueError, match="values: expected the batch of queries"):
        module(queries, keys, values[:1])
    with pytest.raises(ValueError, match=rf"keys: expected 8 features, got \[{B}, {N}, 5\]"):
        module(queries, keys[..., :5], values)
    with pytest.raises(ValueError, match="keys and values: expected the same length"):
        module(queries, keys, values[:, :5])
    with pytest.raises(ValueError, match="values: expected 3 dims"):
        module(queries, keys, values[0])
