"""LocationSensitiveAttention over several steps against the papers' formulas, in float64."""

import itertools

import pytest
import torch
from helpers import assert_module_close, assert_tools_keep
from torch import nn

from fastattn import AdditiveAttention, LocationSensitiveAttention, Mask, coverage_loss, testing

B, T, N, DQ, DK, DV, HIDDEN = 3, 4, 13, 8, 5, 6, 7


class Decoder(nn.Module):
    """All steps, so that gradients pass through the states: (contexts, weights, coverage loss)."""

    def __init__(self, **options):
        super().__init__()
        self.attention = LocationSensitiveAttention(DQ, DK, HIDDEN, **options)

    def forward(self, queries, keys, values, **options):
        cache, state, steps = self.attention.project_keys(keys), None, []
        for q in queries.unbind(1):
            *step, state = self.attention(q, None, values, state=state, cache=cache, **options)
            steps.append(step)
        contexts, weights = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        return contexts, weights, coverage_loss(weights)


class _Smooth(Decoder):
    def forward(self, *tensors):
        return super().forward(*tensors)[:2]


def convolve(past, kernel):
    """past [B, C, N], kernel [F, C, K]: F features of each position, zeros beyond the ends."""
    half = kernel.shape[-1] // 2
    padded = torch.cat([past.new_zeros(*past.shape[:2], half), past,
                        past.new_zeros(*past.shape[:2], half)], -1)  # fmt: skip
    windows = padded.unfold(-1, kernel.shape[-1], 1)  # [B, C, N, K]
    return (windows[:, None] * kernel[None, :, :, None]).sum((2, 4)).mT  # [B, N, F]


def plain(decoder, queries, keys, values, keep=None):
    a = decoder.attention
    previous = total = values.new_zeros(B, values.shape[1])
    j, contexts, all_weights, losses = torch.arange(values.shape[1]), [], [], []
    for q in queries.unbind(1):
        features = (q @ a.W_q.weight.T)[:, None] + keys @ a.W_k.weight.T
        if a.W_q.bias is not None:
            features = features + a.W_q.bias + a.W_k.bias
        if a.location_conv is not None:
            past = {
                "cumulative": [total],
                "previous": [previous],
                "both": [previous, total],
            }[a.location]
            location = convolve(torch.stack(past, 1), a.location_conv.weight)
            features = features + location @ a.location_proj.weight.T
        if a.W_c is not None:
            features = features + total[..., None] * a.W_c.weight[:, 0]
        scores = torch.tanh(features) @ a.w_v.weight[0]
        allowed = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep
        if a.window is not None:
            peak = previous.argmax(1)[:, None]
            allowed = allowed & (j >= peak - a.window[0]) & (j <= peak + a.window[1])
        has_key = allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~allowed & has_key, -torch.inf).softmax(-1) * has_key
        losses.append(torch.minimum(weights, total).sum(-1))
        previous, total = weights, total + weights
        contexts.append((weights[..., None] * values).sum(1))
        all_weights.append(weights)
    return tuple(torch.stack(x, 1) for x in (contexts, all_weights, losses))


@pytest.fixture
def tensors():
    return [torch.randn(s) for s in ((B, T, DQ), (B, N, DK), (B, N, DV))]


OPTIONS = [
    dict(filters=4, kernel_size=5),
    dict(filters=4, kernel_size=5, location="previous"),
    dict(filters=3, kernel_size=31, location="both"),
    dict(filters=0, coverage=True),
    dict(filters=2, kernel_size=1, coverage=True),
    dict(filters=4, kernel_size=3, window=(0, 2)),
    dict(filters=0, window=(1, 3)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
class TestSteps:
    def test_formula(self, options, tensors):
        assert_module_close(Decoder(**options), plain, tensors)

    def test_bfloat16(self, options, tensors):
        """Without the coverage loss: where rounding makes a tie, its min has two gradients."""
        assert_module_close(
            _Smooth(**options).bfloat16(),
            lambda *a: plain(*a)[:2],
            [x.bfloat16() for x in tensors],
        )

    def test_masks(self, options, tensors):
        lens = torch.tensor([N, 0, 6])
        some = torch.rand(B, 1, N) < 0.7
        keep = some[:, 0] & (torch.arange(N) < lens[:, None]) & (torch.arange(N) < 10)
        masks = dict(valid_lens=lens, attn_mask=some, mask=Mask(window=(-1, 9)))
        module = Decoder(**options)
        assert_module_close(module, lambda *a: plain(*a, keep), tensors, **masks)
        expected = module(*tensors, **masks)
        assert not expected[0][1].any()
        torch.testing.assert_close(module(*tensors, mask=Mask(keep=keep[:, None])), expected)

    def test_garbage_behind_a_mask(self, options, tensors):
        module, lens = Decoder(**options), torch.tensor([N, 3, 6])
        expected = module(*tensors, valid_lens=lens)
        for x in tensors[1:]:
            x[1, 3:], x[2, 6:] = torch.nan, torch.inf
        torch.testing.assert_close(module(*tensors, valid_lens=lens), expected)


def test_without_location_it_is_additive_attention(tensors):
    """In the first step always, and in every step if nothing is added."""
    torch.manual_seed(0)
    expected = AdditiveAttention(DQ, DK, HIDDEN, bias=True)(*tensors)
    torch.manual_seed(0)
    found = Decoder(filters=0, bias=True)(*tensors)[0]
    torch.testing.assert_close(found, expected)


def test_window_moves_forward_only(tensors):
    _, weights, _ = Decoder(window=(0, 2))(*tensors)
    seen = [step.nonzero()[:, 1].view(B, -1) for step in weights.unbind(1)]
    for now, later in itertools.pairwise(seen):
        assert (later[:, 0] >= now[:, 0]).all()
    assert (seen[0] == torch.arange(3)).all()


def test_dropout_of_all_weights_moves_no_window_back():
    torch.manual_seed(0)
    attention = LocationSensitiveAttention(DQ, DK, HIDDEN, window=(0, 1), dropout=0.5).train()
    memory, state, seen = torch.randn(1, 20, DK), None, []
    for _ in range(40):
        _, weights, state = attention(torch.randn(1, DQ), memory, memory, state=state)
        seen.append(weights[0].nonzero().flatten().tolist())
    first = [keys[0] for keys in seen if keys]
    assert len(first) < len(seen)
    assert first == sorted(first)


def test_state(tensors):
    queries, keys, values = tensors
    attention = LocationSensitiveAttention(DQ, DK, HIDDEN)
    _, first, state = attention(queries[:, 0], keys, values)
    _, second, state = attention(queries[:, 1], keys, values, state=state)
    torch.testing.assert_close(state.previous, second)
    torch.testing.assert_close(state.cumulative, first + second)
    order = torch.tensor([2, 0, 0, 1])
    expected = attention(queries[:, 2], keys, values, state=state)[0][order]
    picked = (x[order] for x in (queries[:, 2], keys, values))
    torch.testing.assert_close(attention(*picked, state=state.reorder(order))[0], expected)
    half = LocationSensitiveAttention(DQ, DK, HIDDEN).bfloat16()
    *_, state = half(*(x.bfloat16() for x in (queries[:, 0], keys, values)))
    assert state.previous.dtype == state.cumulative.dtype == torch.float32


def test_autocast(tensors):
    module = Decoder(filters=4, coverage=True)
    with torch.autocast("cpu", torch.bfloat16):
        contexts, weights, _ = module(*tensors)
    assert contexts.dtype == weights.dtype == torch.bfloat16
    grads = torch.autograd.grad(contexts.sum(), list(module.parameters()))
    assert all(g.isfinite().all() for g in grads)


def test_no_keys():
    tensors = [torch.randn(s) for s in ((B, T, DQ), (B, 0, DK), (B, 0, DV))]
    contexts, weights, loss = Decoder(coverage=True, window=(0, 1))(*tensors)
    assert contexts.shape == (B, T, DV)
    assert weights.shape == (B, T, 0)
    assert not contexts.any()
    assert not loss.any()


def test_coverage_loss():
    weights = torch.tensor([[[0.7, 0.3], [0.5, 0.5], [0.1, 0.9]]])
    testing.assert_within_budget(
        coverage_loss(weights),
        torch.tensor([[0.0, 0.5 + 0.3, 0.1 + 0.8]]),
        torch.tensor([[0.0, 0.8, 0.9]], dtype=torch.float64),
    )
    with pytest.raises(ValueError, match=r"\(B, M, N\)"):
        coverage_loss(weights[0])
    with pytest.raises(TypeError, match="weights: expected a Tensor, got list"):
        coverage_loss([weights])


@pytest.mark.slow
def test_tools(tensors):
    module = Decoder(filters=4, kernel_size=5, coverage=True, dropout=0.5)
    assert (module(*tensors)[1] == 0).any()
    module.eval()
    assert "cumulative" in repr(module)
    assert_tools_keep(module, Decoder(filters=4, kernel_size=5, coverage=True).eval(), *tensors)
    weights = module(*tensors)[1]
    module.attention.store_weights = True
    module(*tensors)
    torch.testing.assert_close(module.attention.attention_weights, weights[:, -1])


def test_errors(tensors):
    queries, keys, values = tensors
    make = LocationSensitiveAttention
    for bad in (
        dict(location="here"), dict(kernel_size=4), dict(filters=-1), dict(window=(1, -1)),
        dict(window=(1,)), dict(dropout=2.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            make(DQ, DK, HIDDEN, **bad)
    with pytest.raises(TypeError, match=r"window: expected \(back, ahead\), got int"):
        make(DQ, DK, HIDDEN, window=3)
    module = make(DQ, DK, HIDDEN)
    with pytest.raises(ValueError, match="one step"):
        module(queries, keys, values)
    with pytest.raises(TypeError, match="query: expected a Tensor, got NoneType"):
        module(None, keys, values)
    *_, state = module(queries[:, 0], keys, values)
    with pytest.raises(ValueError, match="keys and values: expected the same length, got 5 and "):
        module(queries[:, 0], keys[:, :5], values)
    with pytest.raises(ValueError, match=r"state\.previous: expected \(B, N\) = \[3, 5\]"):
        module(queries[:, 0], keys[:, :5], values[:, :5], state=state)
    with pytest.raises(ValueError, match=r"state\.previous: expected \(B, N\)"):
        module(queries[:, 0], keys, values, state=state._replace(previous=state.previous[:1]))
    with pytest.raises(ValueError, match=r"state\.cumulative: expected .* on cpu .* on meta"):
        module(queries[:, 0], keys, values, state=state._replace(cumulative=state[1].to("meta")))
    with pytest.raises(TypeError, match=r"state\.previous: expected a Tensor, got list"):
        module(queries[:, 0], keys, values, state=state._replace(previous=[1]))
    with pytest.raises(
        TypeError, match=r"state\.previous: expected a floating-point.* write x\.float"
    ):
        module(queries[:, 0], keys, values, state=state._replace(previous=state[0].long()))
    with pytest.raises(TypeError, match="state: expected an AlignmentState, got Tensor"):
        module(queries[:, 0], keys, values, state=state.previous)
    with pytest.raises(ValueError, match="cache=project_keys"):
        module(queries[:, 0], None, values)
