"""Characters and pairs of characters as numbers."""

from __future__ import annotations

from examples.common.vocabulary import Vocabulary


def bigrams(text: str) -> list[str]:
    """Each character with the next one. The last character stands alone."""
    return [text[i : i + 2] for i in range(len(text))]


class Tokenizer:
    """Turns a text into two rows of numbers: its characters, and the bigrams that start at them.

    Args:
        texts: the training set only. What occurs only in other texts is unknown.
        min_frequency: of characters and bigrams.
        max_length: characters; the rest of a text is not read.
    """

    def __init__(self, texts: list[str], min_frequency: int = 3, max_length: int = 128) -> None:
        self.max_length = max_length
        self.characters = Vocabulary((c for text in texts for c in text), min_frequency)
        self.bigrams = Vocabulary((b for text in texts for b in bigrams(text)), min_frequency)

    def __call__(self, text: str) -> tuple[list[int], list[int]]:
        """Numbers of the characters and of the bigrams, equally many of each."""
        text = text[: self.max_length]
        return self.characters.encode(text), self.bigrams.encode(bigrams(text))
