"""Heads over 128: by warpgroups without a gradient, and by nothing else of CUDA C++."""

import host_build
import pytest
import shim_backend
import torch
from hopper import CPU, explained, found_right, heads, takes_wgmma

from fastattn import scaled_dot_product_attention
from fastattn.backends import cuda, health, registry, wgmma
from fastattn.problem import validate

pytestmark = [
    pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler"),
    pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products"),
]

LARGE = "have D and E up to 128, here they are 136 and 136"


def test_large_heads_take_it_without_a_gradient(triton):
    found_right()
    q = heads(40, 136)
    for _ in range(2):  # the second time from the cache of calls
        assert takes_wgmma(triton, q)
        assert takes_wgmma(triton, q, backend="cuda")
    found = explained(q)
    assert (found.backend, found.path) == ("cuda", "wgmma")
    odd = torch.randn(1, 2, 40, 137).half()[..., :136]
    assert not takes_wgmma(triton, odd)
    assert not takes_wgmma(triton, odd, q, q, backend="cuda")  # other kernels of cuda
    leaf = q.clone().requires_grad_()
    assert not takes_wgmma(triton, leaf)
    found = explained(leaf)
    assert (found.backend, found.path) == ("triton", None)
    assert found.reasons["cuda"] == [f"gradients {LARGE}"]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"'cuda' cannot do this problem: gradients {LARGE}"):
            scaled_dot_product_attention(leaf, q, q, backend="cuda")
    narrow = heads().requires_grad_()  # beside wide values
    assert not takes_wgmma(triton, narrow, heads(), q)
    with pytest.raises(ValueError, match=r"gradients have D and E up to 128, here .* 64 and 136"):
        scaled_dot_product_attention(narrow, heads(), q, backend="cuda")
    triton.unsupported = lambda p: ["Triton is not installed"]
    assert takes_wgmma(triton, heads(41, 136))


def test_who_has_no_large_heads_says_so(triton, monkeypatch):
    found_right()
    q, few = heads(40, 136), heads(16, 136)

    def reasons(query, **options):
        p = validate.build("dot", query, q, q, **options).p
        return registry.against("cuda", p, grad=False)

    assert reasons(q) == []
    assert reasons(few) == [f"up to 16 queries {LARGE}"]
    assert reasons(q, return_weights="mean") == [f"returned weights {LARGE}"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert reasons(q) == [f"GPUs of another compute capability than 9.0 {LARGE}"]
    q = heads(40, 257)
    assert reasons(q) == ["D ends at 256 and E at 256, here they are 257 and 257"]


def test_the_kernels_refuse_large_heads_themselves(triton):
    """Whoever asks the operators, and not the registry."""
    q, few = heads(40, 136), heads(16, 136)
    with pytest.raises(RuntimeError, match="up to 16 queries have D and E up to 128"):
        cuda.forward(validate.build("dot", few, q, q).p, few, q, q, None, None)
    p = validate.build("dot", q, q, q, return_weights="full").p
    with pytest.raises(RuntimeError, match="returned weights have D and E up to 128"):
        cuda.forward(p, q, q, q, None, None)
    p = validate.build("dot", q, q, q).p
    out, _, _, stats = cuda.forward(p, q, q, q, None, None)
    with pytest.raises(RuntimeError, match="gradients have D and E up to 128"):
        cuda.backward(p, q, q, q, None, None, out, stats, out, None, None, False)


def test_a_wrong_check_keeps_large_heads_off_cuda(triton):
    health.keep(wgmma.CHECK, CPU, "its error is 7 times")
    q = heads(40, 136)
    assert not takes_wgmma(triton, q)
    with (
        pytest.warns(RuntimeWarning, match="'cuda' for such calls: its error is 7 times"),
        pytest.raises(ValueError, match="'cuda' cannot do this problem: its error is 7 times"),
    ):
        scaled_dot_product_attention(q, q, q, backend="cuda")
