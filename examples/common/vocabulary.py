"""Tokens as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

PADDING, UNKNOWN, BEGIN, END = 0, 1, 2, 3
SPECIAL = ("<pad>", "<unk>", "<begin>", "<end>")


class Vocabulary:
    """The special tokens, then tokens by falling frequency.

    Args:
        tokens: all tokens of the training texts.
        min_frequency: rarer tokens are unknown.

    Attributes:
        tokens: all tokens, in the order of their numbers.
        frequencies: how often each token was seen, whether kept or not.
    """

    def __init__(self, tokens: Iterable[str], min_frequency: int) -> None:
        self.frequencies = Counter(tokens)
        kept = [token for token, n in self.frequencies.most_common() if n >= min_frequency]
        self.tokens = [*SPECIAL, *kept]
        self.numbers = {token: n for n, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """The number of each token."""
        return [self.numbers.get(token, UNKNOWN) for token in tokens]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The token of each number."""
        return [self.tokens[n] for n in numbers]
