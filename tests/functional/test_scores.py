"""attention(score=...): the five scores against their formulas, gradients included."""

import math

import pytest
import torch
from helpers import assert_close

from fastattn import Mask, attention, scores

B, H, M, N, D, E = 2, 4, 5, 7, 3, 2


def scaled_dot(q, k, **_):
    return q @ k.mT / math.sqrt(q.shape[-1])


def dot(q, k, **_):
    return q @ k.mT


def cosine(q, k, **_):
    return q @ k.mT / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])


def gaussian(q, k, bandwidth=1.0, **_):
    own = isinstance(bandwidth, torch.Tensor) and bandwidth.dim() > 0
    h = bandwidth.unsqueeze(-2) if own else bandwidth
    return -((q[..., None, :] - k[..., None, :, :]) / h).square().sum(-1) / 2


def additive(q, k, weight, **_):
    w = weight if weight.dim() == 1 else weight[:, None, None]
    return (torch.tanh(q[..., None, :] + k[..., None, :, :]) * w).sum(-1)


def formula(score, mask=None):
    """softmax(score) @ v by plain PyTorch: (out, weights, lse)."""

    def run(q, k, v, **options):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
        scores = score(q, k, **options)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v, scores.softmax(-1), scores.logsumexp(-1)

    return run


def ours(score, backend, **more):
    def run(q, k, v, **options):
        return attention(
            q, k, v, score=score, return_weights="full", return_lse=True, backend=backend,
            **options, **more,
        )  # fmt: skip

    return run


def draw(Hkv=H, offset=0.0):
    shapes = [(B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, E)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    # float32 values: the truth uses the same inputs
    return [(q + offset).float(), (k + offset).float(), v.float()]


def with_grads(run, tensors, dtype, **options):
    """Results and gradients of all tensors, including those in the options."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    named = {
        n: x.to(dtype).requires_grad_() if isinstance(x, torch.Tensor) else x
        for n, x in options.items()
    }
    wanted = leaves + [x for x in named.values() if isinstance(x, torch.Tensor)]
    results = run(*leaves, **named)
    loss = sum(
        (r * torch.linspace(-1, 1, r.numel(), dtype=dtype).view(r.shape)).sum() for r in results
    )
    return [*results, *torch.autograd.grad(loss, wanted)]


def assert_score(score, backend, tensors, naive, keep=None, more=None, **options):
    assert_close(
        with_grads(ours(score, backend, **(more or {})), tensors, torch.float32, **options),
        with_grads(formula(naive, keep), tensors, torch.float32, **options),
        with_grads(formula(naive, keep), tensors, torch.float64, **options),
    )


SCORES = [("scaled_dot", scaled_dot), ("dot", dot), ("cosine", cosine), ("gaussian", gaussian)]


@pytest.mark.parametrize(("score", "naive"), SCORES)
def test_formula(backend, score, naive):
    assert_score(score, backend, draw(), naive)


@pytest.mark.parametrize("shape", [(D,), (H, D)])
def test_additive_formula(backend, shape):
    assert_score("additive", backend, draw(), additive, weight=torch.randn(shape))


@pytest.mark.parametrize(("score", "naive"), SCORES)
def test_grouped_heads(backend, score, naive):
    assert_score(score, backend, draw(Hkv=2), naive, more=dict(enable_gqa=True))


@pytest.mark.parametrize(("score", "naive"), SCORES)
def test_masks_and_bias(backend, score, naive):
    keep = torch.ones(M, N, dtype=torch.bool).tril() & (torch.arange(N) != 2)
    keep[:, 0] = True
    bias = torch.randn(N)
    options = dict(is_causal=True, attn_mask=keep, bias=bias)

    def biased(q, k, **_):
        return naive(q, k) + bias.to(q.dtype)

    assert_score(score, backend, draw(), biased, keep=keep, more=options)


@pytest.mark.parametrize(
    ("score", "naive", "scale"), [("scaled_dot", dot, 0.7), ("cosine", cosine, 10.0)]
)
def test_some_take_a_scale(backend, score, naive, scale):
    assert_score(score, backend, draw(), lambda q, k: naive(q, k) * scale, more=dict(scale=scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cosine_of_a_zero_vector_is_zero(dtype):
    q, k, v = (x.to(dtype) for x in draw())
    q[:, :, 0] = k[:, :, 2] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, weights = attention(*leaves, score="cosine", return_weights="full")
    torch.testing.assert_close(weights[:, :, 0], torch.full_like(weights[:, :, 0], 1 / N))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.bfloat16, -100), (torch.float32, -100), (torch.float32, 100), (torch.float64, 900)],
)
def test_cosine_of_vectors_of_any_length(dtype, exponent):
    """A power of two changes no bit, but in gradients, which it divides."""

    def run(factor):
        leaves = [x.to(dtype) * f for x, f in zip(draw(), (factor, factor, 1.0), strict=True)]
        leaves = [x.requires_grad_() for x in leaves]
        out = attention(*leaves, score="cosine", scale=5.0)
        q, k, v = torch.autograd.grad(out.square().sum(), leaves)
        return out, q * factor, k * factor, v

    torch.manual_seed(0)
    expected = run(1.0)
    torch.manual_seed(0)
    for found, same in zip(run(2.0**exponent), expected, strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cosine_of_the_largest_numbers(dtype):
    x = torch.full((2, 4), torch.finfo(dtype).max, dtype=dtype)
    torch.testing.assert_close(scores.normalize(x), torch.full_like(x, 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x[..., ::2], lambda x: x.mT.clone().mT])
def test_cosine_of_ordinary_vectors_is_one_division(dtype, layout, monkeypatch):
    x, grad = (torch.randn(3, 5, 70).to(dtype) for _ in range(2))
    x = layout(x).requires_grad_()
    grad = grad[..., : x.shape[-1]]

    def run():
        unit = scores.normalize(x)
        return unit, *torch.autograd.grad(unit, x, grad)

    with torch.profiler.profile() as profile:
        short = run()
    names = {event.key for event in profile.key_averages()}
    assert "aten::div" in names
    assert "aten::where" not in names
    monkeypatch.setattr(scores.arguments, "can_read", lambda x: False)  # as on a GPU
    for found, expected in zip(short, run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_vector_of_zeros_has_cosine_0_and_gradient_0(dtype):
    x = torch.randn(3, 5).to(dtype)
    x[1] = 0
    x.requires_grad_()
    unit = scores.normalize(x)
    [grad] = torch.autograd.grad(unit, x, torch.ones_like(unit))
    assert (unit[1] == 0).all()
    assert (grad[1] == 0).all()
    assert (grad[::2] != 0).any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("score", ["cosine", "gaussian"])
def test_garbage_that_nothing_uses_has_gradient_0(backend, score, garbage):
    """Garbage in keys behind a mask, and in a query without keys."""
    lengths = torch.tensor([[3] * M, [5] * M])
    lengths[1, 2] = 0

    def run(value):
        q, k, v = draw()
        q[1, :, 2] = k[0, :, 3:] = v[0, :, 3:] = value
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = dict(mask=Mask(kv_len=lengths), backend=backend, return_weights="full")
        results = attention(*leaves, score=score, **options)
        return [*results, *torch.autograd.grad(sum(x.sum() for x in results), leaves)]

    torch.manual_seed(0)
    clean = run(0.0)
    torch.manual_seed(0)
    found = run(garbage)
    for ours, expected in zip(found, clean, strict=True):
        torch.testing.assert_close(ours, expected)
    assert (found[2][1, :, 2] == 0).all()
    assert (found[3][0, :, 3:] == 0).all()


@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_cosine_of_a_row_in_use_that_is_not_finite(backend, special):
    """Its users and all their gradients are NaN, and no other row is."""
    q, k, v = draw()
    q[0, 1, 2, 0] = k[1, 2, 4, 1] = special
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, score="cosine", is_causal=True, backend=backend)
    spoilt = torch.zeros(B, H, M, dtype=torch.bool)
    spoilt[0, 1, 2] = spoilt[1, 2, 4] = True  # only query 4 sees key 4
    assert torch.equal(out.isnan().all(-1), spoilt)
    assert torch.equal(out.isnan().any(-1), spoilt)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert torch.equal(grads[0].isnan().all(-1), spoilt)
    assert torch.equal(grads[0].isnan().any(-1), spoilt)
    users = torch.zeros(B, H, N, dtype=torch.bool)
    users[0, 1, :3] = users[1, 2, :5] = True  # the keys that these queries see
    for grad in grads[1:]:
        assert torch.equal(grad.isnan().any(-1), users)


# ---- gaussian ----


SHAPES = [(), (H, 1, 1), (D,), (H, 1, D), (B, 1, 1, 1), (B, H, 1, D)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bandwidth_may_be_learned(backend, shape):
    bandwidth = torch.rand(shape) + 0.5
    assert_score("gaussian", backend, draw(), gaussian, bandwidth=bandwidth)


@pytest.mark.parametrize("shape", [(), (H, 1, D)], ids=str)
def test_bandwidth_of_grouped_heads(backend, shape):
    options = dict(bandwidth=torch.rand(shape) + 0.5, more=dict(enable_gqa=True))
    assert_score("gaussian", backend, draw(Hkv=2), gaussian, **options)


@pytest.mark.parametrize("offset", [0.0, 2000.0, -2000.0])
def test_gaussian_far_from_the_origin(backend, offset):
    """Years, for example: the score uses differences and keeps their digits."""
    assert_score("gaussian", backend, draw(offset=offset), gaussian)


@pytest.mark.parametrize("garbage", [None, math.nan, 1e30])
def test_gaussian_of_a_query_without_keys(backend, garbage):
    """Its log-sum-exp is -inf, and has no gradient."""
    q, k, v = draw()
    q[1] = q[1] if garbage is None else garbage
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bandwidth = torch.ones(H, 1, 1, requires_grad=True)
    options = dict(bandwidth=bandwidth, mask=Mask(kv_len=torch.tensor([N, 0])), backend=backend)
    out, lse = attention(*leaves, score="gaussian", return_lse=True, **options)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    grads = torch.autograd.grad(lse, (*leaves[:2], bandwidth), torch.ones_like(lse))
    assert (grads[0][1] == 0).all()
    assert (grads[1][1] == 0).all()
    assert grads[2].isfinite().all()


ULP = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("score", ["scaled_dot", "additive", "gaussian"])
def test_a_seed_is_checked_after_a_known_call(score):
    q, own = torch.zeros(1, 2, 4, 8), {}
    if score == "additive":
        own["weight"] = torch.ones(2, 8)
    attention(q, q, q, score=score, **own)
    with pytest.raises(TypeError, match="seed"):
        attention(q, q, q, score=score, seed=1.5, **own)


def test_an_infinite_bandwidth_weighs_all_keys_alike():
    q, k, v = draw()
    for bandwidth in (math.inf, torch.tensor(math.inf)):
        out = attention(q, k, v, score="gaussian", bandwidth=bandwidth)
        torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("shape", [(), (H, 1, 1), (D,), (H, 1, D)], ids=str)
def test_a_small_bandwidth_costs_no_digits(backend, shape):
    """At 1e-4 of the range a score is within 4 ulp, its gradients within the budget."""
    bandwidth = (torch.rand(shape) + 0.5) * 1e-4
    k = torch.rand(B, H, N, D) + 2.0
    q, v = k[:, :, :M] + 1e-4 * torch.randn(B, H, M, D), torch.randn(B, H, N, E)
    lonely = k[:, :, :M], v[:, :, :M]  # a key for each query: the log-sum-exp is its score
    mask = Mask(keep=torch.eye(M, dtype=torch.bool))
    options = dict(score="gaussian", bandwidth=bandwidth, mask=mask, backend=backend)
    _, lse = attention(q, *lonely, return_lse=True, **options)
    h = bandwidth.double()
    truth = gaussian(q.double(), lonely[0].double(), h).diagonal(dim1=-2, dim2=-1)
    assert ((lse / truth - 1).abs() <= 4 * ULP).all()
    assert_score("gaussian", backend, [q, k, v], gaussian, bandwidth=bandwidth)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_any_unit_of_length(backend, size):
    """Nothing is squared before it is measured in bandwidths; gradients are per unit of length."""
    tensors, bandwidth = draw(), torch.rand(H, 1, D) + 0.5
    run = ours("gaussian", backend)
    expected = with_grads(run, tensors, torch.float32, bandwidth=bandwidth)
    scaled = [x * size for x in tensors[:2]] + tensors[2:]
    found = with_grads(run, scaled, torch.float32, bandwidth=bandwidth * size)
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x * size if n in (3, 4, 6) else x, y, rtol=1e-4, atol=1e-5)


def test_a_query_too_far_from_every_key_has_none(backend):
    """And no gradient; beside other keys, one that is infinitely far weighs 0."""
    q, k, v = (x[0, 0] for x in draw())
    q[1], k[2] = 1e30, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, score="gaussian", return_lse=True, backend=backend)
    assert not out[1].any()
    assert lse[1] == -math.inf
    grads = torch.autograd.grad(out.sum() + lse[0], leaves)
    assert all(g.isfinite().all() for g in (out, *grads))
    assert not grads[0][1].any()
    assert not any(g[2].any() for g in grads[1:])


@pytest.mark.parametrize("far", [1e3, 1e19, 1e38])
def test_a_softcap_of_a_far_key(backend, far):
    """Its score is -c, without a gradient, however far it is."""
    q, k = torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [far, 0.0]])
    leaves = [x.requires_grad_() for x in (q, k, torch.eye(2), torch.tensor([[1e-2, 1.0]]))]
    out = attention(
        *leaves[:3], score="gaussian", bandwidth=leaves[3], softcap=2.0, backend=backend
    )
    torch.testing.assert_close(out, torch.tensor([[0.0, -2.0]]).softmax(-1))
    for grad in torch.autograd.grad(out[0, 1], [leaves[n] for n in (0, 1, 3)]):
        assert not grad.any()


def summed(backend):
    """A function of all tensors of the score, of which every element has a say."""

    def run(q, k, v, bandwidth):
        results = ours("gaussian", backend)(q, k, v, bandwidth=bandwidth)
        return sum((x * torch.linspace(0.3, 1, x.shape[-1]).to(x)).sum() for x in results)

    return run


def test_gaussian_gradients_of_gradients():
    leaves = [torch.randn(1, 2, n, 2).double().requires_grad_() for n in (2, 3, 3)]
    leaves.append((torch.rand(2, 1, 2).double() + 0.5).requires_grad_())
    assert torch.autograd.gradgradcheck(summed("auto"), leaves)
    first = torch.autograd.grad(summed("eager")(*leaves), leaves, create_graph=True)
    truth = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    single = [x.detach().float().requires_grad_() for x in leaves]
    first = torch.autograd.grad(summed("auto")(*single), single, create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in first), single)
    for x, y in zip(found, truth, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (None, 0, None, 0), (0, None, None, 1)], ids=str)
def test_gaussian_under_vmap(backend, dims):
    tensors = [*draw(), torch.rand(B, H, 1, D) + 0.5]
    mapped = [x if d is None else torch.stack([x, x + 0.1, x * 2], d)
              for x, d in zip(tensors, dims, strict=True)]  # fmt: skip
    gradient = torch.func.grad(summed(backend), argnums=(0, 1, 2, 3))
    found = torch.func.vmap(gradient, dims)(*mapped)
    for n in range(3):
        one = [x if d is None else x.select(d, n) for x, d in zip(mapped, dims, strict=True)]
        for x, y in zip(found, gradient(*one), strict=True):
            torch.testing.assert_close(x[n], y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gaussian_is_compiled():
    leaves = [x.requires_grad_() for x in (*draw(), torch.rand(H, 1, D) + 0.5)]
    compiled = torch.compile(summed("auto"), fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, summed("auto")))
    torch.testing.assert_close(found, expected)


def test_autocast_keeps_points_apart():
    """As torch.cdist: points of half precision would be one."""
    x, y = torch.linspace(1, 1.001, 40)[:, None], torch.randn(40, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(x, x, y.bfloat16(), score="gaussian", bandwidth=1e-4)
    expected = attention(x, x, y.bfloat16().float(), score="gaussian", bandwidth=1e-4)
    assert torch.equal(found, expected)


def test_gaussian_is_kernel_regression():
    """Nadaraya and Watson, 1964: each fitted value is a weighted mean of the y."""
    x, y = torch.linspace(0, 5, 40)[:, None], torch.linspace(0, 5, 40)[:, None].sin()
    fit = attention(x, x, y, score="gaussian", bandwidth=0.2)
    kernel = torch.exp(-(x - x.T).square() / (2 * 0.2**2))
    torch.testing.assert_close(fit, kernel @ y / kernel.sum(1, keepdim=True))


@pytest.mark.parametrize("lead", [(), (2,), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("score", ["cosine", "gaussian", "dot"])
def test_any_number_of_leading_dims(score, lead):
    q, k, v = torch.randn(*lead, M, D), torch.randn(*lead, N, D), torch.randn(*lead, N, E)
    out = attention(q, k, v, score=score)
    flat = [x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v)]
    torch.testing.assert_close(out, attention(*flat, score=score).view(*lead, M, E))
