"""CosineAttention and NadarayaWatson against their formulas, in float64."""

import numpy as np
import pytest
import torch
from helpers import assert_module_close, assert_tools_keep

import fastattn
from fastattn import CosineAttention, Mask, NadarayaWatson

B, M, N, D, E = 3, 5, 11, 4, 6


@pytest.fixture
def tensors():
    return [torch.randn(s) for s in ((B, M, D), (B, N, D), (B, N, E))]


def attend(scores, values, keep=None):
    if keep is None:
        weights = scores.softmax(-1)
    else:
        has_key = keep.any(-1, keepdim=True)
        weights = scores.masked_fill(~keep & has_key, -torch.inf).softmax(-1) * has_key
    return weights @ values, weights


def cosine(module, queries, keys, values, keep=None):
    norms = queries.norm(dim=-1)[:, :, None] * keys.norm(dim=-1)[:, None]
    return attend(module.scale * (queries @ keys.mT) / norms, values, keep)


def gaussian(module, queries, keys, values, keep=None):
    u = (queries[:, :, None] - keys[:, None]) / module.bandwidth.to(queries.dtype)
    return attend(-0.5 * u.square().sum(-1), values, keep)


MODULES = [
    pytest.param(lambda: CosineAttention(3.0, learnable=True), cosine, id="cosine"),
    pytest.param(lambda: NadarayaWatson(2.0, learnable=True), gaussian, id="gaussian"),
    pytest.param(
        lambda: NadarayaWatson([1.5, 2.0, 3.0, 2.5], learnable=True), gaussian, id="gaussian-each"
    ),
]


@pytest.mark.parametrize(("make", "formula"), MODULES)
class TestBoth:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_formula(self, make, formula, dtype, tensors):
        tensors = [x.to(dtype) for x in tensors]
        module = make().to(dtype)
        assert_module_close(module, formula, tensors, need_weights=True)

    def test_masks(self, make, formula, tensors):
        lens = torch.tensor([N, 0, 4])
        pairs = torch.rand(B, M, N) < 0.7
        keep = pairs & (torch.arange(N) < lens[:, None, None])
        keep = keep & torch.ones(M, N, dtype=torch.bool).tril(2)
        options = dict(valid_lens=lens, attn_mask=pairs, mask=Mask(window=(-1, 2)))
        module = make()
        assert_module_close(
            module, lambda *a: formula(*a, keep), tensors, need_weights=True, **options
        )
        out, weights = module(*tensors, need_weights=True, **options)
        assert not out[1].any()
        assert not weights[1].any()
        torch.testing.assert_close(module(*tensors, mask=Mask(keep=keep)), out)

    def test_garbage_behind_a_mask(self, make, formula, tensors):
        module, lens = make(), torch.tensor([N, 3, 4])
        expected = module(*tensors, lens)
        for x in tensors[1:]:
            x[1, 3:], x[2, 4:] = torch.nan, torch.inf
        torch.testing.assert_close(module(*tensors, lens), expected)

    def test_garbage_that_nothing_uses_has_gradient_0(self, make, formula, tensors):
        module, lens = make(), torch.tensor([[N] * M, [3] * M, [4] * M])
        lens[1, 2] = 0

        def run(value):
            queries, keys, values = (x.clone() for x in tensors)
            queries[1, 2] = keys[1, 3:] = values[1, 3:] = value
            leaves = [x.requires_grad_() for x in (queries, keys, values)]
            out = module(*leaves, lens)
            return out, *torch.autograd.grad(out.sum(), [*leaves, *module.parameters()])

        for garbage in (torch.nan, torch.inf, 3e38):
            for found, expected in zip(run(garbage), run(0.0), strict=True):
                torch.testing.assert_close(found, expected)

    def test_nan_in_use_reaches_the_parameter(self, make, formula, tensors):
        module, (queries, keys, values) = make(), tensors
        queries[1, 2] = torch.nan
        grads = torch.autograd.grad(module(queries, keys, values).sum(), module.parameters())
        assert all(g.isnan().all() for g in grads)

    @pytest.mark.slow
    def test_tools(self, make, formula, tensors):
        module = make()
        module.dropout = 0.5
        assert (module(*tensors, need_weights=True)[1] == 0).any()
        module.eval()
        assert_tools_keep(module, make(), *tensors)


class TestCosine:
    def test_same_as_the_score(self, tensors):
        found = CosineAttention(2.0)(*tensors)
        q, k, v = (x[:, None] for x in tensors)
        expected = fastattn.attention(q, k, v, score="cosine", scale=2.0)[:, 0]
        torch.testing.assert_close(found, expected)

    def test_zero_vectors(self, tensors):
        queries, keys, values = (x.requires_grad_() for x in tensors)
        out = CosineAttention()(queries * 0, keys, values)
        torch.testing.assert_close(out, values.mean(1, keepdim=True).expand(-1, M, -1))
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [queries, keys]))

    def test_one_step_and_values(self, tensors):
        module, (queries, keys, values) = CosineAttention(2.0), tensors
        torch.testing.assert_close(module(queries[:, 1], keys, values),
                                   module(queries, keys, values)[:, 1])  # fmt: skip
        torch.testing.assert_close(module(queries, keys), module(queries, keys, keys))
        assert not module.scale.requires_grad
        with pytest.raises(ValueError, match=r"keys: expected \d+ features, got"):
            module(queries, values, values)
        with pytest.raises(ValueError, match="dropout"):
            CosineAttention(dropout=-1)
        with pytest.raises(ValueError, match="scale: expected -1e30 to 1e30, got 1e"):
            CosineAttention(scale=1e300)

    def test_repr(self):
        assert (
            repr(CosineAttention(2.0, dropout=0.25)) == "CosineAttention(scale=2.0, dropout=0.25)"
        )
        assert "meta" in repr(CosineAttention(device="meta"))


class TestNadarayaWatson:
    def test_same_as_the_score(self, tensors):
        q, k, v = (x[:, None] for x in tensors)
        expected = fastattn.attention(q, k, v, score="gaussian", bandwidth=0.3)[:, 0]
        torch.testing.assert_close(NadarayaWatson(0.3)(*tensors), expected)

    def test_shapes(self):
        """(M,), (M, D) and (B, M, D); values with and without the last dim."""
        x, points, y = torch.rand(20), torch.rand(7), torch.rand(20)
        model = NadarayaWatson(0.2)
        out, weights = model(points, x, y, need_weights=True)
        assert out.shape == (7,)
        assert weights.shape == (7, 20)
        torch.testing.assert_close(weights @ y, out)
        column = model(points[:, None], x[:, None], y[:, None])
        torch.testing.assert_close(column, out[:, None])
        torch.testing.assert_close(model(points[:, None], x[:, None], y), out)
        batch = [t.expand(2, -1)[..., None] for t in (points, x, y)]
        torch.testing.assert_close(model(*batch), column.expand(2, -1, -1))
        torch.testing.assert_close(model(*batch[:2], batch[2][..., 0]), out.expand(2, -1))
        lens = torch.tensor([5, 20])
        torch.testing.assert_close(
            model(*batch, lens)[0], model(points[:, None], x[:5, None], y[:5, None])
        )

    @pytest.mark.parametrize("shape", [(30,), (30, 2), (2, 30, 2)])
    def test_leave_one_out(self, shape):
        x = torch.rand(shape)
        y = torch.rand(shape if len(shape) == 1 else shape[:-1])
        model = NadarayaWatson(0.3)
        found = model.leave_one_out(x, y)
        assert found.shape == y.shape
        dim = 0 if len(shape) == 1 else len(shape) - 2
        for j in (0, 17):
            rest = torch.tensor([i for i in range(30) if i != j])
            others = x.index_select(dim, rest), y.index_select(dim, rest)
            expected = model(x.narrow(dim, j, 1), *others)
            torch.testing.assert_close(found.narrow(dim, j, 1), expected)

    def test_learning_the_bandwidth(self):
        """From far away on both sides to nearly the best of a fine grid."""
        x = torch.sort(torch.rand(60) * 5).values
        y = 2 * torch.sin(x) + x**0.8 + torch.randn(60) * 0.3

        def loss(model):
            return (model.leave_one_out(x, y) - y).square().mean()

        best = min(loss(NadarayaWatson(h)).item() for h in torch.logspace(-1.5, 0.5, 50).tolist())
        for start in (1.5, 0.08):
            model = NadarayaWatson(start, learnable=True)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            for _ in range(150):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
            assert loss(model).item() < best * 1.01

    @pytest.mark.parametrize("bandwidth", [1e-4, [1e-4, 2e-4]], ids=str)
    def test_far_from_zero_and_narrow(self, bandwidth):
        """Points beside others, in a range 1e4 times the bandwidth, and years: digits stay."""
        keys = torch.rand(2, 40, 2) + torch.tensor([0.0, 7.0])[:, None, None]
        queries = keys[:, ::2] + 1e-4 * torch.randn(2, 20, 2)
        model = NadarayaWatson(bandwidth, learnable=True)
        tensors = [queries, keys, torch.rand(2, 40, 1)]
        assert_module_close(model, lambda *a: gaussian(*a)[0], tensors)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bandwidth", [1e-3, 700.0, [0.03, 500.0]], ids=str)
    def test_half_types_keep_the_bandwidth(self, bandwidth, dtype):
        exact = NadarayaWatson(bandwidth)
        expected = torch.tensor(bandwidth)
        for module in (
            NadarayaWatson(bandwidth, dtype=dtype),
            NadarayaWatson(bandwidth).to(dtype),
            torch.nn.Sequential(NadarayaWatson(bandwidth)).to("cpu", dtype)[0],
        ):
            torch.testing.assert_close(module.bandwidth, expected)
            module.load_state_dict(exact.state_dict())
            exact.load_state_dict(module.state_dict())
        torch.testing.assert_close(exact.double().bandwidth, expected.double(), rtol=1e-5, atol=0)
        assert exact.to(dtype).log_bandwidth.dtype == torch.float32

    def test_meta_tensors(self, tensors):
        model = NadarayaWatson([1.0] * D, learnable=True, device="meta")
        assert model(*(x.to("meta") for x in tensors)).shape == (B, M, E)
        assert "meta" in repr(model)
        model = model.to_empty(device="cpu")
        model.load_state_dict(NadarayaWatson([0.5] * D).state_dict())
        torch.testing.assert_close(model.bandwidth, torch.full((D,), 0.5))

    def test_errors(self, tensors):
        for bad in (0.0, -1.0, [1.0, 0.0], [[1.0]], [], float("nan")):
            with pytest.raises(ValueError, match="bandwidth: expected a positive number"):
                NadarayaWatson(bad)
        with pytest.raises(ValueError, match="bandwidth: expected finite numbers to learn"):
            NadarayaWatson([1.0, float("inf")], learnable=True)
        for bad in (True, np.True_):
            with pytest.raises(TypeError, match=r"bandwidth: expected a number.* got bool"):
                NadarayaWatson(bad)
        for bad in ("a", None, [1.0, None], 1j, torch.tensor(1 + 1j), torch.tensor(True)):
            with pytest.raises(TypeError, match=r"bandwidth: expected a number, or one for each"):
                NadarayaWatson(bad)
        with pytest.raises(ValueError, match="3 features"):
            NadarayaWatson([1.0, 2.0, 3.0])(*tensors)
        with pytest.raises(ValueError, match=r"queries: .*like keys"):
            NadarayaWatson()(torch.rand(5), torch.rand(6, 1), torch.rand(6))
        with pytest.raises(ValueError, match="same length"):
            NadarayaWatson()(torch.rand(5), torch.rand(6), torch.rand(7))
        for name, bad in (("queries", [1.0]), ("keys", None), ("values", 1.0)):
            given = dict(zip(("queries", "keys", "values"), tensors, strict=True)) | {name: bad}
            with pytest.raises(TypeError, match=f"{name}: expected a Tensor, got"):
                NadarayaWatson()(**given)
        with pytest.raises(TypeError, match="y: expected a Tensor, got list"):
            NadarayaWatson().leave_one_out(tensors[0], [1.0])
        assert "bandwidth=0.5, dropout=0.25" in repr(NadarayaWatson(0.5, dropout=0.25))
