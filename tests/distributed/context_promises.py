"""What attention over ranks promises beside its numbers; each function runs on every rank."""

from __future__ import annotations

import dataclasses
import weakref
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fastattn
from bench.context import Shape
from fastattn import Mask, testing
from fastattn.backends import registry
from fastattn.distributed import (
    Layout,
    comm,
    context_parallel_attention,
    count_bytes,
    heads,
    parallelize,
    shard,
    unshard,
)
from fastattn.distributed.comm import Group
from fastattn.problem import validate

B, H, N, D = 2, 4, 24, 8


def world():
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def drawn(*shape):
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), requires_grad=True)


def local(method=None, mesh=None, **options):
    """One call with the rows of this rank of one tensor, contiguous unless a layout is given."""
    group, _, size = world()
    layout = options.get("layout") or Layout.contiguous(N, size)
    x = shard(drawn(B, H, N, D), 2, layout, group)
    return context_parallel_attention(x, x, x, mesh or group, method=method, **options)


# ---- what works ----


def a_mesh_and_its_group_are_one():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert torch.equal(local(mesh=mesh), local())


def a_group_may_have_one_rank():
    """Which is another rank of the world."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    layout, keys = Layout.contiguous(1, 1), Layout.contiguous(N, 1)
    q, x, mask = drawn(B, H, 1, D), drawn(B, H, N, D), drawn(1, N)
    whole = fastattn.scaled_dot_product_attention(q, x, x, mask)
    for method in ("heads", "gather", "ring"):
        out = context_parallel_attention(
            q, x, x, group, method=method, layout=layout, key_layout=keys, attn_mask=mask
        )
        torch.testing.assert_close(out, whole)


def without_a_layout_ranks_may_hold_any_number():
    group, rank, size = world()
    x = drawn(B, H, N, D)
    sizes = [N - 5 * (size - 1), *[5] * (size - 1)]
    begin = sum(sizes[:rank])
    own = x[:, :, begin : begin + sizes[rank]]
    out = context_parallel_attention(own, own, own, group, is_causal=True)
    whole = fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(out, whole[:, :, begin : begin + sizes[rank]])


def with_a_layout_ranks_ask_nothing():
    """An answer would wait for the device."""
    group, _, size = world()
    layout, mesh = (
        Layout.contiguous(N, size),
        init_device_mesh("cpu", (size,), mesh_dim_names=("c",)),
    )
    module = fastattn.MultiheadAttention(D, 2, batch_first=True)
    parallelize(module, mesh, context="c", layout=layout)
    x = shard(drawn(B, N, D), 1, layout, group)
    with mock.patch.object(comm, "lengths", side_effect=AssertionError):
        local(layout=layout, is_causal=True)
        module(x, x, x)


def one_seed_for_all_ranks():
    """Without a seed, all ranks take the one that the first of them draws."""
    group, rank, size = world()
    layout = Layout.zigzag(9, size, unit=4)  # some pieces are empty
    x = drawn(B, H, 9, D)
    own = layout.take(x, 2, rank)
    torch.manual_seed(100)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    p = validate.build("dot", x, x, x, dropout_p=0.5, seed=seed).p
    expected = layout.take(p.dropout.bits(p) >= p.dropout.threshold, 2, rank)
    for method in ("heads", "gather", "ring"):
        torch.manual_seed(100 + rank)
        _, weights = context_parallel_attention(
            own, own, own, group, method=method, layout=layout, dropout_p=0.5,
            return_weights="full",
        )  # fmt: skip
        assert torch.equal(weights != 0, expected), method


def sinks_and_their_gradients():
    group, rank, size = world()
    layout = Layout.zigzag(N, size, unit=4)
    x, sink = drawn(B, H, N, D), drawn(H)
    for kind in ("full", "mean"):
        options = dict(sink=sink, return_weights=kind, return_lse=True)
        whole = fastattn.scaled_dot_product_attention(x, x, x, **options)
        expected = torch.autograd.grad(sum(y.square().sum() for y in whole), (x, sink))
        for method in ("heads", "gather", "ring"):
            own = layout.take(x.detach(), 2, rank).requires_grad_()
            found = context_parallel_attention(
                own, own, own, group, layout=layout, method=method, **options
            )
            dims = (2, 2 if kind == "full" else 1, 2)
            for a, b, dim in zip(found, whole, dims, strict=True):
                torch.testing.assert_close(a, layout.take(b, dim, rank))
            grads = torch.autograd.grad(sum(y.square().sum() for y in found), (own, sink))
            torch.testing.assert_close(grads[0], layout.take(expected[0], 2, rank))
            torch.testing.assert_close(grads[1], expected[1])


def gradients_of_what_is_the_same_everywhere():
    """Beside a bias with rows, which is each rank's own."""
    group, rank, size = world()
    layout = Layout.zigzag(N, size, unit=4)
    x, rows, keys = drawn(B, H, N, D), drawn(N, N), drawn(H, 1, N)
    whole = fastattn.scaled_dot_product_attention(x, x, x, keys, bias=rows)
    expected = torch.autograd.grad(whole.square().sum(), (rows, keys))
    for method in ("heads", "gather", "ring"):
        own = layout.take(x.detach(), 2, rank)
        bias = layout.take(rows.detach(), 0, rank).requires_grad_()
        out = context_parallel_attention(
            own, own, own, group, layout=layout, method=method, attn_mask=keys, bias=bias
        )
        found = torch.autograd.grad(out.square().sum(), (bias, keys))
        torch.testing.assert_close(found[0], layout.take(expected[0], 0, rank))
        torch.testing.assert_close(found[1], expected[1])


def inputs_without_a_head_dim():
    group, rank, size = world()
    layout = Layout.contiguous(N, size)
    x, weight = drawn(B, N, D), drawn(D)
    own = layout.take(x, 1, rank)
    out = context_parallel_attention(own, own, own, group, layout=layout, weight=weight)
    whole = fastattn.additive_attention(x, x, x, weight)
    torch.testing.assert_close(out, layout.take(whole, 1, rank))


def heads_have_second_derivatives():
    group, rank, size = world()
    layout = Layout.contiguous(N, size)
    x = drawn(B, H, N, D).detach().double().requires_grad_()

    def penalty(out, x):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    expected = penalty(fastattn.scaled_dot_product_attention(x, x, x), x)
    own = layout.take(x.detach(), 2, rank).requires_grad_()
    out = context_parallel_attention(own, own, own, group, layout=layout, method="heads")
    torch.testing.assert_close(penalty(out, own), layout.take(expected, 2, rank))


def shards_and_back():
    group, rank, size = world()
    x = drawn(3, N, 2)
    for layout in (Layout.balanced(range(N), size, 2, unit=4), Layout.contiguous(N, size)):
        own = shard(x, 1, layout, group)
        assert torch.equal(own, x[:, layout.positions(rank)])
        whole = unshard(own.mul_(2), -2, layout, group)
        assert torch.equal(whole, x * 2)
        (grad,) = torch.autograd.grad(whole.square().sum(), x)
        torch.testing.assert_close(grad, 8 * x)


def heads_at_a_time_change_no_bit():
    for options in ({}, dict(is_causal=True, return_weights="full")):
        found = []
        for n in (1, 3, 4):
            with mock.patch.object(comm, "gather", wraps=comm.gather) as gather:
                found.append(local("gather", heads_per_step=n, **options))
            assert gather.call_count == 2 * -(-H // n)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def a_mean_of_half_types_is_rounded_once():
    """However many steps it is a sum of. A rank's share of the least float16 would be 0."""
    group, rank, size = world()
    layout = Layout.contiguous(N, size)
    case = testing.Case("mean", B=1, H=256, Hkv=256, M=N, N=N, D=D, E=D, dtype=torch.bfloat16,
                        weights="mean")  # fmt: skip
    t = testing.make(case)
    truth, peer, scale = testing.oracle(case, t)["weights"]
    own = [layout.take(x, 2, rank) for x in (t.q, t.k, t.v)]
    truth, peer = (layout.take(x, 1, rank) for x in (truth, peer))
    same = torch.zeros(1, H, layout.sizes[rank], D, dtype=torch.float16)
    rare = torch.tensor([0.0] + [-16.6] * (N - 1), dtype=torch.float16)
    for method in ("gather", "heads"):
        _, weights = context_parallel_attention(
            *own, group, layout=layout, method=method, heads_per_step=1, return_weights="mean"
        )
        testing.assert_within_budget(weights, peer, truth, scale=scale)
        _, weights = context_parallel_attention(
            same, same, same, group, layout=layout, method=method, attn_mask=rare,
            return_weights="mean",
        )  # fmt: skip
        assert (weights[..., 1:] == 2.0**-24).all()


def inference_tensors_are_copied():
    """As on one device: autograd saves none."""
    with torch.inference_mode():
        lengths, keep = torch.tensor([N, N - 3][:B]), drawn(1, N) < 0.5
        sink = torch.zeros(H)
    for method in ("heads", "gather", "ring"):
        mask = fastattn.Mask(kv_len=lengths, keep=keep)
        local(method, mask=mask, sink=sink, bias=keep.float()).sum().backward()


def keys_without_query_heads_have_gradients_of_0():
    group, _, size = world()
    q, k = torch.zeros(B, 0, 3, D), torch.ones(B, size, 3, D, requires_grad=True)
    for method in ("heads", "gather", "ring"):
        out = context_parallel_attention(q, k, k, group, method=method, enable_gqa=True)
        (grad,) = torch.autograd.grad(out.sum(), k)
        assert not grad.any(), method


def by_itself_it_takes_heads_or_gather():
    """Without rows in masks, heads; with them, or too few key heads, gather."""
    group, _, size = world()
    none = torch.zeros(B, 0, 3, D)
    assert context_parallel_attention(none, none, none, group).shape == none.shape
    layout = Layout.contiguous(N, size)
    with count_bytes() as sent:
        local("heads", layout=layout, return_lse=True)
    of_heads = sent.bytes
    with count_bytes() as sent:
        local(layout=layout, return_lse=True)
    assert sent.bytes == of_heads
    rows = torch.zeros(layout.sizes[dist.get_rank()], N)
    with count_bytes() as sent:
        local(layout=layout, bias=rows, return_lse=True)
    with count_bytes() as gathered:
        local("gather", layout=layout, return_lse=True)
    assert sent.bytes == gathered.bytes != of_heads
    x = drawn(B, H, layout.sizes[dist.get_rank()], D)
    with count_bytes() as both, count_bytes() as sent:
        for method in (None, "gather"):
            context_parallel_attention(
                x, x[:, :1], x[:, :1], group, layout=layout, method=method, enable_gqa=True
            )
            assert both.bytes == sent.bytes == gathered.bytes // H * (1 if method is None else 2)


def backends_are_asked_about_wide_sums():
    """Sums over blocks are wide, which some GPU backends lack. A bias has kernels of its own."""
    for method, bias in product(("heads", "gather", "ring"), (None, torch.zeros(N))):
        with mock.patch.object(registry, "select", wraps=registry.select) as select:
            local(method, bias=bias)
        (p, _, biased), _ = select.call_args_list[0]
        assert (p.wide, biased) == (method != "heads", bias is not None)
    get = registry.get
    for method, forward in (("gather", False), ("ring", True)):
        spies = {}

        def spied(name, spies=spies):
            return spies.setdefault(name, mock.Mock(wraps=get(name)))

        with mock.patch.object(registry, "get", spied):
            local(method, is_causal=True).sum().backward()
        (spy,) = spies.values()
        for call, wide in ((spy.forward, forward), (spy.backward, True)):
            assert {p.wide for (p, *_), _ in call.call_args_list} == {wide}
            # One head at a time; or the keys that causal rows see.
            assert call.call_count == (H if method == "gather" else dist.get_rank() + 1)


def each_rank_uses_the_results_it_likes():
    """Backward is collective: a rank that ignores a result takes part all the same."""
    for method, kind in product(("heads", "gather", "ring"), (None, "full")):
        found = local(method, return_lse=True, return_weights=kind)
        picked = found[-dist.get_rank() % len(found)]
        picked.square().sum().backward()


def inputs_are_freed():
    """What travels is not kept by who sent it."""
    group, _, size = world()
    x = torch.ones(B, H, 2, D, requires_grad=True) * 2
    gone = weakref.ref(x)
    own = heads.heads_of_ranks(H, H, size)[0]
    moved = heads.to_heads(x, Layout.contiguous(2 * size, size), own, Group(group))
    del x
    assert gone() is None
    assert moved.requires_grad


# ---- bytes: docs/distributed.md has the table ----


def bytes_are_those_of_the_table():
    """In equal shares, and in others."""
    group, rank, P = world()
    for n, dtype in ((N, torch.float32), (N - 1, torch.bfloat16)):
        layout = Layout.contiguous(n, P)
        own = layout.sizes[rank]
        shape = Shape(B, H, 2, n, D, 16, size=dtype.itemsize)
        lengths = Mask(kv_len=torch.full((B, own), n))  # of this rank's rows
        q, k, v = (
            drawn(B, heads, own, width).to(dtype)
            for heads, width in ((H, D), (shape.Hkv, D), (shape.Hkv, shape.E))
        )
        methods = "gather", "ring", *(() if shape.Hkv % P else ("heads",))
        for method, mask, lse in product(methods, (Mask(kv_len=[n] * B), lengths), (False, True)):
            shape = dataclasses.replace(shape, limits=int(mask is lengths), lse=lse)
            forward, backward = shape.bytes_sent(method, layout.sizes, rank)
            with count_bytes() as sent:
                found = context_parallel_attention(
                    q, k, v, group, layout=layout, method=method, mask=mask, enable_gqa=True,
                    return_lse=lse,
                )  # fmt: skip
                out = found[0] if lse else found
                assert sent.bytes == forward, (method, sent.bytes, forward)
                torch.autograd.grad(out.sum(), (q, k, v))
                assert sent.bytes == forward + backward, (method, sent.bytes, forward, backward)


def decoding_with_keys_spread_over_ranks():
    """Each attends to its own keys; what travels does not grow with them."""
    group, rank, size = world()
    layout = Layout.contiguous(203, size)
    (begin, end), *_ = layout.pieces[rank]
    lengths = torch.tensor([203, 41])  # of the second sequence, later ranks have no key
    for M in (1, 3):
        q, k, v = drawn(B, H, M, D), drawn(B, H, 203, D), drawn(B, H, 203, 2 * D)
        rows = lengths[:, None] - M + 1 + torch.arange(M)  # new queries see what stands before
        own = Mask(kv_len=(rows - begin).clamp(0, end - begin))
        out, lse = fastattn.scaled_dot_product_attention(
            q, k[:, :, begin:end], v[:, :, begin:end], mask=own, return_lse=True
        )
        every: list = [None] * size
        dist.all_gather_object(every, (out.detach(), lse.detach()))
        found = fastattn.merge_attention(*zip(*every, strict=True))
        whole = fastattn.scaled_dot_product_attention(
            q, k, v, mask=Mask(kv_len=rows), return_lse=True
        )
        for a, b in zip(found, whole, strict=True):
            torch.testing.assert_close(a, b)


def limits_of_ranks_with_one_row():
    """One row's limit looks like one for all rows, on which ranks must agree all the same."""
    group, rank, size = world()
    x = drawn(1, size, size, D)
    lengths = torch.arange(1, size + 1)[None]
    own = x[:, :, rank : rank + 1]
    whole = fastattn.scaled_dot_product_attention(x, x, x, mask=Mask(kv_len=lengths))
    for method in ("heads", "gather", "ring"):
        out = context_parallel_attention(
            own, own, own, group, layout=Layout.contiguous(size, size), method=method,
            mask=Mask(kv_len=lengths[:, rank : rank + 1]),
        )  # fmt: skip
        torch.testing.assert_close(out, whole[:, :, rank : rank + 1])


def masks_of_ranks_with_one_row():
    """With rows and without, beside limits of samples; ranks with more rows know which it is."""
    group, rank, size = world()
    n = 2 * size - 1
    layout = Layout.contiguous(n, size)
    x, rows, keys = drawn(B, H, n, D), drawn(n, n), drawn(H, 1, n)
    mask = Mask(kv_len=[n, 2], keep=torch.arange(n)[None, None] > 0)
    own = [layout.take(y, dim, rank) for y, dim in ((x.detach(), 2), (rows.detach(), 0))]
    q, bias = (y.requires_grad_() for y in own)
    for method in ("heads", "gather", "ring"):
        for options, leaves, of_rows in (
            (dict(attn_mask=keys, mask=mask), (x, keys), (q, keys)),
            (dict(attn_mask=keys, bias=rows, mask=mask), (x, keys, rows), (q, keys, bias)),
        ):
            whole = fastattn.scaled_dot_product_attention(x, x, x, **options)
            here = options | (dict(bias=bias) if "bias" in options else {})
            out = context_parallel_attention(q, q, q, group, layout=layout, method=method, **here)
            torch.testing.assert_close(out, layout.take(whole, 2, rank))
            expected = torch.autograd.grad(whole.square().sum(), leaves)
            found = torch.autograd.grad(out.square().sum(), of_rows)
            for a, b, dim in zip(found, expected, (2, None, 0), strict=False):
                torch.testing.assert_close(a, b if dim is None else layout.take(b, dim, rank))


PROMISES = [
    a_mesh_and_its_group_are_one,
    a_group_may_have_one_rank,
    without_a_layout_ranks_may_hold_any_number,
    with_a_layout_ranks_ask_nothing,
    one_seed_for_all_ranks,
    sinks_and_their_gradients,
    gradients_of_what_is_the_same_everywhere,
    inputs_without_a_head_dim,
    heads_have_second_derivatives,
    shards_and_back,
    heads_at_a_time_change_no_bit,
    a_mean_of_half_types_is_rounded_once,
    by_itself_it_takes_heads_or_gather,
    backends_are_asked_about_wide_sums,
    inference_tensors_are_copied,
    keys_without_query_heads_have_gradients_of_0,
    bytes_are_those_of_the_table,
    decoding_with_keys_spread_over_ranks,
    limits_of_ranks_with_one_row,
    masks_of_ranks_with_one_row,
    each_rank_uses_the_results_it_likes,
    inputs_are_freed,
]
