"""The first launch of kernels compiles them side by side: kernels/host/together.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BACKWARD = ["sdpa_bwd_delta_kernel", "sdpa_bwd_dq_kernel", "sdpa_bwd_dkdv_kernel"]
MASKED = ["classify_kernel", "compact_kernel", "sdpa_fwd_kernel"]


@pytest.fixture(scope="module")
def found():
    """What first_launch.py reports. Its kernels wait there for those beside them."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "first_launch.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("launch", "kernels"),
    [("forward", ["sdpa_fwd_kernel"]), ("backward", BACKWARD), ("within", BACKWARD + BACKWARD[2:])],
)
def test_kernels_of_a_launch_are_compiled_in_threads_and_then_launched(found, launch, kernels):
    assert found[launch] == {
        "raised": "nothing", "compiled": sorted(kernels), "here": 0, "launched": kernels,
    }  # fmt: skip


def test_a_launch_that_misses_nothing_compiles_nothing(found):
    assert found["again"]["compiled"] == []
    assert found["again"]["launched"] == BACKWARD


def test_launches_of_other_threads_go_on(found):
    assert found["others"]["compiled"] == MASKED
    assert found["others"]["launched"] == ["sdpa_fwd_kernel", *MASKED]


def test_another_device_may_be_first_used_meanwhile(found):
    assert found["devices"]["raised"] == "nothing"
    assert found["devices"]["launched"] == ["sdpa_fwd_kernel"]


def test_what_fails_to_compile_raises_and_is_tried_again(found):
    assert found["broken"]["raised"] == "no sdpa_bwd_dq_kernel"
    assert found["broken"]["launched"] == BACKWARD[:1]
    assert found["mended"]["raised"] == "nothing"
    assert found["mended"]["compiled"] == BACKWARD[1:2]
    assert found["mended"]["launched"] == BACKWARD[:1] + BACKWARD


def test_a_capture_compiles_and_launches_nothing(found):
    assert "is not compiled for this problem yet" in found["capture"]["raised"]
    assert found["capture"]["compiled"] == found["capture"]["launched"] == []
