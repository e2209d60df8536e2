"""``bias=`` of the multi-head modules: as the matrix of its numbers, which a float mask may be."""

import copy

import pytest
import torch
from helpers import assert_close

from fastattn import (
    ALiBi,
    KVCache,
    MultiheadAdditiveAttention,
    MultiheadAttention,
    RelativeBias,
    SelfAttention,
)

B, H, M, N, E = 2, 4, 5, 7, 16
BIASES = {
    "tensor": ((H, M, N), lambda x, n: x),
    "keys": ((B, 1, 1, N), lambda x, n: x),
    "alibi": ((H,), ALiBi),
    "alibi-samples": ((B, H), ALiBi),
    "table": ((5, H), lambda x, n: RelativeBias(x, torch.arange(5), n)),
}
KINDS = [MultiheadAttention, MultiheadAdditiveAttention]


def dense(bias, m=M, n=N):
    """[B * H, m, n], which nn.MultiheadAttention takes as attn_mask."""
    matrix = bias if isinstance(bias, torch.Tensor) else bias.to_dense(m, n)
    return matrix.expand(B, H, m, n).flatten(0, 1)


def inputs(batch_first=True, length=N):
    q, k = torch.randn(B, M, E), torch.randn(B, length, E)
    return (q, k) if batch_first else (q.transpose(0, 1), k.transpose(0, 1))


def derived(module, leaves, call):
    """The results of ``call`` with these leaves, and all gradients."""
    wide = [x.detach().to(next(module.parameters()).dtype).requires_grad_() for x in leaves]
    results = [x for x in call(module, *wide) if x is not None]
    loss = sum(x.sin().sum() for x in results)
    grads = torch.autograd.grad(loss, [*wide, *module.parameters()])
    return [x.detach() for x in results] + list(grads)


def check(module, leaves, ours, masked):
    """``ours`` against ``masked``, the same call with a matrix for attn_mask, in float64 too."""
    expected = derived(module, leaves, masked)
    truth = derived(copy.deepcopy(module).double(), leaves, masked)
    assert_close(derived(module, leaves, ours), expected, truth)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BIASES)
def test_as_a_matrix(name, kind, batch_first, need_weights):
    shape, make = BIASES[name]
    module = kind(E, H, batch_first=batch_first)

    def ours(module, q, k, x):
        return module(q, k, k, need_weights=need_weights, bias=make(x, 1))

    def masked(module, q, k, x):
        return module(q, k, k, need_weights=need_weights, attn_mask=dense(make(x, 1)))

    check(module, [*inputs(batch_first), torch.randn(shape)], ours, masked)


@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("pairs", ["none", "bool", "float"])
def test_beside_masks(pairs, padding):
    module = MultiheadAttention(E, H, batch_first=True)
    kinds = {"none": lambda x: None, "bool": lambda x: x > 1, "float": lambda x: x}
    attn_mask, own = kinds[pairs](torch.randn(M, N)), kinds[padding](torch.randn(B, N))
    added = torch.zeros(M, N) if attn_mask is None else attn_mask
    if pairs == "bool":
        added = torch.zeros(M, N).masked_fill(attn_mask, -torch.inf)
    own_float = own
    if padding == "bool":
        own_float = torch.zeros(B, N).masked_fill(own, -torch.inf)

    def of(x, like):
        return x.to(like.dtype) if x is not None and x.is_floating_point() else x

    def ours(module, q, k, x):
        return module(q, k, k, of(own, q), attn_mask=of(attn_mask, q), bias=ALiBi(x, 1))

    def masked(module, q, k, x):
        return module(q, k, k, of(own_float, q), attn_mask=dense(ALiBi(x, 1)) + of(added, q))

    check(module, [*inputs(), torch.randn(H)], ours, masked)


def test_without_gradients_and_without_a_batch_dim():
    """At inference, self-attention without masks is one operator, which has no bias."""
    module, x, bias = MultiheadAttention(E, H), torch.randn(M, 1, E), ALiBi(torch.randn(H))
    out, weights = expected = module(x, x, x, bias=bias)
    with torch.no_grad():
        torch.testing.assert_close(module(x, x, x, bias=bias), expected)
    one = x[:, 0]
    torch.testing.assert_close(module(one, one, one, bias=bias), (out[:, 0], weights[0]))


@pytest.mark.parametrize("padded", [False, True])
def test_decoding(padded):
    """Every step names the place of its first query."""
    module = MultiheadAttention(E, H, batch_first=True)
    x, slopes, cache = torch.randn(B, N, E), torch.randn(H), KVCache()
    padding = torch.randn(B, N) if padded else None
    causal = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    with torch.no_grad():
        expected, _ = module(x, x, x, padding, attn_mask=causal + dense(ALiBi(slopes), N, N))
        outs = []
        for t in x.split([3, 1, 1, 2], dim=1):
            seen = cache.length + t.shape[1]
            own = None if padding is None else padding[:, :seen]
            bias = ALiBi(slopes, cache.length)
            outs.append(module(t, t, t, own, cache=cache, bias=bias)[0])
        torch.testing.assert_close(torch.cat(outs, 1), expected)
        with pytest.raises(ValueError, match=r"bias: expected .* \[2, 4, 1, 8\], got \[4, 1, 7\]"):
            module(t[:, :1], t[:, :1], t[:, :1], cache=cache, bias=torch.zeros(H, 1, N))
    assert cache.length == N  # a call that does not fit leaves the cache unchanged


def test_static_cache():
    module, (q, k), slopes = MultiheadAttention(E, H, batch_first=True), inputs(), torch.randn(H)
    cache, expected = KVCache(static=True), module(q, k, k, bias=ALiBi(slopes))
    for _ in range(2):
        torch.testing.assert_close(module(q, k, k, cache=cache, bias=ALiBi(slopes)), expected)


def jagged(lengths=(3, 0, 5)):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.randn(sum(lengths), E), offsets), lengths


@pytest.mark.parametrize("kind", [*KINDS, SelfAttention])
def test_sequences(kind):
    module = kind(E, H) if kind is SelfAttention else kind(E, H, batch_first=True)
    (x, lengths), bias = jagged(), ALiBi(torch.randn(H))

    def call(x):
        if kind is SelfAttention:
            return module(x, need_weights=False, bias=bias)[1]
        return module(x, x, x, need_weights=False, bias=bias)[0]

    expected = torch.cat([call(t[None])[0] for t in x.values().split(lengths)])
    torch.testing.assert_close(call(x).values(), expected)


def test_sequences_and_a_matrix():
    (x, lengths), module = jagged(), SelfAttention(E, H)
    matrix = torch.randn(H, 5, 5)  # of the longest
    found = module(x, need_weights=False, bias=matrix)[1].values()
    parts = zip(x.values().split(lengths), lengths, strict=True)
    alone = [module(t[None], need_weights=False, bias=matrix[:, :n, :n])[1][0] for t, n in parts]
    torch.testing.assert_close(found, torch.cat(alone))
    attention = MultiheadAttention(E, H, batch_first=True)
    with pytest.raises(ValueError, match="bias: jagged nested tensors take none"):
        attention(x, x, x, need_weights=False, bias=matrix)


@pytest.mark.parametrize("name", ["tensor", "alibi-samples", "table"])
def test_self_attention(name):
    _, make = BIASES[name]
    shape = (H, M, M) if name == "tensor" else BIASES[name][0]

    def ours(module, x, b):
        return module(x, bias=make(b, 0))

    def masked(module, x, b):
        return module(x, attn_mask=dense(make(b, 0), M, M).unflatten(0, (B, H)))

    check(SelfAttention(E, H), [inputs()[0], torch.randn(shape)], ours, masked)


def test_refusals():
    q, k = inputs()
    bias, module = ALiBi(torch.ones(H)), MultiheadAttention(E, H, batch_first=True)
    extra = MultiheadAttention(E, H, add_zero_attn=True, batch_first=True)
    with pytest.raises(ValueError, match="bias: expected a module without add_bias_kv"):
        extra(q, k, k, bias=bias)
    with pytest.raises(ValueError, match=r"bias.slopes: expected 4 heads, got \[3\]"):
        module(q, k, k, bias=ALiBi(torch.ones(3)))
    with pytest.raises(TypeError, match="bias: expected a Tensor, an ALiBi or a RelativeBias"):
        module(q, k, k, bias=[1.0])
    nested = torch.nested.nested_tensor([q[0], q[1, :2]])
    with pytest.raises(TypeError, match="bias: expected None in a call like this: of nested"):
        module(nested, nested, nested, need_weights=False, bias=bias)
    whole = q.cfloat()
    with pytest.raises(TypeError, match=r"bias: expected None .* the query is torch.complex64"):
        module(whole, whole, whole, bias=bias)
    module._shared = object()
    with pytest.raises(TypeError, match=r"bias: expected None .* ranks share the module"):
        module(q, k, k, bias=bias)
