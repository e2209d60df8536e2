"""Trains a translator for each kind of attention, compares them, and draws alignments."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fastattn
from bench.given import count
from examples.common import options, plots, report
from examples.common.vocabulary import BEGIN, Vocabulary
from examples.translation import compare, data, lstm, train
from examples.translation.data import Corpus
from examples.translation.decode import translate
from examples.translation.lstm import RecurrentTranslator
from examples.translation.transformer import Transformer

DATA = Path("build/translation")  # relative to the repository, where `make` runs
KINDS = (*lstm.KINDS, "transformer")
SHOWN = ("additive", "transformer")  # drawn, and compared with plain PyTorch
EPOCHS, BATCH, BEAMS = 10, 64, 4


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of this program."""
    parser, few = options.parser("translation", __doc__), ("none", *SHOWN)
    parser.add_argument(
        "--epochs", type=count, help=f"of each model (default: {EPOCHS}, or 2 with --smoke)"
    )
    parser.add_argument(
        "--max-tokens", type=count, default=20, help="of an English sentence; fewer are faster"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, metavar="KIND",
        help=f"of attention: some of {', '.join(KINDS)} (default: all, or {', '.join(few)} with "
        "--smoke). What result.json holds of the others stays, if they were trained with the same "
        "options",
    )  # fmt: skip
    given = options.parse(parser, argv)
    if given.epochs is None:
        given.epochs = 2 if given.smoke else EPOCHS
    if given.kinds is None:
        given.kinds = few if given.smoke else KINDS
    return given


def prepare(
    smoke: bool, seed: int, max_tokens: int, device: torch.device
) -> tuple[list[Corpus], Vocabulary, Vocabulary]:
    """Training, validation and test corpus, and the vocabularies of the first."""
    pairs = [
        pair for pair in data.load_pairs(None if smoke else DATA) if len(pair[0]) <= max_tokens
    ]
    splits = data.split(pairs, seed)
    if not splits[1]:
        raise SystemExit(f"--max-tokens {max_tokens}: so short are {len(pairs)} pairs, too few")
    frequency = 1 if smoke else 2
    source, target = (
        Vocabulary((token for pair in splits[0] for token in pair[side]), frequency)
        for side in (0, 1)
    )
    print(f"{' + '.join(str(len(part)) for part in splits)} pairs to train, validate and test;")
    print(f"{len(source)} English words, {len(target)} Chinese characters and words")
    return [Corpus(part, source, target, device) for part in splits], source, target


def build(kind: str, source: Vocabulary, target: Vocabulary, plain: bool = False) -> nn.Module:
    """The model of a kind. ``plain``: the attention in plain PyTorch, with the same parameters."""
    sizes = len(source), len(target)
    if kind != "transformer":
        return RecurrentTranslator(*sizes, kind, plain=plain)
    return Transformer(
        *sizes, attention=nn.MultiheadAttention if plain else fastattn.MultiheadAttention
    )


def score(model: nn.Module, test: Corpus, target: Vocabulary) -> dict[str, float | None]:
    """BLEU on the test set by greedy and by beam search."""
    return {
        "greedy BLEU": train.bleu(train.translations(model, test, target, 1), test),
        f"beam {BEAMS} BLEU": train.bleu(train.translations(model, test, target, BEAMS), test),
    }


@torch.no_grad()
def align(model: nn.Module, test: Corpus, target: Vocabulary, picture: Path) -> str:
    """Translates a sentence of the test set, and draws which words each of its words looked at."""
    longest = max(len(english) for english, _ in test.pairs)
    index = min(range(len(test)), key=lambda n: abs(len(test.pairs[n][0]) - min(longest, 14)))
    batch = test.batch([index])
    model.eval()
    (row,) = translate(model, batch.source, batch.lengths, BEAMS)
    weights = model.align(
        batch.source, batch.lengths, torch.tensor([[BEGIN, *row]], device=test.device)
    )
    plots.use_chinese_font()
    english, chinese = test.pairs[index]
    figure = fastattn.plot_attention(
        weights[0], [*target.decode(row), "<end>"], [*english, "<end>"]
    )
    plots.save(figure, picture)
    said = train.join(target.decode(row))
    print(f"\n{' '.join(english)}\n  translated: {said}\n  reference:  {train.join(chinese)}")
    return said


def examine(
    kind: str, model: nn.Module, corpora: list[Corpus], words: tuple, given: argparse.Namespace
) -> dict:
    """An alignment by the trained model, a comparison with its plain twin, and costs of steps."""
    training, _, test = corpora
    seen: dict = {"translated": align(model, test, words[1], given.out / f"alignment-{kind}.png")}
    plain = build(kind, *words, plain=True).to(test.device)
    plain.load_state_dict(model.state_dict())
    pair = {"fastattn": model, "plain PyTorch": plain}
    seen["equal parameters"] = compare.results(pair, test, 16 if given.smoke else 128)
    seen["training step"] = compare.training_steps(
        pair, training, 8 if given.smoke else BATCH, given.smoke
    )
    if kind == "transformer":
        seen["decoding step"] = compare.decoding_steps(model, test, given.smoke)
        compare.draw_decoding(seen["decoding step"], given.out / "steps.png")
    return seen


def table(result: dict[str, dict]) -> str:
    """One row for each kind; without BLEU if it could not be computed."""
    rows = [
        {"attention": name} | {key: f"{x:.2f}" for key, x in row.items() if isinstance(x, float)}
        for name, row in result.items()
    ]
    hint = "" if "greedy BLEU" in rows[0] else "\nBLEU needs sacrebleu: pip install sacrebleu"
    return report.table(rows) + hint


def main(argv: list[str] | None = None) -> dict:
    """Runs everything; returns what result.json holds."""
    given = arguments(argv)
    how = {name: getattr(given, name) for name in ("smoke", "seed", "epochs", "max_tokens")}
    corpora, *words = prepare(given.smoke, given.seed, given.max_tokens, given.device)
    training, validation, test = corpora
    result = report.load(given.out)
    if result.get("trained with") != how:
        result = {"trained with": how, "kinds": {}}
    for kind in given.kinds:
        options.set_seed(given.seed)
        model = build(kind, *words).to(given.device)
        row = train.train(model, training, given.epochs, BATCH, given.seed, kind)
        row["validation"] = train.validation_loss(model, validation, BATCH)
        row |= score(model, test, words[1])
        if kind in SHOWN:
            row |= examine(kind, model, corpora, tuple(words), given)
        result["kinds"][kind] = row
        report.save(result, given.out, given.device)  # keeps this result if a later kind fails
    result["kinds"] = {kind: result["kinds"][kind] for kind in KINDS if kind in result["kinds"]}
    print("\n" + table(result["kinds"]))
    report.save(result, given.out, given.device)
    return result


if __name__ == "__main__":
    main()
