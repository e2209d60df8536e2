"""The command: ``python -m bench.host``: what a call of the Triton backend costs on the host.

    first       what the operator does without a plan
    repeated    what it does with one: kernels/host/prepared.py
    operator    the same behind torch.library's dispatcher
    call        the public function, of 4-D tensors without a gradient

Without a GPU, bench/stand_in.py takes the driver's place. What a launch takes there, about 2 to 3
us, is then missing. Memory is the CPU's, and operators of PyTorch's compute on it. On a GPU,
problems are so small that the host is what takes the time. PyTorch's function then stands beside
ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fastattn
from bench import given, stand_in
from fastattn import Mask
from fastattn.backends import triton
from fastattn.problem import validate
from fastattn.problem.schemas import Saved

ROUNDS, CALLS = 500, 5  # a time is that of the fastest of so many rounds of so many calls
DEFAULTS: dict[str, Any] = dict(M=32, N=32, D=64)  # operators of PyTorch's compute on the CPU
CASES: dict[str, dict[str, Any]] = {
    "plain d64": {},
    "plain d128": dict(D=128),
    "causal": dict(causal=True),
    "kv_len": dict(kv_len=True),
    "keep mask": dict(keep=True),
    "dropout, bias": dict(dropout_p=0.1, bias=True),
    "decode": dict(M=1, N=4096),
    "additive": dict(score="additive"),
    "additive decode": dict(M=1, N=4096, score="additive"),
    "gaussian": dict(score="gaussian"),
}


class Problem:
    """One case: its operators' arguments, and its call."""

    def __init__(self, device: str, M: int, N: int, D: int, score: str = "dot", **features: Any):
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        B, H = 1, 2
        q, k, v = draw(B, H, M, D), draw(B, H, N, D), draw(B, H, N, D)
        w = None if score == "dot" else draw(H, D)
        if score == "gaussian":
            w = torch.ones(1, H, 1, D, device=device)
        keep = torch.ones(B, 1, M, N, dtype=torch.bool, device=device)
        lengths = torch.full((B,), N, dtype=torch.int32, device=device)
        mask = Mask(
            causal="top_left" if features.get("causal") else None,
            keep=keep if features.get("keep") else None,
            kv_len=lengths if features.get("kv_len") else None,
        )
        self.bias = draw(1, H, M, N) if features.get("bias") else None
        self.options: dict[str, Any] = dict(mask=mask, dropout_p=features.get("dropout_p", 0.0))
        self.options["seed"] = torch.tensor(1, device=device) if self.options["dropout_p"] else None
        self.inputs, self.score = (q, k, v, w), score
        p, *tensors = validate.build(score, q, k, v, w, bias=self.bias, **self.options)[:6]
        self.p, self.tensors = p, tensors
        self.forward = (*tensors, *p.operands)
        out, _, _, stats = triton.launch_forward(*self.forward)
        saved = Saved(out, stats, torch.randn_like(out), bias_needs_grad=self.bias is not None)
        self.backward = (*self.forward, *saved)

    def call(self) -> object:
        """The public function."""
        q, k, v, w = self.inputs
        options = dict(self.options, backend="triton")
        if self.score == "gaussian":
            return fastattn.attention(q, k, v, score="gaussian", bandwidth=w, **options)
        if w is not None:
            return fastattn.additive_attention(q, k, v, weight=w, bias=self.bias, **options)
        return fastattn.scaled_dot_product_attention(q, k, v, bias=self.bias, **options)

    def torch(self) -> object:
        """PyTorch's function on the same tensors."""
        return F.scaled_dot_product_attention(*self.inputs[:3])


def ways(problem: Problem) -> dict[str, dict[str, Callable[[], object]]]:
    """What is measured: {direction: {name: call}}."""
    p, tensors, saved = problem.p, problem.tensors, problem.backward[len(problem.forward) :]
    forward: dict[str, Callable[[], object]] = {
        "first": lambda: triton.launch_forward(*problem.forward),
        "repeated": lambda: triton.run(triton.launch_forward, problem.forward),
        "operator": lambda: triton.forward(p, *tensors),
        "call": problem.call,
    }
    backward: dict[str, Callable[[], object]] = {
        "first": lambda: triton.launch_backward(*problem.backward),
        "repeated": lambda: triton.run(triton.launch_backward, problem.backward),
        "operator": lambda: triton.backward(p, *tensors, *saved),
    }
    return {"forward": forward, "backward": backward}


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Of one call on the host; the GPU's queue is empty before each round."""
    best = float("inf")
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return round(best * 1e6, 1)


def python_calls(call: Callable[[], object]) -> int:
    """Calls of Python functions within a call."""
    count = 0

    def event(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind == "call"

    sys.setprofile(event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 1  # its own


def measure(rounds: int) -> list[dict]:
    """A row for each case and direction."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, features in CASES.items():
        problem = Problem(device, **DEFAULTS | features)
        for direction, calls in ways(problem).items():
            row: dict[str, Any] = {"case": name, "direction": direction}
            row["us"], row["calls"] = {}, {}
            for way, call in calls.items():
                for _ in range(3):
                    call()  # the first compiles, the second is watched
                row["calls"][way] = python_calls(call)
                row["us"][way] = microseconds(call, rounds)
            if direction == "forward" and name.startswith("plain") and device == "cuda":
                row["us"]["torch"] = microseconds(problem.torch, rounds)
            rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """Microseconds, and in brackets calls of Python functions."""
    columns = ["first", "repeated", "operator", "call", "torch"]
    cells = [["case", "direction", *columns]]
    for row in rows:
        shown = [row["case"], row["direction"]]
        for way in columns:
            time, calls = row["us"].get(way), row["calls"].get(way)
            counted = "" if calls is None else f" ({calls})"
            shown.append("" if time is None else f"{time}{counted}")
        cells.append(shown)
    return "\n".join("  ".join(x.ljust(14) for x in line).rstrip() for line in cells)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.host", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rounds", type=given.count, default=ROUNDS, help="of 5 calls, for each number"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        stand_in.install()
    with torch.no_grad():
        rows = measure(options.rounds)
    print(json.dumps(rows) if options.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
