"""One long text that is part of every Python: the pages of help()."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.common.vocabulary import Vocabulary
from examples.drop_in.search import pages

RARE = 5  # characters seen fewer times are unknown


def read(most_pages: int | None) -> tuple[Vocabulary, Tensor]:
    """The characters, and the text as their numbers [length]."""
    text = "\n\n".join(pages(most_pages).values())
    vocabulary = Vocabulary(text, RARE)
    return vocabulary, torch.tensor(vocabulary.encode(text))


def split(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """(what is trained on, the held-out end): a context, and the character after it."""
    return text[: -(context + 1)], text[-(context + 1) :]


def window(text: Tensor, context: int, generator: torch.Generator) -> Tensor:
    """A random part of the text, [context + 1]: inputs, and one later what to predict."""
    begin = int(torch.randint(len(text) - context, (), generator=generator))
    return text[begin : begin + context + 1]
