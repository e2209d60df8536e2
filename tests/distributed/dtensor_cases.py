"""DTensors at the public functions, compared with the whole; each function runs on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import Mask, testing
from fastattn.problem import relative

B, H, N, D = 4, 4, 24, 8
ONE = {"samples": [Shard(0)], "heads": [Shard(1)], "rows": [Shard(2)], "nothing": [Replicate()]}
TWO = {"samples-heads": [Shard(0), Shard(1)], "samples-rows": [Shard(0), Shard(2)],
       "heads-rows": [Shard(1), Shard(2)]}  # fmt: skip


def drawn(*shape):
    seed = sum(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def meshes():
    size = dist.get_world_size()
    found = [(init_device_mesh("cpu", (size,)), x) for x in ONE.values()]
    two = (2, size // 2) if size % 2 == 0 else (1, size)
    return found + [(init_device_mesh("cpu", two), x) for x in TWO.values()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def leaves_of(shape=(B, H, H, N), **beside):
    """Query, key and value of B, H, Hkv and so many positions, and what is given beside them."""
    samples, heads, Hkv, n = shape
    points = {"query": drawn(samples, heads, n, D), "key": drawn(samples, Hkv, n, D),
              "value": drawn(samples, Hkv, n, D + 1)}  # fmt: skip
    return points | {name: x for name, x in beside.items() if x is not None}


def results_of(leaves, options, share=lambda x: x, compiled=False):
    """Results and gradients, of points that are shared."""
    own = {n: x.detach().requires_grad_() for n, x in leaves.items()}
    for name in ("query", "key", "value"):
        own[name] = share(own[name].detach()).requires_grad_()
    call = fastattn.scaled_dot_product_attention
    if "weight" in own:
        call = fastattn.additive_attention
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = call(**own, return_lse=True, **options)
    loss = sum(whole(x).square().sum() for x in results)
    return [*map(whole, (*results, *torch.autograd.grad(loss, list(own.values()))))]


def compare(
    mesh, placements, compiled=False, shape=(B, H, H, N), bias=None, weight=None, sink=None,
    **options
):  # fmt: skip
    """Plain tensors with DTensors, whose call may be compiled."""
    leaves = leaves_of(shape, bias=bias, weight=weight, sink=sink)
    found = results_of(leaves, options, lambda x: distribute_tensor(x, mesh, placements), compiled)
    for a, b in zip(found, results_of(leaves, options), strict=True):
        torch.testing.assert_close(a, b)


def every_placement_of_a_causal_call():
    for mesh, placements in meshes():
        compare(mesh, placements, is_causal=True)


def masks_biases_and_dropout():
    """Of all shapes; dropout draws the bits of one device. Two mesh dims may share the heads."""
    for mesh, placements in [*meshes(), (meshes()[-1][0], [Shard(1), Shard(1)])]:
        for shape in ((N, N), (H, 1, N), (B, 1, N, N)):
            compare(mesh, placements, bias=drawn(*shape), dropout_p=0.3, seed=5,
                    mask=Mask(kv_len=[24, 9, 0, 17]))  # fmt: skip


def the_additive_score_and_full_weights():
    for mesh, placements in meshes():
        compare(mesh, placements, shape=(B, 2 * H, H, N), weight=drawn(2 * H, D),
                return_weights="full")  # fmt: skip


def sinks_softcap_windows_and_shared_key_heads():
    for mesh, placements in meshes():
        over = mesh.size() if Shard(1) in placements else 2
        compare(mesh, placements, shape=(B, 2 * over, over, N), sink=drawn(2 * over), softcap=2.0,
                enable_gqa=True, mask=Mask(window=(7, 3)))  # fmt: skip
        if Shard(1) not in placements:
            compare(mesh, placements, sink=drawn(H), return_weights="mean")


class Sums(TorchDispatchMode):
    """Remembers of which dtypes ranks make sums."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_reduce" in str(func):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def biases_of_half_types():
    """Their gradients are sums over ranks, which are rounded once."""
    case = testing.Case("half", B=B, H=H, Hkv=H, M=N, N=N, D=D, E=D, bias="n", keep="bn",
                        dtype=torch.bfloat16)  # fmt: skip
    t = testing.make(case)
    oracle = testing.oracle(case, t)
    for mesh, placements in meshes():
        own = [distribute_tensor(x, mesh, placements) for x in (t.q, t.k, t.v)]
        leaves = [x.detach().requires_grad_() for x in (*own, t.bias)]
        out = fastattn.scaled_dot_product_attention(*leaves[:3], bias=leaves[3], mask=t.mask)
        with Sums() as sums:
            grads = torch.autograd.grad(whole(out), leaves, t.grad_out)
        assert sums.dtypes <= {torch.float32}
        assert sums.dtypes or placements == [Replicate()]
        found = zip(("out", "grad_q", "grad_k", "grad_v", "grad_bias"), (out, *grads), strict=True)
        oracle.check(case, {name: whole(x).detach() for name, x in found})


def ranks_with_one_row():
    """Of masks and biases with rows and without."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for n in {2 * size - 1, size}:
        keep = torch.arange(n) < torch.tensor([[n], [1]])
        for bias in (drawn(H, n, n), drawn(H, 1, n)):
            mask = Mask(keep=keep[:, None, None], kv_len=torch.arange(1, n + 1)[None])
            compare(mesh, [Shard(2)], shape=(2, H, H, n), bias=bias, mask=mask)


def the_gaussian_score():
    """With a number as bandwidth; in float32 under autocast, as on one device."""
    x = 30 + drawn(B, H, N, D).detach() / 100
    for mesh, placements in meshes():
        shared = distribute_tensor(x, mesh, placements)
        with torch.autocast("cpu", torch.bfloat16):
            out, alone = (
                fastattn.attention(y, y, y, score="gaussian", bandwidth=0.01) for y in (shared, x)
            )
        torch.testing.assert_close(out.full_tensor(), alone)


def compiled_calls():
    """In one graph, with the collectives in it."""
    mesh, placements = meshes()[-1]
    compare(mesh, placements, weight=drawn(H, D), bias=drawn(H, N, N), compiled=True,
            dropout_p=0.3, seed=5, mask=Mask(kv_len=torch.tensor([24, 9, 0, 17])))  # fmt: skip


def mean_weights_where_one_rank_has_all_heads():
    """Over mesh dims of one rank."""
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(), 1)), drawn(B, H, N, D).detach()
    _, expected = fastattn.scaled_dot_product_attention(x, x, x, return_weights="mean")
    for dim in (0, 2):
        shared = distribute_tensor(x, mesh, [Shard(dim), Shard(1)])
        out, weights = fastattn.scaled_dot_product_attention(
            shared, shared, shared, return_weights="mean"
        )
        assert list(out.placements) == [Shard(dim), Shard(1)]
        assert list(weights.placements) == [Shard(min(dim, 1)), Replicate()]
        torch.testing.assert_close(weights.full_tensor(), expected)


def seeds_that_are_shared():
    for mesh, placements in meshes():
        seed = distribute_tensor(torch.tensor(5), mesh, [Replicate()] * mesh.ndim)
        x = drawn(B, H, N, D).detach()
        shared = distribute_tensor(x, mesh, placements)
        out = fastattn.scaled_dot_product_attention(
            shared, shared, shared, dropout_p=0.5, seed=seed
        )
        alone = fastattn.scaled_dot_product_attention(x, x, x, dropout_p=0.5, seed=5)
        torch.testing.assert_close(out.full_tensor(), alone)


def placements_of_results():
    for mesh, placements in meshes():
        x = distribute_tensor(drawn(B, H, N, D).detach(), mesh, placements)
        out = fastattn.scaled_dot_product_attention(x, x, x)
        assert list(out.placements) == placements
        assert out.shape == (B, H, N, D)
        for other in (Shard(3), Shard(-1), Partial()):
            y = DTensor.from_local(x.to_local(), mesh, [other] * mesh.ndim)
            out = fastattn.scaled_dot_product_attention(y, y, y)
            assert list(out.placements) == [Replicate()] * mesh.ndim
            y = y.full_tensor()
            alone = fastattn.scaled_dot_product_attention(y, y, y)
            torch.testing.assert_close(out.full_tensor(), alone)


def one_seed_for_all_ranks():
    """Without a seed, all ranks take the one that the first of them draws."""
    for mesh, placements in meshes():
        x = drawn(B, H, N, D).detach()
        shared = distribute_tensor(x, mesh, placements)
        torch.manual_seed(100)
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
        alone = fastattn.scaled_dot_product_attention(x, x, x, dropout_p=0.5, seed=seed)
        torch.manual_seed(100 + dist.get_rank())
        out = fastattn.scaled_dot_product_attention(shared, shared, shared, dropout_p=0.5)
        torch.testing.assert_close(out.full_tensor(), alone)


def sequences_of_any_length():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for n in (5, 7, 1):
        x = drawn(2, 2, n, D).detach()
        shared = distribute_tensor(x, mesh, [Shard(2)])
        out = fastattn.scaled_dot_product_attention(shared, shared, shared, is_causal=True)
        alone = fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)
        torch.testing.assert_close(out.full_tensor(), alone)


def limits_of_one_query():
    """Of shape [B, 1] and [1, 1], which is each sample's limit on ranks without the row, too."""
    limits = [[3], [4]], torch.tensor([[3]]), [3, 4]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k = drawn(2, 2, 1, D).detach(), drawn(2, 2, 6, D).detach()
    own_q, own_k = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k))
    for limit in limits:
        mask = Mask(kv_len=limit, kv_begin=torch.ones(2, 1, dtype=torch.int64))
        out = fastattn.scaled_dot_product_attention(own_q, own_k, own_k, mask=mask)
        alone = fastattn.scaled_dot_product_attention(q, k, k, mask=mask)
        torch.testing.assert_close(out.full_tensor(), alone)


def limits_of_one_sample():
    """Most ranks have no sample, and no limit either; [1, M] is for all samples."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = drawn(1, 2, 3, D).detach()
    own = distribute_tensor(x, mesh, [Shard(0)])
    for kv_len, kv_begin in ([3], None), (None, [1]), ([2], torch.tensor([1])), ([[3, 1, 2]], None):
        mask = Mask(kv_len=kv_len, kv_begin=kv_begin)
        out = fastattn.scaled_dot_product_attention(own, own, own, mask=mask)
        alone = fastattn.scaled_dot_product_attention(x, x, x, mask=mask)
        torch.testing.assert_close(out.full_tensor(), alone)


def one_key_head_for_all():
    """It is the same on all ranks, and its gradient is a sum over them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, kv = drawn(2, 4, N, D), drawn(2, 1, N, D)
    shared = distribute_tensor(q.detach(), mesh, [Shard(1)])
    one = distribute_tensor(kv.detach(), mesh, [Replicate()]).requires_grad_()
    out = fastattn.scaled_dot_product_attention(shared, one, one)
    (grad,) = torch.autograd.grad(out.full_tensor().square().sum(), one)
    alone = fastattn.scaled_dot_product_attention(q, kv, kv)
    torch.testing.assert_close(out.full_tensor(), alone)
    (expected,) = torch.autograd.grad(alone.square().sum(), kv)
    torch.testing.assert_close(grad.full_tensor(), expected)


def refused():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(drawn(B, H, N, D).detach(), mesh, [Shard(1)])
    attend = fastattn.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"write bias.to_dense\(M, N\)"):
        attend(x, x, x, bias=relative.Relative.__new__(relative.Relative))
    with pytest.raises(TypeError, match="key: expected a DTensor"):
        attend(x, drawn(B, H, N, D), x)
    with pytest.raises(ValueError, match="write return_weights='full'"):
        attend(x, x, x, return_weights="mean")
    y = distribute_tensor(torch.zeros(H, N, D), mesh, [Shard(0)])
    plain, seed = drawn(B, H, N, D), distribute_tensor(torch.tensor(3), mesh, [Replicate()])
    keep, sink = (
        distribute_tensor(n, mesh, [Replicate()]) for n in (torch.ones(N) > 0, torch.ones(H))
    )
    for match, options in (
        ("attn_mask: .*write x.full_tensor", dict(attn_mask=y[..., :1])),
        ("bias: .*write x.full_tensor", dict(bias=y[..., :1])),
        ("seed: .*write x.full_tensor", dict(seed=seed, dropout_p=0.5)),
        ("sink: .*write x.full_tensor", dict(sink=sink)),
        ("mask.keep: .*write x.full_tensor", dict(mask=Mask(keep=keep > 0))),
    ):
        with pytest.raises(ValueError, match=match):
            attend(plain, plain, plain, **options)
    with pytest.raises(ValueError, match="DTensors have 4 dims"):
        attend(y, y, y)
    one, many, head = (
        distribute_tensor(torch.zeros(shape), mesh, [Replicate()])
        for shape in ((1, 2, N, D), (3, 2, N, D), (1, 1, N, D))
    )
    with pytest.raises(ValueError, match="key: expected as many samples as query"):
        attend(one, many, many)
    both = init_device_mesh("cpu", (1, size))
    rows = distribute_tensor(plain.detach(), both, [Shard(2), Shard(2)])
    with pytest.raises(ValueError, match=r"query: expected rows on one mesh dim.*write Shard\(1\)"):
        attend(rows, rows, rows)
    with pytest.raises(ValueError, match="key: expected the mesh of query"):
        attend(x, rows, rows)
    with pytest.raises(ValueError, match="query: expected the heads of key"):
        attend(head, one, one)
    with pytest.raises(ValueError, match=r"write weight\[None\]"):
        fastattn.additive_attention(one, one, one, weight=torch.ones(D))
    with pytest.raises(TypeError, match="weight: expected a Tensor, got list"):
        fastattn.additive_attention(one, one, one, weight=[1.0] * D)
    with pytest.raises(ValueError, match="bandwidth: expected a number beside DTensors"):
        fastattn.attention(one, one, one, score="gaussian", bandwidth=torch.ones(1))


def offsets_and_parts_that_are_shared():
    """Plain tensors beside DTensors say which argument is meant."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out, lse, offsets = drawn(N, H, D).detach(), drawn(N, H).detach(), torch.tensor([0, 9, N])
    own, logs, ends = (distribute_tensor(x, mesh, [Replicate()]) for x in (out, lse, offsets))
    for x in (out, own):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            cu = {"cu_seqlens_q": offsets, name: ends}
            with pytest.raises(TypeError, match=rf"{name}: .*write x\.full_tensor\(\)"):
                fastattn.varlen_attention(x, x, x, **cu)
    for outs, lses in (([own, own], [lse, lse]), ([out, own], [lse, logs]), ([out], [logs])):
        with pytest.raises(TypeError, match="outs, lses: expected either DTensors or plain"):
            fastattn.merge_attention(outs, lses)


def parameters_of_another_score():
    """torch's own forward, which takes DTensors, has no additive score."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = fastattn.MultiheadAdditiveAttention(D, 2)
    module.in_proj_bias = torch.nn.Parameter(
        distribute_tensor(module.in_proj_bias.detach(), mesh, [Replicate()])
    )
    x = drawn(3, 2, D).detach()
    with pytest.raises(TypeError, match=r"type of an input or of a parameter .* as DTensor"):
        module(x, x, x)


def what_fits_ranks_but_not_the_whole():
    """Each raises on every rank, though some or all of them might find their parts right."""
    P = dist.get_world_size()
    mesh = init_device_mesh("cpu", (P,))
    zeros, lengths = torch.zeros, "key and value: expected the same length"
    limit, keep = r"mask.kv_len: expected \[2\] or \[2, .*\], got", zeros(2, 1, 1, N) == 0
    gqa = dict(enable_gqa=True)
    for shape, dim, options, match in (
        (
            (2 * P, 2, 2, 2, N, N, N),
            0,
            dict(mask=Mask(keep=keep > 0)),
            "mask.keep: expected a shape",
        ),
        ((2, 2 * P, 2 * P, 2 * P, N, N, N), 1, dict(bias=zeros(2, 1, N)), "bias: expected a shape"),
        ((2, 2, 2, 2, 2 * P, N, N), 2, dict(attn_mask=zeros(2, N)), "attn_mask: expected a shape"),
        ((2, 2, 2, 2, 2 * P + 1, N, N), 2, dict(bias=zeros(2 * P, N)), "bias: expected a shape"),
        ((2, 2 * P, 2 * P, 2 * P, N, N, N), 1, dict(weight=zeros(2, D)), "weight: expected"),
        ((2, P, P, P, N, N, N), 1, dict(sink=zeros(1)), rf"sink: expected \[{P}\]"),
        ((2, 2 * P, 2 * P, 2 * P, N, N, N), 1, dict(sink=zeros(2)), "sink: expected"),
        ((1, P + 1, P + 1, P + 1, N, N, N), 1, {}, "heads: expected a multiple"),
        ((2, P * P + P, 1, P + 1, N, N, N), 1, gqa, "heads: expected a multiple"),
        ((2, 2 * P, P, P, N, N, N), 1, {}, "enable_gqa=True shares key heads"),
        ((2, 2, 2, 2, N, P, P + 1), 2, {}, lengths),
        ((2, 2, 2, 2, P + 1, P + 1, P + 1), 0, dict(mask=Mask(kv_len=[1])), limit),
        ((2, 2, 2, 2, P + 1, P + 1, P + 1), 2, dict(mask=Mask(kv_len=[[1], [1]])), limit),
        ((2, 2, 2, 2, N, N, N), 0, dict(mask=Mask(kv_len=[N, N + 1])), "expected values in"),
    ):
        samples, H, Hkv, Hv, M, keys, values = shape
        q, k, v = (
            distribute_tensor(zeros(samples, heads, n, D), mesh, [Shard(dim)])
            for heads, n in ((H, M), (Hkv, keys), (Hv, values))
        )
        call = fastattn.scaled_dot_product_attention
        if "weight" in options:
            call = fastattn.additive_attention
        with pytest.raises(ValueError, match=match):
            call(q, k, v, **options)


def torch_takes_them_from_its_own_function():
    """As the other subclasses of a tensor: it has calls that this package refuses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (distribute_tensor(x.detach()[0], mesh, [Replicate()]) for x in leaves_of().values())
    call = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = call(q, k, v)
        with fastattn.use_for_sdpa() as calls:
            found = call(q, k, v)
    assert torch.equal(found.full_tensor(), expected.full_tensor())
    assert list(calls.torch) == ["DTensor is a tensor subclass"]


CASES = [
    every_placement_of_a_causal_call,
    masks_biases_and_dropout,
    the_additive_score_and_full_weights,
    sinks_softcap_windows_and_shared_key_heads,
    biases_of_half_types,
    ranks_with_one_row,
    the_gaussian_score,
    compiled_calls,
    mean_weights_where_one_rank_has_all_heads,
    seeds_that_are_shared,
    one_seed_for_all_ranks,
    placements_of_results,
    sequences_of_any_length,
    limits_of_one_query,
    limits_of_one_sample,
    one_key_head_for_all,
    refused,
    offsets_and_parts_that_are_shared,
    parameters_of_another_score,
    what_fits_ranks_but_not_the_whole,
    torch_takes_them_from_its_own_function,
]
