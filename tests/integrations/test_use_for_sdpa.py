"""fastattn.use_for_sdpa: what is reached, what is left to torch and why, and that nothing stays."""

import contextlib
import copy
import inspect
import math
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported

import fastattn
from fastattn.testing import assert_within_budget


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Attention as most models write it."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x, scale=None):
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gradients(model, x):
    model.zero_grad()
    out = model(x.requires_grad_())
    out.square().sum().backward()
    return out.detach(), *(p.grad.clone() for p in model.parameters())


def check(call, *tensors):
    """``call`` in the context, within the budget of the call as it is; what was counted."""
    with fastattn.use_for_sdpa() as calls:
        ours = call(*tensors)
    plain, truth = call(*tensors), call(*(x.double() for x in tensors))
    assert_within_budget(ours, plain, truth)
    return calls


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, imported])
def test_every_name_of_the_function(function):
    x = draw(2, 4, 6, 8)
    keep = draw(6, 6) > 0
    for options in ({}, dict(is_causal=True), dict(attn_mask=keep), dict(scale=0.2)):
        calls = check(lambda x, o=options: function(x, x + 1, x - 1, **o), x)
        assert (calls.fastattn, dict(calls.torch)) == (1, {})
    assert function is F.scaled_dot_product_attention


def test_arguments_by_place():
    x = draw(2, 4, 6, 8)
    assert check(lambda x: imported(x, x, x, None, 0.0, True), x).fastattn == 1
    keys = draw(2, 2, 6, 8)
    assert check(lambda q, k: imported(q, k, k, enable_gqa=True), x, keys).fastattn == 1


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention(training, weights):
    module = nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    wide = copy.deepcopy(module).double()

    def call(x):
        chosen = module if x.dtype == torch.float32 else wide
        return chosen(x, x, x, need_weights=weights)[0].detach()

    calls = check(call, draw(2, 5, 16))
    assert calls.fastattn == (0 if weights else 1)  # torch computes weights by its own softmax


@pytest.mark.parametrize("training", [False, True])
def test_transformer(training):
    model = nn.Transformer(16, 4, 2, 2, 20, dropout=0.0, batch_first=True).train(training)
    wide = copy.deepcopy(model).double()
    mask = nn.Transformer.generate_square_subsequent_mask(5)

    @torch.no_grad()
    def call(x):
        chosen = model if x.dtype == torch.float32 else wide
        return chosen(x, x, tgt_mask=mask.to(x.dtype), tgt_is_causal=True)

    assert check(call, draw(2, 5, 16)).fastattn == 6


def test_causal_bias():
    bias = causal_lower_right(4, 6)
    q, k = draw(1, 2, 4, 8), draw(1, 2, 6, 8)
    calls = check(lambda q, k: imported(q, k, k, attn_mask=bias), q, k)
    assert calls.fastattn == 1


class Subclass(torch.Tensor):
    pass


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def jagged(*tensors):
    """[B, H, j, D] of tensors [j, H * D]."""
    offsets = torch.tensor([0, *map(len, tensors)]).cumsum(0)
    x = torch.nested.nested_tensor_from_jagged(torch.cat(tensors), offsets)
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def nested():
    return torch.nested.nested_tensor([draw(2, 3, 4), draw(2, 2, 4)])


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_sequences(is_causal):
    """With gradients, which torch has none of on a CPU."""
    parts = [draw(n, 8) for n in (3, 0, 5)]

    def gradient(x, together):
        x = x.detach().requires_grad_()
        rows = x.split([len(part) for part in parts])
        if together:
            heads = jagged(*rows)
            out = imported(heads, heads, heads, is_causal=is_causal).transpose(1, 2).values()
        else:
            heads = [row.unflatten(-1, (2, 4)).transpose(0, 1) for row in rows]
            outs = [imported(h, h, h, is_causal=is_causal) for h in heads]
            out = torch.cat([out.transpose(0, 1) for out in outs])
        return torch.cat([out.flatten(1), torch.autograd.grad(out.square().sum(), x)[0]])

    x = torch.cat(parts)
    with fastattn.use_for_sdpa() as calls:
        ours = gradient(x, True)
    assert (calls.fastattn, dict(calls.torch)) == (1, {})
    assert_within_budget(ours, gradient(x, False), gradient(x.double(), False))


def test_jagged_sequences_with_a_mask_are_left_to_torch():
    x = jagged(draw(3, 8), draw(2, 8))
    with contextlib.suppress(ValueError), fastattn.use_for_sdpa() as calls:
        imported(x, x, x, torch.zeros(3, 3))
    [said] = calls.torch
    assert said.startswith("attn_mask: jagged nested tensors take none")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: draw(1, 2, 3, 4).as_subclass(Overriding), "Overriding is a tensor subclass"),
        (nested, "nested tensor"),
        (lambda: draw(1, 2, 3, 4).cfloat(), "dtype torch.complex64"),
        (lambda: jagged(draw(3, 8).cfloat()), "dtype torch.complex64"),
        (lambda: draw(1, 2, 3, 4).to_sparse(), "layout torch.sparse_coo"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_left_to_torch(make, reason):
    x = make()
    with contextlib.suppress(RuntimeError), fastattn.use_for_sdpa() as calls:
        imported(x, x, x)  # torch has no complex ones either
    assert calls.fastattn == 0
    [said] = calls.torch
    assert reason in said
    assert str(calls) == f"fastattn  0\ntorch     1  {said}"
    assert repr(calls) == f"SdpaCalls(fastattn=0, torch=Counter({{{said!r}: 1}}))"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *((dict(scale=x), "scale") for x in (torch.tensor(0.3), True, math.inf, math.nan)),
        *((dict(dropout_p=x), "dropout_p") for x in (torch.tensor(0.0), False)),
        *((dict(scale=x), None) for x in (np.float32(0.3), np.int64(1), 2)),
        (dict(dropout_p=np.float32(0)), None),
    ],
)
def test_numbers_that_torch_takes(options, reason):
    x = draw(1, 2, 3, 4)
    with fastattn.use_for_sdpa() as calls:
        out = imported(x, x, x, **options)
    torch.testing.assert_close(out, imported(x, x, x, **options), equal_nan=True)
    assert calls.fastattn == (reason is None)
    assert [said.startswith(reason) for said in calls.torch] == [True] * (reason is not None)


@pytest.mark.parametrize(("heads", "ours"), [((2, 4), 0), ((4, 2), 0), ((2, 1), 1), ((2, 2), 1)])
def test_key_and_value_of_other_heads_are_left_to_torch(heads, ours):
    query, key, value = (draw(1, H, 3, 4) for H in (4, *heads))
    with fastattn.use_for_sdpa() as calls:
        out = imported(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, imported(query, key, value, enable_gqa=True))
    assert calls.fastattn == ours
    assert sum(calls.torch.values()) == 1 - ours


def test_attn_mask_beside_is_causal_is_left_to_torch():
    x = draw(1, 2, 3, 4)
    with contextlib.suppress(RuntimeError), fastattn.use_for_sdpa() as calls:
        imported(x, x, x, attn_mask=torch.ones(3, 3).bool(), is_causal=True)
    assert (calls.fastattn, calls.torch.total()) == (0, 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(attn_mask=torch.ones(()).bool()), IndexError),
        (dict(attn_mask=torch.zeros(3)), IndexError),
        (dict(attn_mask=torch.ones(3, 3).bool(), is_causal=True, dropout_p=0.5), RuntimeError),
        (dict(attn_mask=causal_lower_right(3, 3), is_causal=True), ValueError),
    ],
)
def test_what_torch_refuses_is_refused(options, error):
    x = draw(1, 2, 3, 4)
    for context in (contextlib.nullcontext(), fastattn.use_for_sdpa()):
        with context, pytest.raises(error):
            imported(x, x, x, **options)


def test_a_subclass_that_changes_nothing_is_ours():
    x = draw(1, 2, 3, 4).as_subclass(Subclass)
    with fastattn.use_for_sdpa() as calls:
        imported(x, x, x)
    assert calls.fastattn == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_are_left_to_torch():
    x = draw(1, 2, 3, 4)
    with fastattn.use_for_sdpa() as calls:
        traced = torch.jit.trace(lambda x: imported(x, x, x), (x,), check_trace=False)
    assert (calls.fastattn, calls.torch.total()) == (0, 1)
    assert "scaled_dot_product_attention" in str(traced.graph)


def test_forward_mode():
    def tangent(x):
        return torch.func.jvp(lambda x: imported(x, x, x), (x,), (x,))[1]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # which has a rule
        assert check(tangent, draw(1, 2, 3, 4)).fastattn == 1


# ---- what stays, and who sees it ----


def test_nothing_stays():
    before = vars(F) | {}
    with pytest.raises(ZeroDivisionError), fastattn.use_for_sdpa():
        1 / 0  # noqa: B018
    assert vars(F) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_contexts_nest_and_repeat():
    x = draw(1, 2, 3, 4)
    context = fastattn.use_for_sdpa()
    with context as outer:
        imported(x, x, x)
        with fastattn.use_for_sdpa() as inner:
            imported(x, x, x)
        imported(x, x, x)
    with context:
        imported(x, x, x)
    imported(x, x, x)
    assert (outer.fastattn, inner.fastattn) == (3, 1)


def test_other_threads_see_nothing():
    x, done = draw(1, 2, 3, 4), []

    def work():
        done.append(torch.overrides._get_current_function_mode_stack())
        done.append(imported(x, x, x))

    with fastattn.use_for_sdpa() as calls:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert done[0] == []
    assert calls.fastattn == 0


# ---- a model of its own ----


def test_a_wrapped_model():
    model = Blocks()
    wrapped, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    keys = list(model.state_dict())
    calls = fastattn.use_for_sdpa(wrapped)
    x = draw(2, 5, 8)
    truth = gradients(wide, x.detach().double())
    for got in zip(gradients(wrapped, x), gradients(model, x), truth, strict=True):
        assert_within_budget(*got)
    assert calls.fastattn == 2
    assert list(wrapped.state_dict()) == keys
    assert inspect.signature(wrapped.forward) == inspect.signature(model.forward)
    again = fastattn.use_for_sdpa(wrapped)
    assert wrapped.forward.__wrapped__.__self__ is wrapped
    for context in (torch.device("cpu"), outer := fastattn.use_for_sdpa()):  # modes, both
        with context:
            wrapped(x)
    assert (calls.fastattn, again.fastattn, outer.calls.fastattn) == (2, 2, 2)  # the latest


def test_copies_of_a_wrapped_model_are_wrapped_and_their_own():
    model = Blocks()
    fastattn.use_for_sdpa(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.__wrapped__.__self__ is other
        nn.init.zeros_(other.blocks[1].project.weight)
        assert not torch.equal(other(draw(2, 5, 8)), model(draw(2, 5, 8)))
        assert other.forward.mode.calls.fastattn == 2


@pytest.mark.slow
def test_export_of_a_wrapped_model():
    model, x = Blocks(), draw(2, 5, 8)
    fastattn.use_for_sdpa(model)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        exported = torch.export.export(one, (x,))
        assert exported.graph_module.code.count("fastattn.forward.default(") == 2
        assert torch.equal(exported.module()(x), one(x))


def test_model_must_be_a_module_of_python():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module .* got function"):
        fastattn.use_for_sdpa(lambda x: x)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(TypeError, match=r"not scripted, got RecursiveScriptModule"):
        fastattn.use_for_sdpa(scripted)
    layers = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2)]
    model = nn.Sequential(layers[0], scripted, layers[1])
    calls = fastattn.use_for_sdpa(model)
    model(torch.randn(2, 5, 8)).sum().backward()
    assert calls.fastattn == 2


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled(wrapped):
    torch.compiler.reset()
    model, graphs = Blocks(), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    if wrapped:
        fastattn.use_for_sdpa(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = draw(2, 5, 8)
    with torch.no_grad():
        for _ in range(3):
            if wrapped:
                out = compiled(x)
            else:
                with fastattn.use_for_sdpa():
                    out = compiled(x)
        assert len(graphs) == 1
        assert graphs[0].count("fastattn.forward.default(") == 2
        plain = compiled(x) if not wrapped else Blocks.forward(copy.deepcopy(model), x)
    torch.testing.assert_close(out, plain)
    if not wrapped:
        assert "fastattn" not in graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_compiled_encoder_layers_keep_the_fast_path_unless_replaced_first(first):
    torch.compiler.reset()
    model, graphs = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True).eval(), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    if first:
        assert fastattn.replace_attention(model) == 1
    fastattn.use_for_sdpa(model)
    if not first:
        with pytest.warns(UserWarning, match="left these attention modules alone"):
            assert fastattn.replace_attention(model) == 0
    with torch.no_grad():
        torch.compile(model, backend=backend)(draw(2, 5, 16))
    assert graphs[0].count("fastattn") == first
    assert ("_transformer_encoder_layer_fwd(" in graphs[0]) != first


@pytest.mark.slow
def test_a_context_inside_what_is_compiled():
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        with fastattn.use_for_sdpa():
            x = x.unflatten(-1, (2, 4))  # a method in Python, for which there is a special case
            return imported(x, x + 1, x - 1)

    x = draw(2, 5, 8)
    y = x.unflatten(-1, (2, 4))
    torch.testing.assert_close(run(x), imported(y, y + 1, y - 1))
