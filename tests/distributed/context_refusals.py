"""What attention over ranks refuses, on every rank alike; each function runs on every rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from context_cases import CASES, check
from context_promises import B, D, H, N, drawn, local, world
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.bias import causal_lower_right

import fastattn
from fastattn import Mask
from fastattn.distributed import Layout, context_parallel_attention, shard, unshard


def refused():
    group, rank, size = world()
    layout, other = Layout.contiguous(N, size), Layout.contiguous(N, size + 1)
    x = drawn(B, H, 5, D)
    own = layout.take(drawn(B, H, N, D), 2, rank)
    one = own[:, :1]
    row = own[:, :, :1]
    mesh = init_device_mesh("cpu", (1, size))
    odd = Layout(N, (((0, 6),), ((6, N),), *(((N, N),),) * (size - 2)))
    single = Layout(size, tuple(((r, r + 1),) for r in range(size)))
    bias = torch.zeros(1, size)

    def call(*tensors, **options):
        return lambda: context_parallel_attention(*tensors, group, **options)

    for error, match, wrong in (
        (ValueError, f"expected one for {size} ranks.*got one for {size + 1}",
         call(x, x, x, layout=other)),
        (ValueError, f"query: expected .* rows on rank {rank}", call(x, x, x, layout=layout)),
        (ValueError, "cross-attention takes key_layout=", call(own, x, x, layout=layout)),
        (TypeError, "layout: expected a Layout", call(own, own, own, layout=N)),
        (TypeError, "mesh: expected a DeviceMesh", lambda: local(mesh="cpu")),
        (ValueError, "expected one dim, got 2", lambda: local(mesh=mesh)),
        (ValueError, "method: expected one of", lambda: local("rings")),
        (ValueError, "'mean'.*method='gather'", lambda: local("ring", return_weights="mean")),
        (ValueError, "multiples of 4.*method='gather'",
         lambda: local("ring", layout=odd, dropout_p=0.5)),
        (ValueError, "cannot share 1 query heads.*method='gather'",
         call(one, one, one, method="heads", layout=layout)),
        (TypeError, "unexpected keyword argument 'causal'", lambda: local(causal=True)),
        (ValueError, "a rank has one row", call(row, row, row, layout=single, bias=bias)),
        (ValueError, "key and value: expected the same length", call(row, row, row[:, :, :0])),
        (TypeError, "unexpected keyword argument 'scale'",
         call(row, row, row, weight=torch.ones(D), scale=2.0)),
        (TypeError, "weight", call(row, row, row, layout=single, weight=[1.0] * D)),
        (ValueError, "write is_causal=True",
         call(row, row, row, layout=single, attn_mask=causal_lower_right(size, size))),
        (TypeError, "layout: expected a Layout", lambda: shard(row, 2, None, group)),
        (TypeError, "layout: expected a Layout", lambda: unshard(row, 2, None, group)),
        (TypeError, "x: expected a plain tensor, got DTensor",
         lambda: shard(whole(row, size), 2, Layout.contiguous(1, size), group)),
        (TypeError, "x: expected a plain tensor, got Mask",
         lambda: unshard(Mask(), 2, single, group)),
        (TypeError, "dim: expected an int, got bool", lambda: shard(row, True, single, group)),
        (ValueError, r"sink: expected \[4\]", lambda: local(sink=torch.zeros(H + 1))),
        (ValueError, "cannot share 0 query heads",
         call(*(own[:, :0],) * 3, method="heads", layout=layout)),
        (ValueError, r"write bias.to_dense\(M, N\)",
         lambda: local(bias=fastattn.ALiBi(torch.ones(H)))),
        (TypeError, "return_lse: expected a bool", lambda: local(return_lse=1)),
        (ValueError, f"layout: expected one for {size} ranks, got {size + 1}",
         lambda: shard(drawn(N), 0, other, group)),
        (ValueError, "x: expected 24 entries in dim 1", lambda: shard(drawn(N), 1, layout, group)),
        (ValueError, "x: expected .* entries in dim 0", lambda: unshard(x, 0, layout, group)),
        (ValueError, "heads_per_step: expected 1 or more",
         lambda: local("gather", heads_per_step=0)),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            wrong()


def whole(x, size):
    """A DTensor with all of it on every rank."""
    return distribute_tensor(x.detach(), init_device_mesh("cpu", (size,)), [Replicate()])


def dtensors():
    """Their shapes are not those of what a rank holds. Without a layout all ranks raise."""
    group, rank, size = world()
    x, one, many = (torch.zeros(shape) for shape in ((1, H, 3, D), (H,), (1, 3 * size)))
    at_last = rank == size - 1
    says = "query: expected a plain tensor.*write x.to_local" if at_last else "says why"
    wrong = whole(x, size)
    with pytest.raises((TypeError, ValueError), match=says):
        context_parallel_attention(wrong if at_last else x, x, x, group)
    for name, options in (
        ("sink", dict(sink=whole(one, size))),
        ("weight", dict(weight=whole(torch.ones(H, D), size))),
        ("bias", dict(bias=whole(many, size))),
        ("mask.keep", dict(mask=Mask(keep=whole(many == 0, size)))),
    ):
        for layout in (None, Layout.contiguous(3 * size, size)):
            with pytest.raises(TypeError, match=f"{name}: expected a plain tensor, got a DTensor"):
                context_parallel_attention(x, x, x, group, layout=layout, **options)


def what_one_rank_refuses_all_refuse():
    """The last rank says why, and no other waits for it."""
    group, rank, size = world()
    last = size - 1
    at_last = rank == last
    own, row = torch.zeros(1, H, 3, D), torch.zeros(1, H, 0 if at_last else 1, D)
    one_row = torch.zeros(1, H, 1 if at_last else 3, D)
    longer = torch.zeros(1, H, 4 if at_last else 3, D)
    lengths = torch.full((1, 3), 3 * size + (1 if at_last else 0))
    one_query = torch.zeros(1, H, 0 if rank else 1, D)
    mask = torch.zeros(0 if rank else 1, size * 3)
    same = Layout.contiguous(3 * size, size)
    one_each = Layout(3 * last + 1, (*same.pieces[:-1], ((3 * last, 3 * last + 1),)))

    def call(*tensors, **options):
        return lambda: context_parallel_attention(*tensors, group, **options)

    says, others = "refuses its arguments, and says why", r"expected values in \[0"
    query = Layout.contiguous(1, size)
    for wrong, refuses, match in (
        (call(own, own, longer), at_last, "key and value: expected the same length"),
        (call(own, own.double() if at_last else own, own), at_last, "key: expected the dtype"),
        (call(own, own, own, layout=same, mask=Mask(kv_len=lengths)), at_last, others),
        (call(one_row, one_row, one_row, layout=one_each, mask=Mask(kv_len=[[3]])), not at_last,
         r"mask.kv_len: expected"),
        (call(one_query, own, own, layout=query, key_layout=same, attn_mask=mask), rank > 0,
         "attn_mask: of one query it is the same on every rank"),
        (call(own, own, own, attn_mask=torch.zeros(3, 3 * size + at_last)), at_last,
         "attn_mask: expected a shape that broadcasts"),
        (call(own, own, own, sink=torch.zeros(H + at_last)), at_last, "sink: expected"),
        (call(row, longer, longer, key_layout=same), True,
         f"key: expected 3 rows on rank {last}, as key_layout says, got 4"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=match if refuses else says):
            wrong()


def no_second_derivative_is_dropped():
    for method in ("gather", "ring"):
        out = local(method)
        with pytest.raises(NotImplementedError, match="write method='heads'"):
            out.sum().backward(create_graph=True)


def what_differs_by_rank():
    """Without a layout all ranks raise; the numbers would be wrong, or a process would abort."""
    group, rank, size = world()
    at_last = rank == size - 1
    x = torch.zeros(2, H, 3, D)
    for match, other in (
        ("samples: .* got 2 on rank 0 and 1", x[:1]),
        ("heads of query: .* got 4 on rank 0 and 8", x.view(2, 2 * H, 3, D // 2)),
        ("last dim of query", x[..., :4]),
        ("dtype: .* got torch.float32 on rank 0 and torch.bfloat16", x.bfloat16()),
    ):
        own = other if at_last else x
        for method in ("heads", "gather", "ring"):
            with pytest.raises(ValueError, match=match):
                context_parallel_attention(own, own, own, group, method=method)
    for match, query, key, value in (
        ("heads of key", x, x[:, :2], x[:, :2]),
        ("last dim of value", x, x, x[..., :4]),
        ("heads of value", x, x, x[:, :1]),
        ("samples", x[:1], x[:1], x[:1]),
    ):
        own = (key, value) if at_last else (x, x)
        with pytest.raises(ValueError, match=match):
            context_parallel_attention(query, *own, group, enable_gqa=True)
    some, here = torch.ones(B, 3, dtype=torch.int64), size - rank - 1
    for options in (
        dict(mask=Mask(kv_len=some)),
        dict(mask=Mask(kv_begin=some)),
        dict(mask=Mask(keep=torch.ones(3 * size) > 0)),
        dict(attn_mask=torch.zeros(3, 3 * size)),
        dict(bias=torch.zeros(3, 3 * size)),
        dict(sink=torch.zeros(H)),
        dict(weight=torch.ones(D)),
    ):
        with pytest.raises(ValueError, match="is given: expected the same on every rank"):
            context_parallel_attention(x, x, x, group, **(options if here else {}))


def ranks_outside_of_the_mesh():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    if rank == 0:
        return
    x = drawn(B, H, N, D)
    for given in (group, mesh):
        with pytest.raises(ValueError, match=rf"rank {rank} is not in the mesh"):
            context_parallel_attention(x, x, x, given)
    with pytest.raises(ValueError, match="is not in the mesh"):
        shard(x, 2, Layout.contiguous(N, size), group)


def transforms_and_tangents():
    """Which would not reach other ranks."""
    zeros = torch.zeros(2, N)
    refused = pytest.raises(NotImplementedError, match=r"torch\.func, forward mode and")
    for method in ("heads", "gather", "ring"):

        def call(x, method=method):
            return local(method, attn_mask=x)

        with refused:
            torch.func.vmap(call, randomness="same")(zeros)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(zeros[0], zeros[1])
            with refused:
                call(dual)


def batches_of_gradients():
    """That is_grads_batched makes: memory of another shape would be sent."""
    for method in ("heads", "gather", "ring"):
        x = torch.zeros(N, requires_grad=True)
        out = local(method, attn_mask=x)
        with pytest.raises(NotImplementedError, match="is_grads_batched"):
            torch.autograd.grad(out, x, torch.zeros(2, *out.shape), is_grads_batched=True)


def masks_and_seeds_that_change_before_backward():
    """Autograd sees it, as on one device."""
    layout = Layout.zigzag(N, dist.get_world_size(), unit=4)
    rows = layout.sizes[dist.get_rank()]
    for method in ("gather", "ring"):
        for name in ("keep", "kv_len", "kv_begin", "seed"):
            tensor = {
                "keep": torch.ones(1, 1, rows, N) > 0, "seed": torch.tensor(5)
            }.get(name, torch.full((B, rows), 2, dtype=torch.int32))  # fmt: skip
            options: dict = dict(seed=tensor, dropout_p=0.5)
            if name != "seed":
                options = dict(mask=Mask(**{name: tensor}))
            out = local(method, layout=layout, **options)
            tensor.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


REFUSALS = [
    refused,
    dtensors,
    what_one_rank_refuses_all_refuse,
    what_differs_by_rank,
    ranks_outside_of_the_mesh,
    transforms_and_tangents,
    batches_of_gradients,
    masks_and_seeds_that_change_before_backward,
    no_second_derivative_is_dropped,
]


# ---- a rank that is gone ----


def two_ranks_leave():
    """What the first of three gets, beside each of the others: an error of torch, and no hang.

    Before that they compute. Of two ranks, the next one is the one before.
    """
    for case in CASES:
        if case.method == "ring" and case.case.name in ("causal", "cross"):
            check(case)
    rank, layout = dist.get_rank(), Layout.contiguous(N, 2)
    beside = {n: dist.new_group([0, n]) for n in (1, 2)}
    x = layout.take(drawn(B, H, N, D), 2, 0)
    ring = None
    if rank in (0, 2):
        ring = context_parallel_attention(x, x, x, beside[2], layout=layout, method="ring")
    if rank > 0:
        os._exit(1)

    def on_dtensors():
        mesh = DeviceMesh.from_group(beside[1], "cpu")
        own = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
        fastattn.scaled_dot_product_attention(own, own, own)

    errors = []
    for call in (
        ring.sum().backward,
        lambda: context_parallel_attention(x, x, x, beside[1], layout=layout, method="gather"),
        lambda: context_parallel_attention(x, x, x, beside[1], method="heads"),
        on_dtensors,
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        assert error.type is RuntimeError
        errors.append(str(error.value))
    return errors
