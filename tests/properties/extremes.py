"""Large logits, biases and sizes: results are right, not only finite."""

import math

import pytest
import torch
from helpers import SCORES, attend, everything, inputs

from fastattn import Mask, testing
from fastattn.testing import Case

scores = pytest.mark.parametrize("score", SCORES)
HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("value", [-1e30, torch.finfo(torch.float32).min])
@scores
def test_a_large_negative_bias_masks_beside_others(backend, score, value):
    """Code that does not use -inf writes such values into a padding mask."""
    named = inputs(score)
    padding = torch.arange(7) >= 4
    masked = everything(named, mask=Mask(keep=~padding), backend=backend)
    finite = everything(named, bias=torch.where(padding, value, 0.0), backend=backend)
    del finite["grad_bias"]
    for name, x in finite.items():
        torch.testing.assert_close(x, masked[name], msg=lambda m, name=name: f"{name}: {m}")


def row_with_bias(score, backend, value):
    """Results in which the bias of row 2 exceeds all scores, and results without a bias."""
    torch.manual_seed(0)
    named = inputs(score)
    bias = torch.zeros(5, 7)
    bias[2] = value
    plain = everything(named, bias=torch.zeros(5, 7), backend="eager")
    return everything(named, bias=bias, backend=backend), plain, named


LARGE = [-1e30, -3e38, torch.finfo(torch.float32).min, 1e30, 3e38]


@pytest.mark.parametrize("value", LARGE)
@scores
def test_a_large_bias_in_a_whole_row_leaves_it_uniform(backend, score, value):
    """The bias is a constant, which softmax removes. It is not -inf, and makes no NaN."""
    results, plain, named = row_with_bias(score, backend, value)
    assert all(x.isfinite().all() for x in results.values())
    mean = named["value"].mean(2)
    torch.testing.assert_close(results["out"][:, :, 2], mean)
    torch.testing.assert_close(results["lse"][:, :, 2], torch.full((2, 2), value))
    torch.testing.assert_close(results["weights"][:, :, 2], torch.full((2, 2, 7), 1 / 7))
    others = [0, 1, 3, 4]
    torch.testing.assert_close(results["out"][:, :, others], plain["out"][:, :, others])


@pytest.mark.parametrize("value", LARGE)
@scores
def test_gradients_under_a_large_bias(backend, score, value):
    found, _, _ = row_with_bias(score, backend, value)
    expected, _, _ = row_with_bias(score, "eager", value)
    for name in ("grad_query", "grad_key", "grad_value"):
        torch.testing.assert_close(found[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", HALF)
@scores
def test_the_smallest_half_as_bias(backend, score, dtype):
    named = inputs(score, dtype=dtype)
    lowest = torch.finfo(dtype).min
    padding = torch.arange(7) >= 4
    bias = torch.where(padding, lowest, 0.0).to(dtype)
    found, weights = attend(**named, bias=bias, return_weights="full", backend=backend)
    masked = attend(**named, mask=Mask(keep=~padding), backend=backend)
    torch.testing.assert_close(found, masked)
    assert (weights[..., padding] == 0).all()
    everywhere = torch.full((5, 7), lowest, dtype=dtype)
    assert attend(**named, bias=everywhere, backend=backend).isfinite().all()


def test_infinity_in_a_bias_is_nan_in_its_row_alone(backend):
    """inf - inf has no value. Other rows do not see it."""
    named = inputs()
    bias = torch.zeros(5, 7)
    bias[1, 3] = math.inf
    found, clean = attend(**named, bias=bias, backend=backend), attend(**named, backend=backend)
    assert found[:, :, 1].isnan().all()
    others = [0, 2, 3, 4]
    torch.testing.assert_close(found[:, :, others], clean[:, :, others])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("logit", [1e4, 3e4, 6e4, 1e5])
def test_logits_beyond_half_accumulate_in_float32(backend, dtype, logit):
    """q . k overflows fp16 and has no digits left in bf16, but its softmax is ordinary."""
    D = 64
    side = math.sqrt(logit / D)
    q, k = torch.full((1, 1, 3, D), side), torch.full((1, 1, 4, D), side)
    k[:, :, 1] *= -1
    k[:, :, 2] *= 0.5
    q, k = q.to(dtype), k.to(dtype)
    v = torch.randn(1, 1, 4, 8).to(dtype)
    out, lse = attend(q, k, v, scale=1.0, return_lse=True, backend=backend)
    torch.testing.assert_close(out, (v[:, :, :1] + v[:, :, 3:]).expand(1, 1, 3, 8) / 2)
    plain, exact = ((q.to(x) @ k.to(x).mT).logsumexp(-1) for x in (torch.float32, torch.float64))
    testing.assert_within_budget(lse, plain, exact)


@pytest.mark.parametrize("dtype", HALF)
def test_random_large_logits(backend, dtype):
    testing.check(Case("large", magnitude=10.0, dtype=dtype, M=20, N=70, D=64), backend)


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-50])
def test_a_scale_below_the_numbers_of_float32(backend, scale):
    """Such a scale keeps every weight equal, and makes no NaN of a masked pair."""
    case = Case("least-scale", scale=scale, causal="top_left", dtype=torch.float16, lse=True)
    testing.check(case, backend)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("M", [1, 40])
def test_a_scale_far_above_the_softcap(backend, M, dtype):
    """float32 does not hold their ratio. A score of 0 stays 0 all the same."""
    q = torch.zeros(1, 1, M, 8, dtype=dtype)
    k = torch.randn(1, 1, 40, 8).to(dtype)
    for scale in (1e25, -1e25):
        out = attend(q, k, k, scale=scale, softcap=1e-15, backend=backend)
        torch.testing.assert_close(out, k.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("distance", [20.0, 88.0, 89.0, 1e3, 1e4, 1e30])
def test_additive_with_opposite_queries_and_keys(backend, sign, distance):
    """Both are huge but their sum is moderate, and right to float32's last digit there."""
    delta = torch.linspace(-4, 4, 9)
    q = torch.full((1, 1, 1, 1), sign * distance)
    k = (delta - sign * distance).view(1, 1, 9, 1)
    v, w = torch.randn(1, 1, 9, 3), torch.ones(1, 1)
    named = dict(query=q, key=k, value=v, weight=w)
    ours = everything(named, backend=backend)
    double = {name: x.double() for name, x in named.items()}
    plain, truth = everything(named, backend="eager"), everything(double, backend="eager")
    for name, x in ours.items():
        scale = testing.largest(truth[name])
        if name == "grad_query":  # the sum of the keys' gradients, which may cancel
            scale = max(scale, truth["grad_key"].norm().item())
        testing.assert_within_budget(x, plain[name], truth[name], name, scale)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_additive_with_extreme_weights(backend, value):
    named = inputs("additive") | {"weight": torch.full((2, 4), value)}
    results = everything(named, backend=backend)
    assert all(x.isfinite().all() for x in results.values())
    if value < 1:
        torch.testing.assert_close(results["weights"], torch.full((2, 2, 5, 7), 1 / 7))


def test_gradients_of_additive_keys_with_huge_weights(backend):
    """Keys agree in the dims of these weights, so that a row keeps more than one."""
    named = inputs("additive", D=8)
    named["key"] = named["key"].clamp(-2, 2) * 4
    named["key"][..., :4] = 6.0
    named["weight"][..., :4] *= 1e25
    double = {name: x.double() for name, x in named.items()}
    found, plain, truth = (
        everything(x, backend=name)["grad_key"]
        for x, name in ((named, backend), (named, "eager"), (double, "eager"))
    )
    testing.assert_within_budget(found, plain, truth)


@pytest.mark.parametrize("weight", [0.09, -0.37])
@pytest.mark.parametrize("M", [1, 5])
def test_errors_of_additive_weights_that_are_alike_do_not_add_up(backend, M, weight):
    """A sum that rounds each of these terms alike has a mean error far above its spread."""
    named = inputs("additive", B=32, M=M, N=1, D=256) | {"weight": torch.full((2, 256), weight)}
    _, score = attend(**named, return_lse=True, backend=backend)  # of one key
    sums = named["query"].double() + named["key"].double()
    error = score.double() - (torch.tanh(sums) * named["weight"][:, None].double()).sum(-1)
    assert error.mean().abs() < error.std()


def test_additive_with_some_weights_zero(backend):
    """A dim with weight 0 changes nothing, for any values in it."""
    named = inputs("additive")
    named["weight"][:, 1] = 0.0
    plain = attend(**named, backend=backend)
    named["query"][..., 1], named["key"][..., 1] = 1e4, -1e4
    torch.testing.assert_close(attend(**named, backend=backend), plain)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@scores
def test_tiny_values_underflow_quietly(backend, score, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    named = {name: x * tiny for name, x in inputs(score, dtype=dtype).items()}
    results = everything(named, backend=backend)
    uniform = torch.full((2, 2, 5, 7), 1 / 7, dtype=dtype)
    torch.testing.assert_close(results["weights"], uniform)


# ---- sizes ----


@scores
def test_more_than_65536_keys(backend, score):
    case = Case("keys", score, B=1, H=1, Hkv=1, M=2, N=70_000, D=4, E=4, kv_len="rows")
    testing.check(case, backend)


@scores
def test_more_than_65536_heads(backend, score):
    case = Case("heads", score, B=70_000, H=1, Hkv=1, M=1, N=3, D=2, E=2)
    testing.check(case, backend)


@scores
def test_more_than_65536_queries(backend, score):
    case = Case("queries", score, B=1, H=1, Hkv=1, M=70_000, N=3, D=2, E=2, causal="bottom_right")
    testing.check(case, backend)


@scores
def test_rows_do_not_depend_on_how_many_there_are(backend, score):
    """A row has the same value alone and beside a hundred other queries."""
    named = inputs(score, M=130)
    together = attend(**named, backend=backend)
    for row in (0, 64, 129):
        alone = attend(**(named | {"query": named["query"][:, :, row : row + 1]}), backend=backend)
        torch.testing.assert_close(together[:, :, row : row + 1], alone)


@scores
def test_a_uniform_shift_of_the_bias_changes_lse_alone(backend, score):
    named = inputs(score)
    plain = everything(named, bias=torch.zeros(5, 7), backend=backend)
    shifted = everything(named, bias=torch.full((5, 7), 2.0), backend=backend)
    torch.testing.assert_close(shifted.pop("lse"), plain.pop("lse") + 2)
    for name in plain:
        torch.testing.assert_close(shifted[name], plain[name])


def test_zero_size_results_have_their_shapes(backend):
    for size in ("B", "M", "N", "D", "E"):
        named = inputs("additive", **{size: 0})
        ours, eager = everything(named, backend=backend), everything(named, backend="eager")
        for name in eager:
            torch.testing.assert_close(ours[name], eager[name])


@scores
def test_the_mean_over_no_heads_is_0(backend, score):
    out, weights = attend(**inputs(score, H=0), return_weights="mean", backend=backend)
    assert out.shape == (2, 0, 5, 3)
    assert torch.equal(weights, torch.zeros(2, 5, 7))


@scores
def test_keys_without_query_heads_have_gradients_of_0(backend, score):
    found = everything(inputs(score, H=0, Hkv=2, dtype=torch.float16), backend=backend)
    for name in "grad_key", "grad_value":
        assert found[name].shape[1] == 2, name
        assert not found[name].any(), name
