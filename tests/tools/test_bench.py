"""The benchmark suite: what it writes and refuses, and that its peers are comparable."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import math
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from runs import recorded

from fastattn import testing
from fastattn.backends import eager, registry

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *options: str) -> tuple[int, dict, Path]:
    """(exit status, bench.json, its folder) of a quick run."""
    from bench.run import main

    threads = torch.get_num_threads()
    status = main(["--quick", "--device", "cpu", "--out", str(tmp_path), *options])
    assert torch.get_num_threads() == threads
    (path,) = tmp_path.rglob("bench.json")
    return status, json.loads(path.read_text()), path.parent


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(exit status, bench.json, its folder, what was printed) of a suite; each runs once."""

    @functools.cache
    def quick(suite: str) -> tuple[int, dict, Path, str]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            found = run(tmp_path_factory.mktemp(suite), "--suite", suite)
        return *found, printed.getvalue()

    return quick


@pytest.mark.parametrize("suite", ["cpu", "cuda", "models", "modules", "extras", "peers"])
def test_quick_run_writes_table_json_and_picture(quick, suite):
    """Tiny sizes on the CPU. The GPU cases run the same code."""
    from bench.cases import QUICK, SUITES

    status, found, folder, table = quick(suite)
    assert status == 0
    assert "WRONG" not in table
    assert list(dict.fromkeys(row["case"] for row in found["rows"])) == [
        c.name for c in SUITES[suite] if c.name in QUICK
    ]
    assert {"cpu", "torch", "python", "fastattn", "commit", "date"} <= found["machine"].keys()
    for row in found["rows"]:
        assert row["case"] in table
        assert 0 <= max(row["error_ratios"].values()) <= 1
        ours, peer = (row["times_ms"][n] for n in ("fastattn", row["best_peer"]))
        assert len(ours["samples"]) >= 2
        assert row["speedup"] == pytest.approx(peer["median"] / ours["median"], rel=0.01)
        assert {"fastattn", row["best_peer"]} <= row["peak_extra_bytes"].keys(), row["skipped"]
        assert row["of_bound"] == pytest.approx(row["bound_ms"] / ours["median"], rel=0.01)
    assert f"limits: multiply_add {found['machine']['limits']['multiply_add']:.4g}" in table
    pytest.importorskip("matplotlib")
    for picture in ("bench.png", "roofline.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch, factor):
    def forward(*args):
        out, *rest = eager.forward(*args)
        return out * factor, *rest

    names = {"unsupported": eager.unsupported, "backward": eager.backward, "forward": forward}
    monkeypatch.setitem(registry.BACKENDS, "broken", types.SimpleNamespace(**names))
    status, found, _ = run(tmp_path, "--filter", "dense", "--backend", "broken")
    assert status == 1
    assert "WRONG" in capsys.readouterr().out
    assert all(row["wrong"] and "times_ms" not in row for row in found["rows"])


def test_what_was_measured_outlives_what_falls_over(tmp_path, capsys, monkeypatch):
    """On a GPU, everything after an illegal access may fail, or a kernel may never end."""
    import bench.run
    from bench import peers, report, suite

    monkeypatch.setattr(bench.run, "QUICK", ("dense", "blocks"))
    monkeypatch.setattr(suite, "_add_memory", lambda *given: None)
    kept, build, write = [], peers.build, report.write_json

    def fail_later(case, *args, **options):
        if case.name == "blocks":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return build(case, *args, **options)

    def watch(rows, path, **about):
        write(rows, path, **about)
        written = json.loads(path.read_text())["rows"]
        kept.append((path.name, [(row["case"], row["failure"]) for row in written]))

    monkeypatch.setattr(peers, "build", fail_later)
    monkeypatch.setattr(report, "write_json", watch)
    status, found, folder = run(tmp_path)
    assert status == 1
    lost = [row for row in found["rows"] if row["case"] == "blocks"]
    assert [row["direction"] for row in lost] == ["forward", "forward+backward"]
    assert all("illegal memory access" in row["failure"] for row in lost)
    assert "illegal memory access" in capsys.readouterr().out
    assert [row["wrong"] for row in found["rows"] if row["case"] == "dense"] == [False] * 2
    first = kept[0]
    assert first == ("bench.partial.json", [("dense", None)] * 2)
    assert not (folder / "bench.partial.json").exists()


def test_a_backend_that_raises_is_refused(tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such kernel")

    names = {"unsupported": eager.unsupported, "backward": eager.backward, "forward": fail}
    monkeypatch.setitem(registry.BACKENDS, "broken", types.SimpleNamespace(**names))
    status, found, _ = run(tmp_path, "--filter", "additive", "--backend", "broken")
    assert status == 1
    assert "no such kernel" in capsys.readouterr().out
    assert found["rows"][0]["failure"] == "RuntimeError: no such kernel"


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    from bench import plot

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.write(tmp_path / "x.png", "", len) == "matplotlib is not installed"


def test_a_picture_that_is_not_drawn_is_neither_named_nor_left(tmp_path):
    """No GPU run has a roofline, and a folder may have one of an earlier run."""
    from bench import plot, roofline

    pytest.importorskip("matplotlib")
    about = dict(device="cuda", device_name="", fastattn="", torch="")
    old = tmp_path / "roofline.png"
    old.touch()
    pictures = {"bench.png": None, "roofline.png": roofline.write_png([], {}, about, old)}
    assert not old.exists()
    assert plot.said(tmp_path, "bench.json", pictures).splitlines() == [
        f"in {tmp_path}: bench.json, bench.png",
        "no roofline.png: no row has a bound",
    ]


def test_titles_name_our_instruction_set():
    from bench import plot, report

    about = dict(device="cpu", device_name="CPU", fastattn="1", torch="2", threads=2, cores=2)
    about |= dict(torch_isa="AVX512", commit=None, modified=False, python="3", load_average=0.0)
    about |= dict(extension="loaded")
    for isa, shown in ("amx", "amx"), (None, "AVX512"):
        ours = about | {"fastattn_isa": isa}
        assert plot.title(ours) == f"fastattn 1 and PyTorch 2 on CPU, 2 threads, {shown}"
        assert f"CPU, 2 threads of 2 cores, {shown}; our" in report.header([], ours)


def test_another_backend_of_ours_has_no_ratio_to_peers_of_another_time():
    from bench import cases, report, suite

    setting = suite.Setting("cpu", "auto", tiny=True, compile=False)
    case = cases.named("dense").tiny()
    rows = list(suite._run_on("eager", case, setting, lambda doing, done: None))
    assert [row.timings.keys() for row in rows] == [{"fastattn"}] * 2
    assert [row.speedup for row in rows] == [None] * 2
    assert report.table(rows).count("not timed") == 2


def test_committed_results_are_those_of_whole_runs(monkeypatch, tmp_path):
    from bench import machine
    from bench.run import _folder, _parse

    def folder(*options):
        return str(_folder(_parse(["--device", "cpu", *options])).relative_to(tmp_path))

    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert folder() == folder("--suite", "cpu") == "bench/results"
    assert folder("--suite", "models") == "bench/results/models"
    for partial in (
        ["--quick"], ["--filter", "dense"], ["--no-compile"], ["--backend", "eager"],
        ["--seconds", "0.01"],
    ):  # fmt: skip
        assert folder(*partial) == "build/bench"
        assert folder("--suite", "models", *partial) == "build/bench/models"
    monkeypatch.setenv("OUT", str(tmp_path / "own"))
    assert folder("--suite", "models", "--quick") == "own/models"
    assert folder("--suite", "models", "--out", str(tmp_path / "here")) == "here/models"
    assert folder("--suite", "cpu", "--out", str(tmp_path / "here")) == "here"


def test_unknown_case_is_an_error(tmp_path, capsys):
    from bench.run import main

    assert main(["--filter", "nothing-is-called-so", "--out", str(tmp_path)]) == 2


def test_every_peer_computes_the_same():
    """With the same mask, bias and inputs: each output is within our own budget of the truth."""
    from bench import check, peers
    from bench.cases import CASES, FORWARD

    for case in CASES:
        if FORWARD not in case.directions:  # with dropout, whose bits are our own
            continue
        work = peers.build(case.tiny(), compiled=False)
        checker = check.Checker(work)
        for name in work.implementations:
            ratios = checker.error_ratios(name)[FORWARD]
            assert check.worst(ratios) <= 1, f"{case.name} {name} {ratios}"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same_wherever_it_is_a_peer(monkeypatch):
    """As a user's code, without compilation."""
    from bench import cases, measure, peers

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    offered = {}
    for case in (c.tiny() for suite in cases.SUITES.values() for c in suite if c.compiled):
        work = peers.build(case)
        if peers.FLEX not in work.implementations:
            continue
        found = work.implementations[peers.FLEX].results(cases.FORWARD, work.upstream)["out"]
        truth, plain = (f(case.problem, work.t)["out"] for f in (testing.exact, testing.plain))
        testing.assert_within_budget(found, plain, truth, case.name)
        offered[case.name] = work.step(peers.FLEX, cases.BOTH)
    some = {"blocks", "documents", "softcap", "bias-grad", "pair-bias", "dot-256", "padding-4k"}
    assert some <= offered.keys()
    assert "sink" not in offered
    _, failed = measure.interleave({"flex": offered["blocks"]}, 0.001, "cpu")
    assert failed == {"flex": "NotImplementedError: FlexAttention has no gradients on a CPU"}


def test_what_there_was_no_time_to_compile_is_said(monkeypatch):
    from bench import cases, report, suite

    monkeypatch.setattr(suite, "COMPILE_S", float("inf"))
    setting = suite.Setting("cpu", "auto", tiny=True, compile=True)
    for name, expected in (
        ("blocks", {"torch.compile", "FlexAttention"}),
        ("mha", {"torch.compile"}),
    ):
        case = cases.named(name).tiny()
        pace = suite.Pace(0.001, 2, time.monotonic() + 1)
        for row in suite._run_case(case, setting, pace, lambda doing, done: None):
            assert row.skipped == dict.fromkeys(expected, "no time left")
            assert "≤" in report.table([row])
            row.skipped = {"torch.compile (memory)": "no time left"}
            assert "≤" not in report.table([row])


def test_what_compiles_is_timed_first_and_reported_in_its_place(monkeypatch):
    from bench import cases, suite

    timed, kept = [], []

    def run_case(case, setting, pace, say):
        timed.append(case.name)
        yield suite._new_row(case, "cpu", cases.FORWARD, 1)

    monkeypatch.setattr(suite, "_run_case", run_case)
    monkeypatch.setattr(suite, "_add_memory", lambda *given: None)
    names = ["dense", "blocks", "decode", "additive-small"]
    setting, pace = suite.Setting("cpu", "cpu", tiny=True, compile=True), suite.Pace(0.01, 4, 0.0)
    rows = suite.run(
        [cases.named(name) for name in names], setting, pace, lambda doing, done: None,
        lambda rows: kept.append([row.case for row in rows]),
    )  # fmt: skip
    assert timed == ["blocks", "additive-small", "dense", "decode"]
    assert [row.case for row in rows] == kept[-1] == names
    assert kept[1] == ["blocks", "additive-small"]


def test_memory_of_ours_comes_first_and_that_of_compilers_last(monkeypatch):
    from bench import cases, measure, suite

    asked = []

    def measured(requests, deadline):
        for request in requests:
            asked.append((request["case"], request["name"]))
            yield request, 8 if len(asked) <= 3 else measure.NO_TIME

    rows = [suite._new_row(cases.named(x), "cpu", cases.FORWARD, 1) for x in ("dense", "blocks")]
    for row, peer in zip(rows, ("eager", "torch.compile"), strict=True):
        row.timings = dict.fromkeys((peer, suite.OURS), measure.Timing([1.0]))
    monkeypatch.setattr(suite.memory, "measure", measured)
    setting = suite.Setting("cpu", "cpu", tiny=True, compile=True)
    suite._add_memory(rows, setting, 0.0, lambda doing, done: None)
    ours = [(row.case, suite.OURS) for row in rows]
    assert asked == [*ours, ("dense", "eager"), ("blocks", "torch.compile")]
    assert rows[0].memory == {"eager": 8, suite.OURS: 8}
    assert rows[1].memory == {suite.OURS: 8}
    assert rows[1].skipped == {"torch.compile (memory)": measure.NO_TIME}


def test_kept_pairs_are_what_the_names_say():
    from bench import cases

    kept = {"padding": 1 / 2, "padding-len": 1 / 2, "blocks": 1 / 4, "causal": 65 / 128}
    for case in (c.tiny() for c in cases.CASES):
        p = case.problem
        share = cases.kept_pairs(case, cases.draw(case)) / (p.B * p.H * p.M * p.N)
        assert share == pytest.approx(kept.get(case.name, 1)), case.name


def test_memory_sees_a_known_allocation():
    """Eager additive attention holds [B, M, N, D] twice while it computes tanh."""
    from bench import memory

    name = {"name": "eager", "backend": "auto", "tiny": False, "direction": "forward"}
    ((_, measured),) = memory.measure([{"case": "additive-small", **name}])
    matrix = 2 * 512 * 512 * 64 * 4
    assert 1.9 * matrix < measured < 2.2 * matrix


# ---- comparing two runs ----


@pytest.mark.parametrize(
    ("new", "status"),
    [
        (recorded(1.0, 2.0), 0),
        (recorded(10.0, 20.0), 0),  # a machine ten times slower
        (recorded(1.05, 2.0), 0),
        (recorded(1.2, 2.0), 1),
        (recorded(1.2, 2.0, spread=0.1), 0),  # the run was noisy
        (recorded(0.5, 2.0), 0),
        (recorded(1.0, 2.0, wrong=True), 1),
        (recorded(1.0, 2.0, case="other"), 1),
        (recorded(1.0, 2.0) | {"schema": 0}, 2),
        (recorded(1.0, 2.0, case="other") | {"options": {"filter": "other"}}, 2),
        (recorded(1.0, 2.0) | {"options": {"filter": "dense", "suite": "cpu"}}, 0),
        (recorded(1.0, 2.0) | {"options": {"suite": "models"}}, 2),
        (recorded(1.0, 2.0) | {"options": {"no_compile": True}}, 2),
    ],
)
def test_compare_judges_by_the_ratio_to_the_peer(tmp_path, capsys, new, status):
    from bench import compare

    for name, run in ("old", recorded(1.0, 2.0)), ("new", new):
        (tmp_path / name).write_text(json.dumps(run))
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == status
    assert ("SLOWER" in capsys.readouterr().out) == (status == 1)


@pytest.mark.parametrize("path", sorted((ROOT / "bench/results").glob("*/bench.json")), ids=str)
def test_compare_expects_what_is_timed_today(path):
    from bench import cases, compare

    run = json.loads(path.read_text())
    rows = [r for r in run["rows"] if r["direction"] in cases.named(r["case"]).directions]
    found = compare.changes(run, run | {"rows": rows})
    assert not [change.name for change in found if change.reason == "not in the new run"]


@pytest.mark.parametrize(("ours", "spread", "status"), [(1.04, 0, 0), (1.08, 0, 1), (1.08, 0.1, 0)])
def test_compare_finds_smaller_changes_if_asked(tmp_path, ours, spread, status):
    from bench import compare

    paths = [str(tmp_path / name) for name in ("old", "new")]
    for path, run in zip(paths, (recorded(1.0, 2.0), recorded(ours, 2.0, spread)), strict=True):
        Path(path).write_text(json.dumps(run))
    assert compare.main(paths) == 0
    assert compare.main(["--least", "0.05", *paths]) == status
    with pytest.raises(SystemExit):
        compare.main(["--least", "5", *paths])


def test_compare_says_how_many_rows_it_judged(tmp_path, capsys):
    from bench import compare

    run = recorded(1.0, 2.0)
    run["rows"] += recorded(1.0, 2.0, case="decode", wrong=True)["rows"]
    (tmp_path / "run").write_text(json.dumps(run))
    assert compare.main([str(tmp_path / "run")] * 2) == 0
    assert capsys.readouterr().out.endswith("1 of 2 rows judged; nothing is slower\n")


def test_compare_reads_what_a_run_writes(quick, capsys):
    from bench import compare

    _, _, folder, _ = quick("cpu")
    assert compare.main([str(folder), str(folder)]) == 0
    assert "dense fwd+bwd" in capsys.readouterr().out


# ---- options ----


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("run", "--seconds", "0"), "--seconds: expected seconds, more than 0, got 0"),
        (("run", "--seconds", "nan"), "got nan"),
        (("scaling", "--longest", "-3"), "--longest: expected a whole number, 1 or more, got -3"),
        (("scaling", "--longest", "1"), "--longest: expected 256 or more, got 1"),
        (("distributed", "--length", "0"), "--length: expected a whole number, 1 or more"),
        (("distributed", "--length", "1"), "--length: expected 2 or more, got 1"),
        (("compare", "a", "b", "--least", "x"), "expected a share between 0 and 1, got x"),
    ],
    ids=" ".join,
)
def test_a_wrong_option_ends_a_command_at_once(command, message, capsys):
    module = importlib.import_module(f"bench.{command[0]}")
    with pytest.raises(SystemExit):
        module.main([*command[1:]])
    assert message in capsys.readouterr().err


def test_compare_names_a_file_that_is_none_of_ours(tmp_path, capsys):
    from bench import compare

    (tmp_path / "bench.json").write_text("hello")
    assert compare.main([str(tmp_path), str(tmp_path)]) == 2
    assert f"{tmp_path / 'bench.json'}: expected a bench.json: " in capsys.readouterr().err
