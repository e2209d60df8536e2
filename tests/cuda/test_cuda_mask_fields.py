"""Every field of Mask changes the result of the CUDA C++ kernels, run on the CPU."""

import host_build
import pytest
import shim_backend
import torch
from helpers import SCORES, attend
from properties.mask_fields import check_backend, every_field

pytestmark = pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler")


@pytest.fixture
def backend(monkeypatch):
    return shim_backend.install(monkeypatch)


@every_field
@pytest.mark.parametrize("score", SCORES)
def test_results_and_gradients(score, field, backend):
    check_backend(backend, field, score, attend, torch.float16)
