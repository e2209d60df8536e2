"""The self-check finds the Triton kernels right, and planted faults in them wrong."""

import pytest
import torch

from fastattn import self_check
from fastattn.backends import triton
from fastattn.backends.health import Check, Verdict

QUICK = [("dot", "plain"), ("dot", "rich"), ("additive", "plain decoding")]
OTHERS = {(score, kind) for score in ("dot", "additive") for kind in self_check.PROBLEMS} - {*QUICK}
CALLS = [*QUICK, *(pytest.param(*call, marks=pytest.mark.slow) for call in sorted(OTHERS))]


@pytest.mark.parametrize(("score", "kind"), CALLS)
def test_the_kernels_are_right(device, score, kind):
    dtype = "float16" if score == "dot" else "float32"
    assert self_check.run(Check("triton", "", score, dtype, kind), device) == Verdict(None)


def test_tf32_counts_as_such(device, monkeypatch):
    """Products of TF32 are within the budget of TF32, and beyond that of float32."""
    forward = triton.forward

    def rounded(p, q, k, *others):
        return forward(p, q.half().float(), k.half().float() * (1 + 2**-12), *others)

    monkeypatch.setattr(triton, "forward", rounded)
    check = Check("triton", "", "dot", "float32", "plain decoding")
    assert self_check.run(check, device).reason.startswith("its error is")
    monkeypatch.setattr(self_check, "_uses_tf32", lambda: True)
    assert self_check.run(check, device) == Verdict(None)


def test_a_backward_pass_of_another_mask(device, monkeypatch):
    backward = triton.backward
    check = Check("triton", "", "dot", "float32", "plain decoding")

    def unmasked(p, *args):
        return backward(p.with_tensors(*[None] * len(p.tensors())), *args)

    monkeypatch.setattr(triton, "backward", unmasked)
    assert "grad_" in self_check.run(check, device).reason


def test_torchs_setting_decides_on_the_dtype_of_the_problems():
    check = Check("triton", "", "dot", "float32", "plain")
    before = torch.backends.cuda.matmul.fp32_precision
    for name, dtype in (("ieee", torch.float32), ("tf32", torch.float16)):
        try:
            torch.backends.cuda.matmul.fp32_precision = name
            assert {case.dtype for case in self_check.cases_of(check)} == {dtype}
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
