"""Runs the tests of a GPU without one: Triton interprets its kernels, the simulator has CUDA's.

    python -m pytest -p as_gpu tests/contract -k cuda

A pytest plugin. Only tests marked gpu run. It finds what is wrong with a test before a GPU runs
it: most of these tests run nowhere else. Tests of tests/triton and tests/cuda need no GPU anyway.
"""

import runpy
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "cuda")]


@pytest.hookimpl(tryfirst=True)  # before conftest.py, which deselects them
def pytest_collection_modifyitems(config, items):
    """Leaves the tests of a GPU, without their mark."""
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in {*chosen}])
    for item in chosen:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "gpu"]
    items[:] = chosen


def pytest_collection_finish():
    """Makes the backends of GPUs available to CPU tensors."""
    import helpers
    import shim_backend

    from fastattn.backends import _gpu, cuda, triton

    if not triton._interpreted():
        runpy.run_path(str(HERE / "triton/conftest.py"))["pytest_collection_finish"]()
    torch.ops.load_library(str(shim_backend.library()))
    _gpu.reasons = lambda device: []
    cuda.LIBRARY_ERROR = None
    on_cpu = helpers.Carrier.__init__
    helpers.Carrier.__init__ = lambda self, backend, _: on_cpu(self, backend, torch.device("cpu"))
