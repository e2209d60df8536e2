"""HardAttention: which key it picks, how often, and the gradients of its two substitutes."""

import copy

import pytest
import torch
from helpers import assert_module_close
from plain import plain_scores

from fastattn import HardAttention

B, M, N, DQ, DV = 3, 5, 11, 8, 6


@pytest.fixture(params=["dot", "general", "concat"])
def module(request):
    return HardAttention(DQ, method=request.param)


@pytest.fixture
def tensors():
    return [torch.randn(s) for s in ((B, M, DQ), (B, N, DQ), (B, N, DV))]


def plain(module, queries, keys, values, index=None):
    """(picked value, log of its probability, probabilities); index None picks the largest.

    The picked value has the straight-through gradient.
    """
    p = plain_scores(module, queries, keys).softmax(-1)
    index = p.argmax(-1) if index is None else index
    one_hot = torch.nn.functional.one_hot(index, keys.shape[1]).to(p.dtype)
    hard = one_hot @ values
    soft = p @ values.detach()
    log_prob = p.gather(-1, index[..., None]).squeeze(-1).log()
    output = hard + soft - soft.detach() if module.training else hard
    return output, log_prob, p


def test_evaluation(module, tensors):
    module.eval()
    choice = module(*tensors, return_choice=True)
    expected = plain(module, *tensors)
    assert torch.equal(choice.indices, expected[2].argmax(-1))
    assert torch.equal(choice.output, module(*tensors))
    assert torch.equal(
        choice.output, tensors[2].gather(1, choice.indices[..., None].expand(-1, -1, DV))
    )
    assert_module_close(_Differentiable(module), _unwrapped(plain), tensors)


class _Differentiable(torch.nn.Module):
    """Returns all results except the index."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *tensors):
        torch.manual_seed(3)  # draws the same keys each time
        choice = self.inner(*tensors, return_choice=True)
        return choice.output, choice.log_prob, choice.probabilities


def _unwrapped(formula, **options):
    return lambda module, *tensors: formula(module.inner, *tensors, **options)


def test_training(module, tensors):
    """Straight-through output, log-probability and probabilities, with their gradients."""
    wrapped = _Differentiable(module)
    torch.manual_seed(3)
    index = module(*tensors, return_choice=True).indices
    assert (index != plain(module, *tensors)[2].argmax(-1)).any()
    assert_module_close(wrapped, _unwrapped(plain, index=index), tensors)


@pytest.mark.parametrize("training", [False, True])
def test_forward_mode(module, tensors, training):
    """The transpose of backward: of jvp, and of jacfwd, whose tangents are mapped."""
    wrapped = _Differentiable(module.train(training))
    tangents = tuple(torch.randn_like(x) for x in tensors)
    found, moved = torch.func.jvp(wrapped, tuple(tensors), tangents)
    expected, pull = torch.func.vjp(wrapped, *tensors)
    torch.testing.assert_close(found, expected)
    upstream = tuple(torch.randn_like(x) for x in expected)
    ours, theirs = (
        sum((x * y).sum() for x, y in zip(xs, ys, strict=True))
        for xs, ys in ((moved, upstream), (tangents, pull(upstream)))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def of_queries(x):
        return wrapped(x, *tensors[1:])[0][0]

    jacobian = torch.func.jacfwd(of_queries, randomness="same")(tensors[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(of_queries)(tensors[0]))
    tangent = tangents[0]

    def along(x):
        return torch.func.jvp(of_queries, (x,), (tangent,))[1]

    nested = torch.func.jvp(along, (tensors[0],), (tangent,))[1]
    _, pull = torch.func.vjp(along, tensors[0])
    upstream = torch.randn_like(nested)
    ours, theirs = (nested * upstream).sum(), (tangent * pull(upstream)[0]).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_follow_the_probabilities(dtype):
    """Chi-square over 20000 draws of one distribution."""
    module = HardAttention(DQ, method="dot").to(dtype)
    query, keys = torch.randn(1, 1, DQ).to(dtype), torch.randn(1, 6, DQ).to(dtype)
    count = 20000
    choice = module(query.expand(1, count, -1), keys, return_choice=True)
    found = torch.bincount(choice.indices[0], minlength=6).double()
    expected = choice.probabilities[0, 0].double() * count
    assert ((found - expected) ** 2 / expected).sum() < 25.7  # 99.99%, 5 degrees of freedom


def test_draws_among_many_keys_in_float16():
    """Draws of float16 are 0 or its smallest numbers where the largest should win."""
    module, count = HardAttention(DQ, method="dot").half(), 2**16
    queries, keys = (torch.zeros(1, n, DQ).half() for n in (64, count))
    indices = module(queries, keys, return_choice=True).indices
    assert 0.3 < indices.double().mean() / count < 0.7  # 5 standard deviations of 64 draws


def test_a_draw_of_0_picks_no_masked_key(module, tensors, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", torch.Tensor.zero_)
    lens = torch.full((B,), 3)
    assert (module(*tensors, valid_lens=lens, return_choice=True).indices < 3).all()


def test_reinforce_gradient_is_the_expected_one():
    """The mean of reward * grad log p is the gradient of the expected reward: 100 runs, 5 sigma."""
    module, runs, count = HardAttention(4, method="dot"), 100, 400
    queries = torch.randn(1, 1, 4).expand(runs, 1, 4).clone().requires_grad_()
    keys, rewards = torch.randn(1, 3, 4).expand(runs, 3, 4), torch.tensor([1.0, -2.0, 0.5])
    values = rewards[None, :, None].expand(runs, 3, 1)
    choice = module(queries.expand(runs, count, 4), keys, values, return_choice=True)
    loss = (choice.output.detach().squeeze(-1) * choice.log_prob).mean(1).sum()
    (found,) = torch.autograd.grad(loss, queries, retain_graph=True)
    expected_reward = (choice.probabilities[0, 0] * rewards).sum()
    (expected,) = torch.autograd.grad(expected_reward, queries)
    mean, sigma = found.mean(0), found.std(0) / runs**0.5
    assert ((mean - expected[0]).abs() < 5 * sigma).all()
    assert (expected[0].abs() > 10 * sigma).any()  # so that a wrong gradient would show


@pytest.mark.parametrize("training", [False, True])
def test_masks_and_empty_rows(module, tensors, training):
    module.train(training)
    lens = torch.tensor([N, 0, 4])
    keep = torch.rand(B, M, N) < 0.5
    keep[0, 1] = False
    tensors[2][2, 4:] = tensors[1][2, 4:] = torch.nan
    leaves = [x.requires_grad_() for x in tensors]
    choice = module(*leaves, lens, attn_mask=keep, return_choice=True)
    kept = keep & (torch.arange(N) < lens[:, None, None])
    empty = ~kept.any(-1)
    picked = kept.gather(-1, choice.indices[..., None]).squeeze(-1)
    assert (picked | empty).all()
    for result in (choice.output, choice.log_prob, choice.probabilities, choice.indices):
        assert not result[empty].any()
    total = choice.output.sum() + choice.log_prob.sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, leaves, allow_unused=True))


@pytest.mark.parametrize("training", [False, True])
def test_no_keys(module, training):
    module.train(training)
    leaves = [torch.randn(s).requires_grad_() for s in ((B, M, DQ), (B, 0, DQ), (B, 0, DV))]
    choice = module(*leaves, return_choice=True)
    assert choice.output.shape == (B, M, DV)
    assert choice.probabilities.shape == (B, M, 0)
    assert not choice.output.any()
    assert not choice.log_prob.any()
    grads = torch.autograd.grad(choice.output.sum(), leaves, allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


@pytest.mark.parametrize("training", [False, True])
def test_nan_reaches_its_row(module, tensors, training):
    module.train(training)
    tensors[0][1, 2] = torch.nan
    rows = module(*tensors).isnan().any(-1)
    assert rows.sum() == 1
    assert rows[1, 2]


def test_autocast(module, tensors):
    leaves = [x.requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        choice = module(*leaves, return_choice=True)
    assert choice.probabilities.dtype == torch.bfloat16
    grads = torch.autograd.grad(choice.output.sum() + choice.log_prob.sum(), leaves)
    assert all(g.isfinite().all() and g.any() for g in grads)


def test_values_default_to_keys_and_cache(module, tensors):
    module.eval()
    queries, keys, values = tensors
    assert torch.equal(module(queries, keys), module(queries, keys, keys))
    cache = module.project_keys(keys)
    expected = module(queries, keys, values, return_choice=True)
    for i, q in enumerate(queries.unbind(1)):
        step = module(q, None, values, cache=cache, return_choice=True)
        for found, all_steps in zip(step, expected, strict=True):
            torch.testing.assert_close(found, all_steps[:, i])


@pytest.mark.slow
def test_tools(tensors):
    module = HardAttention(DQ, method="general").eval()
    expected = module(*tensors)
    assert torch.equal(copy.deepcopy(module)(*tensors), expected)
    other = HardAttention(DQ, method="general").eval()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(*tensors), expected)
    module.train()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in tensors]
    choice = compiled(*leaves, return_choice=True)
    expected = plain(module, *leaves, index=choice.indices)[0]
    torch.testing.assert_close(choice.output, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x.square().sum(), leaves) for x in (choice.output, expected))
    )
    with pytest.raises(ValueError, match="one of dot"):
        HardAttention(DQ, method="hard")


def test_what_is_no_tensor(module, tensors):
    queries, keys, values = tensors
    with pytest.raises(TypeError, match="values: expected a Tensor, got ndarray"):
        module(queries, keys, values.numpy())
    with pytest.raises(TypeError, match="keys: expected a Tensor, got ndarray"):
        module(queries, keys.numpy())
