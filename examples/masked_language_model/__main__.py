"""Pre-trains a small BERT on reviews without labels, and fine-tunes it on a few with labels.

Two tasks: where words begin, and whether a review is a good one.
"""

from __future__ import annotations

import copy
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


def build(tokenizer: Tokenizer) -> dict[str, GapFiller]:
    """A model on nn.TransformerEncoder, and a copy with the attention of fastattn."""
    plain = GapFiller(Encoder(len(tokenizer.characters), tokenizer.max_length))
    ours = copy.deepcopy(plain)
    fastattn.replace_attention(ours)
    return {"fastattn": ours, "nn.TransformerEncoder": plain}


def few_labels(reviews: ReviewDataset, most: int) -> ReviewDataset:
    """The first reviews of a data set, which already is in random order."""
    few = copy.copy(reviews)
    few.items = reviews.items[:most]
    return few


def fine_tune(encoder: Encoder, splits: list[ReviewDataset], epochs: int, name: str, seed: int):
    """Test accuracy of a classifier on this encoder, and its training history."""
    training, validation, test = splits
    options.set_seed(seed)
    model = Classifier(encoder).to(devices.of(encoder))
    batches = dataset.training_batches(training, 32, seed)
    history = train(model, batches, dataset.evaluation_batches(validation, 256), epochs, name)
    return {"test": accuracy(model, dataset.evaluation_batches(test, 256)), **history}


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
    for name, history in result["words"].items():
        values = history["validation"]
        right.plot(range(1, len(values) + 1), values, label=name)
    right.set(xlabel="fifth of fine-tuning", ylabel="validation, F1 of words")
    for axes in (left, right):
        axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
    plots.save(figure, picture)


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = options.parse(options.parser("masked_language_model", __doc__), argv)
    tokenizer, (training, validation, test) = prepare(given.smoke, given.seed)
    vocabulary = len(tokenizer.characters)
    epochs, fine_epochs = (3, 2) if given.smoke else (EPOCHS, FINE_EPOCHS)
    options.set_seed(given.seed)
    models = {name: model.to(given.device) for name, model in build(tokenizer).items()}
    untrained = copy.deepcopy(models["fastattn"].encoder)
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

    encoders = {
        "pre-trained": copy.deepcopy(ours.encoder),
        "pre-trained, nn.TransformerEncoder": copy.deepcopy(
            models["nn.TransformerEncoder"].encoder
        ),
        "from scratch": untrained,
    }
    cut = words.cutter(given.smoke)
    sizes = (20 if given.smoke else WORD_LABELS), HELD_OUT, HELD_OUT
    splits = (training, validation, test)
    tagged = [words.tag(part, most, cut) for part, most in zip(splits, sizes, strict=True)]
    result["words"] = {
        name: words.fine_tune(
            copy.deepcopy(encoder), tagged, 10 if given.smoke else WORD_STEPS, name, given.seed
        )
        for name, encoder in encoders.items()
    }
    few = [few_labels(training, 100 if given.smoke else LABELLED), validation, test]
    result["good or bad"] = {
        name: fine_tune(encoder, few, fine_epochs, name, given.seed)
        for name, encoder in encoders.items()
    }
    rows = [
        {
            "": name,
            f"words, F1, {len(tagged[0])} labels": f"{row['test']:.2%}",
            f"good or bad, {len(few[0])} labels": f"{result['good or bad'][name]['test']:.2%}",
        }
        for name, row in result["words"].items()
    ]
    print("\n" + report.table(rows))
    draw(result, given.out / "learning.png")
    longest = dataset.collate(sorted(training.items, key=lambda item: len(item[0]))[-BATCH:])
    measured = compare(models, longest.characters, vocabulary, 0.05 if given.smoke else 2.0)
    print(f"\na step of pre-training: {BATCH} reviews of {longest.characters.shape[1]} characters")
    print(report.comparison(measured))
    report.save(result | {"measured": measured}, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
