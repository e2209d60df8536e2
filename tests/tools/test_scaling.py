"""bench.scaling: how time and memory grow with the length of a sequence."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_exponents_are_slopes_of_logarithms():
    from bench.scaling import exponent

    assert exponent({n: 3.0 * n**2 for n in (256, 512, 1024, 2048)}) == 2.0
    overhead = {256: 1.0, 512: 1.0, 1024: 1.1, 2048: 2.2, 4096: 4.4}  # short problems are left out
    assert exponent(overhead) == 1.0
    assert exponent({256: 1.0, 512: 1.0, 1024: 1.1, 2048: 2.2}) == 1.0
    assert exponent({256: 1.0, 512: 2.0}) is None
    assert exponent({256: 0.0, 512: 0.0, 1024: 0.0}) is None


def test_rows_of_each_backend_are_curves_of_their_own():
    from bench.measure import Timing
    from bench.report import Row
    from bench.scaling import curves

    rows = [
        Row(case=f"dot-{n}{backend}", about="", shape="", direction="forward", backend="triton",
            work=1.0, unit="FLOP", kept=1.0, error_ratios={"out": 0.5},
            timings={"ours": Timing([float(n)])})
        for n in (256, 512) for backend in ("", " (triton)")
    ]  # fmt: skip
    assert [c.kind for c in curves(rows)] == ["dot", "dot (triton)"]
    assert all(c.milliseconds == {256: 256.0, 512: 512.0} for c in curves(rows))


def test_committed_exponents_are_those_of_the_points():
    from bench.scaling import exponent

    names = {"time": "milliseconds", "memory": "mib"}
    for path in ROOT.glob("bench/results/**/scaling.json"):
        for row in json.loads(path.read_text())["rows"]:
            points = {k: {int(n): y for n, y in row[name].items()} for k, name in names.items()}
            assert row["exponents"] == {k: exponent(found) for k, found in points.items()}


def test_scaling_writes_curves_and_a_picture(tmp_path, capsys):
    from bench import scaling

    threads = ["--longest", "256", "--seconds", "0.01", "--out", str(tmp_path)]
    assert scaling.main(threads) == 0
    (folder,) = tmp_path.iterdir()
    rows = json.loads((folder / "scaling.json").read_text())["rows"]
    kinds = {(r["kind"], r["direction"]) for r in rows if r["name"] == "fastattn"}
    assert kinds == {(k, d) for k in ("dot", "additive") for d in ("forward", "forward+backward")}
    assert all(r["milliseconds"].keys() == {"256"} for r in rows)
    assert "memory ~ N^" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
