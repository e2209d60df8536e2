"""One query a head: heads that share keys are rows of one head, in both passes.

At large logits, a score that backward sums in another order than forward has another weight.
"""

import pytest
import torch
from helpers import attend, inputs

from fastattn import testing
from fastattn.testing import Case

pytestmark = pytest.mark.usefixtures("extension")

GROUPS = [4, 12, 16]  # query heads per key head
BIASES = {"none": None, "heads": "hn", "shared": "n"}
EPS = torch.finfo(torch.float32).eps
ULPS = 8


def sized(group, bias, batch=2, key_heads=2, **sizes):
    return Case(
        "heads",
        B=batch,
        H=group * key_heads,
        Hkv=key_heads,
        M=1,
        bias=BIASES[bias],
        lse=True,
        drawn=True,  # measures errors by the condition of such scores
        **sizes,
    )


@pytest.mark.parametrize("logit", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("group", GROUPS)
def test_columns_of_weights_sum_to_1(isa, group, bias, logit):
    """dv, summed over keys, equals dO, summed over the heads that share the keys."""
    call = inputs(B=2, H=group, Hkv=1, M=1, N=300, D=16, E=5)
    call["query"] *= logit**0.5
    call["key"] *= logit**0.5
    value = call["value"].requires_grad_()
    added = None
    if bias != "none":
        heads = group if bias == "heads" else 1
        added = torch.randn(1, heads, 1, 300).requires_grad_()
    out = attend(**call, bias=added, backend="cpu")
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    found, expected = value.grad.double().sum((1, 2)), grad_out.double().sum((1, 2))
    most = grad_out.double().abs().sum((1, 2))
    assert ((found - expected).abs() <= ULPS * EPS * most).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("group", GROUPS)
def test_large_logits(isa, group, bias, dtype):
    """Logits of about 1e4 in fp32, against the oracle, with the gradient of the bias."""
    magnitude = 50.0 if dtype == torch.float32 else 5.0
    sizes = dict(N=300, D=16, E=12, dtype=dtype, magnitude=magnitude)
    testing.check(sized(group, bias, **sizes), "cpu")
    testing.check(sized(group, bias, key_heads=1, layout="bmhd", **sizes), "cpu")
    testing.check(sized(group, bias, kv_len="batch", keep="hn", **sizes), "cpu")


@pytest.mark.parametrize("letters", ["b", "bn", "bh", "bhn", ""])
def test_gradient_of_every_bias(isa, letters):
    """A bias with any dims, in fp32, and in bf16, which needs separate sums."""
    sizes = dict(B=3, H=24, Hkv=2, M=1, N=500, D=16, E=12, bias=letters)
    testing.check(Case("bias", **sizes), "cpu")
    testing.check(Case("bias", dtype=torch.bfloat16, **sizes), "cpu")


@pytest.mark.parametrize("left", [298, 299, 300])
def test_a_window_that_ends_at_the_first_key(isa, left):
    """A row has its own diagonal, a head has none: the next heads keep the first key too."""
    case = sized(4, "none", N=300, D=8, E=8, causal="bottom_right", window=(left, -1))
    testing.check(case, "cpu")
