"""Pre-trains a small BERT on reviews without labels, and fine-tunes it on a few with labels.

Two tasks: where words begin, and whether a review is a good one. Each is learned three times, with
other labels, initial values and batches, from one pre-training and from scratch.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path

import torch
from torch import nn

import fastattn
from examples.common import devices, options, plots, report
from examples.common.compare import side_by_side, training_step
from examples.masked_language_model import words
from examples.masked_language_model.model import Classifier, Encoder, GapFiller
from examples.masked_language_model.pretrain import fill, gap_loss, pretrain
from examples.text_classification import dataset
from examples.text_classification.__main__ import prepare
from examples.text_classification.dataset import ReviewDataset
from examples.text_classification.tokenizer import Tokenizer
from examples.text_classification.train import accuracy, train

GAPS = "酒店的_务很好,房间也很干_。"
EPOCHS, BATCH = 12, 64
WORD_LABELS, WORD_STEPS, HELD_OUT = 100, 250, 600  # texts, steps, texts to validate and to test
LABELLED, FINE_EPOCHS = 1000, 5  # of good and bad reviews
RUNS = 3


def build(tokenizer: Tokenizer) -> dict[str, GapFiller]:
    """A model on nn.TransformerEncoder, and a copy with the attention of fastattn."""
    plain = GapFiller(Encoder(len(tokenizer.characters), tokenizer.max_length))
    ours = copy.deepcopy(plain)
    fastattn.replace_attention(ours)
    return {"fastattn": ours, "nn.TransformerEncoder": plain}


def few_labels(reviews: ReviewDataset, count: int, run: int = 0) -> ReviewDataset:
    """``count`` reviews, others in each run, of a data set that already is in random order."""
    few, own = copy.copy(reviews), slice(run * count, (run + 1) * count)
    few.items, few.reviews = reviews.items[own], reviews.reviews[own]
    return few


def fine_tune(encoder: Encoder, splits: list[ReviewDataset], epochs: int, name: str, seed: int):
    """Test accuracy of a classifier on this encoder, and its training history."""
    training, validation, test = splits
    options.set_seed(seed)
    model = Classifier(encoder).to(devices.of(encoder))
    batches = dataset.training_batches(training, 32, seed)
    history = train(model, batches, dataset.evaluation_batches(validation), epochs, name)
    return {"test": accuracy(model, dataset.evaluation_batches(test)), **history}


def learn_tasks(
    pretrained: Encoder,
    tokenizer: Tokenizer,
    splits: list[ReviewDataset],
    cut: words.Cut,
    given: Namespace,
) -> dict:
    """Both tasks, each in several runs, by a pre-trained encoder and by new ones."""
    training, validation, test = splits
    sizes = (20, 10, 100, 2) if given.smoke else (WORD_LABELS, WORD_STEPS, LABELLED, FINE_EPOCHS)
    texts, steps, labelled, epochs = sizes
    held_out = [words.tag(few_labels(part, HELD_OUT), cut) for part in (validation, test)]
    found: dict = {
        task: {"pre-trained": [], "from scratch": []} for task in ("words", "good or bad")
    }
    for run in range(1 if given.smoke else RUNS):
        seed = given.seed + run
        options.set_seed(seed)
        new = build(tokenizer)["fastattn"].encoder.to(given.device)
        tagged = [words.tag(few_labels(training, texts, run), cut), *held_out]
        few = [few_labels(training, labelled, run), validation, test]
        for name, encoder in (("pre-trained", pretrained), ("from scratch", new)):
            about = f"{name}, run {run + 1}"
            own = copy.deepcopy(encoder)
            found["words"][name].append(words.fine_tune(own, tagged, steps, about, seed))
            own = copy.deepcopy(encoder)
            found["good or bad"][name].append(fine_tune(own, few, epochs, about, seed))
    return found


def summary(result: dict) -> list[dict]:
    """Rows of a table: the mean of the runs on the test set, and their range."""

    def cell(runs: list[dict]) -> str:
        scores = [run["test"] for run in runs]
        mean = sum(scores) / len(scores)
        return f"{mean:.1%} ({min(scores):.1%} to {max(scores):.1%})"

    return [
        {
            "": name,
            "words, F1": cell(result["words"][name]),
            "good or bad, accuracy": cell(result["good or bad"][name]),
        }
        for name in result["words"]
    ]


def compare(
    models: dict[str, GapFiller], tokens: torch.Tensor, vocabulary: int, seconds: float
) -> dict:
    """Time and memory of a pre-training step."""

    def loss(model: nn.Module) -> torch.Tensor:
        model.train()
        return gap_loss(model, tokens, vocabulary, torch.Generator().manual_seed(0))

    steps = {name: training_step(m, lambda m=m: loss(m)) for name, m in models.items()}
    return side_by_side(steps, seconds, devices.of(next(iter(models.values()))))


def draw(result: dict, picture: Path) -> None:
    """Draws the loss of both pre-trainings, and the score of the words during fine-tuning."""
    figure = plots.figure(8, 3)
    left, right = figure.subplots(1, 2)
    for (name, history), style in zip(result["pre-training"].items(), ("-", "--"), strict=True):
        left.plot(range(1, len(history["losses"]) + 1), history["losses"], style, label=name)
    left.set(xlabel="epoch of pre-training", ylabel="loss on the gaps")
    for (name, runs), color in zip(result["words"].items(), ("C0", "C1"), strict=True):
        for n, values in enumerate(run["validation"] for run in runs):
            label = name if n == 0 else None
            right.plot(range(1, len(values) + 1), values, color=color, label=label)
    right.set(xlabel="fifth of fine-tuning", ylabel="validation, F1 of words")
    for axes in (left, right):
        axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
    plots.save(figure, picture)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("masked_language_model", __doc__), argv)
    cut = words.cutter(given.smoke)
    tokenizer, splits = prepare(given.smoke, given.seed)
    training, vocabulary = splits[0], len(tokenizer.characters)
    epochs = 3 if given.smoke else EPOCHS
    options.set_seed(given.seed)
    models = {name: model.to(given.device) for name, model in build(tokenizer).items()}
    result: dict = {"pre-training": {}}
    for name, model in models.items():
        options.set_seed(given.seed)  # the same batches, gaps and dropout for both
        batches = dataset.training_batches(training, BATCH, given.seed, balanced=False)
        result["pre-training"][name] = pretrain(
            model, batches, epochs, vocabulary, name, given.seed
        )
    ours = models["fastattn"]
    result["gaps"] = {"text": GAPS, "filled": fill(ours, tokenizer, GAPS)}
    print(f"\n{GAPS}: " + ", ".join("/".join(best) for best in result["gaps"]["filled"]))

    result |= learn_tasks(models["fastattn"].encoder, tokenizer, splits, cut, given)
    print("\n" + report.table(summary(result)))
    draw(result, given.out / "learning.png")
    longest = dataset.collate(sorted(training.items, key=lambda item: len(item[0]))[-BATCH:])
    measured = compare(models, longest.characters, vocabulary, 0.05 if given.smoke else 2.0)
    print(f"\na step of pre-training: {BATCH} reviews of {longest.characters.shape[1]} characters")
    print(report.comparison(measured))
    report.save(result | {"measured": measured}, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
