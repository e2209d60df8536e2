"""AdditiveAttention and MultiheadAdditiveAttention against their formulas in plain PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastattn import (
    AdditiveAttention,
    Mask,
    MultiheadAdditiveAttention,
    MultiheadAttention,
    replace_attention,
    testing,
)

INF = torch.inf


class Textbook(nn.Module):
    """The classic module, with its M * N * hidden tensor."""

    def __init__(self, query_dim, key_dim, hidden_dim, bias=False):
        super().__init__()
        self.W_k = nn.Linear(key_dim, hidden_dim, bias=bias)
        self.W_q = nn.Linear(query_dim, hidden_dim, bias=bias)
        self.w_v = nn.Linear(hidden_dim, 1, bias=bias)

    def forward(self, queries, keys, values, valid_lens=None):
        features = self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1)
        scores = self.w_v(torch.tanh(features)).squeeze(-1)
        if valid_lens is not None:
            lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            beyond = torch.arange(keys.shape[1]) >= lens[..., None]
            scores = scores.masked_fill(beyond, -1e6)
        weights = scores.softmax(-1)
        return weights @ values, weights


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g) for s in ((3, 5, 7), (3, 11, 4), (3, 11, 6))]


def gradients(module, results, tensors):
    loss = sum(r.square().sum() for r in results)
    wanted = [*tensors, *module.parameters()]
    return torch.autograd.grad(loss, wanted, allow_unused=True)


class TestAdditiveAttention:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("lens", [None, [11, 2, 7], "rows"])
    def test_same_as_the_textbook(self, tensors, lens, bias):
        torch.manual_seed(0)
        theirs = Textbook(7, 4, 8, bias)
        torch.manual_seed(0)
        ours = AdditiveAttention(7, 4, 8, bias=bias)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)  # same seed, same weights
        ours.load_state_dict(theirs.state_dict())
        if lens is not None:
            lens = (
                torch.arange(1, 16).view(3, 5).clamp(max=11)
                if lens == "rows"
                else torch.tensor(lens)
            )
        tensors = [t.requires_grad_() for t in tensors]
        found = ours(*tensors, lens, need_weights=True)
        expected = theirs(*tensors, lens)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours(*tensors, lens), expected[0])
        torch.testing.assert_close(
            gradients(ours, found, tensors),
            gradients(theirs, expected, tensors),
            atol=1e-5,
            rtol=1e-4,
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half(self, tensors, dtype):
        torch.manual_seed(0)
        module, peer = AdditiveAttention(7, 4, 8), Textbook(7, 4, 8)
        peer.load_state_dict(module.state_dict())
        halves = [t.to(dtype) for t in tensors]
        ours = module.to(dtype)(*halves)
        theirs = peer.to(dtype)(*halves)[0]
        exact = peer.double()(*(t.double() for t in halves))[0]
        assert ours.dtype == dtype
        testing.assert_within_budget(ours, theirs, exact)

    def test_no_valid_key_gives_zero(self, tensors):
        module = AdditiveAttention(7, 4, 8)
        tensors = [t.requires_grad_() for t in tensors]
        out, weights = module(*tensors, torch.tensor([0, 3, 11]), need_weights=True)
        assert not out[0].any()
        assert not weights[0].any()
        assert all(g is None or g.isfinite().all() for g in gradients(module, (out,), tensors))

    def test_masks(self, tensors):
        module = AdditiveAttention(7, 4, 8)
        queries, keys, values = tensors
        causal = torch.ones(5, 11, dtype=torch.bool).tril()
        lens = torch.tensor([3, 3, 3])
        expected = module(queries, keys, values, lens, attn_mask=causal)
        assert not torch.allclose(expected, module(queries, keys, values, lens))
        mask = Mask(causal="top_left")
        torch.testing.assert_close(module(queries, keys, values, lens, mask=mask), expected)
        added = torch.zeros(5, 11).masked_fill(~causal, -INF)
        torch.testing.assert_close(module(queries, keys, values, lens, attn_mask=added), expected)
        with pytest.raises(ValueError, match="kv_len"):
            module(queries, keys, values, lens, mask=Mask(kv_len=lens))

    def test_cached_keys(self, tensors):
        """Step by step, with the keys projected once: the same results, gradients and errors."""
        module = AdditiveAttention(7, 4, 8)
        queries, keys, values = (t.requires_grad_() for t in tensors)
        lens = torch.tensor([11, 2, 7])
        expected = module(queries, keys, values, lens, need_weights=True)
        cache = module.project_keys(keys)
        steps = [
            module(q, None, values, lens, need_weights=True, cache=cache) for q in queries.unbind(1)
        ]
        assert steps[0][0].shape == (3, 6)
        found = [torch.stack(parts, 1) for parts in zip(*steps, strict=True)]
        torch.testing.assert_close(tuple(found), expected)
        torch.testing.assert_close(
            gradients(module, found, tensors), gradients(module, expected, tensors)
        )
        with pytest.raises(ValueError, match=r"cache: expected \[3, 11, 8\]"):
            module(queries, None, values, cache=cache[:2])
        with pytest.raises(TypeError, match="project_keys"):
            module(queries, None, values, cache=[cache])
        with pytest.raises(ValueError, match="keys: expected a tensor"):
            module(queries, None, values)

    def test_weights_are_stored_on_request(self, tensors):
        module = AdditiveAttention(7, 4, 8)
        module(*tensors)
        assert module.attention_weights is None
        module.store_weights = True
        out = module(*tensors)
        assert out.requires_grad
        assert module.attention_weights.shape == (3, 5, 11)
        assert not module.attention_weights.requires_grad
        torch.testing.assert_close(module.attention_weights @ tensors[2], out)

    def test_dropout_in_training_only(self, tensors):
        module = AdditiveAttention(7, 4, 8, dropout=0.5)
        assert (module(*tensors, need_weights=True)[1] == 0).any()
        assert (module.eval()(*tensors, need_weights=True)[1] > 0).all()
        with pytest.raises(ValueError, match="dropout"):
            AdditiveAttention(7, 4, 8, dropout=1.5)

    def test_autocast(self, tensors):
        module = AdditiveAttention(7, 4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(*tensors)
        torch.testing.assert_close(out.float(), module(*tensors), rtol=0.05, atol=0.05)

    @pytest.mark.slow
    def test_tools(self, tensors):
        module = AdditiveAttention(7, 4, 8, dropout=0.25)
        assert "dropout=0.25" in repr(module)
        module.eval()
        expected = module(*tensors)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(copied(*tensors), expected)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            compiled(*tensors, torch.tensor([1, 2, 3])), module(*tensors, torch.tensor([1, 2, 3]))
        )


def plain_multihead(module, query, key, value, padding=None, attn_mask=None):
    """(output, weights per head), batch first, by the definition. Masks are boolean, True drops."""
    E, H = module.embed_dim, module.num_heads
    projected = [
        (x @ w.T + b).unflatten(-1, (H, E // H)).transpose(1, 2)
        for x, w, b in zip(
            (query, key, value),
            module.in_proj_weight.chunk(3),
            module.in_proj_bias.chunk(3),
            strict=True,
        )
    ]
    q, k, v = projected
    features = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2))
    scores = (features * module.score_weight[:, None, None]).sum(-1)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], -INF)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, -INF)
    weights = scores.softmax(-1)
    merged = (weights @ v).transpose(1, 2).flatten(2)
    return merged @ module.out_proj.weight.T + module.out_proj.bias, weights


class TestMultihead:
    @pytest.fixture
    def module(self):
        torch.manual_seed(0)
        return MultiheadAdditiveAttention(12, 3, batch_first=True)

    @pytest.fixture
    def sequences(self):
        g = torch.Generator().manual_seed(0)
        return [torch.randn(2, n, 12, generator=g).requires_grad_() for n in (5, 7)]

    @pytest.mark.parametrize("average", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_same_as_plain(self, module, sequences, masked, average):
        query, key = sequences
        masks = {}
        if masked:
            masks["attn_mask"] = torch.ones(5, 7, dtype=torch.bool).triu(2)
            masks["key_padding_mask"] = torch.arange(7) >= torch.tensor([[7], [4]])
        found = module(query, key, key, **masks, average_attn_weights=average)
        out, weights = plain_multihead(module, query, key, key, *list(masks.values())[::-1])
        expected = (out, weights.mean(1) if average else weights)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            gradients(module, found, sequences),
            gradients(module, expected, sequences),
            atol=1e-5,
            rtol=1e-4,
        )

    def test_layouts_and_extra_keys(self):
        x = torch.randn(2, 5, 12)
        torch.manual_seed(0)
        first = MultiheadAdditiveAttention(
            12, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True
        )
        second = MultiheadAdditiveAttention(12, 3, add_bias_kv=True, add_zero_attn=True)
        second.load_state_dict(first.state_dict())
        out, weights = first(x, x, x)
        assert weights.shape == (2, 5, 7)
        y = x.transpose(0, 1)
        torch.testing.assert_close(second(y, y, y), (out.transpose(0, 1), weights))
        torch.testing.assert_close(second(x[0], x[0], x[0]), (out[0], weights[0]))

    def test_parameters(self):
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(12, 3)
        torch.manual_seed(0)
        ours = MultiheadAdditiveAttention(12, 3)
        state = ours.state_dict()
        assert set(state) == {*theirs.state_dict(), "score_weight"}
        assert state["score_weight"].shape == (3, 4)
        for name, value in theirs.state_dict().items():
            assert torch.equal(state[name], value)
        before = ours.score_weight.clone()
        ours._reset_parameters()
        assert not torch.equal(before, ours.score_weight)
        assert (
            MultiheadAdditiveAttention(12, 3, dtype=torch.float64).score_weight.dtype
            == torch.float64
        )

    def test_empty_rows(self, module, sequences):
        query, key = sequences
        out, weights = module(query, key, key, torch.tensor([[False] * 7, [True] * 7]))
        torch.testing.assert_close(out[1], module.out_proj.bias.expand(5, 12))
        assert not weights[1].any()
        assert all(g.isfinite().all() for g in gradients(module, (out, weights), sequences))

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_in_an_encoder(self, training):
        """torch's fused layer must not run: it would compute another score from our parameters."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True)
        layer.self_attn = MultiheadAdditiveAttention(12, 4, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        x, padding = torch.randn(2, 5, 12), torch.arange(5) >= torch.tensor([[5], [3]])
        expected = model(x, src_key_padding_mask=padding)
        model.train(training)
        with torch.no_grad():
            found = model(x, src_key_padding_mask=padding)
        kept = ~padding[..., None]
        torch.testing.assert_close(found * kept, expected * kept, atol=1e-5, rtol=0)
        assert replace_attention(model) == 0

    def test_lost_hook_raises(self):
        layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True).eval()
        layer.self_attn = MultiheadAdditiveAttention(12, 4, batch_first=True).eval()
        layer.self_attn._forward_pre_hooks.clear()
        with torch.no_grad(), pytest.raises(RuntimeError, match="replace_attention"):
            layer(torch.randn(2, 5, 12))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_no_way_round_our_forward(self, module, sequences):
        assert isinstance(module, MultiheadAttention)
        x = torch.ones(2, 5, 12, dtype=torch.int64)
        with pytest.raises(TypeError, match="int64"):
            module(x, x, x)
        with pytest.raises(NotImplementedError, match="script"):
            torch.jit.script(module)
        with pytest.raises(TypeError, match=r"torch\.jit\.trace"):
            torch.jit.trace(module, tuple(sequences[:1] * 3))

    def test_copies(self, module, sequences):
        query, key = sequences
        expected = module(query, key, key)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(copied(query, key, key), expected)
            assert len(copied._forward_pre_hooks) == 1

    @pytest.mark.slow
    def test_compile_and_autocast(self, module, sequences):
        query, key = sequences
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        expected = module(query, key, key)
        torch.testing.assert_close(compiled(query, key, key), expected)
        with torch.autocast("cpu", torch.bfloat16):
            out, weights = module(query, key, key)
        assert out.dtype == weights.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected[0], atol=0.05, rtol=0.05)
