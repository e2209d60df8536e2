"""What layers of transformers call: fastattn.integrations.transformers.attention, by itself."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fastattn.integrations.transformers import ModelMask, attention, register
from fastattn.testing import assert_within_budget

B, H, HKV, M, N, D = 2, 4, 2, 5, 7, 8


def draw(*shape):
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng)


def layer(causal=False):
    module = torch.nn.Identity()
    module.is_causal = causal
    return module


def plain(q, k, v, bias=None, sinks=None, keep=None, softcap=None):
    """(out, weights) of the formula, with a column of sinks that is then left out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v).transpose(1, 2), weights


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (True, 0.5)])
def test_formula(bias, softcap, sinks, weights):
    """Output, weights, and gradients of everything, those of sinks and bias included."""
    given = [draw(B, H, M, D), draw(B, HKV, N, D), draw(B, HKV, N, D)]
    names = [*(["position_bias"] if bias else []), *(["s_aux"] if sinks else [])]
    given += [draw(1, H, M, N)] if bias else []
    given += [draw(H)] if sinks else []

    def ours(q, k, v, *more):
        options = dict(zip(names, more, strict=True))
        options |= {"softcap": softcap, "output_attentions": weights}
        return attention(layer(), q, k, v, None, **options)

    def formula(q, k, v, *more):
        options = dict(zip(names, more, strict=True))
        bias, sinks = options.get("position_bias"), options.get("s_aux")
        return plain(q, k, v, bias, sinks, softcap=softcap)

    results = []
    for call, dtype in ((ours, None), (formula, None), (formula, torch.float64)):
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in given]
        out, probs = call(*leaves)
        loss = out.square().sum() + (probs.square().sum() if weights else 0.0)
        results.append((out, *([probs] if weights else []), *torch.autograd.grad(loss, leaves)))
    for n, got in enumerate(zip(*results, strict=True)):
        assert_within_budget(*got, name=f"result {n}")


def test_causal_only_without_a_mask():
    q, k = draw(B, H, M, D), draw(B, H, M, D)
    _, weights = attention(layer(True), q, k, k, None, output_attentions=True)
    assert (weights.triu(1) == 0).all()
    everything = torch.ones(1, 1, M, M, dtype=torch.bool)
    for mask in (everything, everything.float(), ModelMask()):
        _, weights = attention(layer(True), q, k, k, mask, output_attentions=True)
        assert (weights > 0).all()
    _, weights = attention(layer(True), q[:, :, :1], k, k, None, output_attentions=True)
    assert (weights > 0).all()
    _, weights = attention(layer(True), q, k, k, None, is_causal=False, output_attentions=True)
    assert (weights > 0).all()
    # Splinter's layers do not say whether they are causal, and get no mask where none is needed.
    _, weights = attention(torch.nn.Identity(), q, k, k, None, output_attentions=True)
    assert (weights > 0).all()


def test_masks_may_be_longer_than_the_keys():
    q, k = draw(B, H, M, D), draw(B, H, N, D)
    keep = draw(B, 1, M, N + 3) > -0.5
    keep[..., 0] = True
    out, _ = attention(layer(), q, k, k, keep)
    truth = plain(*(x.double() for x in (q, k, k)), keep=keep[..., :N])[0]
    assert_within_budget(out, plain(q, k, k, keep=keep[..., :N])[0], truth)


@pytest.mark.parametrize("kind", ["none", "bool", "float", "structured"])
def test_only_the_keys_of_indices(kind):
    """A key that is named twice counts once, and one that the mask leaves out not at all."""
    q, k = draw(B, H, M, D), draw(B, HKV, N, D)
    indices = draw(B, M, 4).argsort(-1).int() + torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    keep = draw(B, 1, M, N) > -0.5 if kind in ("bool", "float") else torch.ones(1, 1, M, N) > 0
    masks = {"none": None, "bool": keep, "float": keep.float().log()}
    if kind == "structured":
        keep = torch.arange(N) <= torch.arange(M)[:, None]
        masks[kind] = ModelMask(causal="top_left", shape=(B, 1, M, N), device=q.device)
    out, weights = attention(layer(), q, k, k, masks[kind], indices=indices, output_attentions=True)
    named = (indices[..., None] == torch.arange(N)).any(-2).unsqueeze(1)
    sees = (named & keep).any(-1, keepdim=True)
    expected = [
        [x.nan_to_num() for x in plain(*(y.to(dtype) for y in (q, k, k)), keep=named & keep)]
        for dtype in (torch.float32, torch.float64)
    ]
    assert sees.any()
    for got, *others in zip((out, weights), *expected, strict=True):
        assert_within_budget(got, *others)


@pytest.mark.parametrize("masked", [False, True])
def test_only_the_blocks_of_block_indices(masked):
    """Each key head has its own. Blocks have 3 keys, of which the last has what is left."""
    q, k = draw(B, H, M, D), draw(B, HKV, N, D)
    indices = draw(B, HKV, M, -(-N // 3)).argsort(-1)[..., :2]
    indices[:, 0, 0] = -1
    indices[:, 0, 1, 1] = -1
    own = layer()
    own.indexer = SimpleNamespace(block_size=3)
    keep = draw(B, 1, M, N) > -0.5 if masked else None
    out, _ = attention(own, q, k, k, keep, block_indices=indices)
    named = (indices[..., None] == torch.arange(N) // 3).any(-2).repeat_interleave(H // HKV, 1)
    kept = named if keep is None else named & keep
    plains = [
        plain(*(y.to(dtype) for y in (q, k, k)), keep=kept)[0].nan_to_num()
        for dtype in (torch.float32, torch.float64)
    ]
    assert (out[:, 0, 0] == 0).all()
    assert_within_budget(out, *plains)


def test_a_mask_is_compared_and_combined_as_its_tensor():
    own = ModelMask(causal="top_left", shape=(B, 1, M, N), device=torch.device("cpu"))
    dense, other = own[:], draw(B, 1, M, N) > 0
    pairs = [
        (own == 0, dense == 0), (own != 0, dense != 0), (own > 0, dense), (~own, ~dense),
        (own & other, dense & other), (other & own, dense & other), (own | other, dense | other),
        (own ^ other, dense ^ other), (own * 2.0, dense * 2.0), (2.0 * own, dense * 2.0),
    ]  # fmt: skip
    assert all(torch.equal(*pair) for pair in pairs)
    assert own in {own: 1}


def test_a_mask_moves_as_its_tensor():
    own = ModelMask(kv_len=torch.tensor([3, 2]), shape=(2, 1, M, N), device=torch.device("cpu"))
    moved = own.to("meta", non_blocking=True)
    assert (moved.device, moved.kv_len.device.type) == (torch.device("meta"), "meta")
    assert moved[:].device.type == "meta"
    assert isinstance(own.to(torch.bool), ModelMask)
    assert torch.equal(own.to(torch.float32), own[:].float())


@pytest.mark.parametrize("name", ["cache", "block_indices", "sinks"])
def test_refuses_what_it_does_not_compute(name):
    q = draw(B, H, M, D)
    with pytest.raises(ValueError, match=rf"{name}: .*set_attn_implementation\('eager'\)"):
        attention(layer(), q, q, q, None, **{name: 30.0})
    attention(layer(), q, q, q, None, **{name: None}, sliding_window=3, another=1)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        register()
