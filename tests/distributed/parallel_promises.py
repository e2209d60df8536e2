"""What parallelize promises beside its numbers; each function runs on every rank."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dtensor_cases import Sums
from parallel_cases import BOTH, HEADS, ROWS, Called, Way, compare, drawn, module_of, zigzag
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import KVCache, MultiheadAdditiveAttention
from fastattn.distributed import Layout, count_bytes, parallelize, shard, unshard
from fastattn.testing import assert_within_budget

PLAIN, ADDITIVE = Called("plain"), Called("additive", cls=MultiheadAdditiveAttention)
OTHERS = [
    Called("other sizes", options=dict(kdim=12, vdim=20)),
    Called("appended", options=dict(add_bias_kv=True)),
]
DROPOUT = Called("dropout", options=dict(dropout=0.4), call=dict(average_attn_weights=False))


def mesh_of(*shape, names=("cp", "tp")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def one(name="tp"):
    return mesh_of(dist.get_world_size(), names=(name,))


def by_heads(case=PLAIN):
    return parallelize(module_of(case), one(), heads="tp")


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_state(module, expected):
    found = module.state_dict()
    assert list(found) == list(expected)
    for name, x in found.items():
        assert x.shape == expected[name].shape, name
        assert torch.equal(whole(x), expected[name]), name


# ---- the state dict ----


def the_plain_state_dict_comes_and_goes():
    for case in (PLAIN, ADDITIVE, *OTHERS):
        expected = module_of(case).state_dict()
        assert_state(by_heads(case), expected)
        others = {n: x + 1 for n, x in expected.items()}
        for assign in (False, True):
            module = by_heads(case)
            module.load_state_dict(others, assign=assign)
            assert_state(module, others)
            assert all(isinstance(p, DTensor) for p in module.parameters())
            with pytest.raises(RuntimeError, match=r"size mismatch for out_proj\.weight"):
                module.load_state_dict(others | {"out_proj.weight": torch.zeros(3)})
        plain = {n: whole(x) for n, x in module.state_dict().items()}
        module_of(case).load_state_dict(plain)
        inside = nn.Sequential(module)
        inside.load_state_dict({f"0.{n}": x for n, x in expected.items()})
        assert_state(module, expected)


def a_plain_state_dict_fills_a_model_on_meta():
    expected = module_of(PLAIN).state_dict()
    module = parallelize(module_of(PLAIN).to("meta"), one(), heads="tp")
    module.load_state_dict(expected, assign=True)
    assert not any(p.is_meta for p in module.parameters())
    assert_state(module, expected)


def tied_and_frozen_parameters_stay_so():
    model, x = nn.Sequential(module_of(PLAIN), module_of(PLAIN)), drawn(2, 5, 32)
    model[1].in_proj_weight = model[0].in_proj_weight
    model[0].out_proj.weight.requires_grad_(False)
    alone = copy.deepcopy(model)
    parallelize(model, one(), heads="tp")
    assert model[1].in_proj_weight is model[0].in_proj_weight
    assert [x.out_proj.weight.requires_grad for x in model] == [False, True]
    for both in (model, alone):
        sum(module(x, x, x)[0].square().sum() for module in both).backward()
    torch.testing.assert_close(whole(model[0].in_proj_weight.grad), alone[0].in_proj_weight.grad)


def checkpoints_of_torch_take_it():
    """Saved from shared modules, loaded into plain ones; and from the first rank's memory."""
    expected = module_of(PLAIN).state_dict()
    module, folder = by_heads(), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(module.state_dict(), checkpoint_id=folder[0])
    plain = {n: torch.zeros_like(x) for n, x in expected.items()}
    dcp.load(plain, checkpoint_id=folder[0])
    assert all(torch.equal(x, expected[n]) for n, x in plain.items())
    others = {n: x + 1 for n, x in expected.items()}
    for first in (False, True):
        module = by_heads()
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
        states.set_model_state_dict(module, dict(others), options=options)
        assert_state(module, others)


def optimizers_take_it():
    x, found = drawn(2, 5, 32), []
    for module in (by_heads(ADDITIVE), module_of(ADDITIVE)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(x, x, x)[0].square().sum().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.append([whole(norm), *map(whole, module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def kinds_of_parameters_side_by_side():
    """Fast optimizers take DTensors and others in groups, and each kind is clipped by itself."""
    x, found = drawn(2, 5, 32), []
    for attention in (by_heads(), module_of(PLAIN)):
        model = nn.ModuleList([attention, nn.LayerNorm(32)])
        kinds = [[*module.parameters()] for module in model]
        optimizer = torch.optim.AdamW([dict(params=x) for x in kinds], lr=0.1, foreach=True)
        model[1](attention(x, x, x)[0]).pow(3).sum().backward()
        norms = [whole(nn.utils.get_total_norm([x.grad for x in kind])) for kind in kinds]
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, 1.0, nn.utils.get_total_norm(norms))
        found.append([whole(x.grad) for kind in kinds for x in kind])
        optimizer.step()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def copies_are_shared_too():
    module, x = by_heads(), drawn(2, 5, 32)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])


# ---- wrappers: DDP and FSDP make means over the context, which ``shared`` adds up ----


class Within(nn.Module):
    """A module in a context, or checkpointed."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args, **kwargs):
        return self.call(self.module, *args, **kwargs)


def in_autocast(module, _mesh):
    def call(module, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return module(*args, **kwargs)

    return Within(module, call)


def data_parallel_over_the_context():
    for case in (PLAIN, ADDITIVE):
        compare(case, ROWS, lambda module, mesh: DistributedDataParallel(
            module, process_group=mesh["cp"].get_group()
        ))  # fmt: skip


def fully_sharded_over_the_context_beside_heads():
    for way in (ROWS, BOTH):
        for case in (PLAIN, ADDITIVE):
            compare(case, way, lambda module, mesh: fully_shard(module, mesh=mesh["cp"]))


def fully_sharded_in_half_precision():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compare(
        PLAIN, BOTH, lambda module, mesh: fully_shard(module, mesh=mesh["cp"], mp_policy=policy),
        peer_dtype=torch.bfloat16,
    )  # fmt: skip


def autocast_casts_as_in_one_process():
    for way in (HEADS, ROWS):
        for case in (PLAIN, ADDITIVE):
            compare(case, way, in_autocast, peer_dtype=torch.bfloat16)


def activation_checkpoints_draw_the_same_bits():
    def change(module, _mesh):
        def call(module, query, key, value, **kwargs):
            return checkpoint(module, query, key, value, use_reentrant=False, **kwargs)

        return Within(module, call)

    for way in (HEADS, ROWS):
        compare(DROPOUT, way, change)


def compiled_in_one_graph():
    """Rows in equal shares, as ranks cannot tell each other how many they have.

    Where bytes are counted, those of its collectives are not.
    """

    def change(module, _mesh):
        torch._dynamo.reset()
        module.compile(backend="aot_eager", fullgraph=True)
        return module

    lean = Called("lean", attn_mask="bool", call=dict(need_weights=False))
    with count_bytes():
        compare(lean, Way(True, True), change)


def layouts_are_compiled_for_each_length():
    torch._dynamo.reset()
    shared = parallelize(module_of(PLAIN), one("cp"), context="cp", layout=zigzag)._shared

    def positions(x):
        layout, _ = shared.layouts(lambda: [x.shape[1], x.shape[1], 2, 0, 0, 0])
        return x + layout.positions(0)[:, None]

    compiled = torch.compile(positions, backend="eager", fullgraph=True)
    for x in (drawn(2, 8, 32), drawn(2, 16, 32)):
        assert torch.equal(compiled(x), positions(x))


# ---- inside a model ----


def inference_tensors_are_copied():
    """The inputs of a part that learns, from a part that does not."""
    size = dist.get_world_size()
    with torch.inference_mode():
        x = drawn(2, 4 * size, 16)
    for shape, dims in (((1, size), dict(heads="tp")), ((size, 1), dict(context="cp"))):
        module = fastattn.MultiheadAttention(16, size, batch_first=True)
        parallelize(module, mesh_of(*shape), **dims)
        module(x, x, x, need_weights=False)[0].sum().backward()


def a_transformer_shares_its_attention():
    """Two lengths, cross-attention, padding, causal rows; in training and at inference."""
    size = dist.get_world_size()
    torch.manual_seed(5)
    plain = nn.Transformer(32, 4, 2, 2, 40, dropout=0.0, batch_first=True)
    fastattn.replace_attention(plain)
    for layer in plain.encoder.layers:  # at inference torch would not call it, but for a hook
        layer.self_attn = fastattn.MultiheadAttention(32, 4, batch_first=True)
    source, target = drawn(2, 24, 32), drawn(2, 16, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    absent = torch.arange(24) >= torch.tensor([[24], [15]])
    padding = dict(src_key_padding_mask=absent, memory_key_padding_mask=absent)
    wide = [x.double() for x in (source, target, mask)]
    truth = copy.deepcopy(plain).double()(*wide[:2], tgt_mask=wide[2], **padding)
    peer = plain(source, target, tgt_mask=mask, **padding)
    shape = (2, size // 2) if size % 4 == 0 else (size, 1)
    mesh = mesh_of(*shape)
    model = parallelize(copy.deepcopy(plain), mesh, context="cp", heads="tp", layout=zigzag)
    cp, layouts = mesh["cp"], [zigzag(n, shape[0]) for n in (24, 16)]
    own = [shard(x, 1, layout, cp) for x, layout in zip((source, target), layouts, strict=True)]
    rows = shard(mask, 0, layouts[1], cp)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            out = unshard(model(*own, tgt_mask=rows, **padding), 1, layouts[1], cp)
        assert_within_budget(out, peer, truth)


def a_cache_holds_own_heads():
    for case in (PLAIN, ADDITIVE):
        module, x = by_heads(case).eval(), drawn(2, 6, 32)
        cache = KVCache()
        with torch.no_grad():
            steps = [module(t, t, t, cache=cache)[0] for t in x.split(1, 1)]
            causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
            expected = module_of(case)(x, x, x, attn_mask=causal)[0]
        torch.testing.assert_close(torch.cat(steps, 1), expected)
        assert cache.key.shape[1] == 4 // dist.get_world_size()


def weights_of_all_heads_are_rounded_once():
    """The least of all float16: a rank's share of it would be 0."""
    case, x = Called("half", dtype=torch.float16), torch.zeros(1, 4, 32, dtype=torch.float16)
    rare = torch.tensor([0, -16.6, -16.6, -16.6], dtype=torch.float16).expand(4, 4)
    with Sums() as sums:
        out, weights = by_heads(case)(x, x, x, attn_mask=rare)
        out.sum().backward()
    assert sums.dtypes == {torch.float32}
    assert (weights == 2.0**-24).any()
    assert torch.equal(weights, module_of(case)(x, x, x, attn_mask=rare)[1])


def outputs_are_rounded_once():
    """Behind the bias: 1 of the first head and 2^-12 of the last one are 1, rounded too early."""
    module, x = module_of(Called("half", dtype=torch.float16)), torch.zeros(1, 4, 32).half()
    values = {"in_proj_bias": 1.0, "out_proj.bias": -1.0}
    for name, p in module.named_parameters():
        p.data.fill_(values.get(name, 0.0))
    module.out_proj.weight.data[:, [0, -1]] = torch.tensor([1.0, 2.0**-12]).half()
    assert (parallelize(module, one(), heads="tp")(x, x, x)[0] == 2.0**-12).all()


def causal_rows_take_heads():
    """Their mask is dropped, and has no rows that each rank would need."""
    size, x, found = dist.get_world_size(), drawn(2, 8, 32), []
    layout, cp = Layout.contiguous(8 * size, size), one("cp")
    for method in ("heads", None):
        module = parallelize(module_of(PLAIN), cp, context="cp", layout=layout, method=method)
        whole_mask = nn.Transformer.generate_square_subsequent_mask(8 * size)
        for mask in (shard(whole_mask, 0, layout, cp), whole_mask[:8, :8]):
            with count_bytes() as sent:
                out, _ = module(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)
            found.append((sent.bytes, out))
    for sent, out in found:
        assert sent == found[0][0]
        assert torch.equal(out, found[0][1])


def calls_are_explained():
    x, one_cp = drawn(2, 5, 32), one("cp")
    for module in (by_heads(), parallelize(module_of(PLAIN), one_cp, context="cp")):
        found = fastattn.explain(module, x, x, x)
        assert len(found.calls) == 1
        assert not found.torch
        assert found.calls[0][1].backend == fastattn.explain(x, x, x).backend


def bytes_are_those_of_the_page():
    """3 E^2 / ranks numbers of weights, and all-reduces of outputs and of gradients of inputs."""
    P, x = dist.get_world_size(), drawn(2, 8, 32).requires_grad_()
    module = by_heads()
    with count_bytes() as sent:
        out, _ = module(x, x, x, need_weights=False)
        weights = 3 * 32 * 32 * (P - 1) // P**2
        sums = 2 * x.numel() * (P - 1) // P
        assert sent.bytes == 4 * (weights + sums)
        out.sum().backward()
    biases = 2 * 96 * (P - 1) // P
    assert sent.bytes == 4 * (2 * (weights + sums) + biases)


# ---- ranks with all rows, and with one ----


def one_rank_may_have_every_row():
    """Its mask looks causal, and those of other ranks do not."""
    size, n = dist.get_world_size(), 100
    layout, cp = Layout.zigzag(n, size), one("cp")  # one unit holds them all
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(32, 4, 40, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    fastattn.replace_attention(plain)
    model = parallelize(copy.deepcopy(plain), cp, context="cp", layout=Layout.zigzag)
    x, mask = drawn(2, n, 32), nn.Transformer.generate_square_subsequent_mask(n)
    out = model(shard(x, 1, layout, cp), mask=shard(mask, 0, layout, cp))
    torch.testing.assert_close(unshard(out, 1, layout, cp), plain(x, mask=mask))
    own = shard(x, 1, layout, cp)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        model.layers[0].self_attn(own, own, own, is_causal=True)


def masks_of_one_row():
    """Of one query in all, and of a rank that has one row."""
    size, cp = dist.get_world_size(), one("cp")
    padding = torch.arange(8) > torch.tensor([[7], [4]])
    for n in (1, 2 * size - 1):
        layout, keys = (Layout.contiguous(length, size) for length in (n, 8))
        x, kv, mask = drawn(2, n, 32), drawn(2, 8, 32), drawn(n, 8).requires_grad_()
        for method in ("heads", "gather", None):
            module = module_of(PLAIN)
            expected = module(x, kv, kv, padding, attn_mask=mask)[0]
            parallelize(module, cp, context="cp", layout=Layout.contiguous, method=method)
            q, k = shard(x, 1, layout, cp), shard(kv, 1, keys, cp)
            out = module(q, k, k, padding, attn_mask=shard(mask, 0, layout, cp))[0]
            found = unshard(out, 1, layout, cp)
            torch.testing.assert_close(found, expected)
            grads = (torch.autograd.grad(y.square().sum(), mask)[0] for y in (found, expected))
            torch.testing.assert_close(*grads)
            out = module(q, k, k, attn_mask=shard(mask > 0, 0, layout, cp))[0]
            whole_mask = module_of(PLAIN)(x, kv, kv, attn_mask=mask > 0)[0]
            torch.testing.assert_close(unshard(out, 1, layout, cp), whole_mask)


PROMISES = [
    the_plain_state_dict_comes_and_goes,
    a_plain_state_dict_fills_a_model_on_meta,
    tied_and_frozen_parameters_stay_so,
    checkpoints_of_torch_take_it,
    optimizers_take_it,
    kinds_of_parameters_side_by_side,
    copies_are_shared_too,
    data_parallel_over_the_context,
    fully_sharded_over_the_context_beside_heads,
    fully_sharded_in_half_precision,
    autocast_casts_as_in_one_process,
    activation_checkpoints_draw_the_same_bits,
    compiled_in_one_graph,
    layouts_are_compiled_for_each_length,
    inference_tensors_are_copied,
    a_transformer_shares_its_attention,
    a_cache_holds_own_heads,
    weights_of_all_heads_are_rounded_once,
    outputs_are_rounded_once,
    causal_rows_take_heads,
    calls_are_explained,
    bytes_are_those_of_the_page,
    one_rank_may_have_every_row,
    masks_of_one_row,
]
