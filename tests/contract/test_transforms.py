"""torch.func: grad, vmap over every argument, their compositions; forward mode raises."""

import pytest
import torch
from helpers import SCORES, assert_close, attend, inputs
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastattn import Mask

S, B, H, M, N, D, E = 3, 2, 2, 5, 7, 4, 3
scores = pytest.mark.parametrize("score", SCORES)


def tensors(score, dtype, mapped=()):
    """The inputs and every tensor option; those in `mapped` have a leading dim of S."""
    torch.manual_seed(0)
    drawn = inputs(score, S, H, M=M, N=N, D=D, E=E)
    shapes = {name: tuple(x.shape[1:]) for name, x in drawn.items() if name != "weight"}
    shapes = {name: (B, *shape) for name, shape in shapes.items()}
    if score == "additive":
        shapes["weight"] = (H, D)
    shapes |= {"bias": (H, M, N), "kv_len": (B,), "keep": (B, 1, M, N), "kv_begin": (1, M)}
    made = {}
    for name, shape in shapes.items():
        shape = (S, *shape) if name in mapped else shape
        if name in ("kv_len", "kv_begin"):
            made[name] = torch.randint(0, N + 1, shape)
        elif name == "keep":
            made[name] = torch.rand(shape) < 0.7
        else:
            made[name] = torch.randn(shape, dtype=torch.float64).to(dtype)
    return made


def function(names, backend, **options):
    """A function of the named tensors that returns its finite float results."""

    def call(*args):
        named = dict(zip(names, args, strict=True))
        masks = {name: named.pop(name, None) for name in ("kv_len", "keep", "kv_begin")}
        mask = Mask(**masks)
        out, weights, lse = attend(
            **named, mask=mask, return_weights="full", return_lse=True, backend=backend, **options
        )
        return out, weights, torch.where(lse.isinf(), 0.0, lse)

    return call


def by_loop(call, in_dims):
    def looped(*args):
        rows = []
        for s in range(S):
            picked = [
                x if dim is None else x.select(dim, s) for x, dim in zip(args, in_dims, strict=True)
            ]
            rows.append(call(*picked))
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return looped


def assert_vmap(transform, score, mapped, backend, in_dim=0, **options):
    """vmap(transform(f)) meets the error budget of a loop over transform(f)."""

    def run(how, backend, dtype):
        made = tensors(score, dtype, mapped)
        in_dims = tuple(in_dim if name in mapped else None for name in made)
        args = [
            x.movedim(0, in_dim) if d else x for x, d in zip(made.values(), in_dims, strict=True)
        ]
        return how(transform(function(list(made), backend, **options)), in_dims)(*args)

    ours, looped = (run(how, backend, torch.float32) for how in (vmap, by_loop))
    assert_close(ours, looped, run(by_loop, "eager", torch.float64))


def identity(call):
    return call


def gradients(call):
    """All gradients of `call`, for a fixed nonlinear function of its results."""

    def of(*args):
        floats = [n for n, x in enumerate(args) if x.is_floating_point()]

        def loss(*leaves):
            full = list(args)
            for n, leaf in zip(floats, leaves, strict=True):
                full[n] = leaf
            return sum(r.square().sum() for r in call(*full))

        return grad(loss, argnums=tuple(range(len(floats))))(*[args[n] for n in floats])

    return of


ARGUMENTS = ["query", "key", "value", "weight", "bias", "kv_len", "keep", "kv_begin"]
transforms = pytest.mark.parametrize("transform", [identity, gradients], ids=["out", "grad"])
arguments = [(s, a) for s in SCORES for a in ARGUMENTS if (s, a) != ("dot", "weight")]


@pytest.mark.parametrize(("score", "argument"), arguments)
@transforms
def test_vmap_over_one_argument(backend, score, argument, transform):
    assert_vmap(transform, score, (argument,), backend)


def twice(call):
    """The gradients of a norm of the gradients."""
    return gradients(gradients(call))


@scores
@pytest.mark.parametrize("transform", [identity, gradients, twice])
def test_vmap_over_everything(backend, score, transform):
    mapped = ("query", "key", "value", "bias", "kv_len", "keep", "kv_begin")
    assert_vmap(transform, score, mapped, backend)


@scores
@transforms
def test_vmap_over_another_dim(backend, score, transform):
    assert_vmap(transform, score, ("query", "value", "bias"), backend, in_dim=1)


@scores
@transforms
def test_vmap_with_dropout_of_a_fixed_seed(backend, score, transform):
    """Each sample drops the same weights as a call for it alone."""
    assert_vmap(transform, score, ("query", "bias"), backend, dropout_p=0.4, seed=11)


@scores
def test_vmap_of_vmap(backend, score):
    call = function(["query", "key", "value"] + ["weight"] * (score == "additive"), backend)
    made = {
        n: x
        for n, x in tensors(score, torch.float32).items()
        if n not in ("bias", "kv_len", "keep", "kv_begin")
    }
    query = torch.randn(2, 3, *made["query"].shape)
    rest = list(made.values())[1:]
    nested = vmap(vmap(lambda q: call(q, *rest)))(query)
    for a, b in [(0, 0), (1, 2)]:
        for mine, theirs in zip(nested, call(query[a, b], *rest), strict=True):
            torch.testing.assert_close(mine[a, b], theirs)


def test_vmap_with_mean_weights(backend):
    q = torch.randn(S, B, H, M, D)
    kv = torch.randn(B, H, N, D)

    def call(q):
        return attend(q, kv, kv, return_weights="mean", backend=backend)[1]

    mapped = vmap(call)(q)
    assert mapped.shape == (S, B, M, N)
    torch.testing.assert_close(mapped, torch.stack([call(x) for x in q]))


def test_vmap_over_unbatched_inputs(backend):
    q, k, v = torch.randn(S, M, D), torch.randn(S, N, D), torch.randn(S, N, E)
    mapped = vmap(lambda *x: attend(*x, backend=backend))(q, k, v)
    torch.testing.assert_close(mapped, attend(q[:, None], k[:, None], v[:, None])[:, 0])


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap_randomness_is_honoured(backend, randomness):
    q = torch.randn(1, B, H, M, D).expand(S, -1, -1, -1, -1)
    call = vmap(lambda x: attend(x, x, x, dropout_p=0.5, backend=backend), randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            call(q)
        return
    out = call(q)
    same = [torch.equal(out[0], out[s]) for s in range(1, S)]
    assert all(same) if randomness == "same" else not any(same)


# ---- derivatives ----


def small(score, dtype=torch.float64, backend="auto"):
    """A function of one query, and that query."""
    made = inputs(score, 1, 1, M=2, N=3, D=2, E=2, dtype=dtype)
    q = made.pop("query")
    return lambda x: attend(x, **made, backend=backend), q


@scores
def test_func_grad_is_autograd(backend, score):
    made = inputs(score)

    def loss(*args, backend=backend):
        return attend(*args, backend=backend).square().sum()

    args = list(made.values())
    ours = grad(loss, argnums=tuple(range(len(args))))(*args)
    leaves = [x.requires_grad_() for x in args]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@scores
def test_jacobian_by_vjp_is_autograds(score):
    call, q = small(score)
    expected = torch.autograd.functional.jacobian(call, q)
    torch.testing.assert_close(jacrev(call)(q), expected)
    _, pull = vjp(call, q)
    torch.testing.assert_close(pull(torch.ones_like(q))[0], expected.sum((0, 1, 2, 3)))


@scores
def test_hessian_by_reverse_over_reverse(score):
    call, q = small(score)

    def loss(x):
        return call(x).sin().sum()

    expected = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(jacrev(jacrev(loss))(q), expected)
    assert expected.abs().max() > 0


@scores
def test_gradient_of_a_gradient_norm(backend, score):
    def penalty(backend, dtype):
        torch.manual_seed(0)
        made = inputs(score, dtype=dtype)
        q = made.pop("query")

        def loss(x):
            return attend(x, **made, backend=backend).sin().sum()

        return (grad(lambda x: grad(loss)(x).square().sum())(q),)

    f32, f64 = torch.float32, torch.float64
    assert_close(penalty(backend, f32), penalty("eager", f32), penalty("eager", f64))


@scores
def test_per_sample_gradients_of_a_shared_weight(backend, score):
    """vmap(grad) with mapped data and shared parameters, as in differential privacy."""
    projection = torch.randn(D, D)
    made = inputs(score, S, H, M=M, N=N, D=D, E=E)
    samples = [made["query"], made["key"], made["value"]]
    extra = [made["weight"]] if score == "additive" else []

    def loss(projection, q, k, v):
        heads = [x[None] for x in (q @ projection, k @ projection, v)]
        return attend(*heads, *extra, backend=backend).square().sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0))(projection, *samples)
    together = grad(lambda p: sum(loss(p, *(x[s] for x in samples)) for s in range(S)))(projection)
    torch.testing.assert_close(per_sample.sum(0), together)


# ---- forward mode ----


def results(backend, made):
    """All three results of a masked call with a bias."""
    options = dict(is_causal=True, return_weights="full", return_lse=True, backend=backend)
    return attend(**made, **options)


def moved(score, backend, dtype):
    """The tangents of (out, weights, lse), all inputs moving at once."""
    torch.manual_seed(1)
    made = inputs(score, dtype=dtype) | {"bias": torch.randn(M, N).to(dtype)}
    tangents = {name: torch.randn(x.shape).to(dtype) for name, x in made.items()}
    return jvp(lambda made: results(backend, made), (made,), (tangents,))[1]


@scores
def test_jvp(backend, score):
    f32, f64 = torch.float32, torch.float64
    found, plain = moved(score, backend, f32), moved(score, "eager", f32)
    truth = moved(score, "eager", f64)
    assert_close(found, plain, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@scores
def test_tangents_have_the_dtypes_of_results(backend, score, dtype):
    made = inputs(score, dtype=dtype)

    def call(made):
        return results(backend, made)

    def gradients(made):
        return grad(lambda made: sum(x.float().sum() for x in call(made)))(made)

    for function in (call, gradients):
        both = map(tree_leaves, jvp(function, (made,), (made,)))
        for value, tangent in zip(*both, strict=True):
            assert value.dtype == tangent.dtype


@scores
def test_jacobians_of_both_modes_are_equal(backend, score):
    call, q = small(score, torch.float32, backend)
    torch.testing.assert_close(jacfwd(call)(q), jacrev(call)(q))


@scores
def test_hessian_is_forward_over_reverse(backend, score):
    call, q = small(score, torch.float32, backend)

    def loss(x):
        return call(x).square().sum()

    torch.testing.assert_close(hessian(loss)(q), jacrev(jacrev(loss))(q))


@scores
def test_forward_over_forward(backend, score):
    call, q = small(score, torch.float32, backend)

    def loss(x):
        return call(x).square().sum()

    torch.testing.assert_close(jacfwd(jacfwd(loss))(q), jacrev(jacrev(loss))(q))


@scores
def test_dual_numbers(backend, score):
    call, q = small(score, torch.float32, backend)
    tangent = torch.randn_like(q)
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        found = forward.unpack_dual(call(forward.make_dual(q, tangent))).tangent
    torch.testing.assert_close(found, jvp(call, (q,), (tangent,))[1])


def test_torch_function_modes_pass_through(backend):
    """Tools that watch calls (profilers, device contexts) see ordinary tensors."""

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    made = inputs()
    plain = attend(**made, backend=backend)
    with Watch():
        assert torch.equal(attend(**made, backend=backend), plain)
