"""The simulator finds mistakes with copies, barriers and products of warpgroups.

Each mistake must show in one of a few schedules, as an error or as a wrong number. Numbers are
small and whole: a right kernel has no rounding.
"""

import ctypes
import os

import host_build
import mutate
import pytest
import torch

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

SCHEDULES = max(16, int(os.environ.get("FASTATTN_SCHEDULES", "0")))
MISTAKES = (
    "none wrong_stretch wrong_panel unpublished half_the_bytes no_wait_for_empty wrong_parity "
    "no_wait_for_full no_wait_for_scores no_fence weights_too_early released_too_early "
    "nobody_waits one_warp_less one_warps_registers fewer_taken nothing_given unaligned"
).split()


def outcome(mistake="none", schedule=0, keys=600, kind="plain") -> str:
    """ "right", "wrong numbers", or the launch's error."""
    library = ctypes.CDLL(str(host_build.library("shim", kind)))
    call = library.shim_async
    call.restype = ctypes.c_char_p
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    q, k, v = draw(64, 64), draw(keys, 64), draw(keys, 128)
    out = torch.zeros(64, 128)
    library.shim_schedule(schedule)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out))
    error = call(*pointers, ctypes.c_int64(keys), MISTAKES.index(mistake))
    library.shim_schedule(0)
    if error:
        return error.decode()
    right = (q.double() @ k.double().T) @ v.double()
    return "right" if out.double().equal(right) else "wrong numbers"


@pytest.mark.parametrize("keys", [1, 128, 600])
def test_a_right_kernel_in_every_schedule(keys):
    assert {outcome(schedule=n, keys=keys) for n in range(SCHEDULES)} == {"right"}


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("wrong_stretch", "wrong numbers"),
        ("wrong_panel", "wrong numbers"),
        ("unpublished", "a barrier that only its own thread can see yet"),
        ("half_the_bytes", "a barrier expects other bytes than came|deadlock"),
        ("no_wait_for_empty", "wrong numbers|more arrivals at a barrier than it counts"),
        ("wrong_parity", "deadlock"),
        ("no_wait_for_full", "more arrivals at a barrier than it counts"),
        ("no_wait_for_scores", "wrong numbers"),
        ("no_fence", "a product without a fence before its group"),
        ("weights_too_early", "wrong numbers"),
        ("released_too_early", "wrong numbers"),
        ("nobody_waits", "wrong numbers|products that nobody waits for"),
        ("one_warp_less", "the warps of warpgroup 0 issued other products"),
        ("one_warps_registers", "not all threads of a warpgroup changed its registers"),
        ("fewer_taken", "8 registers fewer, by taking"),
        ("nothing_given", "deadlock"),
        ("unaligned", "no multiple of 1024"),
    ],
)
def test_a_mistake_shows(mistake, found):
    outcomes = {outcome(mistake, schedule) for schedule in range(SCHEDULES)}
    assert any(part in each for each in outcomes for part in found.split("|")), outcomes


def test_every_mistake_is_tried():
    tried = next(m for m in test_a_mistake_shows.pytestmark if m.name == "parametrize").args[1]
    assert {name for name, _ in tried} == {*MISTAKES} - {"none"}


def test_mutate_still_finds_the_places_of_its_mistakes():
    for x in mutate.MISTAKES:
        text = (host_build.ROOT / "csrc/cuda" / x.file).read_text()
        assert text.count(x.right) == 1, x.name


def test_a_deadlock_says_where_each_warpgroup_waits():
    error = outcome("wrong_parity")
    assert error.startswith("deadlock in block 0; warpgroup 0: 128 async_kernels.cu:")
    assert "; warpgroup 1: 1 async_kernels.cu:" in error
    assert "127 returned" in error


def test_sanitizers_see_no_error_of_the_simulator():
    code = "import test_async; print(test_async.outcome(schedule=3, kind='sanitized'))"
    done = host_build.run_sanitized(code)
    assert done.stdout.strip() == "right", done.stderr
