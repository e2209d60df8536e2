"""examples/text_classification runs in its smoke size and equals plain PyTorch."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from programs import META, gradients, pictures, smoke
from torch.nn.functional import cross_entropy

from fastattn.testing import assert_within_budget


def test_learns_as_its_plain_twin(tmp_path):
    result = smoke("text_classification", tmp_path)
    assert pictures(tmp_path) == {"attention.png"}
    for name in ("fastattn", "nn.MultiheadAttention"):
        assert result[name]["test"] > 0.75  # guessing is right half the time
        assert result[name]["losses"][-1] < result[name]["losses"][0]


def test_plain_twin():
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


def test_same_dropout_as_its_plain_twin():
    """Otherwise the two trainings would not be comparable."""
    from examples.text_classification import __main__ as program
    from examples.text_classification import dataset

    tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
    batch = dataset.collate(training.items[:9])
    logits = []
    for model in program.build(tokenizer).values():
        torch.manual_seed(1)
        logits.append(model.train()(batch)[0])
    assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[1].abs().max()


def test_deduplicates_before_splitting():
    from examples.text_classification.data import Review, deduplicate, split

    reviews = [
        Review("很好", 1),
        Review("很好。", 1),  # the same except for punctuation
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


def test_vocabulary():
    from examples.common.vocabulary import SPECIAL, UNKNOWN, Vocabulary
    from examples.text_classification.tokenizer import Tokenizer

    words = Vocabulary("abcabab", min_frequency=2)
    assert words.tokens == [*SPECIAL, "a", "b"]
    assert words.frequencies["c"] == 1
    assert words.encode("bca") == [5, UNKNOWN, 4]
    assert words.decode([4, 5]) == ["a", "b"]
    tokenizer = Tokenizer(["abab"], min_frequency=2, max_length=3)
    assert tokenizer("abxy") == ([4, 5, UNKNOWN], [4, UNKNOWN, UNKNOWN])


def test_batches_are_balanced():
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


def test_on_another_device():
    from examples.common import devices
    from examples.text_classification import __main__ as program
    from examples.text_classification import dataset

    tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
    for model in program.build(tokenizer).values():
        model.to(META)
        batch = devices.moved(dataset.collate(training.items[:9]), devices.of(model))
        logits, layers = model(batch, need_weights=True)
        assert all(x.is_meta for x in (logits, *layers))
        cross_entropy(logits, batch.labels).backward()
