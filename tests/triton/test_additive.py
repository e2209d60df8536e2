"""Both additive kernels through the public function, against the float64 reference."""

import dataclasses
import math

import helpers
import pytest
import torch
import triton.language as tl

from fastattn import testing
from fastattn.kernels.host.launch import Call
from fastattn.kernels.loop import additive_forward, forward
from fastattn.kernels.score import additive
from fastattn.problem.record import SCORES, WEIGHTS
from fastattn.testing import GRID, Case

pytestmark = pytest.mark.usefixtures("carried")

INF = math.inf


def small(name, **features):
    """A case that spans three of the interpreter's key tiles, with a tail."""
    sizes = dict(B=1, H=2, Hkv=2, M=20, N=70, D=5, E=6)
    return Case(name, "additive", **{**sizes, **features})


EVERYTHING = dict(
    B=2, Hkv=1, causal="bottom_right", window=(60, -1), keep="bhmn", kv_begin="rows", bias="bhmn",
    bias_inf=True,
    empty_rows=True, dropout_p=0.3, sink=0.0, weights="full", lse=True,
)  # fmt: skip
EXTREMES = [
    small("magnitude-30", magnitude=30.0, D=8),
    small("magnitude-1e4", magnitude=1e4),
    small("opposite-60", opposite=60.0, D=8),
    small("opposite-1e4", opposite=1e4),
    small("opposite-25", opposite=25.0, magnitude=0.3),
]
# The sizes, features and extremes of the grid, small enough for the interpreter.
NAMES = (
    "M1-N1 M63-N15 M15-N63 M0 N0 D0 E0 B0 H0 D1-E1 D3-E5 D8-E127 keep-empty-rows window-far "
    "relative"
)
CASES = [
    *(c for c in GRID if c.score == "additive" and c.name in NAMES.split()),
    *EXTREMES,
    small("wide", D=33, E=65),
    small("mqa", H=3, Hkv=1, N=40),
    small("sliced", layout="sliced", causal="top_left"),
    small("tall", M=70, N=20, causal="bottom_right", lse=True),
    small("many-queries", H=1, Hkv=1, M=130, N=9, D=3),  # dw is added up in blocks of 128
    small("kv-len", B=2, kv_len="batch", weights="mean", lse=True),
    small("kv-len-rows", B=2, M=70, kv_len="rows", lse=True),
    small("kv-begin", B=2, kv_begin="batch", weights="full", garbage=math.nan),
    small("documents", B=2, M=70, kv_begin="sorted", kv_len="sorted", garbage=math.nan),
    small("keep", B=2, keep="bn"),
    *(small(f"bias-{x}", B=2, bias=x, N=40) for x in ("bhmn", "bn", "hm", "")),
    small("dropout", B=2, dropout_p=0.5, weights="mean", lse=True),
    small("softcap", softcap=1.0, weights="full", lse=True),
    small("everything", **(EVERYTHING | dict(softcap=2.0))),
]
CASES += [
    dataclasses.replace(c, dtype=dtype)
    for c in (
        small("half"),
        small("everything", **(EVERYTHING | dict(B=1, kv_begin=None))),
        *EXTREMES[1:3],
    )
    for dtype in (torch.float16, torch.bfloat16)
]
ACCURACY = [
    small("wide", D=33, E=65),
    EXTREMES[0],
    small("half", dtype=torch.float16, weights="full"),
]
DECODE = [
    small("softcap", M=4, softcap=1.0, bias="hm"),
    small("sixteen", M=16, H=1, Hkv=1, kv_len="batch", bias="hm", weights="full", lse=True),
    small("plain", M=1, N=200, D=20, lse=True),
    small("gqa", B=2, H=4, M=1, N=150, D=3, kv_len="batch", dtype=torch.bfloat16),
    small("rows", M=3, N=150, kv_len="rows", weights="mean", lse=True),
    small("sparse", M=4, N=300, keep="bhmn", keep_rate=0.01, empty_rows=True),
    small("bias", M=2, N=150, bias="bn", bias_inf=True, dropout_p=0.3, dtype=torch.float16),
    small("huge", M=1, N=150, magnitude=100.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, device):
    if device.type == "cuda":
        pytest.skip("on a GPU the grid runs in tests/contract/test_grid.py")
    testing.check(case, "triton")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_few_queries_have_programs_of_their_own(case, monkeypatch):
    monkeypatch.setattr(forward, "KEYS_PER_CHUNK", 64)
    testing.check(case, "triton")


@pytest.mark.parametrize("kind", ["full", "mean"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("documents", "dropout")], ids=str)
def test_returned_weights_read_the_scores_of_the_forward_pass(case, kind, device, monkeypatch):
    """Scores are computed once, and recomputed where there would be too many: to the same bits.

    A GPU's compiler may round another kernel's weights in another way.
    """
    case, made = dataclasses.replace(case, weights=kind, lse=True), []
    if device.type == "cuda":  # where launchers run twice if kernels are to be compiled
        testing.run(case, testing.make(case), "triton")
    kept = additive_forward.new_scores
    monkeypatch.setattr(additive_forward, "new_scores", lambda call: made.append(1) or kept(call))
    found = [testing.run(case, testing.make(case), "triton")]
    assert len(made) == 1
    monkeypatch.setattr(additive_forward, "KEPT_BYTES", 4 * case.B * case.H * case.M * case.N - 1)
    found += [testing.run(case, testing.make(case), "triton")]
    assert len(made) == 1
    for name, x in found[0].items():
        if device.type == "cuda":
            torch.testing.assert_close(x, found[1][name], equal_nan=True)
        else:
            assert x.equal(found[1][name]), name


def check(case, change):
    """testing.check, on tensors that ``change`` may modify."""
    t = testing.make(case)
    change(t)
    ours, truth, peer = (
        testing.run(case, t, "triton"),
        testing.exact(case, t),
        testing.plain(case, t),
    )
    for name in truth:
        testing.assert_within_budget(ours[name], peer[name], truth[name], f"{case} {name}")


SMALL = small("extreme", H=1, Hkv=1, D=7, lse=True, causal="bottom_right")
FEW = dataclasses.replace(SMALL, name="few", M=2)
WEIGHED = dataclasses.replace(SMALL, name="weighed", weights="full")


# ---- ranges ----


def some_keys_far(t):
    t.k[:, :, 40:50, 2] += 100.0  # in the second tile of three


def one_dim_far(t):
    t.k[..., 3] -= 3000.0
    t.q[..., 3] += 3000.0


def infinite_queries(t):
    t.q[:, :, 3, 2], t.q[:, :, 5, 0] = INF, -INF


def heavy_weights(t):
    t.w[:] = torch.tensor([0, 3e30, -1e30, 0, 2e30, 0, 1e-30])


def light_weights(t):
    t.w[:] = t.w * 1e-35


def zero_weights(t):
    t.w.zero_()


CHANGES = [some_keys_far, one_dim_far, infinite_queries, heavy_weights, light_weights, zero_weights]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", [SMALL, FEW, WEIGHED], ids=str)
def test_extremes(case, change):
    if case is FEW and change is infinite_queries:
        change = lambda t: t.q[:, :, 1, :2].fill_(INF)  # noqa: E731
    check(case, change)


@pytest.mark.parametrize(
    ("opposite", "magnitude", "in_range"),
    [
        (0.0, 3.0, True),
        (60.0, 3.0, True),
        (3000.0, 1.0, True),
        (0.0, 30.0, False),
        (1e4, 1.0, False),
    ],
)
def test_keys_that_are_near_each_other_take_the_fast_loop(opposite, magnitude, in_range, device):
    t = testing.make(dataclasses.replace(SMALL, opposite=opposite, magnitude=magnitude))
    reach = terms(t, device).reach_ptr[..., :70]
    assert (reach <= additive.KEY_LIMIT.value).all() == in_range


def test_far_keys_of_the_last_head():
    """Each key head has a loop of its own, also where several query heads share it."""

    def change(t):
        t.k[-1, -1, 40:50, 2] += 100.0

    check(small("last", B=2, H=4, Hkv=2, M=17, D=4), change)


def test_padding_and_keys_past_the_length_do_not_reach(device):
    t = testing.make(SMALL)
    t.k[:, :, 50:] = INF
    kv_len = torch.full((2, 1), 50, dtype=torch.int32, device=device)
    assert (terms(t, device, kv_len).reach_ptr <= additive.KEY_LIMIT.value).all()


def terms(t, device, kv_len=None):
    q, k, v, w = (x.to(device) for x in (t.q, t.k, t.v, t.w))
    return additive_forward.additive_terms(Call(q, k, v, w, kv_len=kv_len))


# ---- accuracy ----


@pytest.mark.parametrize("case", ACCURACY, ids=str)
def test_reciprocals_may_be_off_by_an_ulp(case, device, monkeypatch):
    """The reciprocals of rcp.approx.ftz.f32 are."""
    if device.type == "cuda":
        pytest.skip("on a GPU they are")

    def inexact(x, spec):
        r = 1.0 / x
        odd = (r.to(tl.int32, bitcast=True) & 1) != 0
        return r * tl.where(odd, 1.0 + 2.0**-23, 1.0 - 2.0**-23)

    monkeypatch.setattr(additive, "reciprocal", inexact)
    monkeypatch.setattr(additive_forward, "reciprocal", inexact)
    testing.check(case, "triton")


@pytest.mark.parametrize("M", [1, 7, 40])  # a row apart, gradients of few queries, tiles
def test_every_kernel_rounds_a_score_alike(M):
    """An ulp of a logit of 1e4 is seen in sums; tests/contract/test_sums.py takes a GPU."""
    call = helpers.inputs("additive", B=1, H=2, Hkv=2, M=M, N=130, D=16, E=5)
    call["weight"] *= 1e4
    value = call["value"].requires_grad_()
    out, weights = helpers.attend(**call, return_weights="full", backend="triton")
    assert (weights.double().sum(-1) - 1).abs().max() < 1e-6
    grad_out = torch.randn_like(out)
    (grad_value,) = torch.autograd.grad(out, value, grad_out)
    found, expected = (x.double().sum((1, 2)) for x in (grad_value, grad_out))
    assert ((found - expected).abs() < 1e-6 * grad_out.double().abs().sum((1, 2))).all()


# ---- determinism, strides ----


def test_same_bits_on_every_run_and_in_every_batch():
    case = small("bits", B=2, Hkv=1, N=40, dropout_p=0.2, lse=True)
    t = testing.make(case)
    first, second = (testing.run(case, t, "triton") for _ in range(2))
    alone = testing.run(dataclasses.replace(case, B=1), first_of_batch(t), "triton")
    helpers.assert_same_bits(first, second)
    del first["grad_w"], alone["grad_w"]  # these sum over the batch
    helpers.assert_same_bits({name: x[:1] for name, x in first.items()}, alone)


def first_of_batch(t):
    tensors = {
        n: x[:1] if isinstance(x, torch.Tensor) and n != "w" else x for n, x in vars(t).items()
    }
    return testing.Tensors(**tensors)


FAR = 2**31 // 3 + 8  # a stride within 32 bits, whose product with 3 is not


@pytest.mark.parametrize(
    ("name", "strides"),
    [("k", (0, 0, FAR, 1)), ("k", (0, 0, 1, FAR)), ("w", (FAR, 1))],
    ids=["keys", "columns", "weights"],
)
def test_offsets_beyond_32_bits(name, strides, device):
    try:
        storage = torch.empty(3 * FAR + 8, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("needs 4.3 GB of address space")
    rng = torch.Generator().manual_seed(0)
    for M, magnitude in ((2, 1.0), (6, 1.0), (6, 1e3)):  # a row apart; both loops of tiles
        q, k = (magnitude * torch.randn(1, n, m, 4, generator=rng) for n, m in ((4, M), (1, 4)))
        near = dict(q=q, k=k, w=torch.randn(4, 4, generator=rng))
        near = {n: x.half().to(device) for n, x in near.items()}
        far = near | {name: storage.as_strided(near[name].shape, strides).copy_(near[name])}
        out, want = (
            torch.ops.fastattn.triton_forward(
                *Call(x["q"], x["k"], near["k"], x["w"], score=SCORES["additive"])
            )[0]
            for x in (far, near)
        )
        assert torch.equal(out, want)


def test_operators_pass_opcheck(device):
    t = testing.make(dataclasses.replace(SMALL, M=5, N=7))
    q, k, v, w = (x.to(device) for x in (t.q, t.k, t.v, t.w))
    given = dict(band_hi=0, weights=WEIGHTS["mean"], score=SCORES["additive"])
    case = tuple(Call(q, k, v, w, **given))
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fastattn.triton_forward.default, case, test_utils=utils)
    out, _, weights, stats = torch.ops.fastattn.triton_forward(*case)
    case = (*case, out, stats, torch.ones_like(out), None, torch.ones_like(weights), False)
    torch.library.opcheck(torch.ops.fastattn.triton_backward.default, case, test_utils=utils)
