"""First and second derivatives by finite differences, and everyday requirements of autograd."""

import gc
import weakref

import pytest
import torch
from helpers import SCORES, assert_same_bits, attend, inputs

import fastattn
from fastattn import ALiBi, Mask, RelativeBias, testing

scores = pytest.mark.parametrize("score", SCORES)

FEATURES = {
    "plain": {},
    "causal": dict(mask=Mask(causal="bottom_right")),
    "kv-len-0": dict(mask=Mask(kv_len=torch.tensor([0, 2]))),
    "keep": dict(mask=Mask(keep=torch.tensor([[True, False, True], [False, False, False]]))),
    "bias": dict(bias=(2, 2, 2, 3)),
    "bias-n": dict(bias=(3,)),
    "bias-h": dict(bias=(2, 1, 1)),
    "alibi": dict(bias=(2,), line=ALiBi),
    "relative": dict(bias=(3, 2), line=lambda table: RelativeBias(table, torch.arange(3))),
    "weights": dict(return_weights="full"),
    "weights-mean": dict(return_weights="mean"),
    "dropout": dict(dropout_p=0.4, seed=1, return_weights="full"),
    "gqa": dict(Hkv=1),
}


def leaves(score, name, dtype=torch.float64):
    """(function of leaves -> finite results, leaves) of a small problem with the feature."""
    options = dict(FEATURES[name])
    call = inputs(score, M=2, N=3, D=2, E=2, Hkv=options.pop("Hkv", 2), dtype=dtype, grad=True)
    if "bias" in options:
        call["bias"] = torch.randn(options.pop("bias"), dtype=torch.float64)
        call["bias"] = call["bias"].to(dtype).requires_grad_()
    line = options.pop("line", lambda bias: bias)

    def function(*tensors, backend="auto"):
        named = dict(zip(call, tensors, strict=True))
        named["bias"] = line(named.get("bias"))
        *results, lse = attend(**named, return_lse=True, backend=backend, **options)
        return *results, torch.where(lse.isinf(), 0.0, lse)

    return function, tuple(call.values())


@pytest.mark.parametrize("name", FEATURES)
@scores
def test_gradcheck(score, name):
    assert torch.autograd.gradcheck(*leaves(score, name), check_batched_grad=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
@scores
def test_gradgradcheck(score, name):
    function, tensors = leaves(score, name)
    assert torch.autograd.gradgradcheck(function, tensors, check_batched_grad=True)


@pytest.mark.parametrize("name", FEATURES)
@scores
def test_double_backward_in_float32(backend, score, name):
    """A gradient penalty, as in training code, against the same in float64."""

    def penalty(dtype, backend):
        torch.manual_seed(0)
        function, tensors = leaves(score, name, dtype)
        results = function(*tensors, backend=backend)
        first = torch.autograd.grad(sum(r.sum() for r in results), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    ours, peer = (penalty(torch.float32, name) for name in (backend, "eager"))
    truth = penalty(torch.float64, "eager")
    scale = max(map(testing.largest, truth))  # that of a bias cancels, and its rounding does not
    for n, results in enumerate(zip(ours, peer, truth, strict=True)):
        testing.assert_within_budget(*results, name=f"result {n}", scale=scale)


# ---- which gradients, and of what shape ----


@scores
@pytest.mark.parametrize("alone", ["query", "key", "value", "weight", "bias"])
def test_one_input_alone_may_require_grad(backend, score, alone):
    if alone == "weight" and score == "dot":
        alone = "value"
    call = inputs(score) | {"bias": torch.randn(5, 7)}
    everyone = {name: x.clone().requires_grad_() for name, x in call.items()}
    one = {name: x.clone().requires_grad_(name == alone) for name, x in call.items()}
    for named in (everyone, one):
        attend(**named, backend=backend).square().sum().backward()
    assert torch.equal(one[alone].grad, everyone[alone].grad)
    assert all(x.grad is None for name, x in one.items() if name != alone)


@pytest.mark.parametrize(
    "shape", [(), (7,), (5, 1), (2, 1, 1), (2, 5, 7), (2, 1, 5, 1), (1, 1, 1, 1)]
)
def test_bias_gradient_has_the_shape_of_the_bias(backend, shape):
    bias = torch.randn(shape, requires_grad=True)
    attend(**inputs(), bias=bias, backend=backend).square().sum().backward()
    assert bias.grad.shape == shape
    assert bias.grad.dtype == bias.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_bias_beside_half_inputs_has_a_float32_gradient(backend, dtype):
    bias = torch.randn(5, 7, requires_grad=True)
    call = inputs(dtype=dtype, grad=True)
    attend(**call, bias=bias, backend=backend).float().square().sum().backward()
    assert bias.grad.dtype == torch.float32
    assert call["query"].grad.dtype == dtype


def test_attn_mask_and_bias_both_get_gradients(backend):
    mask, bias = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    attend(**inputs(), attn_mask=mask, bias=bias, backend=backend).square().sum().backward()
    torch.testing.assert_close(mask.grad.sum(0), bias.grad)


def test_weight_without_heads_gets_its_own_shape(backend):
    weight = torch.randn(4, requires_grad=True)
    call = inputs()
    attend(**call, weight=weight, backend=backend).square().sum().backward()
    assert weight.grad.shape == (4,)


@scores
def test_gradients_reach_through_weights_alone(backend, score):
    call = inputs(score, grad=True)
    _, weights = attend(**call, return_weights="full", backend=backend)
    weights.square().sum().backward()
    assert call["query"].grad.abs().max() > 0
    assert (call["value"].grad == 0).all()


@scores
def test_gradients_reach_through_lse_alone(backend, score):
    """The gradient of lse with respect to a bias is the weights."""
    bias = torch.zeros(2, 2, 5, 7, requires_grad=True)
    call = inputs(score)
    _, weights, lse = attend(
        **call, bias=bias, return_weights="full", return_lse=True, backend=backend
    )
    lse.sum().backward()
    torch.testing.assert_close(bias.grad, weights)


@scores
def test_unused_results_change_nothing(backend, score):
    call = inputs(score, grad=True)
    grads = []
    for options in ({}, dict(return_weights="full"), dict(return_lse=True)):
        results = attend(**call, **options, backend=backend)
        out = results[0] if options else results
        grads.append(dict(enumerate(torch.autograd.grad(out.square().sum(), call.values()))))
    # Triton has other tiles for calls that return weights, hence sums in another order.
    same = torch.testing.assert_close if backend == "triton" else assert_same_bits
    same(grads[0], grads[1])
    assert_same_bits(grads[0], grads[2])


@pytest.mark.parametrize("score", ["scaled_dot", "additive", "gaussian"])
def test_autocast_changes_no_derivative(backend, score):
    """The reference formulas, which are differentiated here, compute as they do without it."""
    dtype = torch.float32 if score == "gaussian" else torch.bfloat16
    tensors = [x.to(dtype).requires_grad_() for x in inputs("dot").values()]
    options = dict(score=score, backend=backend)
    if score == "additive":
        options["weight"] = torch.randn(2, 4, dtype=dtype)

    def call(*tensors):
        return fastattn.attention(*tensors, **options)

    def derivatives():
        first = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        plain = tuple(x.detach() for x in tensors)
        return [*second, *torch.func.jvp(call, plain, plain)]

    expected = derivatives()
    with torch.autocast("cpu", torch.bfloat16):
        found = derivatives()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# ---- everyday requirements of autograd ----


def test_backward_twice_through_one_graph(backend):
    call = inputs(grad=True)
    loss = attend(**call, backend=backend).square().sum()
    first = torch.autograd.grad(loss, call.values(), retain_graph=True)
    second = torch.autograd.grad(loss, call.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, call.values())


def test_gradients_accumulate(backend):
    call = inputs(grad=True)
    for _ in range(2):
        attend(**call, backend=backend).sum().backward()
    once = torch.autograd.grad(attend(**call, backend=backend).sum(), call["query"])[0]
    torch.testing.assert_close(call["query"].grad, 2 * once)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_none_is_wanted(backend, mode):
    call = inputs(grad=True)
    with mode():
        assert not attend(**call, backend=backend).requires_grad
    assert not attend(**inputs(), backend=backend).requires_grad


def test_changing_a_saved_tensor_in_place_is_noticed(backend):
    call = inputs(grad=True)
    key = call.pop("key").clone()
    out = attend(key=key, **call, backend=backend)
    with torch.no_grad():
        key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_changing_the_output_in_place_is_noticed(backend):
    """Backward needs the output, so a change of the output must not go unnoticed."""
    call = inputs(grad=True)
    with pytest.raises(RuntimeError, match=r"inplace"):
        attend(**call, backend=backend).mul_(2).sum().backward()
    with torch.no_grad():
        out = attend(**call, backend=backend)
        assert torch.equal(out.clone().mul_(2), out.mul_(2))


def test_the_graph_is_freed_with_the_output(backend):
    call = inputs(grad=True)
    key = call.pop("key").detach().clone().requires_grad_()
    alive = weakref.ref(key)
    out = attend(key=key * 1, **call, backend=backend)
    out.sum().backward()
    del key, out
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("weights", ["full", "mean"])
def test_results_can_be_written(backend, weights):
    call = inputs(grad=True)
    results = attend(**call, return_weights=weights, return_lse=True, backend=backend)
    expected = [x.detach() + 1 for x in results]
    for x in results:
        x.add_(1)
    assert all(map(torch.equal, results, expected))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()  # needs the output as it was


def test_saved_tensor_hooks_see_every_saved_tensor(backend):
    """Activation checkpointing and offloading use these hooks."""
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        call = inputs(grad=True)
        attend(**call, backend=backend).sum().backward()
    shapes = [tuple(x.shape) for x in packed]
    assert {(2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)} <= set(shapes)
    assert (2, 2, 5, 7) not in shapes


def test_checkpointing_gives_the_same_gradients(backend):
    def function(*tensors):
        return attend(*tensors, dropout_p=0.3, seed=5, backend=backend)

    leaves = [x.requires_grad_() for x in inputs("additive").values()]
    kept = function(*leaves)
    recomputed = torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False)
    plain, again = (
        dict(enumerate([out.detach(), *torch.autograd.grad(out.sum(), leaves)]))
        for out in (kept, recomputed)
    )
    assert_same_bits(plain, again)


def drawn_masks():
    """What a call may have beside query, key and value, by the name of the option."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(5, 7, generator=generator) < 0.7
    numbers, sink = torch.randn(5, 7, generator=generator), torch.randn(2, generator=generator)
    ends = torch.tensor([3, 6], dtype=torch.int32)
    return {
        "bool": dict(attn_mask=keep), "float": dict(attn_mask=numbers), "bias": dict(bias=numbers),
        "limits": dict(mask=Mask(kv_len=ends)), "sink": dict(sink=sink),
        "seed": dict(dropout_p=0.3, seed=torch.tensor([7])),
    }  # fmt: skip


@pytest.mark.parametrize("name", drawn_masks())
def test_masks_from_inference_mode_train(backend, name):
    """Those of a frozen part of a model. Repeated, as later calls go other ways."""
    with torch.inference_mode():
        frozen = drawn_masks()[name]
    call = inputs(grad=True)
    found, want = (
        [
            torch.autograd.grad(attend(**call, **options, backend=backend).sum(), call.values())
            for _ in range(4)
        ]
        for options in (frozen, drawn_masks()[name])
    )
    for grads, expected in zip(found, want, strict=True):
        assert_same_bits(*(dict(zip(call, g, strict=True)) for g in (grads, expected)))


class Endless(torch.autograd.Function):
    """Hands a tensor on, and gives it no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_no_gradient_gives_none(backend):
    """Repeated, as later calls go other ways."""
    for _ in range(4):
        call = inputs(grad=True)
        query = call["query"]
        (Endless.apply(attend(**call, backend=backend)).sum() + query.sum()).backward()
        assert torch.equal(query.grad, torch.ones_like(query))
        assert call["key"].grad is call["value"].grad is None
