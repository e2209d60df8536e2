"""KVCache: memory that others hold is never written to."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fastattn import KVCache

B, H, N = 3, 4, 9


@pytest.mark.parametrize("static", [False, True])
def test_what_was_given_is_never_written(static):
    given = torch.randn(2, B, H, N, 4)
    before, few = given.clone(), torch.zeros(B, H, 2, 4)
    cache, beams = KVCache(static=static), torch.tensor([2, 0, 1])
    cache.update(*given)  # with gradients, or static: without a copy
    with torch.no_grad():
        for _ in range(3):
            cache.reorder(beams)
    assert torch.equal(given, before)
    assert torch.equal(torch.stack((cache.key, cache.value)), before)  # thrice is the identity
    cache.reset()
    cache.update(*given)
    cache.crop(2)
    with torch.no_grad():
        if not static:
            cache.update(few, few)
        for _ in range(2):
            cache.reorder(beams)
    assert torch.equal(given, before)


@pytest.mark.parametrize("change", ["update", "reorder"])
def test_memory_of_a_graph_is_never_written(change):
    """A step with gradients keeps the memory of its keys, though these have no gradient."""
    key, few = torch.randn(B, H, N, 4), torch.zeros(B, H, 2, 4)
    cache, same = KVCache(), torch.arange(B)
    with torch.set_grad_enabled(change == "update"):
        cache.update(key[:, :, :2], key[:, :, :2])
        cache.update(key[:, :, 2:], key[:, :, 2:])
    if change == "reorder":
        cache.reorder(same)
    keys, values = cache.key, cache.value
    query = torch.randn(B, H, N, 4, requires_grad=True)
    out = F.scaled_dot_product_attention(query, keys, values)
    with torch.no_grad():
        cache.crop(2)
        cache.update(few, few)
        for _ in range(2):
            cache.reorder(same)
    assert torch.equal(keys, key)
    out.sum().backward()


@torch.no_grad()
def test_reorder_goes_on_after_inference_mode():
    cache, order = KVCache(), torch.tensor([2, 0, 1])
    with torch.inference_mode():
        cache.update(*torch.randn(2, B, H, N, 4))
        before = cache.key.clone()
        cache.reorder(order)
    for _ in range(2):
        cache.reorder(order)  # thrice is the identity
    assert torch.equal(cache.key, before)


@torch.no_grad()
def test_deep_copies_leave_spare_memory_behind():
    cache = KVCache()
    cache.update(*torch.randn(2, B, H, N, 4))
    cache.reorder(torch.arange(B))
    assert cache._spare is not None
    assert copy.deepcopy(cache)._spare is None


@pytest.mark.parametrize("change", ["update", "reorder"])
@pytest.mark.parametrize("first", [0, 1])
@torch.no_grad()
def test_shallow_copies_go_on_each_for_itself(first, change):
    """Beams that share a prompt: whichever goes on first, the other one keeps its keys."""
    cache, order = KVCache(), torch.tensor([2, 0, 1])
    cache.update(*torch.randn(2, B, H, N, 4))
    for _ in range(3):
        cache.reorder(order)  # which leaves memory for the next one
    both = [cache, copy.copy(cache)]
    before, added = cache.key.clone(), torch.randn(2, B, H, 1, 4)
    expected = [torch.cat([before, x], 2) for x in added]
    for n in (first, 1 - first):
        if change == "reorder":
            for _ in range(3):
                both[n].reorder(order)
        both[n].update(added[n], added[n])
    assert all(torch.equal(x.key, y) for x, y in zip(both, expected, strict=True))
    place = cache.key.data_ptr()
    cache.update(*added)
    assert cache.key.data_ptr() == place  # its own again
