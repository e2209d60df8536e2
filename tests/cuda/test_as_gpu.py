"""Whether tests of a GPU run without one, as tests/as_gpu.py lets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_tests_of_a_gpu_run_without_one():
    """A few of them, in the simulator and the interpreter."""
    command = [sys.executable, "-m", "pytest", "-p", "as_gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/contract/test_grid.py", "-k", "M63-N15"], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                          "FASTATTN_TEST_SECONDS": "inf"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "6 passed, 2 skipped" in done.stdout  # the dot product of cuda is of half types
