"""SelfAttention against the formula, in float64."""

import functools

import pytest
import torch
from helpers import assert_module_close, assert_tools_keep

from fastattn import Mask, SelfAttention

B, N, C = 3, 9, 10
CONFIGS = [(1, None), (1, 7), (3, 4), (5, None)]


def plain(module, x, keep=None, average=True):
    """(weights, output); rows without keys are 0."""
    H, d = module.num_heads, module.head_dim
    packed = (x @ module.in_proj.weight.T + module.in_proj.bias).unflatten(-1, (3, H, d))
    q, k, v = packed.permute(2, 0, 3, 1, 4)  # [B, H, N, d] each
    scores = q @ k.mT / d**0.5
    if keep is None:
        weights = scores.softmax(-1)
    else:
        keep = keep if keep.dim() == 4 else keep[:, None]
        has_key = keep.any(-1, keepdim=True)
        weights = scores.masked_fill(~keep & has_key, -torch.inf).softmax(-1) * has_key
    merged = (weights @ v).transpose(1, 2).flatten(2)
    out = merged @ module.out_proj.weight.T + module.out_proj.bias
    return weights.mean(1) if average else weights, out


@pytest.fixture
def x():
    return torch.randn(B, N, C)


@pytest.mark.parametrize(("heads", "head_dim"), CONFIGS)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula(heads, head_dim, average, dtype, x):
    module = SelfAttention(C, heads, head_dim, dtype=dtype)
    formula = functools.partial(plain, average=average)
    assert_module_close(module, formula, [x.to(dtype)], average_attn_weights=average)


def test_shapes_and_no_weights(x):
    module = SelfAttention(C, num_heads=3, head_dim=16)
    weights, out = module(x)
    assert weights.shape == (B, N, N)
    assert out.shape == x.shape
    assert module(x, average_attn_weights=False)[0].shape == (B, 3, N, N)
    none, same = module(x, need_weights=False)
    assert none is None
    torch.testing.assert_close(same, out)


@pytest.mark.parametrize("heads", [1, 3])
def test_masks(heads, x):
    """Lengths, a mask per sample, a structured mask; the same over heads, and as a float mask."""
    module = SelfAttention(C, heads, 4)
    lens = torch.tensor([N, 0, 4])
    pairs = torch.rand(B, N, N) < 0.7
    keep = pairs & (torch.arange(N) < lens[:, None, None])
    keep = keep & torch.ones(N, N, dtype=torch.bool).tril()
    options = dict(valid_lens=lens, attn_mask=pairs, mask=Mask(causal="top_left"))
    assert_module_close(module, lambda *a: plain(*a, keep), [x], **options)
    expected = module(x, **options)
    weights, out = expected
    assert not weights[1].any()
    torch.testing.assert_close(out[1], module.out_proj.bias.expand(N, C))
    added = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    for same in (
        dict(attn_mask=keep),
        dict(attn_mask=keep[:, None].expand(B, heads, N, N)),
        dict(attn_mask=added),
        dict(mask=Mask(keep=keep)),
    ):
        torch.testing.assert_close(module(x, **same), expected)


def test_lengths_for_each_position(x):
    lens = torch.randint(0, N + 1, (B, N))
    keep = torch.arange(N) < lens[..., None]
    assert_module_close(SelfAttention(C, 2), lambda *a: plain(*a, keep), [x], valid_lens=lens)


def test_padding_changes_nothing(x):
    module = SelfAttention(C, 2)
    expected = module(x[:1, :4])[1]
    x[:, 4:] = torch.nan
    out = module(x[:1], torch.tensor([4]))[1]
    torch.testing.assert_close(out[:, :4], expected)


@pytest.mark.slow
def test_tools(x):
    module = SelfAttention(C, 2, dropout=0.5)
    assert (module(x, average_attn_weights=False)[0] == 0).any()
    module.eval()
    assert "num_heads=2, head_dim=5, dropout=0.5" in repr(module)
    assert_tools_keep(module, SelfAttention(C, 2).eval(), x)
    with torch.autocast("cpu", torch.bfloat16):
        weights, out = module(x)
    assert weights.dtype == out.dtype == torch.bfloat16


def test_errors(x):
    with pytest.raises(ValueError, match="num_heads 3 does not divide hidden_dim 10"):
        SelfAttention(C, 3)
    for bad in (dict(hidden_dim=0), dict(num_heads=0), dict(head_dim=0), dict(dropout=1.5)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SelfAttention(**{"hidden_dim": C, **bad})
    module = SelfAttention(C)
    with pytest.raises(ValueError, match="x: expected 3 dims"):
        module(x[0])
    with pytest.raises(ValueError, match="attn_mask"):
        module(x, attn_mask=torch.ones(N, N + 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"x: .* make the module a leaf of the tracer"):
        torch.fx.symbolic_trace(torch.nn.Sequential(module))
    with pytest.raises(ValueError, match="say the same"):
        module(x, torch.tensor([1, 2, 3]), mask=Mask(kv_len=torch.tensor([1, 2, 3])))
