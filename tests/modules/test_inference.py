"""Attention at inference: one operator computes the whole module."""

import itertools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import MultiheadAttention, functional, testing
from fastattn.backends import cpu
from fastattn.modules.multihead import inference


@pytest.mark.usefixtures("extension")
class TestTheShortWay:
    """Self-attention at inference needs no checks, and has its own short path: ``inference.py``."""

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("tokens", [5, 40])  # with 40, the weight is on the left
    def test_gives_the_same_bits(
        self, monkeypatch, checked, need_weights, batch_first, bias, tokens
    ):
        module = MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first, bias=bias).eval()
        for p in module.parameters():
            nn.init.normal_(p)
        x = torch.randn(1, tokens, 8)
        found = []
        for attend in (inference.attend, lambda *args: None):
            monkeypatch.setattr(inference, "attend", attend)
            with torch.no_grad():
                out, weights = module(x, x, x, need_weights=need_weights)
            found.append([out, *([weights] if need_weights else [])])
            assert out.is_contiguous()
        assert len(checked) == 1
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("padding", [None, torch.bool, torch.float32])
    @pytest.mark.parametrize("keys", [1, 3, 40])
    @pytest.mark.parametrize("apart", [True, False])
    def test_gives_the_same_bits_beside_other_keys(
        self, monkeypatch, checked, need_weights, batch_first, padding, keys, apart
    ):
        module = MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first).eval()
        for p in module.parameters():
            nn.init.normal_(p)
        x, y = torch.randn(2, 5, 8), torch.randn(2, keys, 8)
        if not batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        z = y + 1 if apart else y
        ignored = torch.rand(2, keys) < 0.3
        mask = None if padding is None else ignored.to(padding)
        found = []
        for attend in (inference.attend, lambda *args: None):
            monkeypatch.setattr(inference, "attend", attend)
            with torch.no_grad():
                out, weights = module(x, y, z, mask, need_weights=need_weights)
            found.append([out, *([weights] if need_weights else [])])
        assert len(checked) == 1
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert all(a.stride() == b.stride() for a, b in zip(*found, strict=True))

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("padding", [None, torch.bool, torch.float32])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    @pytest.mark.parametrize("shape", [(5, 5), (6, 5, 5), (5, 9), (6, 5, 9)])
    def test_gives_the_same_bits_under_a_mask_of_pairs(
        self, monkeypatch, module, checked, shape, dtype, padding, is_causal, need_weights
    ):
        x, y = torch.randn(3, 5, 8), torch.randn(3, shape[-1], 8)
        y = x if shape[-1] == 5 else y
        masks = dict(key_padding_mask=None, attn_mask=(torch.rand(shape) < 0.3).to(dtype))
        if padding is not None:
            masks["key_padding_mask"] = (torch.rand(3, shape[-1]) < 0.3).to(padding)
        options = masks | dict(is_causal=is_causal, need_weights=need_weights)
        found = []
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)  # of two kinds of masks
            for attend in (inference.attend, lambda *args: None):
                monkeypatch.setattr(inference, "attend", attend)
                found.append([t for t in module(x, y, y, **options) if t is not None])
        one_kind = padding in (None, torch.bool) if dtype == torch.bool else padding is None
        assert len(checked) == (1 if one_kind else 2)
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

    def test_two_masks_are_described_once(self, monkeypatch, module, x):
        """In training, too: a description takes longer than a small problem."""
        masks = dict(attn_mask=torch.rand(5, 5) < 0.3, key_padding_mask=torch.rand(2, 5) < 0.3)
        module(x, x, x, **masks)
        monkeypatch.setattr(functional.validate, "build", None)
        module(x, x, x, **masks)

    def test_other_keys_that_do_not_fit(self, module, x, operator_calls):
        theirs = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            for y, z in (*((y, y) for y in (x[:1], x[..., :7], x[0])), (x, x[:, :3])):
                with pytest.raises((AssertionError, RuntimeError)) as error:
                    theirs(x, y, z)
                with pytest.raises(error.type, match=re.escape(str(error.value))):
                    module(x, y, z)
            with pytest.raises(RuntimeError, match="dtype"):
                module(x, x.double(), x.double())
            with pytest.raises(TypeError, match="key: expected a Tensor"):
                module(x, None, None)
        assert not operator_calls
        leaf = x[:, :3].clone().requires_grad_()
        module.requires_grad_(False)
        assert module(x, leaf, leaf)[0].requires_grad
        assert not operator_calls
        y = leaf.detach()
        module(x, y, y)
        assert len(operator_calls) == 1

    @pytest.mark.parametrize(
        ("name", "shape", "dtype"),
        [
            *(("attn_mask", n, torch.float32) for n in ((5, 6), (5, 1), (1, 5), (5,), (3, 5, 5))),
            *(("key_padding_mask", n, torch.float32) for n in ((2, 6), (2, 1), (1, 5), (5,))),
            *(("attn_mask", (5, 5), d) for d in (torch.float64, torch.bfloat16, torch.int64)),
            *(("key_padding_mask", (2, 5), d) for d in (torch.float64, torch.half, torch.uint8)),
        ],
    )
    def test_masks_that_do_not_fit(self, module, x, operator_calls, name, shape, dtype):
        """The errors are those of a call with gradients."""
        mask = {name: torch.zeros(shape, dtype=dtype)}
        with pytest.raises((AssertionError, RuntimeError)) as error:
            module(x, x, x, **mask)
        message = re.escape(str(error.value))
        with torch.no_grad(), pytest.raises(error.type, match=message):
            module(x, x, x, **mask)
        assert not operator_calls

    def test_is_for_plain_calls_only(self, module, x, checked):
        calls = [
            lambda: module(x[0], x[0], x[0]),
            lambda: module(x[0], x[0, :3], x[0, :3]),
            lambda: MultiheadAttention(8, 2, add_zero_attn=True)(x, x, x),
            lambda: MultiheadAttention(8, 2, add_bias_kv=True)(x, x, x),
            lambda: prune.identity(module.out_proj, "bias") and module(x, x, x),
        ]
        with torch.no_grad():
            module(x, x, x)
            assert not checked
            for n, call in enumerate(calls, start=1):
                call()
                assert len(checked) == n


@pytest.mark.usefixtures("extension")
class TestOneOperator:
    """At inference the short path is one operator, except where code could see that."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("weights", ["none", "mean", "full"])
    def test_is_right(self, operator_calls, dtype, bias, weights):
        sizes = dict(bias=bias, batch_first=True)
        exact, peer = (nn.MultiheadAttention(8, 2, **sizes).eval() for _ in range(2))
        ours = MultiheadAttention(8, 2, **sizes).eval()
        for p in exact.parameters():
            nn.init.normal_(p)
        for module in (peer, ours):
            module.load_state_dict(exact.state_dict())
            module.to(dtype)
        exact.load_state_dict(ours.state_dict())
        exact.double()
        x = torch.randn(3, 7, 8).to(dtype)
        results = []
        with torch.no_grad():
            for module, y in ((ours, x), (peer, x), (exact, x.double())):
                asked = dict(need_weights=weights != "none", average_attn_weights=weights == "mean")
                results.append([t for t in module(y, y, y, **asked) if t is not None])
        for found in zip(*results, strict=True):
            testing.assert_within_budget(*found)
        assert len(operator_calls) == 1

    def test_when_nothing_wants_a_gradient(self, module, x, operator_calls):
        with torch.inference_mode():
            module(x, x, x)
        module.requires_grad_(False)(x, x, x)
        assert len(operator_calls) == 2
        leaf = x.clone().requires_grad_()
        assert module(leaf, leaf, leaf)[0].requires_grad
        module.out_proj.bias.requires_grad_()
        assert module(x, x, x)[0].requires_grad
        assert len(operator_calls) == 2

    def test_takes_any_strides(self, module, operator_calls):
        x = torch.randn(5, 4, 8).transpose(0, 1)
        with torch.no_grad():
            for same in (x, x[1:3], x[1:3].contiguous(), x[:, :3]):
                torch.testing.assert_close(
                    module(same, same, same),
                    nn.MultiheadAttention.forward(module, same, same, same),
                )
        assert len(operator_calls) == 4

    @pytest.mark.parametrize("other", [False, True])
    def test_pruned_heads(self, operator_calls, other):
        """The scale is that of the heads there are, whose size is not that of embed_dim."""
        module = MultiheadAttention(16, 4, batch_first=True).eval()
        kept = torch.cat([torch.arange(8) + 16 * n for n in range(3)])
        module.num_heads, module.out_proj = 2, nn.Linear(8, 16)
        module.in_proj_weight = nn.Parameter(3 * module.in_proj_weight.detach()[kept])
        module.in_proj_bias = nn.Parameter(module.in_proj_bias.detach()[kept])
        x, cache = torch.randn(2, 3, 16), fastattn.KVCache()
        y = torch.randn(2, 5, 16) if other else x
        want = module(x, y, y)
        with torch.no_grad():
            torch.testing.assert_close(module(x, y, y), want)
            module(x, x, x, cache=cache)
        assert cache.length == 3
        assert not operator_calls

    def test_one_call_tells_the_choice_for_all(self, monkeypatch, module, x, operator_calls):
        with torch.no_grad():
            module(x, x, x)
            monkeypatch.setattr(inference.validate, "build", None)
            for B, M in itertools.product((1, 2, 7), (1, 3, 9)):
                y = torch.randn(B, M, 8)
                want = nn.MultiheadAttention.forward(module, y, y, y)
                torch.testing.assert_close(module(y, y, y), want)
        assert len(operator_calls) == 10

    def test_where_torch_would_see_it(self, module, x, operator_calls):
        """Modes, transforms and traces find torch's operators. All results are the same."""

        torch._dynamo.reset()  # of what other tests compiled

        def attend(y, call=module):
            return call(y, y, y)[0]

        def under(context):
            with context:
                return attend(x)

        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        counter = FlopCounterMode(display=False)
        with torch.no_grad():
            want, _ = nn.MultiheadAttention.forward(module, x, x, x)
            found = [
                attend(x, compiled),
                under(counter),
                under(forward_ad.dual_level()),
                torch.func.vmap(attend, in_dims=1, out_dims=1)(x[:, None]).squeeze(1),
            ]
            half = under(torch.autocast("cpu", torch.bfloat16))
        assert counter.get_total_flops() > 0
        for out in found:
            torch.testing.assert_close(out, want)
        torch.testing.assert_close(half.float(), want, rtol=0.05, atol=0.05)
        assert not operator_calls

    def test_where_it_does_not_apply(self, module, x, operator_calls):
        dropout = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        other = MultiheadAttention(8, 2, batch_first=True)
        other._attend = lambda q, k, v, **_: functional.scaled_dot_product_attention(q, k, v)
        additive = fastattn.MultiheadAdditiveAttention(8, 2, batch_first=True)
        with torch.no_grad():
            for attention in (dropout, other, additive, module.double()):
                y = x.double() if attention is module else x
                attention(y, y, y, need_weights=False)
            assert not operator_calls
            dropout.eval()(x, x, x)
        assert len(operator_calls) == 1

    @pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
    @pytest.mark.parametrize("bias", ["in_proj_bias", "out_proj.bias"])
    def test_biases_that_broadcast(self, module, x, operator_calls, bias, shape):
        owner, _, name = bias.rpartition(".")
        setattr(module.get_submodule(owner), name, nn.Parameter(torch.randn(shape)))
        want, _ = module(x, x, x)
        with torch.no_grad():
            torch.testing.assert_close(module(x, x, x)[0], want)
        assert not operator_calls

    def test_modules_are_told_apart(self, operator_calls):
        """Modules that differ in anything but the shape of their input."""
        x = torch.randn(4, 4, 8)
        for heads, batch_first in itertools.product((2, 4), (True, False)):
            module = MultiheadAttention(8, heads, batch_first=batch_first)
            for dtype in (torch.float32, torch.float64):
                y = x.to(dtype)
                want = nn.MultiheadAttention.forward(module.to(dtype), y, y, y)
                with torch.no_grad():
                    torch.testing.assert_close(module(y, y, y), want)
        assert len(operator_calls) == 4  # those in float32

    def test_the_registry_decides(self, module, x, operator_calls, monkeypatch):
        monkeypatch.setattr(cpu, "unsupported", lambda p: ["not today"])
        with torch.no_grad():
            want = nn.MultiheadAttention.forward(module, x, x, x)
            for _ in range(2):
                torch.testing.assert_close(module(x, x, x), want)
        assert not operator_calls

    @pytest.mark.parametrize("name", ["bias_k", "bias_v"])
    def test_one_more_key_without_its_value(self, module, x, operator_calls, name):
        setattr(module, name, nn.Parameter(torch.zeros(1, 1, 8)))
        with torch.no_grad(), pytest.raises(AssertionError, match=f"{name} is set but bias_"):
            module(x, x, x)
        assert not operator_calls

    def test_errors_are_those_of_torch(self, module, x, operator_calls):
        module.out_proj.bias = nn.Parameter(torch.zeros(8).double())
        for y in (x, x.double(), x.to("meta")):
            with torch.no_grad(), pytest.raises(RuntimeError) as caught:
                module(y, y, y)
            assert "fastattn" not in str(caught.value)
        assert not operator_calls
