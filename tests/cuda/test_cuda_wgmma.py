"""The dot product by products of warpgroups, both passes, in the simulator or on a GPU.

FASTATTN_CUDA_PATH=wgmma chooses it. Every case runs in several schedules of warps, copies and
products, which may change no bit.
"""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import host_build
import pytest
import shim_backend
import torch

from fastattn import Mask, scaled_dot_product_attention, testing
from fastattn.backends import cuda, wgmma
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

HALF = (torch.float16, torch.bfloat16)
LARGEST, LARGEST_LARGE = 120_000, 30_000  # pairs, of large heads too
SCHEDULES = int(os.environ.get("FASTATTN_SCHEDULES", "0"))
FEW_QUERIES = 16  # csrc/cuda/tile/few_queries.h: no more than these take another path
USUAL = wgmma.USUAL_HEAD_SIZE  # larger heads have no gradients here


@pytest.fixture
def backend(by_warpgroups):
    return by_warpgroups


@pytest.fixture
def passes(monkeypatch, backend):
    """(name, arguments, results) of every forward and backward pass."""
    found = []

    def recorded(name, function):
        def call(*arguments):
            results = function(*arguments)
            found.append((name, arguments, results))
            return results

        monkeypatch.setattr(cuda, name, call)

    recorded("forward", cuda.forward)
    recorded("backward", cuda.backward)
    return found


def given(results) -> dict:
    return {n: x for n, x in enumerate(results) if x is not None}


def assert_schedules_agree(passes, simulator, schedules) -> None:
    for number in schedules:
        simulator.set_schedule(number)
        for name, arguments, results in list(passes):
            again = getattr(cuda.OPERATORS, name)(*arguments)
            testing.assert_same_bits(given(again), given(results))


def _cases() -> list[Case]:
    """The small enough cases of the grid, alternately in both half types."""
    chosen = [c for c in GRID if c.score == "dot" and c.M > FEW_QUERIES]
    chosen = [c for c in chosen if c.B * c.H * c.M * c.N <= LARGEST and c.dtype == torch.float32]
    chosen += [_enlarged(c) for c in chosen if 0 < c.B * c.H * c.M * c.N <= LARGEST_LARGE]
    chosen = [c for c in chosen if max(c.D, c.E) <= USUAL or not c.weights]
    return [
        dataclasses.replace(c, dtype=HALF[n % 2 if c.magnitude**2 < 65504 else 1])
        for n, c in enumerate(chosen)
    ]


def _enlarged(case: Case) -> Case:
    """The same problem with a large head, but for what these have not: returned weights."""
    sizes = dict(D=case.D + 128, E=min(case.E + 192, 256))
    return dataclasses.replace(case, name=f"{case.name}-large", weights=None, **sizes)


def check(case: Case, backend: str) -> None:
    testing.check(case, backend, grad=max(case.D, case.E) <= USUAL)


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_case(case, backend, passes, simulator):
    check(case, backend)
    other = 1 + sum(str(case).encode()) % 7
    assert_schedules_agree(passes, simulator, range(1, SCHEDULES) if SCHEDULES else [other])


# Sizes that end inside tiles, all masks, stages that are used again, all widths.
CORNERS = [
    Case("narrow", B=1, H=2, Hkv=1, M=131, N=700, D=40, E=8, causal="bottom_right", lse=True),
    Case("wide", B=1, H=2, Hkv=1, M=70, N=650, D=128, E=72, lse=True),
    Case("dropped", B=1, H=1, Hkv=1, M=140, N=150, D=16, E=64, dropout_p=0.3),
    Case("weighed", B=1, H=2, Hkv=2, M=140, N=150, D=16, E=64, weights="full"),
    Case("all", B=2, H=2, Hkv=1, M=66, N=130, D=72, E=128, kv_len="rows", kv_begin="rows",
         keep="mn", bias="hmn", dropout_p=0.3, weights="mean", garbage=float("nan"),
         scale=-0.7),
    Case("keys", B=2, H=2, Hkv=1, M=70, N=420, D=64, E=64, keep="bn"),
    Case("late", B=1, H=2, Hkv=1, M=250, N=20, D=64, E=64, causal="bottom_right", lse=True),
    Case("in turn", B=3, H=1, Hkv=1, M=200, N=300, D=128, E=72, lse=True),
    Case("in pairs", B=1, H=2, Hkv=1, M=700, N=430, D=64, E=64, causal="bottom_right", lse=True),
    Case("marked", B=1, H=3, Hkv=3, M=260, N=140, D=64, E=64, keep="mn", garbage=float("nan")),
    Case("large", B=1, H=2, Hkv=1, M=150, N=410, D=256, E=136, lse=True, causal="bottom_right"),
    Case("large-all", B=2, H=1, Hkv=1, M=66, N=170, D=136, E=256, kv_len="rows", kv_begin="rows",
         keep="mn", bias="hmn", dropout_p=0.3, garbage=float("nan"), scale=-0.7),
    Case("least scale", B=1, H=1, Hkv=1, M=66, N=130, D=16, E=8, lse=True, scale=1e-40),
    Case("capped", B=1, H=2, Hkv=1, M=70, N=520, D=64, E=96, softcap=1.5, lse=True,
         window=(300, 100)),
    Case("capped-large", B=2, H=1, Hkv=1, M=66, N=260, D=200, E=144, softcap=2.0, keep="mn",
         kv_len="rows", lse=True, garbage=float("inf")),
]  # fmt: skip


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CORNERS, ids=lambda case: case.name)
def test_corner(case, dtype, backend, passes, simulator):
    check(dataclasses.replace(case, dtype=dtype), backend)
    has_grads = max(case.D, case.E) <= USUAL
    assert {name for name, *_ in passes} == {"forward", *(["backward"] if has_grads else [])}
    for name, arguments, _ in list(passes):
        before, usual = simulator.products(), simulator.usual_tiles()
        getattr(cuda.OPERATORS, name)(*arguments)
        served = name == "forward" or not case.softcap
        assert before is None or (simulator.products() > before) == served
        if served and case.garbage is case.weights is case.bias is None:
            assert simulator.usual_tiles() == usual, "a mark without need"
    assert_schedules_agree(passes, simulator, range(1, max(9, SCHEDULES)))


@pytest.mark.skipif(shim_backend.KIND == "sanitized", reason="this is that process")
def test_under_sanitizers():
    host_build.assert_clean(__file__, "test_corner and narrow")


# ---- which blocks ----

MULTIPROCESSORS = 2  # tests/cuda/simulator/cuda_runtime.h
STAY, DEALT = True, False


@pytest.mark.skipif(shim_backend.ON_GPU, reason="the simulator counts blocks")
@pytest.mark.parametrize(
    ("mask", "M", "softcap", "stays"),
    [
        (Mask(), 300, 0, STAY),
        (Mask("top_left"), 300, 0, STAY),  # two tiles of 192
        (Mask("top_left"), 500, 0, DEALT),  # three for each of three heads: no pairs
        (Mask("top_left"), 100, 0, STAY),
        (Mask(window=(20, -1)), 300, 0, STAY),
        (Mask(), 300, 2.0, DEALT),
        (Mask(kv_len=[9, 80, 70]), 300, 0, DEALT),
        (Mask(kv_begin=[9, 0, 70]), 300, 0, DEALT),
        (Mask(keep=torch.ones(3, 1, 1, 80, dtype=torch.bool)), 300, 0, DEALT),
        (Mask(keep=torch.ones(1, 1, 300, 80, dtype=torch.bool)), 300, 0, DEALT),
    ],
    ids="none pairs odd short window softcap lengths begins keys dense".split(),
)
def test_blocks_stay_where_their_work_is_even(mask, M, softcap, stays, backend, simulator):
    q, k = torch.randn(3, 1, M, 64).half(), torch.randn(3, 1, 80, 64).half()
    scaled_dot_product_attention(q, k, k, mask=mask, softcap=softcap, backend=backend)
    tiles = 3 * -(-M // (128 if softcap else 192))
    assert simulator.library.shim_blocks(1) == (MULTIPROCESSORS if stays else tiles)  # (0): marks


@pytest.mark.skipif(shim_backend.ON_GPU, reason="the simulator counts products")
@pytest.mark.parametrize("M", [60, 200, 330])
@pytest.mark.parametrize("heads", [2, 3, 4])
def test_each_tile_is_computed_once(M, heads, backend, simulator):
    """The diagonal takes products away, whichever blocks take the tiles."""
    q = torch.randn(1, heads, M, 64).half().requires_grad_()
    k = torch.randn(1, heads, 256, 64).half().requires_grad_()
    found = []
    for mask in (Mask("bottom_right"), Mask()):
        before = simulator.products()
        out = scaled_dot_product_attention(q, k, k, mask=mask, backend=backend)
        torch.autograd.grad(out, (q, k), torch.ones_like(out))
        found.append(simulator.products() - before)
    assert found[0] <= found[1]
    assert found[0] % heads == 0


# ---- which path ----


def _products(simulator, q, k, v, **options) -> int:
    before = simulator.products()
    scaled_dot_product_attention(q, k, v, backend="cuda", **options)
    return simulator.products() - before


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products")
def test_what_takes_another_path(backend, simulator, monkeypatch):
    q, k, v = (torch.randn(1, 2, 40, 64).half() for _ in range(3))
    assert _products(simulator, q, k, v) > 0
    assert _products(simulator, q[:, :, :FEW_QUERIES], k, v) == 0
    odd = torch.randn(1, 2, 40, 65).half()[..., :64]  # rows that begin at any even address
    assert _products(simulator, odd, k, v) == 0
    assert _products(simulator, q, k.mT.contiguous().mT, v) == 0
    assert _products(simulator, q, k[:, :1].expand(1, 2, 40, 64), v) == 0
    assert _products(simulator, q, k, v, softcap=2.0) > 0
    monkeypatch.delenv("FASTATTN_CUDA_PATH")
    assert _products(simulator, q, k, v) == 0


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products")
def test_what_takes_another_path_backward(backend, simulator, monkeypatch):
    def products(grad_out, M=40, **options):
        q, k, v = (torch.randn(1, 2, n, 64).half().requires_grad_() for n in (M, 40, 40))
        out = scaled_dot_product_attention(q, k, v, backend="cuda", **options)
        before = simulator.products()
        out.backward(grad_out[:, :, :M])
        return simulator.products() - before

    grad = torch.randn(1, 2, 40, 65).half()
    assert products(grad[..., 1:].contiguous()) > 0
    assert products(grad[..., :64]) > 0  # written out first: rows that begin at any even address
    assert products(grad[..., :1].expand(1, 2, 40, 64)) > 0
    assert products(grad[..., 1:].contiguous(), M=FEW_QUERIES) == 0
    assert products(grad[..., 1:].contiguous(), softcap=2.0) == 0
    monkeypatch.delenv("FASTATTN_CUDA_PATH")
    assert products(grad[..., 1:].contiguous()) == 0


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU's driver makes the maps")
def test_other_kernels_compute_what_the_driver_makes_no_maps_for(backend, simulator, monkeypatch):
    q, k, v = (torch.randn(1, 2, 70, 64).half() for _ in range(3))
    monkeypatch.delenv("FASTATTN_CUDA_PATH")
    expected = scaled_dot_product_attention(q, k, v, backend=backend)
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    simulator.library.shim_refuse_maps(True)
    try:
        found = scaled_dot_product_attention(q, k, v, backend=backend)
    finally:
        simulator.library.shim_refuse_maps(False)
    assert found.equal(expected)
    assert _products(simulator, q, k, v) > 0


@pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products")
def test_a_thread_that_never_called_cuda_takes_this_path(backend, simulator):
    """The driver refuses it tensor maps before a call of the runtime's has bound the context."""
    q, k, v = (torch.randn(1, 2, 40, 64).half() for _ in range(3))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_products, simulator, q, k, v).result() > 0


# ---- garbage ----


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_garbage_in_keys_that_some_rows_keep(special, backend):
    """A product carries it to all rows of a tile. Their warps are computed again, others stay."""
    q, k, v = (torch.randn(1, 1, 160, 64).half() for _ in range(3))
    end = torch.full((1, 160), 160, dtype=torch.int32)
    end[:, :70] = 100
    mask = Mask(kv_len=end)
    clean = scaled_dot_product_attention(q, k, v, mask=mask, backend=backend)
    v[0, 0, 130, 5] = special
    found = scaled_dot_product_attention(q, k, v, mask=mask, backend=backend)
    others = torch.arange(64) != 5
    assert not found[0, 0, 70:, 5].isfinite().any()
    torch.testing.assert_close(found[0, 0, :70], clean[0, 0, :70], rtol=2e-3, atol=2e-3)
    assert found[0, 0][:, others].isfinite().all()


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_garbage_that_some_gradients_see(special, backend):
    """Garbage in a query, a key or a row of dO reaches the gradients that see it alone."""
    ends = torch.full((1, 160), 160, dtype=torch.int32)
    ends[:, :70] = 100

    def gradients(spoil):
        torch.manual_seed(3)
        q, k, v, grad = (torch.randn(1, 1, 160, 64).half() for _ in range(4))
        spoil(q, k, grad)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = scaled_dot_product_attention(*leaves, mask=Mask(kv_len=ends), backend=backend)
        return [x[0, 0] for x in torch.autograd.grad(out, leaves, grad)]

    def of_query(q, k, grad):
        q[0, 0, 66, 5] = special  # beside rows that see the last tile of keys

    def of_key(q, k, grad):
        k[0, 0, 130, 5] = special

    def of_grad(q, k, grad):
        grad[0, 0, 66, 5] = special

    clean = gradients(lambda *_: None)
    kept = slice(100, 160)  # keys that the rows before 70 do not see
    for spoil in of_query, of_grad:
        dq, dk, dv = gradients(spoil)
        assert not dq[66].isfinite().any()
        others = torch.arange(160) != 66
        torch.testing.assert_close(dq[others], clean[0][others], rtol=2e-3, atol=2e-3)
        for found, expected in ((dk, clean[1]), (dv, clean[2])):
            assert not found[:100].isfinite().all()
            torch.testing.assert_close(found[kept], expected[kept], rtol=2e-3, atol=2e-3)
    dq, dk, dv = gradients(of_key)
    assert not dq[70:, 5].isfinite().any()  # all columns where a score is NaN
    torch.testing.assert_close(dq[:70], clean[0][:70], rtol=2e-3, atol=2e-3)
    assert not dk[130].isfinite().any()


def test_rows_without_keys(backend):
    q, k, v = (torch.randn(2, 1, 40, 128).bfloat16() for _ in range(3))
    lengths = torch.tensor([0, 40], dtype=torch.int32)
    out, lse = scaled_dot_product_attention(
        q, k, v, mask=Mask(kv_len=lengths), return_lse=True, backend=backend
    )
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()
