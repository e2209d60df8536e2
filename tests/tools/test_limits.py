"""What a machine can do at most, what a case needs, and how runs on unlike machines compare."""

from __future__ import annotations

import json

import pytest
import torch
from runs import recorded

RATES = {
    "multiply_add": 200.0, "pairs": 400.0, "tiles": 0.0, "exp2": 16.0, "exp2_half": 20.0,
    "additive": 30.0, "additive_grad": 10.0, "gaussian": 50.0, "read": 40.0,
    "read 1 MiB": 320.0, "read 64 MiB": 80.0, "read 128 MiB": 50.0, "read 256 MiB": 40.0,
}  # fmt: skip


@pytest.mark.usefixtures("extension")
def test_loops_count_what_all_threads_do():
    from bench import limits

    isa, memory, ran = torch.ops.fastattn.cpu_isa(), torch.zeros(2**12), []
    for number, name in enumerate(limits.LOOPS):
        once, thrice = (torch.ops.fastattn.cpu_loop(memory, number, n) for n in (1, 3))
        assert thrice == 3 * once, name
        if name == "read":
            assert once == 4 * memory.numel()
        ran += [name] if once else []
    absent = {"tiles"} if "amx" not in isa else set()
    absent |= {"pairs"} if isa in ("baseline", "avx2", "avx512") else set()
    assert set(ran) == limits.LOOPS.keys() - absent


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    ("memory", "loop", "message"),
    [
        (torch.zeros(4, dtype=torch.float64), 0, "memory: expected contiguous float32"),
        (torch.zeros(4, 4).mT, 0, "memory: expected contiguous float32"),
        (torch.zeros(0), 9, "loop: expected 0 to 8, got 9"),
        (torch.zeros(0), -1, "loop: expected 0 to 8, got -1"),
    ],
)
def test_what_is_no_loop_raises(memory, loop, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastattn.cpu_loop(memory, loop, 1)


@pytest.mark.usefixtures("extension")
def test_every_need_has_a_rate():
    from bench import cases, limits

    rates = limits.measure(quick=True)
    assert {f"read {mib} MiB" for mib in (1, 2, 4)} <= rates.keys()
    assert rates["gemm float32"] == max(rates[f"gemm float32 {x}"] for x in ("torch", "oneDNN"))
    for case in cases.CASES:
        for direction in case.directions:
            bound = limits.bound_ms(limits.needs(case, 100, direction), rates)
            counted = case.problem.score != "gaussian" or direction == cases.FORWARD
            assert (bound is not None) == counted, (case.name, direction)


@pytest.mark.parametrize(
    ("name", "direction", "expected"),
    [
        # 16 heads x 1024 x 1024 pairs: 256 FLOP each, and an exponential.
        ("dense", "forward", 2**24 * (256 / 200 + 1 / 16)),
        ("dense", "forward+backward", 2**24 * (896 / 200 + 2 / 16)),
        ("dense-bf16", "forward", 2**24 * (256 / 400 + 1 / 20)),
        # 32 key heads x 4096 keys and values of 64 floats; a query and an output of each. A cache
        # may hold these 64 MiB, and of what a backward takes too, a part.
        ("decode", "forward", 4 * 32 * (4096 + 1) * 128 / 80),
        ("decode", "forward+backward", 3 * 4 * 32 * (4096 + 1) * 128 / 50),
        # 512 x 512 pairs of 2 samples, 64 elements and 64 values each.
        ("additive-small", "forward", 2**19 * (64 / 30 + 1 / 16 + 128 / 200)),
        ("additive-small", "forward+backward",
         2**19 * (64 * (2 / 30 + 1 / 10) + 2 / 16 + 384 / 200)),
        ("gaussian", "forward", 2**23 * (8 / 50 + 1 / 16 + 16 / 200)),
    ],
)  # fmt: skip
def test_bounds_are_sums_of_operations_or_bytes(name, direction, expected):
    from bench import cases, limits

    case = cases.named(name)
    p = case.problem
    needed = limits.needs(case, p.B * p.H * p.M * p.N, direction)
    assert limits.bound_ms(needed, RATES) == pytest.approx(expected / 1e6, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "forward", "both"),
    [
        # Queries, keys, values and outputs of 16 heads, 512 x 512 biases of 8, with a gradient.
        ("bias-grad", 4 * 2**21 + 4 * 2**21, 12 * 2**21 + 12 * 2**21),
        # The biases of a table of 41 distances.
        ("t5", 4 * 2**21 + 4 * 41 * 8, 12 * 2**21 + 12 * 41 * 8),
        ("alibi", 4 * 2**21 + 4 * 8, 12 * 2**21 + 8 * 8),  # slopes without one
        ("blocks", 16 * 2**20 + 2**20, 48 * 2**20 + 2 * 2**20),  # a byte a pair, without one
        ("padding", 16 * 2**20 + 2048, 48 * 2**20 + 2 * 2048),
        # Inputs and outputs of 2048 tokens, and four matrices of 512 x 512.
        ("mha", 8 * 2**20 + 4 * 2**20, 24 * 2**20 + 12 * 2**20),
        ("mha-weights", 16 * 2**20, 40 * 2**20),  # weights of 4 x 512 x 512 are written once
    ],
)
def test_bytes_are_those_of_all_inputs_and_results(name, forward, both):
    from bench import cases, limits

    found = [limits.needs(cases.named(name), 1, d)["bytes"] for d in cases.DIRECTIONS]
    assert found == [forward, both]


def test_the_unit_with_the_most_products_is_the_peak():
    from bench import limits

    amx = RATES | {"tiles": 3000.0}
    assert [limits.peak(dtype, RATES) for dtype in limits.TILE_PRODUCTS] == [200, 200, 400]
    assert [limits.peak(dtype, amx) for dtype in limits.TILE_PRODUCTS] == [500, 1000, 3000]


def test_of_two_measurements_the_better_counts():
    from bench import limits

    assert limits.best_of({"read": 1.0, "tiles": 3.0}, {"read": 2.0}) == {"read": 2.0, "tiles": 3.0}


# ---- comparing runs on two kinds of machine ----


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        (("a", 1, 2, 0.8), ("b", 1, 1, 0.8), 0, "80%     80%     +0%"),  # a faster peer
        (("a", 1, 2, 0.8), ("b", 1, 4, 0.6), 1, "SLOWER"),
        (("a", 1, 2, 0.8), ("b", 1, 2, None), 1, "no share was measured"),
        (("a", 1, 2, None), ("b", 1, 1, 0.8), 2, "no row of the baseline"),
        (("a", 1, 2, 0.8), ("a", 1, 2, 0.4), 0, "torch SDPA"),  # one kind: the ratio decides
    ],
)
def test_unlike_machines_are_judged_by_shares(tmp_path, capsys, old, new, status, said):
    from bench import compare

    for name, (cpu, ours, peer, share) in ("old", old), ("new", new):
        run = recorded(ours, peer, cpu=cpu, of_bound=share)
        (tmp_path / name).write_text(json.dumps(run))
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == status
    assert said in "".join(capsys.readouterr())
