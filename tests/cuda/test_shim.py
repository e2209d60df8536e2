"""The shim, which runs kernels on the CPU, finds their mistakes."""

import ctypes
import math
import re

import host_build
import pytest
import torch

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

BLOCKS, THREADS = 3, 64
MISTAKES = (
    "none no_barrier no_barrier_before barrier_in_branch return_early two_barriers lanes_missing "
    "unwritten past_the_end past_shared"
).split()


def block_sums(mistake="none", kind="plain", bytes=4 * THREADS):
    """(what the kernel wrote, the right sums, the launch's error or None)."""
    call = ctypes.CDLL(str(host_build.library("shim", kind))).shim_sum
    call.restype = ctypes.c_char_p
    x = torch.arange(BLOCKS * THREADS, dtype=torch.float32)
    out = torch.zeros(BLOCKS)
    error = call(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), BLOCKS,
        MISTAKES.index(mistake), ctypes.c_int64(bytes),
    )  # fmt: skip
    return out, x.view(BLOCKS, THREADS).sum(1), error.decode() if error else None


def test_a_right_kernel():
    found, expected, error = block_sums()
    assert error is None
    assert found.equal(expected)


@pytest.mark.parametrize("mistake", ["no_barrier", "no_barrier_before", "unwritten"])
def test_values_that_are_not_there_yet(mistake):
    found, expected, error = block_sums(mistake)
    assert error is None
    assert not (found == expected).any()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("barrier_in_branch", "32 wait at a barrier|0 of 64 threads returned, 64 wait"),
        ("return_early", "1 of 64 threads returned, 63 wait at a barrier"),
        ("two_barriers", "0 of 64 threads returned, 64 wait at a barrier"),
        ("lanes_missing", "32 in a warp collective"),
    ],
)
def test_divergence_fails_the_launch(mistake, message):
    _, _, error = block_sums(mistake)
    assert error is not None
    assert any(part in error for part in message.split("|")), error


def test_a_launch_beyond_the_limits_fails():
    _, _, error = block_sums(bytes=(48 << 10) + 1)
    assert error is not None
    assert "49153 bytes of shared memory, of 49152 allowed" in error


@pytest.mark.parametrize("mistake", ["none", "past_the_end", "past_shared"])
def test_sanitizers_see_what_is_out_of_bounds(mistake):
    code = f"import test_shim; print(test_shim.block_sums({mistake!r}, 'sanitized'))"
    done = host_build.run_sanitized(code)
    if mistake == "none":
        assert done.returncode == 0, done.stderr
    else:
        assert "heap-buffer-overflow" in done.stderr, done.stderr
        assert "shim_kernels.cu" in done.stderr


def test_ratios_and_slopes_of_a_softcap_have_all_digits():
    """The exponent's own rounding is 2^-25 of it: a slope e^-2|x| is off by as many times |x|."""
    sizes = torch.cat([torch.logspace(-20, 0, 256), torch.linspace(0.5, 42.9, 768)])
    x = torch.cat([sizes, -sizes, torch.tensor([43.0, math.inf, math.nan])])
    ratio, slope = torch.empty_like(x), torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, ratio, slope)]
    ctypes.CDLL(str(host_build.library("shim"))).shim_tanh(*pointers, ctypes.c_int64(x.numel()))
    assert slope[-3:].tolist() == [0, 0, 0]
    assert ratio[-3:-1].tolist() == [1, 1]
    assert ratio[-1].isnan()
    x, ratio, slope, eps = x[:-3].double(), ratio[:-3], slope[:-3], 2.0**-23
    want = 4 / (torch.exp(x) + torch.exp(-x)) ** 2
    assert ((ratio - x.tanh()).abs() <= 4 * eps * x.tanh().abs()).all()
    assert ((slope - want).abs() <= (4 + x.abs()) * eps * want).all()


def products(c, x, y):
    call = ctypes.CDLL(str(host_build.library("shim"))).shim_sum_products
    call.restype = ctypes.c_float
    x, y = (torch.tensor(t, dtype=torch.float32) for t in (x, y))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    return call(ctypes.c_float(c), *pointers)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("bits", "sum"), [(23, 1 + 16 * 2**-23), (25, 1 + 16 * 2**-25), (26, 1)])
def test_products_of_tensor_cores_keep_few_bits(bits, sum, sign):
    """Two bits beyond float32 are kept."""
    x, y = [sign * 2.0**-13] * 16, [2.0 ** (13 - bits)] * 16
    assert products(sign, x, y) == sign * sum


def test_products_of_tensor_cores():
    none = [0.0] * 15
    large = [256.0, *none]
    assert products(1, [1.5 * 2**-12, *none], [2.0**-12, *none]) == 1  # never rounded up
    assert products(1, large, large) == 65537
    assert products(65536, large, [-256.0, *none]) == 0
    assert products(2**-140, [0.0, *none], large) == 2**-140
    assert products(math.inf, large, large) == math.inf
    assert math.isnan(products(1, [math.nan, *none], large))


def test_approximate_instructions_are_as_exact_as_documented():
    x = torch.linspace(0.5, 100, 10000)
    found = torch.empty(2, x.numel())
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, *found)]
    ctypes.CDLL(str(host_build.library("shim"))).shim_approximate(*pointers, x.numel())
    exact = torch.stack([1 / x.double(), x.double().exp2()])
    ulps = (found - exact) / 2.0 ** (exact.log2().floor() - 23)
    assert ((ulps.abs() <= torch.tensor([[1.0], [2.0]])).all(1)).all()
    assert (ulps.abs().amax(1) > torch.tensor([0.9, 1.8])).all()


def test_instructions_of_a_whole_warp_stay_where_they_are_written():
    """A compiler may move an asm statement into a branch unless it is volatile."""
    csrc = host_build.ROOT / "csrc/cuda"
    text = "".join(path.read_text() for path in sorted(csrc.rglob("*.cuh")))
    statements = re.findall(r"\basm\b( volatile)?\s*\(\s*\"([^;]*);", text)
    collective = [(volatile, code) for volatile, code in statements if ".sync" in code]
    assert len(collective) >= 4
    assert all(volatile for volatile, _ in collective), collective
