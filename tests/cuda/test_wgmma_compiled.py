"""Which backend compiled code takes on Hopper: known when it is traced, and no guard asks."""

import types

import host_build
import pytest
import shim_backend
import torch
from hopper import CPU, EAGER, found_right, heads, products
from torch._dynamo.backends.common import aot_autograd

from fastattn import scaled_dot_product_attention
from fastattn.backends import cuda, health, registry, wgmma

pytestmark = [
    pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU has a Triton, and counts no products"),
    pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler"),
]


def test_compiled_code_knows_that_a_named_path_is_wrong(triton, monkeypatch):
    health.keep(wgmma.CHECK, CPU, "its error is 7 times")
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    monkeypatch.setattr(registry, "BACKENDS", {"cuda": cuda, "eager": EAGER})
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    q, before = heads(), products()
    compiled(q, q, q)
    assert products() == before


@pytest.mark.parametrize("named", ["", "wgmma"])
@pytest.mark.parametrize("right", [False, True])
def test_compiled_code_chooses_without_a_break(triton, monkeypatch, named, right):
    """It takes the path where another process found it right, whatever this one did before."""
    if right:
        found_right()
        health.forget()
    monkeypatch.setenv("FASTATTN_CUDA_PATH", named)
    monkeypatch.setattr(registry, "BACKENDS", {"cuda": cuda, "eager": EAGER})
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    q = heads()
    before = products()
    compiled(q, q, q)
    assert (products() > before) == (right or named == "wgmma")


# ---- beside Triton ----


@pytest.fixture
def beside_triton(triton, monkeypatch):
    """Triton's fake counts no calls, which cannot be traced."""
    fake = types.SimpleNamespace(unsupported=lambda p: [], forward=EAGER.forward)
    fake.backward = EAGER.backward
    monkeypatch.setattr(registry, "BACKENDS", registry.BACKENDS | {"triton": fake})
    found_right()


class Compiled:
    """``scaled_dot_product_attention``, compiled; counts how often."""

    def __init__(self, **options):
        torch._dynamo.reset()
        self.graphs = 0
        self.call = torch.compile(
            lambda *tensors, **masks: scaled_dot_product_attention(*tensors, **masks),
            backend=self.build, fullgraph=True, **options,
        )  # fmt: skip

    def build(self, graph, inputs):
        self.graphs += 1
        return aot_autograd(fw_compiler=lambda graph, _: graph)(graph, inputs)


def tokens(M, H=2, D=64, grad=True):
    """Heads of a projection: rows of one token lie one behind the other."""
    return torch.randn(1, M, H, D).half().requires_grad_(grad).transpose(1, 2)


def used(function, *args, **options):
    before = products()
    found = function(*args, **options)
    return found, products() - before


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_takes_it_where_it_was_found_right(beside_triton, dynamic):
    compiled = Compiled(dynamic=dynamic)
    graphs = []
    for M in (40, 50, 33):
        q, k, v = (tokens(M) for _ in range(3))
        out, forward = used(compiled.call, q, k, v, is_causal=True)
        grads, backward = used(torch.autograd.grad, out, (q, k, v), torch.ones_like(out))
        assert forward > 0
        assert backward > 0
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, backend="cuda")
        assert torch.equal(out, expected)
        for ours, theirs in zip(
            grads, torch.autograd.grad(expected, (q, k, v), torch.ones_like(out)), strict=True
        ):
            assert torch.equal(ours, theirs)
        graphs.append(compiled.graphs)
    assert len(set(graphs)) == (1 if dynamic else 3)  # no guard asks for the sizes


OTHERS = {
    "a softcap, whose gradients it has not": dict(softcap=2.0),
    "a bias": dict(attn_mask=torch.zeros(40, 40).half()),
    "another dtype": dict(dtype=torch.float32),
    "few queries": dict(M=16),
    "rows that begin at any even address": dict(odd=True),
    "large heads": dict(D=256),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_stays_with_triton(beside_triton, what):
    health.keep(health.Check("triton", "dot", "float32", ""), CPU, None)
    health.keep(health.Check("triton", "dot", "float16", ""), CPU, None)
    options = dict(OTHERS[what])
    q = tokens(options.pop("M", 40), D=options.pop("D", 64)).to(options.pop("dtype", None))
    k = tokens(40, D=q.shape[3]).to(q.dtype)
    if options.pop("odd", False):
        k = torch.randn(1, 2, 40, 65).half()[..., :64]
    _, taken = used(Compiled().call, q, k, k, **options)
    assert taken == 0


def test_returned_weights_take_it_with_a_gradient_alone(beside_triton):
    health.keep(health.Check("triton", "dot", "float16", ""), CPU, None)
    compiled, options = Compiled(), dict(return_weights="mean")
    for grad in False, True:
        q = tokens(40, grad=grad)
        assert (used(compiled.call, q, q, q, **options)[1] > 0) == grad
    with torch.no_grad():
        assert used(compiled.call, q, q, q, **options)[1] == 0


def test_unchecked_and_exported_calls_stay_with_triton(beside_triton):
    class Module(torch.nn.Module):
        def forward(self, q):
            return scaled_dot_product_attention(q, q, q)

    q = tokens(40, grad=False)
    assert used(Compiled().call, q, q, q)[1] > 0  # as it is with neither
    exported = torch.export.export(Module(), (q,))
    assert not any("cuda" in str(node.target) for node in exported.graph.nodes)
    health.forget()
    health.keep(wgmma.CHECK, CPU, health.UNKNOWN)
    assert used(Compiled().call, q, q, q)[1] == 0


def test_heads_that_no_copy_reads_guard_no_length(beside_triton):
    compiled = Compiled(dynamic=True)
    graphs = set()
    for M in (40, 42, 33):
        q = torch.randn(2, 2, M, 20).half()
        assert used(compiled.call, q, q, q)[1] == 0
        graphs.add(compiled.graphs)
    assert len(graphs) == 1
