"""Compiled attention over ranks, each of which compiles its own graph; each runs on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from context_promises import B, D, H, N, drawn, world

from fastattn import Mask
from fastattn.distributed import Layout, context_parallel_attention, count_bytes


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _same(x):
    return x


def compare(call, layout, leaves):
    """Outputs, gradients, bytes; and that backward brings the keys of other ranks again."""
    found = []
    for f in (call, compiled(call)):
        own = [layout.take(x, 2, dist.get_rank()) if x.dim() == 4 else x for x in leaves]
        own, kept = [x.detach().requires_grad_() for x in own], []
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x, k=kept: k.append(x) or x, _same)
        with count_bytes() as sent, keep:
            results = f(*own)
        loss = sum(x.square().sum() for x in results)
        grads = torch.autograd.grad(loss, own)
        assert max(x.numel() for x in kept) <= max(x.numel() for x in (*own, *results))
        found.append([*results, *grads, torch.tensor(sent.bytes)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def ranks_with_other_rows_send_the_same():
    """A compiler would drop and move what its own rank does not need, and others would wait."""
    group, _, size = world()
    layout = Layout(N, (((0, N),), *(((N, N),),) * (size - 1)))

    def call(x, bias):
        return [context_parallel_attention(
            x, x, x, group, method="gather", layout=layout, is_causal=True, attn_mask=bias
        )]  # fmt: skip

    compare(call, layout, [drawn(B, H, N, D), drawn(H, 1, N)])


def operators_get_every_option():
    group, rank, size = world()
    layout, keys = Layout.zigzag(N, size, unit=4), Layout.contiguous(2 * N, size)
    keep = layout.take(drawn(N, 2 * N), 0, rank) < 1
    v = keys.take(drawn(B, 1, 2 * N, 5), 2, rank)
    masks = dict(kv_len=torch.tensor([2 * N, 9]), kv_begin=torch.tensor([3, 0]), keep=keep)

    def call(q, k, w):
        out, weights, lse = context_parallel_attention(
            q, k, v, group, weight=w, method="ring", layout=layout, key_layout=keys,
            mask=Mask("bottom_right", (30, -1), **masks), softcap=2.0, dropout_p=0.2, seed=3,
            return_weights="full", return_lse=True,
        )  # fmt: skip
        return out, weights, lse.clamp(min=-9)

    own = keys.take(drawn(B, 1, 2 * N, D), 2, rank)
    compare(lambda q, w: call(q, own, w), layout, [drawn(B, 2, N, D), drawn(2, D)])


def heads_move_all_results():
    group, _, size = world()
    layout = Layout.contiguous(N, size)

    def call(x):
        return context_parallel_attention(
            x, x, x, group, method="heads", layout=layout, return_lse=True
        )

    x = layout.take(drawn(B, H, N, D), 2, dist.get_rank()).detach().requires_grad_()
    plain, found = call(x), compiled(call)(x)
    wanted = dist.get_rank() % 2  # a rank may need the gradient of one result alone
    grads = [torch.autograd.grad(results[wanted].sum(), x) for results in (plain, found)]
    for a, b in zip((*plain, *grads[0]), (*found, *grads[1]), strict=True):
        torch.testing.assert_close(a, b)


def a_graph_for_each_length():
    """Without a layout ranks have equal shares."""
    group, _, _ = world()

    def call(x):
        return context_parallel_attention(x, x, x, group, method="gather", is_causal=True)

    graph = compiled(call)
    for n in (4, 6):
        x = drawn(B, H, n, D)
        torch.testing.assert_close(graph(x), call(x))


def a_rank_without_rows_sends_all_the_same():
    """Inductor drops what makes no number, unless it is told that others wait for it."""
    group, rank, size = world()
    layout = Layout.contiguous(1, size)

    for method in ("gather", "ring"):

        def call(x, method=method):
            return context_parallel_attention(
                2 * x, x, x, group, method=method, layout=layout, backend="cpu"
            )

        x = layout.take(drawn(B, H, 1, D), 2, rank).detach().requires_grad_()
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            found = torch.compile(call)(x)
        for a, b in zip(
            (found, *torch.autograd.grad(found.sum(), x)),
            (own := call(x), *torch.autograd.grad(own.sum(), x)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def what_a_compiler_leaves_out_runs_as_a_whole():
    """Parts that are compiled by themselves would not agree on who tells whom what."""
    group, rank, size = world()
    layout = Layout.contiguous(size + 1, size)  # two rows on the first rank, one on each other

    def call(x, key, bias, method):
        return context_parallel_attention(
            x, key, x, group, layout=layout, attn_mask=bias, method=method
        )

    x, bias = (layout.take(drawn(H, size + 1, n), 1, rank) for n in (D, size + 1))
    for method in ("heads", "gather"):
        torch._dynamo.reset()
        graph = torch.compile(call, backend="aot_eager")  # not fullgraph
        for f in (call, graph):
            with pytest.raises(ValueError, match="query and key: expected the same last dim"):
                f(x, x[..., 1:], None, method)
        for each in (None, bias):  # no rank can tell alone whether a bias of one row has rows
            torch.testing.assert_close(graph(x, x, each, method), call(x, x, each, method))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a rank has one row"):
            compiled(call)(x, x, bias, method)


COMPILED = [
    what_a_compiler_leaves_out_runs_as_a_whole,
    a_rank_without_rows_sends_all_the_same,
    ranks_with_other_rows_send_the_same,
    operators_get_every_option,
    heads_move_all_results,
    a_graph_for_each_length,
]
