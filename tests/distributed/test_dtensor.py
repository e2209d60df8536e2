"""DTensors at the public functions: the same results, whatever is sharded."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from dtensor_cases import CASES, D, H, N, check_all, drawn, leaves_of, results_of
from ranks import by_name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastattn import Mask

NAMES = [case.__name__ for case in CASES]


@pytest.fixture(scope="module")
def outcomes():
    """Of each name, what each rank says; processes start once for all."""
    return by_name(NAMES, check_all)


@pytest.mark.parametrize("name", NAMES)
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
