"""KVCache: decoding step by step equals the full forward, and projects nothing twice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from torch import nn

from fastattn import KVCache, MultiheadAdditiveAttention, MultiheadAttention, testing
from fastattn.modules.multihead import inference

B, N, M, E, H = 3, 9, 5, 16, 4


@pytest.fixture(params=[True, False], ids=["batch_first", "time_major"])
def module(request):
    return MultiheadAttention(E, H, batch_first=request.param).eval()


def sequence(module, length=N):
    x = torch.randn(B, length, E)
    return x if module.batch_first else x.transpose(0, 1)


def time(module) -> int:
    return 1 if module.batch_first else 0


def causal(length=N):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def full(module, x, dtype, **masks):
    """The causal forward of plain torch."""
    plain = nn.MultiheadAttention(E, H, batch_first=module.batch_first, dtype=dtype).eval()
    plain.load_state_dict(module.state_dict())
    x = x.to(dtype)
    return plain(x, x, x, attn_mask=causal(), **masks)[0].detach()


@torch.no_grad()
def decode(module, x, sizes, cache=None, **options):
    cache = KVCache() if cache is None else cache
    outs = [
        module(t, t, t, cache=cache, need_weights=False, **options)[0]
        for t in x.split(sizes, time(module))
    ]
    return torch.cat(outs, time(module))


class TestGrowing:
    @pytest.mark.parametrize("sizes", [[1] * N, [4, 1, 1, 3], [N], [0, 8, 1]], ids=str)
    def test_equals_the_causal_forward(self, module, sizes):
        x = sequence(module)
        expected = (full(module, x, d) for d in (torch.float32, torch.float64))
        assert_close([decode(module, x, sizes)], *([e] for e in expected))

    @pytest.mark.parametrize("length", [15, 16, 17, 33, 70])
    def test_growth(self, module, length):
        x = sequence(module, length)
        cache = KVCache()
        grown = decode(module, x, 1, cache)
        assert cache.length == length
        assert cache.key.shape == (B, H, length, E // H)
        torch.testing.assert_close(grown, decode(module, x, [length]))

    def test_memory_is_reused(self, module):
        """32 steps with room for 40 never move the keys; without room they move twice."""
        x = sequence(module, 32)
        for capacity, moves in ((40, 1), (0, 2)):
            cache, places = KVCache(capacity=capacity), set()
            for t in x.split(1, time(module)):
                decode(module, t, 1, cache)
                places.add(cache.key.data_ptr())
            assert len(places) == moves

    def test_weights(self, module):
        x = sequence(module)
        _, expected = module(x, x, x, attn_mask=causal(), average_attn_weights=False)
        cache = KVCache()
        for i, t in enumerate(x.split(1, time(module))):
            with torch.no_grad():
                _, weights = module(t, t, t, cache=cache, average_attn_weights=False)
            assert weights.shape == (B, H, 1, i + 1)
            torch.testing.assert_close(weights[:, :, 0], expected[:, :, i, : i + 1])

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_masks_cover_the_past(self, module, kind):
        x = sequence(module)
        padding = torch.zeros(B, N, dtype=torch.bool)
        padding[1, :2] = padding[2, 3] = True
        dropped = torch.rand(N, N) < 0.2
        if kind == "float":
            padding, dropped = (
                torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in (padding, dropped)
            )
            pairs = dropped.masked_fill(causal(), -torch.inf)
        else:
            pairs = dropped | causal()
        with torch.no_grad():
            expected = module(x, x, x, padding, attn_mask=pairs)[0]
            cache, outs, past = KVCache(), [], 0
            for t in x.split([4, 1, 1, 3], time(module)):
                end = past + t.shape[time(module)]
                call = dict(key_padding_mask=padding[:, :end], attn_mask=dropped[past:end, :end])
                outs.append(module(t, t, t, cache=cache, **call)[0])
                past = end
        torch.testing.assert_close(torch.cat(outs, time(module)), expected)

    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize("grad", [False, True])
    def test_one_sample(self, module, batched, grad):
        x, dim, cache = torch.randn(N, E), 0, KVCache()
        if batched:
            x, dim = x.unsqueeze(1 - time(module)), time(module)
        with torch.set_grad_enabled(grad):
            outs = [module(t, t, t, cache=cache)[0] for t in x.split([4, 1, 4], dim)]
            expected, _ = module(x, x, x, attn_mask=causal())
        torch.testing.assert_close(torch.cat(outs, dim), expected)

    def test_other_modules(self):
        """Separate projections, and the additive score."""
        x = torch.randn(B, N, E)
        for module in (
            MultiheadAttention(E, H, kdim=E, vdim=5, batch_first=True),
            MultiheadAdditiveAttention(E, H, batch_first=True),
        ):
            v = torch.randn(B, N, module.vdim) if module.vdim != E else x
            expected = module(x, x, v, attn_mask=causal())[0]
            cache, outs = KVCache(), []
            with torch.no_grad():
                for i in range(N):
                    step = (t[:, i : i + 1] for t in (x, x, v))
                    outs.append(module(*step, cache=cache)[0])
            torch.testing.assert_close(torch.cat(outs, 1), expected.detach())

    def test_gradients_flow(self, module):
        """With gradients on, all steps together are one differentiable function."""
        x = sequence(module).requires_grad_()
        cache = KVCache()
        steps = [module(t, t, t, cache=cache)[0] for t in x.split([4, 1, 4], time(module))]
        wanted = [x, *module.parameters()]
        found = torch.autograd.grad(torch.cat(steps, time(module)).square().sum(), wanted)
        expected = torch.autograd.grad(
            module(x, x, x, attn_mask=causal())[0].square().sum(), wanted
        )
        torch.testing.assert_close(found, expected)
        decode(module, x.detach(), [N], cache)  # and on without gradients
        assert cache.length == 2 * N
        assert not cache.key.requires_grad

    def test_gradient_of_queries_alone(self, module):
        """Keys without gradient are in the graph as well, and must not be overwritten."""
        module.requires_grad_(False)
        q, x = sequence(module).requires_grad_(), sequence(module)
        cache, steps = KVCache(), []
        for i, (a, t) in enumerate(zip(*(y.split(1, time(module)) for y in (q, x)), strict=True)):
            steps.append(module(a, t, t, cache=cache)[0])
            if i == 4:
                cache.reorder(torch.arange(B))
        (found,) = torch.autograd.grad(torch.cat(steps, time(module)).square().sum(), q)
        whole = module(q, x, x, attn_mask=causal())[0]
        (expected,) = torch.autograd.grad(whole.square().sum(), q)
        torch.testing.assert_close(found, expected)

    def test_inference_mode_and_back(self, module):
        x = sequence(module)
        head, tail = x.split([4, 5], time(module))
        cache = KVCache()
        with torch.inference_mode():
            first = module(head, head, head, cache=cache)[0]
        second = decode(module, tail, 1, cache)
        found = torch.cat([first, second], time(module))
        torch.testing.assert_close(found, full(module, x, torch.float32))

    @pytest.mark.parametrize("grad", [False, True])
    def test_reorder(self, module, grad):
        """Beam search: every sample continues the sample that it was made from."""
        x = sequence(module)
        batch = 0 if module.batch_first else 1
        head, tail = x.split([6, 3], time(module))
        for order in ([2, 0, 0], [1, 1, 2, 0, 2]):
            picked = torch.tensor(order)
            cache = KVCache()
            decode(module, head, [6], cache)
            with torch.set_grad_enabled(grad):
                cache.reorder(torch.arange(B))
                cache.reorder(picked)
            ends = tail.index_select(batch, picked % B)
            whole = torch.cat([head.index_select(batch, picked), ends], time(module))
            found = decode(module, ends, 1, cache)
            torch.testing.assert_close(found, decode(module, whole, [9]).split(
                [6, 3], time(module)
            )[1])  # fmt: skip
            assert cache.length == 9

    def test_reorder_reuses_memory(self, module):
        """Uses two places in turn while the sizes stay the same."""
        cache = KVCache(capacity=N)
        places = set()
        with torch.no_grad():
            for t in sequence(module).split(1, time(module)):
                decode(module, t, 1, cache)
                cache.reorder(torch.tensor([1, 2, 0]))
                places.add(cache.key.data_ptr())
        assert len(places) == 2

    def test_crop_and_reset(self, module):
        x = sequence(module)
        cache = KVCache()
        decode(module, x, 1, cache)
        cache.crop(4)
        again = decode(module, x.split([4, 5], time(module))[1], 1, cache)
        torch.testing.assert_close(again, decode(module, x, [N]).split([4, 5], time(module))[1])
        cache.reset()
        assert cache.is_empty
        assert cache.key is None
        torch.testing.assert_close(decode(module, x, 1, cache), decode(module, x, [N]))
        with pytest.raises(ValueError, match="0 to 9"):
            cache.crop(10)

    def test_copies(self, module):
        x = sequence(module)
        cache = KVCache()
        decode(module, x, [N], cache)
        branch = copy.deepcopy(cache)
        decode(module, x, [N], cache)
        assert (cache.length, branch.length) == (2 * N, N)
        assert "length=9" in repr(branch)
        assert "empty" in repr(KVCache())
        key = torch.randn(B, H, N, 4, requires_grad=True)
        cache.reset()
        cache.update(2 * key, key)  # part of a graph
        copy.deepcopy(cache).key.sum().backward()
        assert (key.grad == 2).all()

    def test_autocast_keeps_half_keys(self, module):
        x = sequence(module)
        cache = KVCache()
        with torch.autocast("cpu", torch.bfloat16):
            found = decode(module, x, 1, cache)
            peer = full(module, x, torch.float32)
        assert cache.key.dtype == torch.bfloat16
        testing.assert_within_budget(found, peer, full(module, x, torch.float64))

    @pytest.mark.slow
    def test_compile(self):
        """Steps of any length run in a few graphs, without graph breaks."""
        torch._dynamo.reset()  # of what other tests compiled
        module = MultiheadAttention(E, H, batch_first=True).eval()
        x = sequence(module, 40)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
            found = decode(compiled, x, 1)
        torch.testing.assert_close(found, decode(module, x, [40]))

    def test_nothing_past_is_projected(self, module):
        """Each step multiplies one row by the input projection, however many keys are cached."""
        rows = []
        linear = F.linear

        def counting(x, weight, bias=None):
            rows.append(x.shape[:-1].numel())
            return linear(x, weight, bias)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", counting)
            patch.setattr(inference, "attend", lambda *args: None)  # test_cached_steps.py
            decode(module, sequence(module), 1)
        assert rows == [B] * (2 * N)  # in and out, for each step

    def test_errors(self, module):
        x = sequence(module)
        one, two = x.split([1, 2, 6], time(module))[:2]
        cache = KVCache()
        with pytest.raises(ValueError, match="as many new keys"):
            module(one, two, two, cache=cache)
        decode(module, one, [1], cache)
        batch = 0 if module.batch_first else 1
        fewer = one.narrow(batch, 0, 2)
        with pytest.raises(ValueError, match=r"holds batch 3.* batch 2"):
            module(fewer, fewer, fewer, cache=cache)
        with pytest.raises(RuntimeError, match=r"attn_mask is .* \(1, 2\)"):
            module(one, one, one, attn_mask=torch.zeros(1, 1).bool(), cache=cache)
        with pytest.raises(AssertionError, match="key_padded_mask"):
            module(one, one, one, torch.zeros(B, 1).bool(), cache=cache)
        assert cache.length == 1  # as it was
        with pytest.raises(ValueError, match="int32 or int64"):
            cache.reorder(torch.tensor([0.0]))
        with pytest.raises(ValueError, match="indices: expected device cpu, got meta"):
            cache.reorder(torch.zeros(1, dtype=torch.int64, device="meta"))
        with pytest.raises(TypeError, match="indices: expected a Tensor"):
            cache.reorder([0, 1])
        with pytest.raises(IndexError):
            cache.reorder(torch.tensor([B]))
        with pytest.raises(TypeError, match="KVCache"):
            module(one, one, one, cache={})
        with pytest.raises(TypeError, match="plain"):
            module(one.int(), one.int(), one.int(), cache=cache)
        with pytest.raises(ValueError, match="capacity"):
            KVCache(capacity=-1)
        extra = MultiheadAttention(E, H, add_bias_kv=True)
        with pytest.raises(ValueError, match="add_bias_kv"):
            extra(one, one, one, cache=KVCache())


class TestStatic:
    @pytest.mark.parametrize("padded", [False, True])
    def test_projects_once(self, module, padded):
        memory, x = sequence(module), sequence(module, M)
        padding = torch.arange(N) >= torch.tensor([[N], [4], [0]]) if padded else None
        with torch.no_grad():
            expected, weights = module(x, memory, memory, padding)
            cache, outs, rows = KVCache(static=True), [], []
            for i, t in enumerate(x.split(1, time(module))):
                keys = memory if i == 0 else None
                out, row = module(t, keys, keys, padding, cache=cache)
                outs.append(out)
                rows.append(row)
        assert cache.length == N
        torch.testing.assert_close(torch.cat(outs, time(module)), expected)
        torch.testing.assert_close(torch.cat(rows, 1), weights)

    def test_later_memory_is_not_read(self, module):
        memory, x = sequence(module), sequence(module, M)
        cache = KVCache(static=True)
        expected = module(x, memory, memory, cache=cache)[0]
        spoilt = torch.full_like(memory, torch.nan)
        torch.testing.assert_close(module(x, spoilt, spoilt, cache=cache)[0], expected)
        with torch.autocast("cpu", torch.bfloat16):  # casts keys that are there
            half, usual = (
                module(x, y, y, cache=c)[0] for y, c in ((spoilt, cache), (memory, None))
            )
        testing.assert_within_budget(half, usual, expected.double())

    def test_filled_in_inference_mode(self, module):
        """A frozen encoder's keys, and gradients of the queries."""
        memory, x = sequence(module), sequence(module, M).requires_grad_()
        cache = KVCache(static=True)
        with torch.inference_mode():
            module(x, memory, memory, cache=cache)
        found, expected = module(x, None, None, cache=cache)[0], module(x, memory, memory)[0]
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
        torch.testing.assert_close(*grads)

    def test_separate_projections(self):
        module = MultiheadAttention(E, H, kdim=6, vdim=7, batch_first=True)
        x, k, v = torch.randn(B, M, E), torch.randn(B, N, 6), torch.randn(B, N, 7)
        cache = KVCache(static=True)
        expected = module(x, k, v)[0]
        for _ in range(2):
            torch.testing.assert_close(module(x, k, v, cache=cache)[0], expected)

    def test_gradients_flow(self, module):
        memory, x = sequence(module).requires_grad_(), sequence(module, M)
        cache = KVCache(static=True)
        outs = [module(t, memory, memory, cache=cache)[0] for t in x.split(1, time(module))]
        wanted = [memory, *module.parameters()]
        found = torch.autograd.grad(torch.cat(outs, time(module)).square().sum(), wanted)
        expected = torch.autograd.grad(module(x, memory, memory)[0].square().sum(), wanted)
        torch.testing.assert_close(found, expected)

    def test_reorder_spreads_over_beams(self, module):
        memory, x = sequence(module), sequence(module, M)
        batch = 0 if module.batch_first else 1
        beams = torch.arange(B).repeat_interleave(2)
        cache = KVCache(static=True)
        with torch.no_grad():
            expected = module(x, memory, memory, cache=cache)[0].index_select(batch, beams)
            with pytest.raises(ValueError, match="holds batch 3"):
                module(x.index_select(batch, beams), None, None, cache=cache)
            cache.reorder(beams)
            found = module(x.index_select(batch, beams), None, None, cache=cache)[0]
        torch.testing.assert_close(found, expected)

    def test_errors(self, module):
        x = sequence(module)
        with pytest.raises(ValueError, match="does not hold them yet"):
            module(x, None, None, cache=KVCache(static=True))
        cache = KVCache(static=True)
        module(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="once"):
            cache.update(cache.key, cache.value)
        with pytest.raises(AssertionError, match="key_padded_mask"):
            module(x, None, None, torch.zeros(B, 1).bool(), cache=cache)
        with pytest.raises(AssertionError, match="unbatched 2D or batched 3D"):
            module(torch.tensor(1.0), None, None, torch.zeros(B, N).bool(), cache=cache)


@pytest.mark.parametrize("fault", ["device", "dtype", "dropout"])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_call_that_raises_leaves_the_cache_as_it_was(static, fault):
    module, x, masks = MultiheadAttention(E, H, batch_first=True), torch.randn(B, 1, E), {}
    cache, half = KVCache(static=static), torch.autocast("cpu", torch.bfloat16, fault == "dtype")
    if fault == "device":
        masks["key_padding_mask"] = torch.zeros(B, 1, dtype=torch.bool, device="meta")
    elif fault == "dtype":  # under autocast, any float passes the checks of torch's masks
        masks["attn_mask"] = torch.zeros(1, 1, dtype=torch.float64)
    else:
        module.dropout = 2.0
    with half, pytest.raises((TypeError, ValueError)):
        module(x, x, x, cache=cache, **masks)
    assert cache.is_empty
    assert cache.length == 0


@pytest.mark.parametrize("static", [False, True])
def test_update_takes_as_many_values_as_keys(static):
    """Memory after the stored values was never written."""
    cache, key = KVCache(static=static), torch.zeros(2, 3, 4, 5)
    for value, error, message in (
        (key[:, :, :2], ValueError, "same batch, heads, length"),
        (key[:1], ValueError, "same batch"),
        (key.half(), ValueError, "dtype"),
        (key[0], ValueError, r"value: expected \[batch, heads, length, dim\], got \[3, 4, 5\]"),
        (None, TypeError, "value: expected a Tensor"),
    ):
        with torch.no_grad(), pytest.raises(error, match=message):
            cache.update(key, value)
        assert cache.is_empty
    with torch.no_grad():
        cache.update(key, key[..., :2])
        assert cache.value.shape == (2, 3, 4, 2)
        if not static:
            with pytest.raises(ValueError, match="but the new values are batch 2, 3 heads of 5"):
                cache.update(key, key)
            assert cache.length == 4


@torch.no_grad()
def test_autograd_sees_that_a_step_writes_into_the_cache():
    """A graph that holds keys must not go backward over those that replaced them."""
    module, x, cache = (
        MultiheadAttention(E, H, batch_first=True).eval(),
        torch.randn(B, 4, E),
        KVCache(),
    )
    module(x, x, x, cache=cache)
    with torch.enable_grad():
        factor = torch.ones_like(cache.key, requires_grad=True)
        loss = (factor * cache.key).sum()
    cache.crop(2)
    step = x[:, :2]
    module(step, step, step, cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
