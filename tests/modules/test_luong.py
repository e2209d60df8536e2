"""LuongAttention against the formulas of the paper, in float64."""

import pytest
import torch
from helpers import assert_module_close, assert_tools_keep
from plain import plain_scores

from fastattn import LuongAttention, Mask

B, M, N, DQ, DK, DV = 3, 5, 11, 8, 8, 6
METHODS = ("dot", "general", "concat")


@pytest.fixture
def tensors():
    return [torch.randn(s) for s in ((B, M, DQ), (B, N, DK), (B, N, DV))]


def module_for(method, **options):
    hidden = 7 if method == "concat" else None
    return LuongAttention(DQ, DK, method, hidden_dim=hidden, value_dim=DV, **options)


def plain(module, queries, keys, values, keep=None):
    """(attentional vectors, weights); rows without keys are 0."""
    scores = plain_scores(module, queries, keys)
    if keep is not None:
        has_key = keep.any(-1, keepdim=True)
        scores = scores.masked_fill(~keep & has_key, -torch.inf)
        weights = scores.softmax(-1) * has_key
    else:
        weights = scores.softmax(-1)
    context = weights @ values
    return torch.tanh(torch.cat([context, queries], -1) @ module.W_c.weight.T), weights


@pytest.mark.parametrize("method", METHODS)
class TestLuong:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_formula(self, method, dtype, tensors):
        module = module_for(method).to(dtype)
        assert_module_close(module, plain, [x.to(dtype) for x in tensors], need_weights=True)

    def test_autocast(self, method, tensors):
        module = module_for(method)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(*tensors)
        assert out.dtype == torch.bfloat16
        torch.autograd.grad(out.sum(), list(module.parameters()))

    def test_masks(self, method, tensors):
        module = module_for(method)
        lens = torch.tensor([11, 0, 4])
        below = torch.rand(B, M, N) < 0.7
        keep = below & (torch.arange(N) < lens[:, None, None])
        keep = keep & torch.ones(M, N, dtype=torch.bool).tril(3)
        options = dict(valid_lens=lens, attn_mask=below, mask=Mask(window=(-1, 3)))
        assert_module_close(
            module, lambda *x: plain(*x, keep), tensors, need_weights=True, **options
        )
        inside = module(*tensors, **options)
        both = module(*tensors, mask=Mask(keep=keep))
        torch.testing.assert_close(both, inside)
        added = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
        torch.testing.assert_close(module(*tensors, attn_mask=added), inside)

    def test_garbage_behind_a_mask(self, method, tensors):
        module = module_for(method, attentional=False)
        queries, keys, values = tensors
        lens = torch.tensor([11, 3, 4])
        expected = module(queries, keys, values, lens)
        keys[1, 3:] = values[1, 3:] = torch.nan
        torch.testing.assert_close(module(queries, keys, values, lens), expected)

    def test_one_step_with_a_cache(self, method, tensors):
        module = module_for(method)
        queries, keys, values = tensors
        lens = torch.tensor([11, 2, 7])
        expected = module(queries, keys, values, lens, need_weights=True)
        cache = module.project_keys(keys)
        steps = [
            module(q, None, values, lens, need_weights=True, cache=cache) for q in queries.unbind(1)
        ]
        assert steps[0][0].shape == (B, DQ)
        assert steps[0][1].shape == (B, N)
        found = tuple(torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        torch.testing.assert_close(found, expected)

    def test_values_default_to_keys(self, method):
        module = LuongAttention(DQ, method=method, attentional=False)
        queries, keys = torch.randn(B, M, DQ), torch.randn(B, N, DQ)
        assert module.W_c is None
        torch.testing.assert_close(module(queries, keys), module(queries, keys, keys))
        torch.testing.assert_close(
            module(queries, None, keys, cache=module.project_keys(keys)), module(queries, keys)
        )

    @pytest.mark.slow
    def test_tools(self, method, tensors):
        module = module_for(method, dropout=0.5)
        assert (module(*tensors, need_weights=True)[1] == 0).any()
        module.eval()
        assert method in repr(module)
        assert_tools_keep(module, module_for(method).eval(), *tensors)


def test_errors(tensors):
    queries, keys, values = tensors
    with pytest.raises(ValueError, match="one of dot, general, concat, got 'cosine'"):
        LuongAttention(DQ, DK, "cosine")
    with pytest.raises(ValueError, match="equal, got 8, 9"):
        LuongAttention(8, 9, "dot")
    with pytest.raises(ValueError, match="hidden_dim"):
        LuongAttention(8, 8, "general", hidden_dim=4)
    with pytest.raises(ValueError, match="dropout"):
        LuongAttention(8, dropout=2.0)
    module = module_for("dot")
    with pytest.raises(ValueError, match="at least one"):
        module(queries, None)
    with pytest.raises(ValueError, match="cache=project_keys"):
        module(queries, None, values)
    with pytest.raises(ValueError, match=r"cache: expected \[3, 11, 8\]"):
        module(queries, None, values, cache=keys[:, :4])
    with pytest.raises(ValueError, match="keys: expected 3 dims"):
        module(queries, keys[0], values)
    with pytest.raises(ValueError, match=r"queries: expected 3 dims, .*, got \[8\]"):
        module_for("general")(queries[0, 0], keys, values)
    with pytest.raises(ValueError, match="keys: expected 8 features, got"):
        module(queries, keys[..., :4], values)
    with pytest.raises(ValueError, match=r"queries: expected 8 features, got \[3, 5, 4\]"):
        module_for("dot")(queries[..., :4], keys, values)
    with pytest.raises(ValueError, match="same length"):
        module(queries, keys[:, :4], values)
    with pytest.raises(TypeError, match="dtype of query"):
        module(queries, keys.double(), values)
    with pytest.raises(TypeError, match=r"mask: expected a fastattn\.Mask, got Tensor"):
        LuongAttention(8)(queries, queries, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="queries: expected a Tensor, got list"):
        LuongAttention(8)([1.0], queries)
    lens = torch.tensor([N + 1, 0, 4])
    with pytest.raises(ValueError, match=r"^valid_lens: expected values"):
        module(*tensors, lens)
    with pytest.raises(ValueError, match=r"^mask\.kv_len: expected values"):
        module(*tensors, mask=Mask(kv_len=lens))


def test_one_query_for_all_samples():
    module, queries, keys = LuongAttention(8), torch.randn(1, 3, 8), torch.randn(2, 5, 8)
    expected = module(queries.expand(2, -1, -1), keys)
    torch.testing.assert_close(module(queries, keys), expected)
