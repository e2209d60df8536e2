"""Every field of Mask changes the result of the Triton kernels."""

import pytest
from helpers import SCORES, attend
from properties.mask_fields import check_backend, every_field


@every_field
@pytest.mark.parametrize("score", SCORES)
def test_results_and_gradients(score, field, carried):
    check_backend("triton", field, score, attend)
