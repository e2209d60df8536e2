"""Launches from plans (kernels/host/prepared.py) are those of the ordinary way, at less cost."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from fastattn.kernels.host import prepared

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ALL = os.environ.get("FASTATTN_AOT") == "all"
EVERY = "1" if ALL else "4"  # of the grid's cases, one in so many

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is no stand-in")
needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler"
)
needs_plans = pytest.mark.skipif(
    not hasattr(nvidia, "annotate_arguments"), reason="kernels/host/watched.py needs Triton 3.7"
)
pytestmark = [pytest.mark.slow, without_a_gpu, needs_a_compiler, needs_plans]


@functools.cache
def output(*command: str):
    """What a program prints. Its kernels are not interpreted, and its launches do nothing."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build/triton")
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_a_plan_launches_what_the_ordinary_way_launches():
    """The same kernels, grids and arguments, the same operators, and results of the same layout."""
    found = output(str(HERE / "launches.py"), EVERY)
    assert found["different"] == []
    assert found["without"] == 0
    assert found["plans"] > 0.7 * found["calls"]


RULES = {
    "a_plan_comes_with_the_second_call": ["object", "Plan", "Plan"],
    "a_call_that_compiles_is_watched_again": ["object", "object", "Plan", "Plan"],
    "hooks_see_repeated_launches": ["sdpa_fwd_kernel"] * 2,
    "a_configuration_on_trial_runs": [8, 4, 8],  # warps
    "another_precision_takes_another_kernel": [0, 1, 0],
    "launches_go_to_the_current_stream": [0, 7, 9],
    "threads_launch_their_own_tensors": [4, 800, True],
    "no_tensor_outlives_its_call": 0,
    "what_is_known_is_bounded": [4, True],
    "another_triton_launches_in_its_own_way": [4, 1, [None]],
    "an_error_in_a_watched_call_leaves_nothing": [3, True],
}


@pytest.mark.parametrize("rule", RULES)
def test_what_makes_and_unmakes_plans(rule):
    found = output(str(HERE / "plans.py"))
    assert found.keys() == RULES.keys()
    assert found[rule] == RULES[rule]


# Calls of Python functions within the operator's implementation, at most; and of the first call's,
# one in so many. A launch, or an operator of PyTorch's, is one to three.
MOST = {
    "plain d64": (18, 22), "plain d128": (18, 22), "causal": (18, 22), "kv_len": (18, 22),
    "keep mask": (21, 26), "dropout, bias": (18, 36), "decode": (19, 23), "additive": (22, 28),
    "additive decode": (19, 23), "gaussian": (21, 27),
}  # fmt: skip


@pytest.mark.parametrize("case", MOST)
def test_a_repeated_call_takes_few_calls_of_python(case):
    rows = [x for x in output("-m", "bench.host", "--json", "--rounds", "1") if x["case"] == case]
    assert [x["direction"] for x in rows] == ["forward", "backward"]
    for row, most in zip(rows, MOST[case], strict=True):
        calls, times = row["calls"], row["us"]
        assert calls["repeated"] <= most, row
        assert calls["repeated"] * 8 <= calls["first"], row
        assert calls["operator"] <= calls["repeated"] + 5, row
        assert min(times.values()) > 0, row


def test_the_table_has_every_case():
    sys.path.insert(0, str(ROOT))
    try:
        from bench import host
    finally:
        sys.path.remove(str(ROOT))
    assert host.CASES.keys() == MOST.keys()
    row = {"case": "plain d64", "direction": "forward", "us": {"first": 2.5}, "calls": {"first": 7}}
    assert "2.5 (7)" in host.table([row])


def test_every_kernel_is_launched_where_it_can_be_watched():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not re.search(r"_kernel\[", path.read_text("utf-8")), path


def test_the_interpreter_has_no_plans():
    assert not prepared.possible(torch.device("cpu"))
