"""Both scaled dot-product kernels through the public function, against the float64 reference."""

import dataclasses
import math

import pytest
import torch
from properties import large_logits

import fastattn
from fastattn import testing
from fastattn.backends import _gpu
from fastattn.backends import triton as backend
from fastattn.kernels.host import launch
from fastattn.kernels.loop import forward, grad_bias
from fastattn.problem import validate
from fastattn.problem.record import WEIGHTS
from fastattn.problem.schemas import Call
from fastattn.testing import GRID

INF, NAN = math.inf, math.nan


def small(case):
    """About a second in the interpreter, which takes some 20 us a pair (i, j) of a head."""
    return max(case.M, case.N) <= 300 and case.B * case.H * case.M * case.N <= 40_000


CASES = [c for c in GRID if c.score == "dot" and small(c)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, device):
    if device.type == "cuda":
        pytest.skip("on a GPU the grid runs in tests/contract/test_grid.py")
    testing.check(case, "triton")


@pytest.mark.parametrize("name", ["plain-N64", "alibi-decode", "softcap"])
def test_blocks_of_keys_are_merged(name, carried):
    """What a saved maximum counts differs with a bias, and with a softcap."""
    case = next(c for c in CASES if c.name == name and c.dtype == torch.float32)
    testing.check_blocks(case, "triton")


def attend(q, k, v, **options):
    return fastattn.scaled_dot_product_attention(
        q, k, v, enable_gqa=True, backend="triton", **options
    )


def inputs(device, B=1, H=2, Hkv=None, M=40, N=70, D=8, E=8, dtype=torch.float32, grad=True):
    rng = torch.Generator().manual_seed(0)
    shapes = [(B, H, M, D), (B, Hkv or H, N, D), (B, Hkv or H, N, E)]
    drawn = [torch.randn(s, generator=rng).to(device, dtype) for s in shapes]
    return [x.requires_grad_(grad) for x in drawn]


def everything(q, k, v, grad_out=None, **options):
    """Output and gradients, as a dict."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, **options)
    grad_out = (
        torch.linspace(-1, 1, out.numel()).view(out.shape).to(out) if grad_out is None else grad_out
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    return dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True))


# ---- garbage behind masks, NaN in use ----


def test_garbage_in_masked_queries_and_their_gradients_reaches_nothing(device):
    q, k, v = inputs(device, grad=False)
    keep = (torch.arange(40, device=device) % 5 != 0)[:, None]
    grad_out = torch.randn(1, 2, 40, 8).to(device)
    want = everything(q, k, v, grad_out, mask=fastattn.Mask(keep=keep))
    q[:, :, ::5], grad_out[:, :, ::5] = NAN, NAN
    got = everything(q, k, v, grad_out, mask=fastattn.Mask(keep=keep))
    for key in want:
        assert not got[key].isnan().any(), key
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5, msg=key)
    assert (got["grad_q"][:, :, ::5] == 0).all()


def test_nan_reaches_the_rows_that_use_it(device):
    q, k, v = inputs(device, M=70, grad=False)
    v[0, 0, 33, 2] = NAN
    got = everything(q, k, v, is_causal=True)
    used = got["out"].isnan()
    assert used[0, 0, 33:, 2].all()
    used[0, 0, 33:, 2] = False
    assert not used.any()
    rows = got["grad_q"].isnan().any(-1)  # dP of those rows is NaN
    assert rows[0, 0, 33:].all()
    assert not rows[0, 0, :33].any()
    assert not rows[0, 1].any()
    assert not got["grad_v"].isnan().any()


# ---- strides, scales, extremes ----


def test_gradients_with_any_strides(device):
    q, k, v = inputs(device, grad=False)
    grad_out = torch.ones((), device=device).expand(1, 2, 40, 8)  # stride 0 everywhere
    want = everything(q, k, v, grad_out.contiguous())
    mixed = q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), v
    got = everything(*mixed, grad_out)
    for key in want:
        # A GPU sums dO . O in the order in which it loads rows, which depends on their strides.
        torch.testing.assert_close(got[key], want[key], msg=key)


def test_offsets_beyond_32_bits(device):
    """Two keys 2^31 elements apart."""
    far = 2**31 + 8
    try:
        storage = torch.empty(far + 8, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("needs 4.3 GB of address space")
    k = storage.as_strided((1, 1, 2, 4), (0, 0, far, 1))
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).to(device).half()
    k.copy_(q[:, :, :2])
    torch.testing.assert_close(attend(q, k, k), attend(q, k.clone(), k.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_scales_of_any_sign(scale, device):
    q, k, v = inputs(device)
    got = everything(q, k, v, scale=scale, is_causal=True)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(
        ~torch.ones(40, 70, device=device).tril().bool(), -INF
    )
    out = torch.softmax(scores, -1) @ leaves[2]
    torch.testing.assert_close(got["out"].double(), out.detach(), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(
        out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    )
    for key, grad in zip(("grad_q", "grad_k", "grad_v"), grads, strict=True):
        torch.testing.assert_close(got[key].double(), grad, rtol=1e-4, atol=1e-5, msg=key)


def test_weights_of_large_logits_sum_to_one(device):
    q, k, v = (x.detach() * 60 for x in inputs(device))
    _, weights = attend(q, k, v, return_weights="full")
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40, device=device))


@pytest.mark.parametrize(("M", "N", "biased"), [(1, 128, False), (64, 64, False), (64, 128, True)])
@pytest.mark.parametrize("logit", large_logits.LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_logits(dtype, logit, M, N, biased, device):
    bias = torch.linspace(-1, 1, N, device=device).to(dtype) if biased else None
    large_logits.check(logit, dtype, M, N, "triton", device, bias=bias)


def test_rows_of_the_lowest_finite_bias_average(device):
    q, k, v = inputs(device)
    bias = torch.full((40, 70), torch.finfo(torch.float32).min, device=device)
    got = everything(q, k, v, bias=bias)
    assert all(x.isfinite().all() for x in got.values())
    want = v.detach().mean(2, keepdim=True).expand(1, 2, 40, 8)
    torch.testing.assert_close(got["out"], want, rtol=1e-4, atol=1e-4)


# ---- determinism ----


def test_same_bits_on_every_run_and_in_every_batch(device):
    q, k, v = inputs(device, B=2, H=2, Hkv=1, grad=False)
    bias = torch.randn(1, 2, 40, 70).to(device)
    options = dict(is_causal=True, dropout_p=0.2, seed=3)
    first, second = (everything(q, k, v, bias=bias, **options) for _ in range(2))
    # Without the bias: one that samples share has lists of its blocks, hence another kernel.
    alone = everything(q[:1], k[:1], v[:1], grad_out_of(q[:1], first), **options)
    paired = everything(q, k, v, grad_out_of(q, first), **options)
    for key in first:
        assert torch.equal(first[key], second[key]), key
        assert torch.equal(paired[key][:1], alone[key]), key


def grad_out_of(q, results):
    return torch.cos(torch.arange(results["out"][:1].numel())).view(1, 2, 40, 8).to(q).expand_as(q)


@pytest.mark.parametrize("letters", ["", "hn", "mn"])
def test_gradient_of_a_small_bias_is_split_and_added_up(letters, carried, monkeypatch):
    """Sums over blocks of rows, and over samples and heads in parts, some of different size."""
    case = testing.Case(f"parts-{letters}", B=5, M=70, N=20, D=8, E=8, bias=letters)
    for programs in (1, 5):  # the default of 264 has a part for each
        monkeypatch.setattr(grad_bias, "DBIAS_PROGRAMS", programs)
        testing.check(case, "triton")


# ---- few queries, whose keys are split ----


def decode(name, **features):
    return testing.Case(name, **{**dict(B=1, M=2, N=140, D=8, E=5, lse=True), **features})


DECODE = [
    decode("plain", M=1, Hkv=1),
    decode("weights", causal="bottom_right", window=(120, -1), weights="mean"),
    decode("padding", B=3, kv_len="batch", M=1, N=130),
    decode("rows", kv_len="rows", M=16, H=1, Hkv=1, dtype=torch.bfloat16),
    decode("sparse", keep="bhmn", keep_rate=0.05, empty_rows=True, M=4),
    decode("bias", bias="bn", bias_inf=True, dropout_p=0.3, dtype=torch.float16),
    decode("wide", H=1, Hkv=1, keep="mn", D=130, E=7),  # repaired where garbage is found
    decode("three", M=1, N=192, H=1, Hkv=1, D=20, E=33),
    decode("low", M=1, H=1, Hkv=1, opposite=10.0),  # an empty place of the merge holds no 0
    decode("nine", M=1, N=576, H=1, Hkv=1),  # more than the small merge has room for
    # Heads that share keys are rows of one head.
    decode("shared", M=1, H=6, keep="bhn", keep_rate=0.05, empty_rows=True, B=2),
    decode("shared-bias", M=1, H=4, bias="hn", bias_inf=True, keep="n", softcap=3.0),
    decode("shared-fixed-bias", M=1, H=4, bias="hn", bias_grad=False, kv_len="batch", B=2),
    decode("shared-window", M=1, H=4, causal="bottom_right", window=(80, -1), keep="bhn", bias="n"),
    decode("shared-24", M=1, H=24, Hkv=1, layout="bmhd"),
]


@pytest.fixture
def short_chunks(monkeypatch):
    """Keys are split at small sizes, for the interpreter."""
    monkeypatch.setattr(forward, "KEYS_PER_CHUNK", 64)


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_keys_of_few_queries_are_split(case, device, short_chunks):
    assert forward.chunks_of(case.M, case.N) == case.N // 64 > 1
    if device.type == "cuda":
        pytest.skip("on a GPU tests/contract/test_grid.py has M1-N1000 and others")
    testing.check(case, "triton")


@pytest.mark.parametrize(
    ("sizes", "options", "want"),
    [
        (dict(H=8, Hkv=2), {}, (2, 4, 2, 140)),
        (dict(H=24, Hkv=1), {}, (2, 12, 1, 140)),  # 16 rows at most
        (dict(H=8, Hkv=2), dict(band_lo=40, band_hi=139), (2, 4, 2, 100)),
        (dict(H=8, Hkv=2), dict(band_lo=-3, band_hi=0), (2, 4, 2, 1)),
        (dict(H=8, Hkv=2), dict(band_lo=140, band_hi=150), None),
        (dict(H=8, Hkv=2), dict(band_lo=40, kv_len=torch.ones(2, 1, dtype=torch.int32)), None),
        (dict(H=8, Hkv=2), dict(dropout_p=0.5, seed=torch.tensor(1)), None),
        (dict(H=8, Hkv=2), dict(weights=WEIGHTS["mean"]), None),
        (dict(H=8, Hkv=2), dict(w=torch.ones(8, 8)), None),
        (dict(H=8, Hkv=2, M=2), {}, None),
        (dict(H=17, Hkv=1), {}, None),
        (dict(H=2, Hkv=2), {}, None),
    ],
)
def test_heads_of_one_query_that_share_keys_are_rows_of_one_head(sizes, options, want):
    q, k, v = inputs("cpu", **{**dict(B=2, M=1, N=140, grad=False), **sizes})
    call = launch.Call(q, k, v, **options)
    rows = launch.heads_as_rows(call)
    assert (rows is call) == (want is None)
    if want is not None:
        B, M, Hkv, N = want
        assert rows.shape == (B, sizes["H"] // M, M, N)
        assert (rows.Hkv, rows.band) == (Hkv, (None, None))
        assert launch.as_rows(q, rows).data_ptr() == q.data_ptr()


def test_keys_are_split_by_a_rule_of_the_sizes():
    assert forward.chunks_of(launch.FEW_QUERIES + 1, 10**6) == 1
    assert [forward.chunks_of(1, n) for n in (0, 1, 1023, 1024, 10**6)] == [1, 1, 1, 2, 64]


@pytest.mark.parametrize("garbage", [NAN, INF])
def test_garbage_in_a_chunk_stays_masked_or_reaches_the_row(garbage, device, short_chunks):
    q, k, v = inputs(device, M=1, N=140, H=1, grad=False)
    options = dict(mask=fastattn.Mask(keep=torch.arange(140, device=device) % 2 == 0))
    want = everything(q, k, v, **options)
    k[:, :, 81], v[:, :, 81] = garbage, garbage
    got = everything(q, k, v, **options)
    for key in want:
        torch.testing.assert_close(got[key], want[key], msg=key)
    v[:, :, 80, 3] = garbage
    got = attend(q, k, v, **options)
    torch.testing.assert_close(got[..., 3], torch.full_like(got[..., 3], garbage), equal_nan=True)
    torch.testing.assert_close(got[..., :3], want["out"][..., :3])


def test_a_decoded_row_does_not_depend_on_its_mates(device, short_chunks):
    q, k, v = inputs(device, B=3, M=2, N=140, grad=False)
    grad_out = torch.randn(3, 2, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    lengths = torch.tensor([140, 3, 90], device=device)
    together = everything(q, k, v, grad_out, mask=fastattn.Mask(kv_len=lengths))
    for b in range(3):
        one = slice(b, b + 1)
        mask = fastattn.Mask(kv_len=lengths[one])
        alone = everything(q[one], k[one], v[one], grad_out[one], mask=mask)
        for key in alone:
            assert torch.equal(together[key][one], alone[key]), (b, key)


# ---- what is not computed ----


def test_full_and_skipped_tiles_run_no_mask_code(device, monkeypatch):
    """Two lists a row block: a block-diagonal mask only visits its full blocks."""
    if device.type == "cuda":
        pytest.skip("looks into the interpreter")
    visits = []
    original = forward.block_lists

    def spy(*args, **options):
        visits.append(original(*args, **options))
        return visits[-1]

    monkeypatch.setattr(forward, "block_lists", spy)
    q, k, v = inputs(device, M=128, N=128, grad=False)
    block = torch.arange(128) // 64
    attend(q, k, v, attn_mask=block[:, None] == block)
    assert visits[0].counts_ptr[:2].tolist() == [[0, 2], [0, 2]]  # the rest is padding


def test_operators_pass_opcheck(device):
    q, k, v = inputs(device, M=5, N=7, grad=False)
    case = tuple(Call(q, k, v, band_hi=0, scale=0.3, weights=WEIGHTS["mean"]))
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fastattn.triton_forward.default, case, test_utils=utils)
    out, _, weights, stats = torch.ops.fastattn.triton_forward(*case)
    case = (*case, out, stats, torch.ones_like(out), None, torch.ones_like(weights), False)
    torch.library.opcheck(torch.ops.fastattn.triton_backward.default, case, test_utils=utils)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("dropout_p", "weights", "seed"),
    [(0.5, 0, False), (1.5, 0, True), (math.nan, 0, True), (0, 3, False)],
)
def test_operators_refuse(device, dropout_p, weights, seed):
    """Arguments that would drop nothing, or that have no meaning."""
    q, k, v = inputs(device, M=5, N=7, grad=False)
    rows = q.new_zeros(*q.shape[:3], 2), torch.zeros_like(q)
    seed = torch.tensor(1, device=device) if seed else None
    case = Call(q, k, v, seed=seed, band_hi=0, scale=0.3, dropout_p=dropout_p, weights=weights)
    for call in (
        lambda: torch.ops.fastattn.triton_forward(*case),
        lambda: torch.ops.fastattn.triton_backward(*case, q, *rows, None, None, False),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()


def problem(device="cpu", **changes):
    x = torch.zeros(1, 1, 2, 4)
    p = validate.build("dot", x, x, x).p
    return dataclasses.replace(p, device=torch.device(device), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(D=257), "D is 257"),
        (dict(E=300), "E is 300"),
        (dict(device="meta"), "tensors are on meta"),
    ],
)
def test_reasons(changes, reason):
    assert any(reason in r for r in backend.unsupported(problem(**changes)))


def test_reason_without_triton(monkeypatch):
    monkeypatch.setattr(backend, "INSTALLED", False)
    assert backend.unsupported(problem()) == ["Triton is not installed: pip install triton"]


def test_reason_without_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unsupported(problem()) == ["tensors are on cpu; torch sees no CUDA device"]


def test_reason_on_an_old_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    _gpu.capability_reasons.cache_clear()
    assert backend.unsupported(problem("cuda"))[0].startswith("compute capability 7.5")
    _gpu.capability_reasons.cache_clear()
