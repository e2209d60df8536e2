"""Trains one translator for each kind of attention, compares them, and draws an alignment."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fastattn
from examples.common import options, plots, report
from examples.common.compare import side_by_side, training_step
from examples.common.vocabulary import BEGIN, Vocabulary
from examples.translation import data, train
from examples.translation.data import Corpus
from examples.translation.decode import translate
from examples.translation.model import KINDS, Translator

DATA = Path("build/translation")  # of the repository, where `make` starts
PLAIN = "additive, plain PyTorch"
BATCH, BEAMS = 64, 4


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of this program."""
    parser = options.parser("translation", __doc__)
    parser.add_argument("--epochs", type=int, default=8, help="of each model")
    parser.add_argument(
        "--max-tokens", type=int, default=60, help="of an English sentence; fewer are faster"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=(*KINDS, PLAIN), default=(*KINDS, PLAIN), metavar="KIND",
        help=f"of attention: some of {', '.join(KINDS)}, and '{PLAIN}' (default: all)",
    )  # fmt: skip
    given = options.parse(parser, argv)
    if given.smoke:
        given.epochs, given.kinds = 2, ("none", "additive", PLAIN)
    return given


def prepare(smoke: bool, seed: int, max_tokens: int) -> tuple[list[Corpus], Vocabulary, Vocabulary]:
    """Training, validation and test corpus, and the vocabularies of the first."""
    pairs = [
        pair for pair in data.load_pairs(None if smoke else DATA) if len(pair[0]) <= max_tokens
    ]
    splits = data.split(pairs, seed)
    frequency = 1 if smoke else 2
    source, target = (
        Vocabulary((token for pair in splits[0] for token in pair[side]), frequency)
        for side in (0, 1)
    )
    print(f"{' + '.join(str(len(part)) for part in splits)} pairs to train, validate and test;")
    print(f"{len(source)} English words, {len(target)} Chinese characters and words")
    return [Corpus(part, source, target) for part in splits], source, target


def build(name: str, source: Vocabulary, target: Vocabulary, seed: int) -> Translator:
    """The model of a kind; all kinds have the same initial parameters outside attention."""
    options.set_seed(seed)
    if name == PLAIN:
        return Translator(len(source), len(target), "additive", plain=True)
    return Translator(len(source), len(target), name)


def score(model: Translator, test: Corpus, target: Vocabulary) -> dict[str, float | None]:
    """BLEU on the test set by greedy and by beam search."""
    return {
        "greedy BLEU": train.bleu(train.translations(model, test, target, 1, 256), test),
        f"beam {BEAMS} BLEU": train.bleu(train.translations(model, test, target, BEAMS, 256), test),
    }


@torch.no_grad()
def align(model: Translator, test: Corpus, target: Vocabulary, picture: Path) -> str:
    """Translates a sentence of the test set and draws what each of its words looked at."""
    longest = max(len(english) for english, _ in test.pairs)
    index = min(range(len(test)), key=lambda n: abs(len(test.pairs[n][0]) - min(longest, 14)))
    batch = test.batch([index])
    (row,) = translate(model, batch.source, batch.lengths, BEAMS)
    memory, state = model.encode(batch.source, batch.lengths)
    words = torch.tensor([[BEGIN, *row]])
    weights = model.decode(words, memory, state, need_weights=True)[2]
    assert weights is not None
    plots.use_chinese_font()
    english, chinese = test.pairs[index]
    figure = fastattn.plot_attention(
        weights[0], [*target.decode(row), "<end>"], [*english, "<end>"]
    )
    plots.save(figure, picture)
    said = train.join(target.decode(row))
    print(f"\n{' '.join(english)}\n  translated: {said}\n  reference:  {train.join(chinese)}")
    return said


def compare(models: dict[str, Translator], corpus: Corpus, seconds: float) -> dict:
    """Time and memory of a training step with additive attention, on long sentences."""
    size = [len(english) + len(chinese) for english, chinese in corpus.encoded]
    batch = corpus.batch(sorted(range(len(corpus)), key=size.__getitem__)[-BATCH:])
    steps = {}
    for name, model in models.items():
        model.train()
        steps[name] = training_step(model, lambda model=model: train.loss(model, batch))
    N, M = batch.source.shape[1], batch.target.shape[1] - 1
    print(f"\none training step on {len(batch.source)} pairs, {N} English and {M} Chinese tokens")
    return side_by_side(steps, seconds)


def table(result: dict[str, dict]) -> str:
    """A row for each kind; BLEU is left out where it could not be computed."""
    rows = [
        {"attention": name}
        | {key: f"{x:.2f}" for key, x in row.items() if key != "losses" and x is not None}
        for name, row in result.items()
    ]
    hint = "" if len(rows[0]) > 3 else "\nBLEU needs sacrebleu: pip install sacrebleu"
    return report.table(rows) + hint


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = arguments(argv)
    (training, validation, test), source, target = prepare(
        given.smoke, given.seed, given.max_tokens
    )
    models, result = {}, {}
    for name in given.kinds:
        model = models[name] = build(name, source, target, given.seed)
        history = train.train(model, training, given.epochs, BATCH, given.seed, name)
        held_out = train.validation_loss(model, validation, BATCH)
        result[name] = {**history, "validation": held_out, **score(model, test, target)}
        report.save({"kinds": result}, given.out)  # whatever comes later, this is not lost
    print("\n" + table(result))
    result = {"kinds": result}
    attentive = next((name for name in models if name != "none"), None)
    if attentive:
        picture = given.out / "alignment.png"
        result["translated"] = align(models[attentive], test, target, picture)
    if PLAIN in models and "additive" in models:
        twins = {"fastattn": models["additive"], "plain PyTorch": models[PLAIN]}
        result["training_step"] = compare(twins, training, 0.05 if given.smoke else 3.0)
        print(report.comparison(result["training_step"]))
    report.save(result, given.out)
    return result


if __name__ == "__main__":
    main()
