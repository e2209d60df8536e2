"""Every field of Mask changes the result of the Triton kernels."""

import pytest
from helpers import SCORES, Carrier, attend
from properties.mask_fields import check_backend, every_field

from fastattn.backends import registry, triton


@every_field
@pytest.mark.parametrize("score", SCORES)
def test_results_and_gradients(score, field, device, monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "triton", Carrier(triton, device))
    check_backend("triton", field, score, attend)
