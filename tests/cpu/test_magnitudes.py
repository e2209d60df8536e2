"""Numbers of any size in any row: products that split numbers into parts must not lose any."""

import math

import pytest
import torch
from helpers import assert_same_bits, attend, everything, inputs
from properties import extremes

import fastattn
from fastattn import Mask, testing

pytestmark = pytest.mark.usefixtures("extension")

# Factors of (query, key), with moderate scores, of value and of grad_out.
FACTORS = {
    "tiny values": (1, 1, 1e-28, 1),
    "huge values": (1, 1, 1e30, 1e-10),
    "tiny gradients": (1, 1, 1, 1e-30),
    "huge gradients": (1, 1, 1e-5, 1e30),
    "tiny queries": (1e-33, 1e33, 1, 1),
    "huge queries": (1e33, 1e-33, 1, 1),
    "tiny scores": (1e-30, 1, 1, 1),
    "small": (1e-8, 1e8, 1e-8, 1e-8),
    # Outside the range of fp16 parts.
    "small values": (1, 1, 1e-3, 1),
    "large values": (1, 1, 300, 1e-3),
    "small queries": (1e-3, 1e3, 1, 1),
    "large queries": (300, 1 / 300, 1, 1),
}


def results(call, grad_out, **options):
    """All results, and the gradients of the output alone, which take a shorter path."""
    leaves = {name: x.detach().requires_grad_() for name, x in call.items()}
    plain = torch.autograd.grad(attend(**leaves, **options), list(leaves.values()), grad_out)
    plain = {f"plain grad_{name}": x for name, x in zip(leaves, plain, strict=True)}
    return everything(call, grad_out, **options) | plain


def check(call, grad_out, **options):
    """Our results and gradients against float64, with plain float32 as the peer."""
    ours = results(call, grad_out, **options, backend="cpu")
    plain = results(call, grad_out, **options, backend="eager")
    double = {name: x.double() for name, x in call.items()}
    truth = results(double, grad_out.double(), **options, backend="eager")
    for name, x in ours.items():
        testing.assert_within_budget(x, plain[name], truth[name], name)


def scaled(call, query, key, value, grad_out):
    call["query"], call["key"] = call["query"] * query, call["key"] * key
    call["value"] = call["value"] * value
    return call, torch.randn(call["query"].shape[:-1] + call["value"].shape[-1:]) * grad_out


@pytest.mark.parametrize("name", FACTORS)
def test_all_of_one_magnitude(isa, name):
    call, grad_out = scaled(inputs(M=70, N=140, D=40, E=24), *FACTORS[name])
    check(call, grad_out)


@pytest.mark.parametrize("M", [10, 40])
def test_rows_apart_of_a_part_of_a_block(isa, M):
    check(*scaled(inputs(M=M, N=140, D=40, E=24), *FACTORS["tiny queries"]))


def test_huge_rows_may_be_expanded(isa):
    """The last vector of a row is not whole."""
    q, k = (x * torch.randn(1, 2, n, 3) for x, n in ((1e25, 40), (1e-25, 70)))
    q, k = (x[..., :1].expand(-1, -1, -1, 20) for x in (q, k))
    call = dict(query=q, key=k, value=torch.randn(1, 2, 70, 8))
    found = attend(**call, backend="cpu")
    assert torch.equal(found, attend(*(x.contiguous() for x in call.values()), backend="cpu"))


@pytest.mark.parametrize("name", FACTORS)
def test_some_rows_of_another_magnitude(isa, name):
    """Rows that stand apart are among other rows in the same tile."""
    call, grad_out = scaled(inputs(M=70, N=140, D=40, E=24), 1, 1, 1, 1)
    other, other_grad = scaled({k: x.clone() for k, x in call.items()}, *FACTORS[name])
    query, key, value, grad = FACTORS[name]
    if query == 1:
        call["value"][:, :, ::7] = other["value"][:, :, ::7]
        grad_out[:, :, ::5] = other_grad[:, :, ::5]
    else:  # small queries with large keys would give large scores that hide all else
        call["query"][:, :, ::5] *= min(query, 1)
        call["key"][:, :, ::7] *= min(key, 1)
    check(call, grad_out)


SIZES = dict(M=200, N=280, D=40, E=24)  # several blocks of queries and of keys


@pytest.mark.parametrize(
    "factors",
    [
        (1e-8, 1, 1e5),
        (1e5, 1e-8),
        (0, 1e-4, 1e-20),
        (0, 1e-8, 1e-8, 1e-8),
        (1e17, 1e-17),
        (1e-25, 1e25),
        (1e-12, 1e30),
    ],
)
def test_gradients_of_another_magnitude_in_every_block(isa, factors):
    """Sums over blocks keep their digits if the next block is larger or smaller."""
    call, grad_out = scaled(inputs(**SIZES), 1, 1, 1, 1)
    for n, rows in enumerate(grad_out.split(64, dim=2)):
        rows *= factors[n % len(factors)]
    check(call, grad_out)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_small_gradients_beside_a_row_of_another_magnitude(isa, name):
    call, grad_out = scaled(inputs(**SIZES), 1, 1, 1, 1e-8)
    call[name][:, :, 3] *= 1e-4
    check(call, grad_out)


@pytest.mark.parametrize(("others", "factor"), [(1e-3, 1e25), (1e-3, 1e32), (1e-12, 1e37)])
def test_one_huge_row_of_gradients(isa, others, factor):
    call, grad_out = scaled(inputs(**SIZES), 1, 1, 1, others)
    grad_out[:, :, 70] *= factor
    check(call, grad_out)


def test_huge_gradients_of_large_values_behind_tiny_ones(isa):
    call, grad_out = scaled(inputs(**SIZES), 2, 1, 60, 1)
    for rows, factor in zip(grad_out.split(64, dim=2), (1e-18, 2e17) * 2, strict=True):
        rows *= factor
    check(call, grad_out)


@pytest.mark.parametrize("factors", [(1, 1e-4, 1), (1e-4, 1, 1e-4), (1e-12, 1e-12, 1)])
def test_long_sums_of_gradients_of_another_magnitude(isa, factors):
    """The factor changes where sums go on in double, after every 64 tiles of 64 queries."""
    call, grad_out = scaled(inputs(M=130 * 64, N=20, D=8, E=8), 1, 1, 1, 1)
    for rows, factor in zip(grad_out.split(64 * 64, dim=2), factors, strict=True):
        rows += rows.abs().amax()  # terms of one sign
        rows *= factor
    check(call, grad_out)


@pytest.mark.parametrize("rows", [slice(None), slice(None, None, 5)], ids=["all", "some"])
@pytest.mark.parametrize("name", ["lse", "weights"])
def test_huge_gradients_of_another_result(isa, name, rows):
    call = inputs(M=70, N=140, D=40, E=24) | {"bias": torch.randn(70, 140)}
    grads = [torch.randn(2, 2, 70, n) * 1e-12 for n in (24, 140)]
    grads[1][:, :, rows] *= 1e36
    grads[1] = grads[1][..., 0] if name == "lse" else grads[1]

    def pulled(dtype, backend):
        leaves = {n: x.to(dtype).requires_grad_() for n, x in call.items()}
        named = dict(return_weights="full", return_lse=True, backend=backend)
        out, weights, lse = attend(**leaves, **named)
        outs = out, lse if name == "lse" else weights
        return torch.autograd.grad(outs, list(leaves.values()), [x.to(dtype) for x in grads])

    found = (pulled(torch.float32, n) for n in ("cpu", "eager"))
    for n, *x in zip(call, *found, pulled(torch.float64, "eager"), strict=True):
        testing.assert_within_budget(*x, n)


def test_weights_of_every_magnitude(isa):
    """From a dominating key to weights that underflow; with dropout that keeps few."""
    call, grad_out = scaled(inputs(**SIZES), 4, 4, 1, 1)
    check(call, grad_out, dropout_p=0.95, seed=7)


MASKED = pytest.mark.parametrize("factor", [1e-3, 300.0, 1e25, math.inf, math.nan])


@MASKED
@pytest.mark.parametrize("rows", ["all", "each"])
def test_masked_keys_of_another_magnitude_change_no_bit(isa, rows, factor):
    call, grad_out = scaled(inputs(**SIZES), 1, 1, 1, 1)
    grad_out[:, :, 64:] *= 1e-9  # of another size than those before
    keep = torch.rand(1, 1, 1 if rows == "all" else SIZES["M"], SIZES["N"]) < 0.7
    keep[..., ::9] = False
    options = dict(mask=Mask(keep=keep), backend="cpu")
    clean = results(call, grad_out, **options)
    for name in "key", "value":
        call[name] = call[name].clone()
        call[name][:, :, ::9] *= factor
    assert_same_bits(results(call, grad_out, **options), clean)


@MASKED
def test_queries_without_keys_of_another_magnitude_change_no_bit(isa, factor):
    call, grad_out = scaled(inputs(**SIZES), 1, 1, 1, 1)
    keep = torch.rand(1, 1, SIZES["M"], SIZES["N"]) < 0.7
    keep[:, :, ::9] = False
    options = dict(mask=Mask(keep=keep), backend="cpu")
    clean = results(call, grad_out, **options)
    call["query"] = call["query"].clone()
    call["query"][:, :, ::9] *= factor
    grad_out[:, :, ::9] *= factor
    assert_same_bits(results(call, grad_out, **options), clean)


def test_a_weight_is_its_power_of_2_to_few_digits(isa):
    """Beside a key whose logit is 0, a logit of -x ln 2 has 2^-x of its weight, exact in x."""
    x = torch.arange(4096) * (3 / 1024)  # with few bits, as halves of fp16 have
    k, v = torch.tensor([0.0, -1.0]).view(1, 1, 2, 1), torch.ones(1, 1, 2, 1)
    named = dict(scale=math.log(2), return_weights="full", return_lse=True, backend="cpu")
    _, weights, lse = attend(x.view(1, 1, -1, 1), k, v, **named)
    exact = torch.exp2(-x.double())
    ratio = weights[0, 0, :, 1].double() / weights[0, 0, :, 0].double()
    assert ((ratio - exact).abs() <= 2**-21.5 * exact).all()
    q, k, v = (t.bfloat16() for t in (torch.linspace(0, 12, 49).repeat(21), k, v))
    lse = attend(q.view(1, 1, -1, 1), k, v, **named)[2].flatten().double()
    assert ((lse - torch.log1p(torch.exp2(-q.double()))).abs() <= 2**-21).all()


@pytest.mark.parametrize("M", [1, 3, 40])
@pytest.mark.parametrize("score", ["dot", "additive"])
def test_a_row_with_one_key_has_no_gradient(isa, score, M):
    """Its weight is 1 whatever its score is: dO O and dO V^T must be the same sum to show it."""
    if isa.startswith("amx"):
        pytest.skip("the matrix unit sums a product in an order of its own")
    for E in (1, 33, 129):
        call = inputs(score, M=M, N=1, E=E, D=20, grad=True)
        attend(**call).square().sum().backward()
        for name in call.keys() - {"value"}:
            assert not call[name].grad.any(), (name, E)


def test_a_row_does_not_depend_on_the_tiles_that_other_rows_keep(isa):
    """Its largest logit so far decides how a tile is weighed; a skipped tile must not change that.

    The row meets logits near 0, 14 and 16.2, and masks the tile before the last one.
    """
    if isa.startswith("amx"):
        pytest.skip("the matrix unit's tiles depend on the kind of mask")
    levels = torch.tensor([0.0, 14.0, 0.0, 16.2]).repeat_interleave(128)
    q, k, v = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 512, 64), torch.randn(1, 1, 512, 64)
    q[..., 0], k[..., 0] = 1, levels + 0.5 * torch.rand(512)
    keep = torch.ones(1, 1, 64, 512, dtype=torch.bool)
    keep[..., 256:384] = False
    beside = keep.clone()
    beside[:, :, 1, 256:384] = True
    for dtype in (torch.float32, torch.bfloat16):
        call = {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype)}
        alone, other = (attend(**call, scale=1.0, mask=Mask(keep=x)) for x in (keep, beside))
        assert torch.equal(alone[:, :, 0], other[:, :, 0]), dtype


@pytest.mark.parametrize("size", [1.0, 1e27])
@pytest.mark.parametrize("M", [1, 2])
def test_huge_weights_of_saturated_keys(isa, M, size):
    """tanh is 1 of all keys but one, where it is -1."""
    q, k = torch.full((1, 1, M, 64), 8.0), torch.full((1, 1, 4, 64), 8.0)
    k[:, :, 1] = -9
    v = torch.tensor([0.0, 1, 2, 3]).view(1, 1, 4, 1)
    out = fastattn.additive_attention(q, k, v, torch.full((64,), size), backend="cpu")
    torch.testing.assert_close(out, torch.full_like(out, 5 / 3))


@pytest.mark.parametrize("M", [1, 3])
def test_an_infinite_weight_makes_nan_of_its_head(isa, M):
    call = inputs("additive", M=M)
    call["weight"][0, 2] = math.inf
    out = attend(**call, backend="cpu")
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e19])
def test_a_scale_of_zero_weighs_all_keys_alike(isa, size):
    q, v = torch.randn(2, 1, 40, 8) * size, torch.randn(2, 1, 40, 8)
    mask = Mask(kv_len=torch.tensor([30, 0]))
    for rows in (q, q[:, :, :1]):
        out = attend(rows, q, v, scale=0.0, mask=mask, backend="cpu")
        torch.testing.assert_close(out[0, 0], v[0, 0, :30].mean(0).expand_as(out[0, 0]))
        assert (out[1] == 0).all()


def test_a_scale_far_below_the_softcap(isa):
    """Their ratio is no float above 0, which would say that there is no softcap."""
    q, v = torch.randn(2, 1, 40, 8), torch.randn(2, 1, 40, 8)
    out = attend(q, q, v, scale=1e-40, softcap=1e15, backend="cpu")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_scale_far_above_the_softcap(isa, dtype):
    extremes.test_a_scale_far_above_the_softcap("cpu", 40, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cap", [1.0, 1e6])
def test_half_types_know_14_bits_of_a_capped_logit(isa, dtype, cap):
    """However small it is beside the cap: the log-sum-exp of one key is its logit."""
    q = (
        torch.cat([torch.logspace(-4, 3, 500), torch.linspace(0, 7, 500)])
        .to(dtype)
        .view(1, 1, -1, 1)
    )
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    for sign in (1.0, -1.0):
        lse = attend(q, one, one, scale=sign, softcap=cap, return_lse=True, backend="cpu")[1]
        exact = cap * torch.tanh(sign * q[..., 0].double() / cap)
        assert ((lse - exact).abs() <= 2**-14 * exact.abs()).all()


def test_a_capped_logit_and_its_slope(isa):
    """The log-sum-exp of one key is its logit. Small tanh are another function than large ones."""
    sizes = torch.cat([torch.logspace(-30, 1.6, 3000), torch.linspace(0.45, 0.55, 1096)])
    one = torch.ones(1, 1, 1, 1)
    least = 2**-24 if isa == "amx_fp16" else 0  # fp16 parts of a tile have one unit
    for x in (sizes, -sizes, sizes[sizes <= 0.5]):
        q = x.view(1, 1, -1, 1).requires_grad_()
        lse = attend(q, one, one, scale=1.0, softcap=1.0, return_lse=True, backend="cpu")[1]
        (slope,) = torch.autograd.grad(lse.sum(), q)
        exact, power = torch.tanh(x.double()), (2 * x.double().abs()).exp()
        assert ((lse.flatten() - exact).abs() <= 2**-22 * exact.abs()).all()
        exact_slope = 4 * power / (power + 1).square()
        error = (slope.flatten() - exact_slope).abs()
        assert (error <= (2**-22 + 2**-23 * x.abs()) * exact_slope + least).all()


def test_a_capped_row_does_not_see_the_keys_that_it_leaves_out(isa):
    """Its scores lie on both sides of half the cap. Without what it leaves out, most are below."""
    call = inputs(B=1, H=1, M=65, N=20, D=16, E=16)
    call["query"] *= 0.4
    keep = torch.rand(65, 20) < 0.5
    keep[:, 7] = False
    found = []
    for left_out in (0.0, 1e3, math.inf, math.nan):
        call["key"][..., 7, :] = left_out
        found.append(everything(call, softcap=2.0, mask=Mask(keep=keep), backend="cpu"))
        assert_same_bits(found[-1], found[0])


def test_nan_hides_no_large_number_from_a_cap(isa):
    """A masked NaN comes behind the only large score, in the same lane."""
    q, k, v = torch.ones(1, 1, 40, 1), torch.full((1, 1, 40, 1), 0.1), torch.randn(1, 1, 40, 8)
    k[:, :, 7] = 2.5
    mask = Mask(keep=torch.arange(40) != 23)
    found = []
    for left_out in (0.0, math.nan):
        k[:, :, 23] = left_out
        found.append(attend(q, k, v, scale=1.0, softcap=1.0, mask=mask, backend="cpu"))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_stays_nan_under_a_cap(isa, dtype):
    q, k, v = (torch.randn(1, 1, n, 16).to(dtype) for n in (40, 70, 70))
    q[..., 3, 0] = math.nan
    out = attend(q, k, v, softcap=2.0, backend="cpu")
    rows = torch.arange(40) == 3
    assert torch.equal(out.isnan(), rows[:, None].expand_as(out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_have_no_gradient_where_the_cap_is_reached(isa, dtype):
    q, k, v = (torch.randn(1, 1, 70, 32).to(dtype).requires_grad_() for _ in range(3))
    out = attend(q, k, v, scale=1e6, softcap=0.5, backend="cpu")
    for x in torch.autograd.grad(out.square().sum(), (q, k)):
        assert (x == 0).all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_any_nan_in_a_bias_reaches_what_its_row_reaches(isa, bits):
    call = inputs("dot", B=1, M=64, N=64, D=64, E=64, dtype=torch.bfloat16)
    bias = torch.zeros(64, 64)
    bias[3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = everything(call, torch.ones(1, 2, 64, 64, dtype=torch.bfloat16), bias=bias)
    assert found["out"][:, :, 3].isnan().all()
    assert not found["out"][:, :, 4:].isnan().any()
    assert found["grad_value"].isnan().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_any_nan_in_a_sink_reaches_what_its_head_reaches(isa, bits):
    call = inputs(B=1, M=64, N=64, D=64, E=64, dtype=torch.bfloat16, grad=True)
    sink = torch.tensor([0, bits], dtype=torch.int32).view(torch.float32)
    out = attend(**call, sink=sink, backend="cpu")
    for x in out, *torch.autograd.grad(out, list(call.values()), torch.randn_like(out)):
        assert torch.equal(x.isnan(), sink.isnan()[:, None, None].expand_as(x))


@pytest.mark.parametrize("M", [3, 64])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1])
def test_any_nan_in_a_gradient_of_lse_is_nan_in_bf16(isa, M, bits):
    call = inputs(B=1, M=M, N=64, D=64, E=64, dtype=torch.bfloat16, grad=True)
    _, lse = attend(**call, return_lse=True, backend="cpu")
    grad = torch.zeros_like(lse)
    grad[:, :, 1] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = torch.autograd.grad(lse, [call["query"], call["key"]], grad)
    assert found[0][:, :, 1].isnan().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_leaves_denormals_to_its_thread(isa, dtype):
    """Kernels may flush them to 0 meanwhile."""
    attend(**inputs(M=64, N=64, D=64, E=64, dtype=dtype), backend="cpu")
    assert (torch.full((64,), 1e-40) * 0.5).all()


def test_whole_bf16_tiles_of_tiny_values(isa):
    """Products of tiles flush what is below 2^-126, so such values are multiplied in fp32."""
    call = {x: torch.randn(1, 2, 64, 64).bfloat16() for x in ("query", "key", "value")}
    call["value"] = call["value"] * 2.0**-122
    ours, plain = attend(**call, backend="cpu"), attend(**call, backend="eager")
    truth = attend(**{name: x.double() for name, x in call.items()}, backend="eager")
    testing.assert_within_budget(ours, plain, truth, "out")
