"""Draws the pictures of the pages into docs/pictures: each from real calls of fastattn.

`python docs/pictures.py` writes them, or into the folder that is named. A square is a pair of a
query (row) and a key (column), and its colour the weight, or whether a mask keeps the pair.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

import fastattn
from fastattn import Mask

HERE = Path(__file__).resolve().parent / "pictures"
CELL, GAP, LINE = 14, 34, 18  # pixels: a square, between panels, a line of text
# On light and dark pages alike.
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#7a7f87}"
    f".c{{fill:#3b7dd8}}.c,.b{{width:{CELL - 1}px;height:{CELL - 1}px;rx:2px}}.b{{fill:#8882}}"
)
GRID = (
    f'<pattern id="grid" width="{CELL}" height="{CELL}" patternUnits="userSpaceOnUse">'
    '<rect class="b"/></pattern>'
)
Panel = tuple[str, Tensor, Sequence[str], Sequence[str]]  # title, [M, N] from 0 to 1, labels


def picture(*panels: Panel) -> str:
    """An SVG of panels side by side."""
    parts, x, height = [], 0, 0
    for title, values, rows, columns in panels:
        left, above = (8 * max(map(len, labels), default=0) for labels in (rows, columns))
        left, top = left + (6 if rows else 0), LINE + above + 6
        parts.append(f'<text x="{x + left}" y="12">{escape(title)}</text>')
        parts.append(f'<g transform="translate({x + left},{top})">')
        parts += [*_labels(rows, columns), *_squares(values), "</g>"]
        width = left + max(CELL * values.shape[1], 7 * len(title))
        x, height = x + width + GAP, max(height, top + CELL * values.shape[0])
    size = f'width="{x - GAP + 4}" height="{height + 2}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{GRID}'
    return "\n".join([begin, *parts, "</svg>\n"])


def _labels(rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    written = [
        f'<text x="-6" y="{CELL * i + 11}" text-anchor="end">{escape(row)}</text>'
        for i, row in enumerate(rows)
    ]
    for j, column in enumerate(columns):
        place = f"translate({CELL * j + 11},-5) rotate(-90)"
        written.append(f'<text transform="{place}">{escape(column)}</text>')
    return written


def _squares(values: Tensor) -> list[str]:
    M, N = values.shape
    squares = [f'<rect width="{CELL * N}" height="{CELL * M}" fill="url(#grid)"/>']
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if round(value, 2):
                shown = f"{value:.2g}"
                opacity = "" if shown == "1" else f' opacity="{shown}"'
                squares.append(f'<rect class="c" x="{CELL * j}" y="{CELL * i}"{opacity}/>')
    return squares


def panel(title: str, mask: Mask, M: int, N: int) -> Panel:
    """What a mask keeps."""
    return title, mask.to_dense(M, N)[0, 0].float(), (), ()


def masks() -> str:
    """Each kind of mask alone."""
    n = 10
    return picture(
        panel('causal="top_left"', Mask(causal="top_left"), n, n),
        panel("window=(2, 2)", Mask(window=(2, 2)), n, n),
        panel("kv_len=[6]", Mask(kv_len=torch.tensor([6])), n, n),
        panel("keep=...", Mask(keep=_same_document([3, 2, 5])), n, n),
    )


def combined() -> str:
    """Three masks, and all of them together."""
    n, length = 10, torch.tensor([8])
    causal, window = dict(causal="top_left"), dict(window=(3, -1))
    both = _same_document([5, 5])
    return picture(
        panel("causal", Mask(**causal), n, n),
        panel("and window", Mask(**causal, **window), n, n),
        panel("and kv_len", Mask(**causal, **window, kv_len=length), n, n),
        panel("and keep", Mask(**causal, **window, kv_len=length, keep=both), n, n),
    )


def alignments() -> str:
    """Three queries after five keys: both alignments."""
    return picture(
        panel('causal="top_left"', Mask(causal="top_left"), 3, 8),
        panel('causal="bottom_right"', Mask(causal="bottom_right"), 3, 8),
    )


def local() -> str:
    """Restricted self-attention."""
    return picture(
        panel("Mask.local(2)", Mask.local(2), 12, 12),
        panel("Mask.local_blocks(4, 12)", Mask.local_blocks(4, 12), 12, 12),
        panel("..., before=1)", Mask.local_blocks(4, 12, before=1), 12, 12),
    )


def intervals() -> str:
    """Masks that are an interval of keys for each query."""
    return picture(
        panel("Mask.documents(lengths=[3, 5, 4])", Mask.documents(lengths=[3, 5, 4]), 12, 12),
        panel("..., causal=True)", Mask.documents(lengths=[3, 5, 4], causal=True), 12, 12),
        panel("Mask.prefix([4], 12)", Mask.prefix([4], 12), 12, 12),
        panel("Mask(kv_begin=[5])", Mask(kv_begin=[5]), 12, 12),
    )


def weights() -> str:
    """Words that look for the words of their kind, and the same when they may not look ahead."""
    words = "the cat sat on the mat and the dog lay on the rug".split()
    kinds = {"the": 0, "and": 1, "on": 2, "sat": 3, "lay": 3}
    x = torch.nn.functional.one_hot(torch.tensor([kinds.get(word, 4) for word in words])).float()
    panels = []
    for title, is_causal in (("weights", False), ("weights, is_causal=True", True)):
        _, found = fastattn.attention(
            x[None], x[None], x[None], score="dot", is_causal=is_causal, return_weights="mean",
            bias=x @ x.T,
        )  # fmt: skip
        panels.append((title, found / found.max(), words, words))
    return picture(*panels)


def additive() -> str:
    """Decoder steps over a source sentence of which the last places are padding."""
    source = 2 * torch.eye(11) + torch.eye(11).roll(1, 0) * 0.5
    steps = source[[0, 1, 3, 3, 2, 4, 5, 7]]  # a decoder that reads almost in order
    _, found = fastattn.additive_attention(
        steps[None], source[None], source[None], weight=-3 * torch.ones(11),
        mask=Mask(kv_len=torch.tensor([8])), return_weights="mean",
    )  # fmt: skip
    rows, columns = [f"step {i}" for i in range(8)], [f"x{j}" for j in range(8)] + ["pad"] * 3
    return picture(("weights of additive attention", found[0] / found.max(), rows, columns))


def _same_document(lengths: Sequence[int]) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return document[:, None] == document


PICTURES = dict(
    masks=masks, combined=combined, alignments=alignments, local=local, intervals=intervals,
    weights=weights, additive=additive,
)  # fmt: skip


def draw(folder: Path) -> None:
    """Writes every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else HERE)
