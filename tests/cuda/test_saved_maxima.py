"""The unit of the maxima that CUDA C++ saves: blocks of keys are merged by it."""

import host_build
import pytest
import shim_backend
import torch
from helpers import inputs

from fastattn.backends import cuda
from fastattn.problem import validate

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")

PROBLEMS = {  # what of a problem decides, and the unit
    "scores": (dict(scale=0.4), 0.4),
    "scores turned round": (dict(scale=-0.4), 1.0),
    "equal scores": (dict(scale=0.0), 1.0),
    "a softcap": (dict(scale=-0.4, softcap=3.0), 3.0),
    "a bias": (dict(scale=0.4, bias=100 * torch.randn(70)), 1.0),
    "a bias and a softcap": (dict(softcap=3.0, bias=100 * torch.randn(70)), 1.0),
    "additive": (dict(score="additive"), 1.0),
    "additive, a bias": (dict(score="additive", bias=100 * torch.randn(70)), 1.0),
    "additive, a softcap": (dict(score="additive", softcap=0.5), 0.5),
}


@pytest.mark.parametrize("M", [3, 66])  # few queries, and tiles
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_unit_of_a_saved_maximum(monkeypatch, name, M):
    """A row's log-sum-exp is its maximum in natural units, less the logarithm of its factor."""
    shim_backend.install(monkeypatch)
    options, unit = PROBLEMS[name]
    options = dict(options)
    score = options.pop("score", "dot")
    call = inputs(score, M=M, N=70, dtype=torch.float16 if score == "dot" else torch.float32)
    q, k, v, w = (call.get(n) for n in ("query", "key", "value", "weight"))
    p, *tensors = validate.build(score, q, k, v, weight=w, **options)[:6]
    assert cuda.shift_unit(p, "bias" in options) == pytest.approx(unit)
    _, lse, _, stats = cuda.forward(p, *tensors)
    shift, factor = stats.double().unbind(-1)
    torch.testing.assert_close(shift * unit - factor.log(), lse.double(), rtol=1e-6, atol=1e-6)
