"""Dropout: which weights survive depends only on the seed and the indices, on every backend."""

import contextlib
import math

import pytest
import torch
from helpers import SCORES, assert_same_bits, attend, everything, inputs

from fastattn import Mask
from fastattn.problem import call_cache, validate

scores = pytest.mark.parametrize("score", SCORES)

# N beyond a multiple of 4, one query, sizes beyond any tile, keys cut into chunks for decoding
SHAPES = [(2, 3, 5, 7), (1, 1, 1, 1), (2, 2, 1, 1003), (1, 2, 70, 133), (1, 1, 2, 2600)]


def survivors(named, p, seed, **options):
    """Which weights are not zero; softmax itself is always positive."""
    _, weights = attend(**named, dropout_p=p, seed=seed, return_weights="full", **options)
    return weights != 0


def survivors_by_record(shape, p, seed):
    B, H, M, N = shape
    q, kv = torch.zeros(B, H, M, 1), torch.zeros(B, H, N, 1)
    record = validate.build("dot", q, kv, kv, dropout_p=p, seed=seed).p
    return record.dropout.bits(record) >= record.dropout.threshold


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [1e-3, 0.3, 0.9])
@scores
def test_every_backend_drops_the_same_bit_for_bit(backend, score, shape, p):
    B, H, M, N = shape
    named = inputs(score, B, H, M=M, N=N, D=2, E=2)
    found = survivors(named, p, 1234567, backend=backend)
    assert torch.equal(found, survivors_by_record(shape, p, 1234567))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_does_not_matter(backend, dtype):
    named = inputs(M=9, N=30, dtype=dtype)
    found = survivors(named, 0.5, 3, backend=backend)
    assert torch.equal(found, survivors_by_record((2, 2, 9, 30), 0.5, 3))


def test_grouped_heads_drop_by_query_head(backend):
    found = survivors(inputs(H=4, Hkv=2), 0.5, 3, backend=backend)
    assert torch.equal(found, survivors_by_record((2, 4, 5, 7), 0.5, 3))


def test_several_batch_dims_are_counted_as_one(backend):
    q = torch.randn(2, 3, 2, 5, 4)
    found = survivors(dict(query=q, key=q, value=q), 0.5, 3, backend=backend)
    assert torch.equal(found.flatten(0, 1), survivors_by_record((6, 2, 5, 5), 0.5, 3))


def test_masks_do_not_shift_the_bits(backend):
    mask = Mask(causal="bottom_right", keep=torch.rand(5, 7) < 0.8)
    named = inputs()
    _, weights = attend(**named, mask=mask, return_weights="full", backend=backend)
    found = survivors(named, 0.5, 3, mask=mask, backend=backend)
    assert torch.equal(found, survivors_by_record((2, 2, 5, 7), 0.5, 3) & (weights != 0))


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**32, 0])
def test_seeds_of_all_64_bits(backend, seed):
    found = survivors(inputs(), 0.5, seed, backend=backend)
    assert torch.equal(found, survivors_by_record((2, 2, 5, 7), 0.5, seed))


def test_high_and_low_half_of_the_seed_matter(backend):
    found = [survivors(inputs(M=30), 0.5, s, backend=backend) for s in (1, 2, 1 + 2**32, 1 + 2**63)]
    assert not any(torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def test_a_seed_tensor_is_its_value(backend):
    named = inputs()
    expected = survivors(named, 0.5, -7, backend=backend)
    for seed in (torch.tensor(-7), torch.tensor([-7]), torch.tensor(2**64 - 7 - 2**64)):
        assert torch.equal(survivors(named, 0.5, seed, backend=backend), expected)


def test_manual_seed_governs_a_call_without_one(backend):
    named = inputs(M=30)
    torch.manual_seed(5)
    first, second = (survivors(named, 0.5, None, backend=backend) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(survivors(named, 0.5, None, backend=backend), first)
    assert not torch.equal(first, second)


def test_a_repeated_call_draws_what_a_new_one_draws(backend):
    named, found = inputs(M=9, N=30), []
    for where in (contextlib.nullcontext(), call_cache.paused()):
        torch.manual_seed(1)
        with where:
            found.append([survivors(named, 0.5, None, backend=backend) for _ in range(4)])
    assert all(map(torch.equal, *found))


def test_no_dropout_draws_nothing_from_the_generator(backend):
    before = torch.get_rng_state()
    attend(**inputs_without_rng(), dropout_p=0.0, backend=backend)
    attend(**inputs_without_rng(), dropout_p=0.5, seed=1, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)


def inputs_without_rng():
    q = torch.linspace(-1, 1, 24).view(1, 2, 3, 4)
    return dict(query=q, key=q, value=q)


# ---- what it does to the result ----


@scores
def test_survivors_are_scaled(backend, score):
    named = inputs(score)
    _, plain = attend(**named, return_weights="full", backend=backend)
    out, weights = attend(**named, return_weights="full", dropout_p=0.75, seed=2, backend=backend)
    kept = survivors_by_record((2, 2, 5, 7), 0.75, 2)
    torch.testing.assert_close(weights, plain * kept * 4)
    torch.testing.assert_close(out, weights @ named["value"])


@scores
def test_dropping_nothing_is_no_dropout(backend, score):
    named = inputs(score)
    plain = everything(named, backend=backend)
    assert_same_bits(everything(named, dropout_p=0.0, seed=3, backend=backend), plain)


@scores
def test_dropping_everything_gives_zeros(backend, score):
    named = inputs(score)
    plain = everything(named, backend=backend)
    dropped = everything(named, dropout_p=1.0, seed=3, backend=backend)
    assert (dropped["out"] == 0).all()
    assert (dropped["weights"] == 0).all()
    assert (dropped["grad_value"] == 0).all()
    assert torch.equal(dropped["lse"], plain["lse"])


@scores
def test_gradients_of_dropping_everything_are_zeros(backend, score):
    named = {name: x.requires_grad_() for name, x in inputs(score).items()}
    out = attend(**named, dropout_p=1.0, backend=backend)
    grads = torch.autograd.grad(out.sum(), named.values())
    assert all((g == 0).all() for g in grads)


@scores
def test_backward_drops_what_forward_dropped(backend, score):
    """With the identity as upstream gradient, the gradient of value is the weights transposed."""
    M, N = 40, 75
    named = inputs(score, M=M, N=N, E=M)
    named["value"].requires_grad_()
    out, weights = attend(**named, dropout_p=0.4, seed=9, return_weights="full", backend=backend)
    (grad,) = torch.autograd.grad(out, named["value"], torch.eye(M).expand_as(out))
    torch.testing.assert_close(grad.mT, weights)
    assert torch.equal(grad.mT != 0, weights != 0)


def test_lse_is_that_before_dropout(backend):
    named = inputs()
    _, plain = attend(**named, return_lse=True, backend=backend)
    _, dropped = attend(**named, return_lse=True, dropout_p=0.6, seed=4, backend=backend)
    if backend == "triton":  # whose kernels have other tiles for dropout
        torch.testing.assert_close(plain, dropped)
    else:
        assert torch.equal(plain, dropped)


@scores
def test_expectation_is_the_result_without_dropout(backend, score):
    named = inputs(score, B=1, H=1)
    plain = attend(**named, backend=backend)
    samples = torch.stack(
        [attend(**named, dropout_p=0.5, seed=s, backend=backend) for s in range(400)]
    )
    deviations = (samples.mean(0) - plain) / (samples.std(0) / math.sqrt(len(samples)))
    assert deviations.abs().max() < 5


# ---- the bits as random numbers; with fixed seeds, results do not depend on luck ----


def uniform(seed, shape=(4, 8, 32, 64)):
    B, H, M, N = shape
    q, kv = torch.zeros(B, H, M, 1), torch.zeros(B, H, N, 1)
    record = validate.build("dot", q, kv, kv, dropout_p=0.5, seed=seed).p
    return record.dropout.bits(record).double() / 2**32


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_bits_are_uniform(seed):
    u = uniform(seed)
    n = u.numel()
    assert ((u >= 0) & (u < 1)).all()
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    shares = torch.histc(u, 64, 0, 1) / n
    assert (shares - 1 / 64).abs().max() < 5 * math.sqrt(1 / 64 / n)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_dropped_share_is_p(p):
    kept = survivors_by_record((4, 8, 32, 64), p, 17)
    assert abs((~kept).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())


def correlation(a, b):
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return (a @ b / (a.norm() * b.norm())).item(), math.sqrt(1 / len(a))


@pytest.mark.parametrize("dim", range(4), ids=["batches", "heads", "rows", "keys"])
@pytest.mark.parametrize("lag", [1, 3])
def test_neighbours_are_not_correlated(dim, lag):
    u = uniform(23)
    size = u.shape[dim] - lag
    r, sigma = correlation(u.narrow(dim, 0, size), u.narrow(dim, lag, size))
    assert abs(r) < 5 * sigma


def test_neighbouring_seeds_are_not_correlated():
    for other in (24, 23 + 2**32):
        r, sigma = correlation(uniform(23), uniform(other))
        assert abs(r) < 5 * sigma


def test_swapped_indices_are_not_correlated():
    u = uniform(23, (8, 8, 8, 8))
    off_diagonal = ~torch.eye(8, dtype=torch.bool)
    for swapped, dims in ((u.transpose(0, 1), (0, 1)), (u.transpose(1, 2), (1, 2))):
        shape = [8 if d in dims else 1 for d in range(4)]
        use = off_diagonal.view(shape).expand_as(u)
        r, sigma = correlation(u[use], swapped[use])
        assert abs(r) < 5 * math.sqrt(2) * sigma  # each pair is counted twice
