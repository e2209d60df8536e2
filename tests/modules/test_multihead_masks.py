"""Masks of MultiheadAttention: all kinds and pairs, empty rows, garbage, the causal hint."""

import copy
import itertools
import math

import pytest
import torch
from helpers import assert_close
from torch import nn

from fastattn import MultiheadAttention

B, H, M, N, E = 2, 3, 5, 7, 12
INF = math.inf


@pytest.fixture
def pair():
    torch.manual_seed(0)
    peer = nn.MultiheadAttention(E, H, batch_first=True)
    nn.init.normal_(peer.in_proj_bias)
    nn.init.normal_(peer.out_proj.bias)
    ours = MultiheadAttention(E, H, batch_first=True)
    ours.load_state_dict(peer.state_dict())
    return ours, peer


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, M, E, generator=g), torch.randn(B, N, E, generator=g)


def pair_masks() -> dict:
    g = torch.Generator().manual_seed(2)
    drop = torch.rand(B * H, M, N, generator=g) < 0.4
    drop[..., 1] = False
    bias = torch.randn(B * H, M, N, generator=g).masked_fill(drop, -INF)
    return {
        "none": None,
        "bool2": drop[0],
        "bool3": drop,
        "float2": bias[0],
        "float3": bias,
        "expanded": bias[:1].expand(B * H, M, N),
        "causal": nn.Transformer.generate_square_subsequent_mask(N)[:M],
    }


def paddings() -> dict:
    drop = torch.arange(N) >= torch.tensor([N, 4])[:, None]
    return {
        "none": None,
        "bool": drop,
        "zero_inf": torch.zeros(B, N).masked_fill(drop, -INF),
        "float": torch.linspace(-2, 2, B * N).view(B, N).masked_fill(drop, -INF),
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("pairs", "padding"), list(itertools.product(pair_masks(), paddings())))
def test_every_combination(pair, tensors, pairs, padding, need_weights, grad):
    results, returned = [], []
    for module in (*pair, copy.deepcopy(pair[1]).double()):
        dtype = module.in_proj_weight.dtype
        query, key = (t.to(dtype).clone().requires_grad_() for t in tensors)
        masks = [pair_masks()[pairs], paddings()[padding]]
        masks = [m.detach().clone() if m is not None else None for m in masks]
        masks = [m.to(dtype) if m is not None and m.is_floating_point() else m for m in masks]
        floats = [m for m in masks if m is not None and m.is_floating_point()] if grad else []
        for m in floats:
            m.requires_grad_()
        out, weights = module(
            query,
            key,
            key,
            attn_mask=masks[0],
            key_padding_mask=masks[1],
            need_weights=need_weights,
        )
        loss = out.square().sum() + (weights.square().sum() if need_weights else 0)
        results.append([out, *torch.autograd.grad(loss, [query, key, *floats])])
        returned.append([out, *([weights] if need_weights else [])])
    assert_close(*returned)
    for ours, theirs in zip(*results[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class TestSmall:
    """Masks keep their small shapes."""

    def test_two_booleans_broadcast(self, pair, tensors, calls):
        query, key = tensors
        pair[0](query, key, key, paddings()["bool"], attn_mask=pair_masks()["bool2"])
        assert calls[-1]["attn_mask"].shape == (B, 1, M, N)
        assert calls[-1]["mask"] is calls[-1]["bias"] is None

    def test_float_mask_is_passed_as_it_is(self, pair, tensors, calls):
        query, key = tensors
        mask = pair_masks()["float2"]
        pair[0](query, key, key, attn_mask=mask)
        assert calls[-1]["bias"].data_ptr() == mask.data_ptr()
        padding = paddings()["zero_inf"]
        pair[0](query, key, key, padding)
        assert calls[-1]["bias"].data_ptr() == padding.data_ptr()
        assert calls[-1]["bias"].shape == (B, 1, 1, N)
        expanded = pair_masks()["expanded"]
        pair[0](query, key, key, attn_mask=expanded)
        assert calls[-1]["bias"].data_ptr() == expanded.data_ptr()

    def test_two_float_masks_broadcast(self, pair, tensors, calls):
        query, key = tensors
        pair[0](query, key, key, paddings()["float"], attn_mask=pair_masks()["float2"])
        assert calls[-1]["bias"].shape == (B, 1, M, N)
        assert calls[-1]["mask"] is None


def empty_row_masks() -> dict:
    """Masks that leave row 2 of sample 1 (or all its rows) without a key."""
    drop = torch.zeros(B * H, M, N, dtype=torch.bool)
    drop[H:, 2] = True
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1] = True
    return {
        "bool3": {"attn_mask": drop},
        "float3": {"attn_mask": torch.zeros(drop.shape).masked_fill(drop, -INF)},
        "padding": {"key_padding_mask": padding},
        "float_padding": {"key_padding_mask": torch.zeros(B, N).masked_fill(padding, -INF)},
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", empty_row_masks())
def test_rows_without_keys(pair, tensors, kind, need_weights, training):
    module = pair[0].train(training)
    query, key = (t.clone().requires_grad_() for t in tensors)
    masks = empty_row_masks()[kind]
    out, weights = module(query, key, key, **masks, need_weights=need_weights)
    rows = slice(None) if "padding" in kind else slice(2, 3)
    torch.testing.assert_close(out[1, rows], module.out_proj.bias.expand_as(out[1, rows]))
    torch.testing.assert_close(out[0], pair[1](query, key, key)[0][0])
    if need_weights:
        assert not weights[1, rows].any()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(M))
    loss = out.square().sum() + (weights.square().sum() if need_weights else 0)
    grads = torch.autograd.grad(loss, [query, key, *module.parameters()])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][1, rows].any()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, INF])
@pytest.mark.parametrize("kind", ["bool", "zero_inf", "float"])
def test_garbage_in_padding_does_not_leak(pair, tensors, kind, garbage, need_weights):
    query, key = tensors
    padding = paddings()[kind]
    expected = pair[0](query, key, key, padding, need_weights=need_weights)
    key = key.clone()
    key[1, 4:] = garbage
    query = query.clone().requires_grad_()
    out, weights = pair[0](query, key, key, padding, need_weights=need_weights)
    torch.testing.assert_close(out, expected[0])
    if need_weights:
        torch.testing.assert_close(weights, expected[1])
    out.sum().backward()
    assert query.grad.isfinite().all()


class TestCausalHint:
    def square(self, tensors):
        return tensors[0][:, :M]

    def test_mask_is_not_read(self, pair, tensors, calls):
        x = self.square(tensors)
        wrong = torch.full((M, M), torch.nan)
        out, _ = pair[0](x, x, x, attn_mask=wrong, is_causal=True, need_weights=False)
        right = nn.Transformer.generate_square_subsequent_mask(M)
        torch.testing.assert_close(out, pair[1](x, x, x, attn_mask=right)[0])
        assert calls[-1]["is_causal"] is True
        assert calls[-1]["attn_mask"] is calls[-1]["bias"] is None

    @pytest.mark.parametrize("m", [3, 9])
    @pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
    def test_is_aligned_to_the_upper_left(self, extra, m):
        torch.manual_seed(0)
        peer = nn.MultiheadAttention(E, H, **extra)
        ours = MultiheadAttention(E, H, **extra)
        ours.load_state_dict(peer.state_dict())
        query, key = torch.randn(m, B, E), torch.randn(5, B, E)
        kwargs = {"attn_mask": torch.zeros(m, 5), "is_causal": True, "need_weights": False}
        torch.testing.assert_close(
            ours(query, key, key, **kwargs)[0], peer(query, key, key, **kwargs)[0]
        )

    @pytest.mark.parametrize("kwargs", [{"need_weights": True}, {"need_weights": False}])
    def test_mask_is_used_when_torch_uses_it(self, pair, tensors, kwargs):
        x = self.square(tensors)
        banded = torch.ones(M, M, dtype=torch.bool).triu(2)
        if not kwargs["need_weights"]:
            kwargs = kwargs | {"key_padding_mask": torch.zeros(B, M, dtype=torch.bool)}
        out, _ = pair[0](x, x, x, attn_mask=banded, is_causal=True, **kwargs)
        torch.testing.assert_close(out, pair[1](x, x, x, attn_mask=banded)[0])


def test_float32_mask_with_half_query(tensors):
    """torch accepts it if no weights are returned, and so do we."""
    module = MultiheadAttention(E, H, batch_first=True, dtype=torch.bfloat16)
    query, key = (t.bfloat16() for t in tensors)
    mask = pair_masks()["float2"]
    out, _ = module(query, key, key, attn_mask=mask, need_weights=False)
    expected, _ = module(query, key, key, attn_mask=mask.bfloat16(), need_weights=False)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError, match="dtype"):
        module(query, key, key, attn_mask=mask)


KINDS = torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16


def in_kinds(values: list, kinds: tuple) -> list:
    """Masks of these dtypes, None for None. bfloat16 holds every number, and key 0 stays."""
    found = []
    for x, kind in zip(values, kinds, strict=True):
        x = x.bfloat16().index_fill(1, torch.tensor(0), 1.0)
        found.append(None if kind is None else x < -1 if kind == torch.bool else x.to(kind))
    return found


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_of_masks_are_those_of_torch(pair, tensors, dtype, need_weights):
    """torch adds its masks, so the dtype of the sum counts, and not that of each."""
    ours, peer = (m.to(dtype).eval() for m in pair)
    query, key = (t.to(dtype) for t in tensors)
    g = torch.Generator().manual_seed(3)
    values = [torch.randn(M, N, generator=g), torch.randn(B, N, generator=g)]

    def call(module, masks):
        x, y = (t.to(module.in_proj_weight.dtype) for t in (query, key))
        found = module(x, y, y, masks[1], need_weights, masks[0])
        return [t for t in found if t is not None]

    for kinds in itertools.product((None, *KINDS), repeat=2):
        masks = in_kinds(values, kinds)
        try:
            call(peer, masks)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="dtype"):
                call(ours, masks)
            continue
        # The peer gets masks of one dtype: torch's fused operator may misread others.
        same = [k if k in (None, torch.bool) else dtype for k in kinds]
        wide = [k if k in (None, torch.bool) else torch.float64 for k in kinds]
        truth = call(copy.deepcopy(peer).double(), in_kinds(values, tuple(wide)))
        assert_close(call(ours, masks), call(peer, in_kinds(values, tuple(same))), truth)
