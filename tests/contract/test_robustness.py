"""Threads, processes and reruns: the same bits, no hang, no memory leak."""

import ctypes
import gc
import multiprocessing
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import ON_GPU, SCORES, assert_same_bits, attend, everything, inputs

from fastattn import Mask, testing
from fastattn.backends import operators
from fastattn.testing import Case

scores = pytest.mark.parametrize("score", SCORES)

# Large enough for several threads, with every feature that sums over something.
SIZES = dict(B=3, H=4, Hkv=2, M=67, N=130, D=24, E=20)


def options(dtype=torch.float32):
    rng = torch.Generator().manual_seed(7)
    return dict(
        bias=torch.randn(4, 67, 130, generator=rng).to(dtype),
        mask=Mask("bottom_right", (80, -1), torch.randint(0, 131, (3,), generator=rng)),
        dropout_p=0.2,
        seed=3,
    )


@scores
def test_a_rerun_gives_the_same_bits(backend, score):
    call = inputs(score, **SIZES)
    first = everything(call, backend=backend, **options())
    for _ in range(3):
        assert_same_bits(everything(call, backend=backend, **options()), first)


# Sizes and options of what threads share in ways of its own: sums in a fixed order, blocks of
# queries that have fewer keys than others of a task, chunks of keys, heads that share keys.
FEWER = Mask(kv_len=torch.tensor([64, 256], dtype=torch.int32).repeat_interleave(256)[None])
SHARED = {
    "sums": (SIZES, options()),
    "sums, half": (dict(SIZES, dtype=torch.bfloat16), options(torch.bfloat16)),
    "fewer keys": (dict(B=1, H=4, M=512, N=256), dict(mask=FEWER)),
    "decoding": (dict(B=1, H=6, M=1, N=2600), {}),
    "decoding, one head": (dict(B=1, H=1, M=4, N=3000), {}),
    "shared keys": (dict(B=1, H=12, Hkv=1, M=5, N=300), dict(is_causal=True)),
    "shared keys, tiles": (dict(B=1, H=12, Hkv=1, M=20, N=300), dict(is_causal=True)),
}


@pytest.mark.parametrize("name", SHARED)
@scores
def test_the_number_of_threads_changes_no_bit(extension, set_threads, score, name):
    sizes, more = SHARED[name]
    call, found = inputs(score, **dict(D=24, E=20) | sizes), []
    for n in (1, 2, 3, 4, 7):
        set_threads(n)
        plain = attend(**call, **more, backend="cpu")
        found.append(everything(call, backend="cpu", **more) | {"plain": plain})
    for results in found[1:]:
        assert_same_bits(results, found[0])


@pytest.mark.parametrize("sizes", [(67, 130), (1, 2600), (130, 20), (1, 7)], ids=str)
@scores
def test_a_batch_entry_does_not_depend_on_its_mates(extension, score, sizes):
    M, N = sizes
    call = inputs(score, B=3, H=2, M=M, N=N, D=24, E=20)
    kv_len = torch.tensor([N, N // 2, 1])
    together = everything(call, mask=Mask(kv_len=kv_len), backend="cpu")
    for b in range(3):
        single = {n: x if n == "weight" else x[b : b + 1].clone() for n, x in call.items()}
        out, weights, lse = attend(
            **single, mask=Mask(kv_len=kv_len[b : b + 1]), return_weights="full", return_lse=True,
            backend="cpu",
        )  # fmt: skip
        alone = dict(out=out, weights=weights, lse=lse)
        assert_same_bits(alone, {name: together[name][b : b + 1] for name in alone})


@scores
def test_gradients_of_a_batch_entry_do_not_depend_on_its_mates(extension, score):
    """Only while one task owns all keys: the batch decides how many tasks share more keys."""
    call = inputs(score, B=3, H=2, M=67, N=130, D=24, E=20)
    upstream = torch.randn(3, 2, 67, 20)

    def gradients(call, upstream):
        leaves = {n: x.clone().requires_grad_() for n, x in call.items() if n != "weight"}
        weight = {"weight": call["weight"]} if score == "additive" else {}
        out = attend(**leaves, **weight, backend="cpu")
        return dict(zip(leaves, torch.autograd.grad(out, leaves.values(), upstream), strict=True))

    together = gradients(call, upstream)
    for b in range(3):
        single = {n: x if n == "weight" else x[b : b + 1] for n, x in call.items()}
        alone = gradients(single, upstream[b : b + 1])
        assert_same_bits(alone, {name: x[b : b + 1] for name, x in together.items()})


def test_uninitialised_memory_is_not_used(extension):
    """All results and workspaces start as NaN, as in the grid."""
    for score in SCORES:
        call = inputs(score, **SIZES)
        clean = everything(call, backend="cpu", **options())
        with testing.poisoned():
            assert_same_bits(everything(call, backend="cpu", **options()), clean)


def test_callers_in_several_threads(backend):
    call = inputs(**SIZES)
    expected = attend(**call, backend=backend)

    def is_right(_):
        return torch.equal(attend(**call, backend=backend), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(20)))


# ---- fork ----


def compute(queue, threads, call, backend):
    if threads:
        torch.set_num_threads(threads)
    leaves = {name: x.requires_grad_() for name, x in call.items()}
    out = attend(**leaves, backend=backend)
    out.sum().backward()
    queue.put(out.detach().numpy())  # not as a tensor, which would share memory


def in_child(method, *args):
    """The result of `compute` in a child process; None if it hangs."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=compute, args=(queue, *args))
    child.start()
    try:
        return torch.from_numpy(queue.get(timeout=60))
    except multiprocessing.queues.Empty:
        return None
    finally:
        child.kill()
        child.join()


@scores
def test_a_forked_child_computes_after_its_parent_did(backend, score):
    """With one thread, as torch gives data-loader workers: OpenMP does not survive a fork."""
    if backend in ON_GPU:
        pytest.skip("CUDA does not survive a fork either, and torch says so")
    call = inputs(score, **SIZES)
    expected = attend(**call, backend=backend)
    found = in_child("fork", 1, call, backend)
    assert found is not None, "the child hangs"
    assert torch.equal(found, expected) or backend == "eager"
    torch.testing.assert_close(found, expected)
    assert torch.equal(attend(**call, backend=backend), expected)


class Attends(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        torch.manual_seed(index)
        return attend(**inputs(**SIZES))


def test_data_loader_workers_do_not_hang():
    attend(**inputs(**SIZES))
    loader = torch.utils.data.DataLoader(Attends(), batch_size=None, num_workers=2, timeout=60)
    for index, found in enumerate(loader):
        torch.testing.assert_close(found, Attends()[index])


# ---- memory ----


def resident_bytes():
    """Resident memory of this process, after the C library has returned free memory."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read by the means of Linux and glibc")
    gc.collect()
    library.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@scores
def test_memory_is_not_kept(extension, score):
    """300 steps must not add up: 128 kB lost in each would be 39 MB."""
    call = inputs(score, B=2, H=2, M=128, N=128, D=64, E=64, grad=True)

    def steps(count):
        for _ in range(count):
            out, weights = attend(**call, return_weights="mean", backend="cpu")
            (out.sum() + weights.sum()).backward()

    steps(50)
    before = resident_bytes()
    steps(300)
    assert resident_bytes() - before < 16 * 2**20


def test_auto_is_the_same_as_the_backend_it_names():
    call = inputs()
    name = "eager" if operators.EXTENSION_ERROR else "cpu"
    assert torch.equal(attend(**call), attend(**call, backend=name))


@scores
def test_no_matrix_of_scores_is_stored(extension, score):
    """Peak memory of forward and backward grows with M + N: 4,000 x 4,000 floats would be 64 MB."""
    case = Case("memory", score, B=1, H=1, Hkv=1, M=4000, N=4000, D=4, E=4)
    t = testing.make(case)
    with torch.profiler.profile(profile_memory=True) as profile:
        testing.run(case, t, "cpu")
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < 4 * 2**20
