"""DTensors at the public functions: the same results, whatever is sharded."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from dtensor_cases import CASES, D, H, N, drawn, leaves_of, results_of
from ranks import by_name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastattn import Mask
from fastattn.backends import operators
from fastattn.problem import validate

CALLS = {case.__name__: case for case in CASES}


@pytest.fixture(scope="module")
def outcomes():
    return by_name(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_on_every_rank(outcomes, name):
    errors = [error for error in outcomes[name] if error is not None]
    assert not errors, errors[0]


@pytest.fixture
def four_ranks():
    """A mode in which this process computes what each of four ranks would."""
    mode = pytest.importorskip("torch.distributed._local_tensor").LocalTensorMode(4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield mode
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [[Shard(0)], [Shard(1)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]],
    ids=str,
)
def test_four_ranks_in_one_process(four_ranks, placements):
    limits = torch.tensor([N, 9, 0, 17])
    for leaves, options in (
        (leaves_of(bias=drawn(H, 1, N), sink=drawn(H)), dict(mask=Mask(kv_len=limits))),
        (leaves_of(weight=drawn(H, D)), dict(softcap=2.0, is_causal=True)),
    ):
        expected = results_of(leaves, options)
        with four_ranks:
            mesh = init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))
            share = partial(distribute_tensor, device_mesh=mesh, placements=placements)
            found = results_of(leaves, options, share)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.reconcile(), b)  # which every rank has


WAYS = [[Shard(0)], [Shard(1)], [Shard(2)], [Shard(0), Shard(1)]]


@pytest.mark.skipif(operators.EXTENSION_ERROR is not None, reason=str(operators.EXTENSION_ERROR))
@pytest.mark.parametrize("placements", WAYS, ids=str)
def test_rules_of_operators(four_ranks, placements):
    """Without dropout, samples and heads stay sharded: not the heads of a mean, and no few ones."""
    q, w, bias = (drawn(*shape).detach() for shape in ((4, 8, N, D), (8, D), (1, 8, N, N)))
    limits = dict(kv_len=torch.tensor([N, 9, 0, 17]), kv_begin=torch.arange(N)[None] // 3)
    mask = Mask("top_left", keep=drawn(N, N) > -1, **limits)
    sinks = drawn(8).detach(), drawn(4, 8).detach()
    for score, dropout_p, weights, Hkv, *sink in (
        ("dot", 0.0, None, 4), ("additive", 0.0, "full", 4), ("dot", 0.0, "mean", 4),
        ("dot", 0.5, None, 4), ("dot", 0.0, None, 2), ("dot", 0.0, "full", 4, sinks[0]),
        ("dot", 0.0, None, 4, sinks[1]),
    ):  # fmt: skip
        k, v = drawn(4, Hkv, N, D).detach(), drawn(4, Hkv, N, D).detach()
        beside = (w if score == "additive" else None, bias)
        p = validate.build(
            score, q, k, v, beside[0], mask=mask, bias=bias, return_weights=weights,
            dropout_p=dropout_p, seed=7 if dropout_p else None, enable_gqa=True,
        ).p  # fmt: skip

        def run(share, whole, p=p, k=k, v=v, beside=beside, weights=weights, sink=sink):
            own = p.with_tensors(*map(whole, p.tensors()))
            tensors = [*map(share, (q, k, v)), *map(whole, beside)]
            found = operators.CPU.forward(own, *tensors, *map(whole, sink))
            upstream = [share(drawn(*x.shape).detach()) for x in found[:2]]
            upstream.append(found[2] if weights else None)
            saved = found[0], found[3], *upstream, True
            grads = operators.CPU.backward(own, *tensors, *saved)
            return [*found, *(x for x in grads if x is not None)]

        expected = run(lambda x: x, lambda x: x)
        with four_ranks:
            mesh = init_device_mesh("cpu", (4,) if len(placements) == 1 else (2, 2))

            def share(x, to=placements, mesh=mesh):
                return None if x is None else distribute_tensor(x, mesh, to)

            found = run(share, partial(share, to=[Replicate()] * mesh.ndim))
            kept = [x for x in placements if not dropout_p and x in (Shard(0), Shard(1))]
            kept = [x for x in kept if x == Shard(0) or (weights != "mean" and Hkv == 4)]
            assert [x for x in found[0].placements if x != Replicate()] == kept
            found = [x.full_tensor() for x in found]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.reconcile(), b)
