"""The self-check finds the Triton kernels right, and planted faults in them wrong."""

import pytest
import torch

from fastattn import self_check
from fastattn.backends import registry, triton
from fastattn.backends.health import Check, Verdict
from fastattn.kernels.host import config
from fastattn.kernels.host.launch import Call
from fastattn.problem import validate
from fastattn.problem.record import WEIGHTS

QUICK = [("dot", "plain"), ("dot", "rich"), ("additive", "plain decoding")]
OTHERS = {(score, kind) for score in ("dot", "additive") for kind in self_check.PROBLEMS} - {*QUICK}
CALLS = [*QUICK, *(pytest.param(*call, marks=pytest.mark.slow) for call in sorted(OTHERS))]


@pytest.mark.parametrize(("score", "kind"), CALLS)
def test_the_kernels_are_right(device, score, kind):
    dtype = "float16" if score == "dot" else "float32"
    assert self_check.run(Check("triton", score, dtype, kind), device) == Verdict(None)


def test_tf32_counts_as_such(device, monkeypatch):
    """Products of TF32 are within the budget of TF32, and beyond that of float32."""
    forward = triton.forward

    def rounded(p, q, k, *others):
        return forward(p, q.half().float(), k.half().float() * (1 + 2**-12), *others)

    monkeypatch.setattr(triton, "forward", rounded)
    check = Check("triton", "dot", "float32", "plain decoding")
    assert self_check.run(check, device).reason.startswith("its error is")
    assert self_check.run(check._replace(dtype="TF32"), device) == Verdict(None)


def test_a_backward_pass_of_another_mask(device, monkeypatch):
    backward = triton.backward
    check = Check("triton", "dot", "float32", "plain decoding")

    def unmasked(p, *args):
        return backward(p.with_tensors(*[None] * len(p.tensors())), *args)

    monkeypatch.setattr(triton, "backward", unmasked)
    assert "grad_" in self_check.run(check, device).reason


def test_torchs_setting_decides_on_the_dtype_of_the_problems():
    p = validate.build("dot", *[torch.zeros(1, 1, 20, 8)] * 3).p
    before = torch.backends.cuda.matmul.fp32_precision
    for name, dtype in (("ieee", torch.float32), ("tf32", torch.float16)):
        try:
            torch.backends.cuda.matmul.fp32_precision = name
            check = registry.check_of("triton", p, bias=False)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
        assert {case.dtype for case in self_check.cases_of(check, torch.device("cpu"))} == {dtype}
        assert {self_check._dtype(check) or dtype} == {torch.float32}


@pytest.mark.parametrize("size", [64, 65, 128, 129, 256])
def test_a_check_has_the_configurations_of_its_calls(size):
    """Those of ``host/config.py``: heads of one size class, with as many features."""

    def kind(bias, dropout_p, weights):
        x = torch.zeros(())
        given = x if bias else None
        return Call(x, x, x, bias=given, dropout_p=dropout_p, weights=WEIGHTS[weights]).kind

    weights, keep = dict(return_weights="mean"), dict(attn_mask=torch.ones(20, 20).bool())
    dropped, biased = dict(dropout_p=0.5), dict(bias=True)
    two = weights | biased, dropped | biased | keep
    for options in ({}, weights, dropped, biased, keep, dropped | keep, *two):
        bias = options.pop("bias", False)
        p = validate.build("dot", *[torch.zeros(1, 1, 20, size)] * 3, **options).p
        cases = self_check.cases_of(registry.check_of("triton", p, bias), p.device)
        assert {config.size_class(max(case.D, case.E)) for case in cases} == {
            config.size_class(size)
        }
        assert {
            kind(case.bias is not None, case.dropout_p, case.weights or "none") for case in cases
        } == {kind(bias, p.dropout_p, p.weights)}
