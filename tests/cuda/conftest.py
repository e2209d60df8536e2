"""Tests written for every backend and both scores run here for one of them."""

from pathlib import Path

import pytest
import shim_backend
from hopper import by_warpgroups, simulator, triton  # noqa: F401, fixtures of several files

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    """Leaves the dot product out of test_cuda_additive.py: test_cuda_sdpa.py tests it."""

    def is_here(item):
        score = getattr(item, "callspec", None) and item.callspec.params.get("score")
        return item.path.name != "test_cuda_additive.py" or score != "dot"

    config.hook.pytest_deselected(items=[item for item in items if not is_here(item)])
    items[:] = [item for item in items if is_here(item)]
    for item in items:  # this hook gets the items of all folders
        runs_kernels = HERE in item.path.parents and "backend" in getattr(item, "fixturenames", ())
        if shim_backend.ON_GPU and runs_kernels:
            item.add_marker(pytest.mark.gpu)
