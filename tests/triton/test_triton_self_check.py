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


@pytest.mark.parametrize("M", [3, 20])
@pytest.mark.parametrize(("D", "E"), [(64, 64), (65, 8), (8, 128), (129, 8), (8, 256)])
def test_a_check_has_the_configurations_of_its_calls(D, E, M):
    """Those of ``host/config.py``, for heads of one size class."""

    def kind(bias, softcap, dropout_p, weights):
        q = torch.zeros((), dtype=torch.float16)
        given = None if bias is None else q.to(bias)
        options = dict(softcap=softcap, dropout_p=dropout_p, weights=WEIGHTS[weights])
        return Call(q, q, q, bias=given, **options).kind

    tables = [
        rows
        for name, table in config.TABLE.items()
        for rows in table.values()
        if name == "tile" or name.startswith("decode") == (M < 20)
    ]
    size, q = max(D, E), torch.zeros(1, 1, 20, D, dtype=torch.float16)
    v = q.new_zeros(1, 1, 20, E)
    weights, keep = dict(return_weights="mean"), dict(attn_mask=torch.ones(M, 20).bool())
    dropped, biased, wide = dict(dropout_p=0.5), dict(bias=q.dtype), dict(bias=torch.float32)
    one = {}, weights, dropped, biased, wide, keep, dict(softcap=2.0), dict(softcap=2.0) | keep
    rich = weights | dropped, weights | biased, dropped | wide, dropped | dict(softcap=2.0)
    for options in (*one, dropped | keep, *rich, dropped | biased | keep):
        bias = options.get("bias")
        given = {name: value for name, value in options.items() if name != "bias"}
        p = validate.build("dot", q[:, :, :M], q, v, **given).p
        cases = self_check.cases_of(registry.check_of("triton", p, bias is not None), p.device)
        classes = {config.size_class(max(case.D, case.E)) for case in cases}
        assert classes == {config.size_class(size)}
        kinds = {
            kind(
                case.bias and (case.bias_dtype or case.dtype), case.softcap, case.dropout_p,
                case.weights or "none",
            )
            for case in cases
        }  # fmt: skip
        others = p.softcap, given.get("dropout_p", 0.0), p.weights
        own, narrow = kind(bias, *others), kind(bias and q.dtype, *others)
        for rows in tables:
            row = rows[config.size_class(size)]
            found = {getattr(row, x) for x in kinds}
            assert getattr(row, own) in found, options
            assert found <= {getattr(row, x) for x in (narrow, "wide_bias")[: 2 if bias else 1]}
