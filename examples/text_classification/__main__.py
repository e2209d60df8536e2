"""Trains the classifier on fastattn and on nn.MultiheadAttention, and reads a sentence with it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fastattn
from examples.common import devices, options, plots, report
from examples.common.compare import side_by_side, training_step
from examples.text_classification import data, dataset, train
from examples.text_classification.data import LABELS, Review
from examples.text_classification.dataset import Batch, ReviewDataset
from examples.text_classification.model import (
    PlainSelfAttention,
    ReviewClassifier,
    plain_parameters,
)
from examples.text_classification.tokenizer import Tokenizer

SENTENCE = "房间很干净，但是服务员的态度太差了，不会再来。"
EPOCHS, BATCH = 3, 64


def prepare(smoke: bool, seed: int) -> tuple[Tokenizer, list[ReviewDataset]]:
    """The tokenizer, and the training, validation and test set."""
    reviews = data.tiny_reviews() if smoke else data.load_reviews()
    unique = data.deduplicate(reviews)
    splits = data.split(unique, seed)
    tokenizer = Tokenizer([review.text for review in splits.train])
    print(f"{len(reviews)} reviews, {len(unique)} of them different: ", end="")
    print(", ".join(f"{len(part)} {name}" for name, part in splits._asdict().items()))
    for name, words in (("characters", tokenizer.characters), ("bigrams", tokenizer.bigrams)):
        common = " ".join(f"{token}:{n}" for token, n in words.frequencies.most_common(8))
        print(f"{len(words)} {name}; the most frequent: {common}")
    return tokenizer, [ReviewDataset(part, tokenizer) for part in splits]


def build(tokenizer: Tokenizer) -> dict[str, nn.Module]:
    """The model on fastattn and its plain twin, with the same initial parameters."""
    sizes = len(tokenizer.characters), len(tokenizer.bigrams), tokenizer.max_length
    ours = ReviewClassifier(*sizes)
    plain = ReviewClassifier(*sizes, attention=PlainSelfAttention)
    plain.load_state_dict(plain_parameters(ours.state_dict()))
    return {"fastattn": ours, "nn.MultiheadAttention": plain}


@torch.no_grad()
def read(model: nn.Module, tokenizer: Tokenizer, text: str, picture: Path) -> dict:
    """The model's verdict on a text, and a heat map of its layers' weights."""
    text = data.normalize(text)[: tokenizer.max_length]
    batch = dataset.collate([ReviewDataset([Review(text, 0)], tokenizer)[0]])
    batch = devices.moved(batch, devices.of(model))
    model.eval()
    logits, layers = model(batch, need_weights=True)
    probability = logits.softmax(dim=1)[0].tolist()
    plots.use_chinese_font()
    weights = torch.cat(layers)  # for the one review: [layers, N, N]
    names = [f"layer {n + 1}" for n in range(len(layers))]
    figure = fastattn.plot_attention(weights, list(text), list(text), names=names)
    plots.save(figure, picture)
    said = dict(zip(LABELS, probability, strict=True))
    print(f"\n{text}\n" + ", ".join(f"{label} {p:.1%}" for label, p in said.items()))
    return {"text": text, **said}


def compare(models: dict[str, nn.Module], batch: Batch, seconds: float) -> dict:
    """Time and memory of a training step, and of reading a batch with its weights."""
    device = batch.labels.device
    for model in models.values():
        model.train()
    training = {
        name: training_step(model, lambda m=model: cross_entropy(m(batch)[0], batch.labels))
        for name, model in models.items()
    }
    measured = {"training step": side_by_side(training, seconds, device)}
    for model in models.values():
        model.eval()
    with torch.no_grad():
        reading = {
            name: lambda m=model: m(batch, need_weights=True) for name, model in models.items()
        }
        measured["reading, with weights"] = side_by_side(reading, seconds, device)
    return measured


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("text_classification", __doc__), argv)
    tokenizer, (training, validation, test) = prepare(given.smoke, given.seed)
    epochs = 6 if given.smoke else EPOCHS
    options.set_seed(given.seed)
    models, result = build(tokenizer), {}
    for name, model in models.items():
        model.to(given.device)
        options.set_seed(given.seed)  # the same batches and the same dropout for both
        batches = dataset.training_batches(training, BATCH, given.seed)
        history = train.train(model, batches, dataset.evaluation_batches(validation), epochs, name)
        tested = train.accuracy(model, dataset.evaluation_batches(test))
        result[name] = {"test": tested, **history}
    rows = [
        {"": name, "test accuracy": f"{r['test']:.2%}", "training, s": f"{r['seconds']:.1f}"}
        for name, r in result.items()
    ]
    print("\n" + report.table(rows))
    result["sentence"] = read(models["fastattn"], tokenizer, SENTENCE, given.out / "attention.png")
    longest = sorted(training.items, key=lambda item: len(item[0]))[-BATCH:]
    batch = devices.moved(dataset.collate(longest), given.device)
    measured = compare(models, batch, 0.05 if given.smoke else 3.0)
    for what, rows in measured.items():
        print(f"\n{what}: {BATCH} reviews of {batch.characters.shape[1]} characters")
        print(report.comparison(rows))
    report.save(result | {"measured": measured}, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
