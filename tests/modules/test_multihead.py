"""MultiheadAttention against nn.MultiheadAttention: outputs, weights and every gradient."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from fastattn import MultiheadAttention, testing

B, H, M, N, E = 3, 4, 7, 11, 16

FACTORS = {
    "dtype": ["f32", "f64", "bf16", "f16"],
    "layout": ["seq_first", "batch_first", "unbatched"],
    "inputs": ["self", "cross", "qk", "kv"],
    "dims": ["same", "kdim_vdim"],
    "bias": [True, False],
    "bias_kv": [False, True],
    "zero_attn": [False, True],
    "pairs": ["none", "bool2", "bool3", "float2", "float3"],
    "padding": ["none", "bool", "float", "float_inf"],
    "weights": ["none", "mean", "full"],
}
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


def pairwise(factors: dict[str, list]) -> list[dict]:
    """Cases in which any two values of different factors occur together; always the same cases."""
    rng = random.Random(0)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    cases = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        tries = [{n: rng.choice(v) for n, v in factors.items()} | {a: x, b: y} for _ in range(60)]
        best = max(tries, key=lambda case: len(missing & pairs(case)))
        missing -= pairs(best)
        cases.append(best)
    return cases


def case_id(case: dict) -> str:
    return "-".join(f"{k}={v}" if isinstance(v, bool) else v for k, v in case.items())


def make_module(case: dict) -> nn.MultiheadAttention:
    """A module in float64, with nonzero biases."""
    torch.manual_seed(1)
    kdim, vdim = (E, E) if case["dims"] == "same" else (10, 12)
    module = nn.MultiheadAttention(
        E, H, bias=case["bias"], add_bias_kv=case["bias_kv"], add_zero_attn=case["zero_attn"],
        kdim=kdim, vdim=vdim, batch_first=case["layout"] == "batch_first", dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.4)
    return module


def make_inputs(case: dict) -> dict[str, torch.Tensor]:
    """The tensors of a call in float64. The masks keep a key in every row."""
    g = torch.Generator().manual_seed(2)
    unbatched = case["layout"] == "unbatched"
    alone = case["inputs"] == "self"
    n = M if alone else N

    def sequence(length, dim):
        shape = (length, B, dim)
        if case["layout"] == "batch_first":
            shape = (B, length, dim)
        return torch.randn(*((length, dim) if unbatched else shape), generator=g).double()

    kdim, vdim = (E, E) if case["dims"] == "same" else (10, 12)
    leaves = {"query": sequence(M, E), "key": sequence(n, kdim), "value": sequence(n, vdim)}
    kind = case["pairs"]
    shape = (M, n) if kind[-1] == "2" else (H if unbatched else B * H, M, n)
    if kind.startswith("bool"):
        drop = torch.rand(shape, generator=g) < 0.4
        drop[..., 0] = False
        leaves["attn_mask"] = drop
    elif kind.startswith("float"):
        bias = torch.randn(shape, generator=g).double()
        bias[..., 1::3] = -torch.inf
        leaves["attn_mask"] = bias
    shape = (n,) if unbatched else (B, n)
    if case["padding"] == "bool":
        leaves["key_padding_mask"] = torch.arange(n).expand(shape) >= n - 3
    elif case["padding"] == "float":
        leaves["key_padding_mask"] = torch.randn(shape, generator=g).double()
    elif case["padding"] == "float_inf":
        leaves["key_padding_mask"] = (
            torch.zeros(shape).double().index_fill(-1, torch.tensor([n - 1]), -torch.inf)
        )
    return leaves


def share_inputs(case: dict, args: dict) -> dict:
    """Makes query, key and value the same objects for such cases, if their shapes allow it."""
    same = case["dims"] == "same"
    if case["inputs"] == "self" and same:
        args["key"] = args["value"] = args["query"]
    elif case["inputs"] == "kv" and same:
        args["value"] = args["key"]
    elif case["inputs"] == "qk" and same:
        args["key"] = args["query"]
        args["value"] = args["query"] * 0.5
        for name in ("attn_mask", "key_padding_mask"):  # their N is that of the previous key
            if name in args:
                args[name] = args[name][..., :M]
    return args


def results(module: nn.Module, case: dict, leaves: dict, dtype: torch.dtype) -> dict:
    """Output, weights and all gradients of a random linear function of both."""
    module = copy.deepcopy(module).to(dtype)
    args = {
        k: t.clone() if t.dtype == torch.bool else t.clone().to(dtype).requires_grad_()
        for k, t in leaves.items()
    }
    need = case["weights"] != "none"
    call = share_inputs(case, dict(args))
    out, weights = module(**call, need_weights=need, average_attn_weights=case["weights"] == "mean")
    g = torch.Generator().manual_seed(3)
    loss = (out * torch.randn(out.shape, generator=g).to(dtype)).sum()
    found = {"out": out}
    if need:
        loss = loss + (weights * torch.randn(weights.shape, generator=g).to(dtype)).sum()
        found["weights"] = weights
    assert (weights is not None) == need
    loss.backward()
    found |= {f"grad {k}": t.grad for k, t in args.items() if t.grad is not None}
    found |= {f"grad {k}": p.grad for k, p in module.named_parameters()}
    return found


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("case", pairwise(FACTORS), ids=case_id)
def test_same_as_torch(case):
    peer = make_module(case)
    ours = MultiheadAttention(
        E, H, bias=case["bias"], add_bias_kv=case["bias_kv"], add_zero_attn=case["zero_attn"],
        kdim=peer.kdim, vdim=peer.vdim, batch_first=peer.batch_first, dtype=torch.float64,
    )  # fmt: skip
    ours.load_state_dict(peer.state_dict())
    leaves = make_inputs(case)
    dtype = DTYPES[case["dtype"]]
    exact = results(peer, case, leaves, torch.float64)
    theirs = results(peer, case, leaves, dtype)
    if dtype == torch.float64:  # plain PyTorch is the truth; float32 scales its error
        single = results(peer, case, leaves, torch.float32)
        theirs = {n: x + (single[n].double() - x) * 2.0**-29 for n, x in exact.items()}
    found = results(ours, case, leaves, dtype)
    assert found.keys() == theirs.keys()
    for name, value in found.items():
        assert value.dtype == theirs[name].dtype
        testing.assert_within_budget(value, theirs[name], exact[name], name)


@pytest.mark.parametrize("need_weights", [False, True])
def test_twice_differentiable(need_weights):
    torch.manual_seed(0)
    module = MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def run(x, bias):
        out, weights = module(x, x, x, attn_mask=bias, need_weights=need_weights)
        return (out, weights) if need_weights else out

    assert torch.autograd.gradgradcheck(run, (x, bias))


def test_functional_transforms():
    """Per-sample gradients by vmap(grad) over functional_call agree with a loop."""
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, batch_first=True)
    params = dict(module.named_parameters())
    x = torch.randn(4, 5, 8)
    padding = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 1])[:, None]

    def loss(params, x, padding):
        args = (x[None], x[None], x[None], torch.where(padding[None], -torch.inf, 0.0))
        return torch.func.functional_call(module, params, args)[0].square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, padding)
    for i in range(len(x)):
        alone = torch.func.grad(loss)(params, x[i], padding[i])
        for name, value in alone.items():
            torch.testing.assert_close(grads[name][i], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("m", "n", "b"), [(3, 0, 2), (0, 3, 2), (0, 0, 2), (3, 4, 0)])
def test_sizes_of_zero(m, n, b, need_weights):
    torch.manual_seed(0)
    peer = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(peer.out_proj.bias)
    ours = MultiheadAttention(8, 2, batch_first=True)
    ours.load_state_dict(peer.state_dict())
    query, key = torch.randn(b, m, 8, requires_grad=True), torch.randn(b, n, 8)
    out, weights = ours(query, key, key, need_weights=need_weights)
    expected, their_weights = peer(query, key, key, need_weights=need_weights)
    torch.testing.assert_close(out, expected)
    assert out.shape == (b, m, 8)
    if need_weights:
        assert weights.shape == their_weights.shape
    out.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast(need_weights, mask_dtype):
    torch.manual_seed(0)
    module = MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True)
    x = torch.randn(2, 6, 16, requires_grad=True)
    bias = torch.randn(6, 6).to(mask_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = module(x, x, x, attn_mask=bias, need_weights=need_weights)
    assert out.dtype == torch.bfloat16
    assert weights is None or weights.dtype == torch.bfloat16
    expected, _ = module(x, x, x, attn_mask=bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert x.grad.dtype == torch.float32


class TestDropout:
    def test_weights_are_those_that_multiplied_the_values(self):
        torch.manual_seed(0)
        module = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        x = torch.randn(2, 64, 8)
        out, weights = module(x, x, x, average_attn_weights=False)
        assert 0.4 < (weights == 0).float().mean() < 0.6
        v = (x @ module.in_proj_weight[16:].T).unflatten(-1, (2, 4)).transpose(1, 2)
        expected = module.out_proj((weights @ v).transpose(1, 2).flatten(-2))
        torch.testing.assert_close(out, expected)

    def test_keeps_the_mean(self):
        torch.manual_seed(0)
        module = MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        x = torch.randn(1, 5, 8).expand(2000, 5, 8)
        mean = module(x, x, x)[1].mean(0)
        torch.testing.assert_close(mean, module.eval()(x, x, x)[1][0], atol=0.03, rtol=0)

    def test_off_in_eval_and_total_at_one(self):
        torch.manual_seed(0)
        module = MultiheadAttention(8, 2, dropout=1.0)
        nn.init.normal_(module.out_proj.bias)
        x = torch.randn(5, 2, 8, requires_grad=True)
        for need_weights in (False, True):
            out, _ = module(x, x, x, need_weights=need_weights)
            torch.testing.assert_close(out, module.out_proj.bias.expand(5, 2, 8))
            out.sum().backward()
            assert torch.equal(x.grad, torch.zeros_like(x))
        assert not torch.allclose(module.eval()(x, x, x)[0], out)

    def test_seeded_by_torch(self):
        module = MultiheadAttention(8, 2, dropout=0.5)
        x = torch.randn(5, 2, 8)
        runs = []
        for _ in range(2):
            torch.manual_seed(7)
            runs.append(module(x, x, x)[0])
        assert torch.equal(*runs)
        assert not torch.equal(runs[0], module(x, x, x)[0])
