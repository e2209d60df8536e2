"""Jagged nested tensors in modules, in training: each sequence as if it came alone."""

import copy

import pytest
import torch
from helpers import assert_close, assert_gradients_close
from torch import nn
from torch.nn.functional import pad

import fastattn
from fastattn import Mask

DIM, QUERIES, KEYS = 8, (3, 0, 70, 5), (4, 2, 70, 3)
SQUARE = 6, 1, 0, 70


def offsets(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def sequences(*tensors):
    """Jagged (B, j, features) of (values, lengths); equal lengths share their offsets."""
    made = {lengths: offsets(lengths) for _, lengths in tensors}
    return [torch.nested.nested_tensor_from_jagged(x, made[n]) for x, n in tensors]


def derived(module, call, leaves):
    """What ``call`` gives, and gradients of its first result: of leaves and of all parameters."""
    results = call(module, *leaves)
    out = results[0]
    upstream = torch.linspace(-1, 1, out.numel()).to(torch.bfloat16).view(out.shape).to(out.dtype)
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        (out * upstream).sum(), [*leaves, *parameters], allow_unused=True, materialize_grads=True
    )
    return *(x.detach() for x in results), *grads


def check(module, jagged, alone, lengths, dtype=torch.float32):
    """``jagged`` over sequences against ``alone`` over each, joined; in dtype and in float64."""
    leaves = [torch.randn(sum(n), DIM).to(dtype).requires_grad_() for n in lengths]
    module = module.to(dtype)

    def together(module, *leaves):
        return jagged(module, *sequences(*zip(leaves, lengths, strict=True)))

    def one_by_one(module, *leaves):
        parts = zip(*(x.split(n) for x, n in zip(leaves, lengths, strict=True)), strict=True)
        found = [alone(module, *(x[None] for x in part)) for part in parts]
        return [torch.cat([x[0] for x in results]) for results in zip(*found, strict=True)]

    wide = [x.detach().double().requires_grad_() for x in leaves]
    got = derived(module, together, leaves)
    expected = derived(module, one_by_one, leaves)
    truth = derived(copy.deepcopy(module).double(), one_by_one, wide)
    first = -len(leaves) - sum(p.requires_grad for p in module.parameters())
    assert_close(got[:first], expected[:first], truth[:first])
    assert_gradients_close(*(dict(enumerate(x[first:])) for x in (got, expected, truth)))


def both(call):
    """``call`` for jagged tensors, whose values count, and the same for one sequence."""

    def jagged(module, *tensors):
        return [x.values() if x.is_nested else x for x in call(module, *tensors)]

    return jagged, call


# ---- packed ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [fastattn.MultiheadAttention, fastattn.MultiheadAdditiveAttention])
def test_multihead_self_attention(kind, dtype):
    def call(module, x):
        return [module(x, x, x, need_weights=False)[0]]

    check(kind(DIM, 2, batch_first=True), *both(call), [SQUARE], dtype)


@pytest.mark.parametrize("kind", [fastattn.MultiheadAttention, fastattn.MultiheadAdditiveAttention])
def test_multihead_cross_attention(kind):
    def call(module, q, k, v):
        return [module(q, k, v, need_weights=False)[0]]

    check(kind(DIM, 2, batch_first=True), *both(call), [QUERIES, KEYS, KEYS])


def test_multihead_causal():
    def alone(module, x):
        above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return [module(x, x, x, need_weights=False, attn_mask=above)[0]]

    options = dict(need_weights=False, is_causal=True)
    jagged, _ = both(lambda m, x: [m(x, x, x, attn_mask=torch.zeros(1, 1), **options)[0]])
    check(fastattn.MultiheadAttention(DIM, 2, batch_first=True), jagged, alone, [SQUARE])


def test_encoder_layer_in_training():
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, 0.0, batch_first=True)
    fastattn.replace_attention(layer)
    check(layer, *both(lambda layer, x: [layer(x)]), [SQUARE])


@pytest.mark.parametrize(
    "mask", [None, Mask(causal="top_left", window=(2, -1)), Mask(window=(2, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_attention(mask, dtype):
    def call(module, x):
        return [module(x, need_weights=False, mask=mask)[1]]

    check(fastattn.SelfAttention(DIM, 3, 4), *both(call), [SQUARE], dtype)


def test_rows_past_the_last_sequence():
    """Of a buffer that is longer: results are 0 there. torch has no gradients of padded ones."""
    module = fastattn.AdditiveAttention(DIM, DIM, 5)
    values = torch.randn(10, DIM, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(values, offsets((3, 4)))
    short = torch.nested.nested_tensor_from_jagged(values[:7], offsets((3, 4)))
    for options in (dict(need_weights=False), dict(need_weights=True)):
        out, expected = (module(y, y, y, **options) for y in (x, short))
        out, expected = (y[0] if type(y) is tuple else y for y in (out, expected))
        assert torch.equal(out.values()[:7], expected.values())
        assert not out.values()[7:].any()
        if not options["need_weights"]:
            [grad] = torch.autograd.grad(out.values().sum(), values)
            assert not grad[7:].any()


SINGLE = {
    "additive": lambda: fastattn.AdditiveAttention(DIM, DIM, 5),
    "luong": lambda: fastattn.LuongAttention(DIM, method="general"),
    "luong-concat": lambda: fastattn.LuongAttention(DIM, method="concat", attentional=False),
    "cosine": lambda: fastattn.CosineAttention(3.0, learnable=True),
    "nadaraya-watson": lambda: fastattn.NadarayaWatson([2.0] * DIM, learnable=True),
    "local": lambda: fastattn.LocalAttention(DIM, window=2),
    "local-monotonic": lambda: fastattn.LocalAttention(DIM, window=2, alignment="monotonic"),
}
PACKED = list(SINGLE)[:5]


@pytest.fixture
def single(request):
    return SINGLE[request.param]()


def attend(module, q, k, v):
    return [module(q, k, v)]


@pytest.mark.parametrize("single", SINGLE, indirect=True)
def test_single_head(single):
    check(single, *both(attend), [QUERIES, KEYS, KEYS])


@pytest.mark.parametrize("single", PACKED, indirect=True)
def test_bottom_right(single):
    def call(module, q, k, v):
        return [module(q, k, v, mask=Mask(causal="bottom_right"))]

    check(single, *both(call), [QUERIES, KEYS, KEYS])


@pytest.mark.parametrize("single", [n for n in SINGLE if n != "nadaraya-watson"], indirect=True)
def test_a_dense_query_for_each_sequence(single):
    """A step of a decoder, over encoder states of different lengths."""

    def alone(module, q, k, v):
        return [module(q[:, 0], k, v)[:, None]]

    def jagged(module, q, k, v):
        return [module(q.values(), k, v)]

    check(single, jagged, alone, [(1,) * len(KEYS), KEYS, KEYS])


@pytest.mark.parametrize("single", PACKED, indirect=True)
def test_dense_queries(single):
    def jagged(module, q, k, v):
        out = module(q.values().view(len(KEYS), 2, DIM), k, v)
        return [out.flatten(0, 1)]

    check(single, jagged, attend, [(2,) * len(KEYS), KEYS, KEYS])


# ---- padded ----


def with_padding(weights):
    return pad(weights, (0, max(KEYS) - weights.shape[-1]))


@pytest.mark.parametrize("single", SINGLE, indirect=True)
def test_weights(single):
    def call(module, q, k, v):
        out, weights = module(q, k, v, need_weights=True)
        return [out, weights if weights.is_nested else with_padding(weights)]

    check(single, *both(call), [QUERIES, KEYS, KEYS])


@pytest.mark.parametrize("average", [True, False])
def test_weights_of_self_attention(average):
    def call(module, x):
        weights, out = module(x, average_attn_weights=average)
        return [out, weights]

    def jagged(module, x):
        out, weights = call(module, x)
        return [out.values(), (weights if average else weights.transpose(1, 2)).values()]

    def alone(module, x):
        out, weights = call(module, x)
        weights = pad(weights, (0, max(SQUARE) - x.shape[1]))
        return [out, weights if average else weights.transpose(1, 2)]

    check(fastattn.SelfAttention(DIM, 2), jagged, alone, [SQUARE])


def test_stored_weights():
    module = fastattn.AdditiveAttention(DIM, DIM, 5)
    module.store_weights = True
    check(module, *both(attend), [QUERIES, KEYS, KEYS])
    module(Q, K, K)
    assert module.attention_weights.shape == (len(KEYS), max(QUERIES), max(KEYS))


def test_jagged_queries_over_dense_keys():
    module, memory = fastattn.LuongAttention(DIM), torch.randn(4, 6, DIM)

    def jagged(module, q):
        return [module(q, memory.to(q.dtype)).values()]

    def alone(module, q):
        n = QUERIES.index(q.shape[1])
        return [module(q, memory[n : n + 1].to(q.dtype))]

    check(module, jagged, alone, [QUERIES])


def test_keys_projected_before():
    def call(module, q, k, v):
        return [module(q, None, v, cache=module.project_keys(k))]

    check(fastattn.AdditiveAttention(DIM, DIM, 5), *both(call), [QUERIES, KEYS, KEYS])


def test_leave_one_out():
    def call(module, x, y):
        return [module.leave_one_out(x, y)]

    module = fastattn.NadarayaWatson(2.0, learnable=True)
    check(module, *both(call), [SQUARE, SQUARE])


def test_values_without_features():
    def alone(module, x, y):
        return [module(x, x, y[..., 0])]

    def jagged(module, x, y):
        y = torch.nested.nested_tensor_from_jagged(y.values()[:, 0].contiguous(), x.offsets())
        return [module(x, x, y).values()]

    check(fastattn.NadarayaWatson(2.0), jagged, alone, [SQUARE, SQUARE])


def test_hard_attention():
    def call(module, q, k, v):
        choice = module(q, k, v, return_choice=True)
        return [choice.log_prob, choice.output, choice.indices.to(choice.output.dtype)]

    check(fastattn.HardAttention(DIM).eval(), *both(call), [QUERIES, KEYS, KEYS])


def test_hard_attention_samples_in_its_sequence():
    values = torch.arange(float(sum(KEYS))).view(-1, 1).requires_grad_()
    q = torch.randn(sum(QUERIES), DIM)
    keys = torch.randn(sum(KEYS), DIM)
    q, k, v = sequences((q, QUERIES), (keys, KEYS), (values, KEYS))
    module = fastattn.HardAttention(DIM)
    choice = module(q, k, v, return_choice=True)
    first = offsets(KEYS)[:-1].repeat_interleave(torch.tensor(QUERIES))
    assert torch.equal(choice.output.values()[:, 0], (first + choice.indices.values()).float())
    choice.output.values().sum().backward()
    assert values.grad.sum() == sum(QUERIES)
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_location_sensitive_attention():
    """Two steps of a decoder, the second one with the state of the first."""

    def jagged(module, q, k, v):
        _, _, state = module(q.values(), k, v)
        context, weights, _ = module(q.values(), k, v, state=state)
        return [context, weights]

    def alone(module, q, k, v):
        _, _, state = module(q[:, 0], k, v)
        context, weights, _ = module(q[:, 0], k, v, state=state)
        return [context[:, None], with_padding(weights)[:, None]]

    module = fastattn.LocationSensitiveAttention(DIM, DIM, 5, filters=3, kernel_size=3)
    check(module, jagged, alone, [(1,) * len(KEYS), KEYS, KEYS])


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("single", SINGLE, indirect=True)
def test_no_sequences(single, weights):
    leaf = torch.zeros(0, DIM, requires_grad=True)
    [x] = sequences((leaf, ()))
    results = single(x, x, x, need_weights=weights)
    out = results[0] if weights else results
    assert (out.shape[0], out.values().shape) == (0, (0, DIM))
    out.values().sum().backward()
    assert leaf.grad.shape == (0, DIM)


def test_no_sequences_elsewhere():
    [x] = sequences((torch.zeros(0, DIM), ()))
    assert fastattn.SelfAttention(DIM, 2)(x)[1].values().shape == (0, DIM)
    assert fastattn.HardAttention(DIM)(x, x, x).values().shape == (0, DIM)
    assert fastattn.NadarayaWatson().leave_one_out(x, x).values().shape == (0, DIM)
    context, *_ = fastattn.LocationSensitiveAttention(DIM, DIM, 5)(torch.zeros(0, DIM), x, x)
    assert context.shape == (0, DIM)


# ---- bad input ----

Q, K = sequences((torch.randn(sum(QUERIES), DIM), QUERIES), (torch.randn(sum(KEYS), DIM), KEYS))
[OTHER] = sequences((torch.randn(sum(KEYS), DIM), KEYS))
[FEW] = sequences((torch.randn(5, DIM), (2, 3)))
GAPS = torch.nested.nested_tensor_from_jagged(
    torch.randn(9, DIM), torch.tensor([0, 4, 9]), torch.tensor([2, 3])
)
MULTIHEAD = fastattn.MultiheadAttention(DIM, 2, batch_first=True)
APPENDED = fastattn.MultiheadAttention(DIM, 2, batch_first=True, add_zero_attn=True)
LUONG = fastattn.LuongAttention(DIM)
KERNEL = fastattn.NadarayaWatson()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MULTIHEAD(Q, Q, Q), "need_weights: .* write need_weights=False"),
        (lambda: MULTIHEAD(Q, K.to_padded_tensor(0.0), K), "expected jagged tensors, all of them"),
        (lambda: MULTIHEAD(Q, K, OTHER, need_weights=False), "expected the same offsets"),
        (lambda: MULTIHEAD(Q, Q, Q, torch.zeros(4, 70), False), "key_padding_mask: expected None"),
        (
            lambda: MULTIHEAD(Q, Q, Q, None, False, torch.zeros(70, 70)),
            "attn_mask: .* is_causal=True, or call fastattn.varlen_attention",
        ),
        (
            lambda: fastattn.MultiheadAttention(DIM, 2)(Q, Q, Q, need_weights=False),
            "expected a module with batch_first=True",
        ),
        (lambda: APPENDED(Q, Q, Q, need_weights=False), "without add_bias_kv and add_zero_attn"),
        (lambda: LUONG(Q, K, OTHER), "values: expected the offsets of keys"),
        (lambda: LUONG(Q, K, torch.zeros(4, 70, DIM)), "values: expected the offsets of keys"),
        (lambda: LUONG(FEW, K), "keys: expected as many sequences as queries, 2, got 4"),
        (lambda: LUONG(FEW, GAPS), "keys: expected no gaps"),
        (lambda: LUONG(Q.unflatten(-1, (2, 4)), K), r"queries: expected \(B, j, features\)"),
        (lambda: LUONG(torch.zeros(4), K), r"queries: expected \(B, M, features\) or \(B, f"),
        (
            lambda: KERNEL(torch.zeros(4, DIM), K, K),
            r"queries: expected \(B, M, features\), got \[4, 8\]",
        ),
        (lambda: LUONG(Q, K, valid_lens=torch.ones(4)), "valid_lens: expected None"),
        (
            lambda: LUONG(Q, K, need_weights=True, mask=Mask(causal="bottom_right")),
            "'bottom_right' and jagged tensors go with need_weights=False",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_compiles_in_one_graph():
    module = fastattn.MultiheadAttention(DIM, 2, batch_first=True)
    expected = module(Q, Q, Q, need_weights=False)[0].values()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, Q, Q, need_weights=False)[0].values(), expected)
