"""examples/masked_language_model runs in its smoke size and equals plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from programs import META, gradients, pictures, smoke

from fastattn.testing import assert_within_budget


def test_learns_as_its_plain_twin(tmp_path):
    result = smoke("masked_language_model", tmp_path)
    assert pictures(tmp_path) == {"learning.png"}
    ours, plain = (history["losses"] for history in result["pre-training"].values())
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(plain, rel=1e-3)  # else their dropout differs
    for task in ("words", "good or bad"):
        assert set(result[task]) >= {"pre-trained", "from scratch"}


def test_masking():
    from examples.masked_language_model.masking import IGNORED, mask_tokens

    vocabulary = 1000
    tokens = torch.randint(1, vocabulary, (200, 100))
    tokens[:, 90:] = 0
    masked = mask_tokens(tokens, vocabulary, torch.Generator().manual_seed(0))
    chosen = masked.targets != IGNORED
    assert torch.equal(masked.targets[chosen], tokens[chosen])
    assert torch.equal(masked.tokens[~chosen], tokens[~chosen])
    assert not chosen[:, 90:].any()
    assert (masked.tokens[chosen] > 3).logical_or(tokens[chosen] <= 3).all()
    n = chosen.sum().item()
    hidden = (masked.tokens[chosen] == vocabulary).sum().item()
    kept = (masked.tokens[chosen] == tokens[chosen]).sum().item()
    # The share of n independent choices is off by 5 standard deviations once in a million.
    for count, of, share in ((n, 18_000, 0.15), (hidden, n, 0.8), (kept, n, 0.1)):
        assert abs(count - share * of) < 5 * (of * share * (1 - share)) ** 0.5


def test_words():
    from examples.masked_language_model.words import cutter, spans, starts

    begins = starts(cutter(smoke=True)("这本书不错,真的"))
    assert begins.tolist() == [1, 0, 0, 1, 0, 1, 1, 0]
    assert spans(begins) == {(0, 3), (3, 5), (5, 6), (6, 8)}
    assert spans(begins * 0) == {(0, 8)}


def test_score_of_words():
    from examples.masked_language_model.words import Tagged, score, starts

    texts = [
        Tagged(torch.tensor([5, 6, 7, 8]), starts(words)) for words in (["ab", "c", "d"], ["abcd"])
    ]

    class Told(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, tokens):
            return torch.tensor([[1.0, -1.0, 1.0, -1.0]]).expand(tokens.shape)

    # Of 4 words "ab" is right; the model says 2 words of each text.
    assert score(Told(), texts) == 2 * 1 / (4 + 4)


@pytest.mark.parametrize("training", [False, True])
def test_plain_twin(training):
    """With padding; at inference, where torch would bypass the attention; and with gradients."""
    from examples.masked_language_model import __main__ as program
    from examples.text_classification import __main__ as classification
    from examples.text_classification import dataset

    tokenizer, (reviews, *_) = classification.prepare(smoke=True, seed=0)
    torch.manual_seed(0)
    ours, plain = program.build(tokenizer).values()
    truth = copy.deepcopy(plain).double()
    tokens = dataset.collate(reviews.items[:9]).characters
    where = tokens > 5
    results = []
    for model in (ours, plain, truth):
        model.eval()  # dropout aside
        with torch.set_grad_enabled(training):
            out = model(tokens, where)
        grads = gradients(out.square().mean(), model).values() if training else ()
        results.append((out, *grads))
    for got in zip(*results, strict=True):
        assert_within_budget(*got)


def test_on_another_device():
    from examples.common import devices
    from examples.masked_language_model import __main__ as program
    from examples.masked_language_model.model import Classifier
    from examples.text_classification import dataset

    tokenizer, (training, *_) = program.prepare(smoke=True, seed=0)
    encoder = program.build(tokenizer)["fastattn"].encoder.to(META)
    batch = devices.moved(dataset.collate(training.items[:9]), META)
    assert Classifier(encoder).to(META)(batch)[0].is_meta
