"""``mask=`` of the multi-head modules: a fastattn.Mask says what torch's masks of booleans say."""

import dataclasses

import pytest
import torch

from fastattn import ALiBi, KVCache, Mask, MultiheadAdditiveAttention, MultiheadAttention

B, H, M, N, E = 2, 4, 5, 7, 16
LENGTHS = torch.tensor([7, 6])
KINDS = {"none": lambda x: None, "bool": lambda x: x > 1, "float": lambda x: x}


def inputs():
    return torch.randn(B, M, E), torch.randn(B, N, E)


@pytest.fixture
def module():
    return MultiheadAttention(E, H, batch_first=True)


def as_numbers(mask):
    """0, and -inf where a bool mask of torch's drops."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("padding", KINDS)
@pytest.mark.parametrize("pairs", KINDS)
def test_beside_other_masks(pairs, padding, biased, dense):
    kind = MultiheadAdditiveAttention if biased else MultiheadAttention
    module, (query, key) = kind(E, H, batch_first=True), inputs()
    mask = Mask(causal=None if dense else "bottom_right", window=(2, 3), kv_len=LENGTHS)
    kept = mask.to_dense(M, N, B, H)
    if dense:
        keep = torch.rand(B, M, N) < 0.8
        kept, mask = kept & keep[:, None], dataclasses.replace(mask, keep=keep)
    attn_mask, own = KINDS[pairs](torch.randn(M, N)), KINDS[padding](torch.randn(B, N))
    added = torch.zeros(M, N) if attn_mask is None else as_numbers(attn_mask)
    added = added.expand(B, H, M, N).masked_fill(~kept, -torch.inf).flatten(0, 1)
    bias = ALiBi(torch.randn(H), 2) if biased else None
    found = module(query, key, key, own, attn_mask=attn_mask, mask=mask, bias=bias)
    expected = module(query, key, key, as_numbers(own), attn_mask=added, bias=bias)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batched", [True, False])
@torch.no_grad()
def test_self_attention_at_inference(module, batched):
    """Without masks, that is one operator, which has none."""
    x = inputs()[0] if batched else inputs()[0][0]
    dropped = torch.ones(M, M, dtype=torch.bool).triu(1)
    found = module.eval()(x, x, x, mask=Mask(causal="top_left"))
    torch.testing.assert_close(found, module(x, x, x, attn_mask=dropped))


@pytest.mark.parametrize("sizes", [[1] * N, [4, 1, 2]], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_decoding(batch_first, sizes):
    """Each window is around a query's own place among all keys."""
    module, x = MultiheadAttention(E, H, batch_first=batch_first), inputs()[1]
    x, dim = (x, 1) if batch_first else (x.transpose(0, 1), 0)
    mask = Mask(causal="bottom_right", window=(2, -1), kv_begin=torch.tensor([0, 1]))
    expected, _ = module(x, x, x, mask=mask)
    for causal in ("bottom_right", None):
        own, cache = dataclasses.replace(mask, causal=causal), KVCache()
        outs = [module(t, t, t, cache=cache, mask=own)[0] for t in x.split(sizes, dim)]
        torch.testing.assert_close(torch.cat(outs, dim), expected)
    with pytest.raises(ValueError, match=r"mask.causal: .* aligned at 'bottom_right': write"):
        module(x, x, x, cache=cache, mask=Mask(causal="top_left"))
    assert cache.length == N  # a call that does not fit leaves the cache unchanged


def test_static_cache(module):
    (q, k), mask = inputs(), Mask(kv_len=LENGTHS, window=(1, 2))
    cache, expected = KVCache(static=True), module(q, k, k, mask=mask)
    for _ in range(2):
        torch.testing.assert_close(module(q, k, k, cache=cache, mask=mask), expected)


def test_refusals(module):
    (q, k), mask = inputs(), Mask(window=(1, 1))
    extra = MultiheadAttention(E, H, add_zero_attn=True, batch_first=True)
    with pytest.raises(ValueError, match="mask: expected a module without add_bias_kv"):
        extra(q, k, k, mask=mask)
    with pytest.raises(TypeError, match=r"mask: expected a fastattn.Mask, got Tensor"):
        module(q, k, k, mask=torch.ones(M, N))
    padding, keep = torch.zeros(B, N).bool(), torch.ones(M, N - 1).bool()
    with pytest.raises(ValueError, match=r"mask.keep: expected a shape .* got \[5, 6\]"):
        module(q, k, k, padding, mask=Mask(keep=keep))
    whole = q.cfloat()
    with pytest.raises(TypeError, match=r"mask: expected None .* the query is torch.complex64"):
        module(whole, whole, whole, mask=mask)
    x = torch.nested.nested_tensor_from_jagged(k.flatten(0, 1), torch.tensor([0, N, 2 * N]))
    with pytest.raises(ValueError, match="mask: jagged nested tensors take none"):
        module(x, x, x, need_weights=False, mask=mask)
    module._shared = object()
    with pytest.raises(TypeError, match=r"mask: expected None .* ranks share the module"):
        module(q, k, k, mask=mask)
