"""Pictures of attention weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn.problem import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fonts with Chinese, Japanese and Korean letters on Linux, macOS and Windows.
CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC",
    "Source Han Sans CN", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback",
    "AR PL UMing CN", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei",
)  # fmt: skip
CELL = 0.28  # inches; fits labels of 9 points
SMALLEST, LARGEST = 2.0, 12.0  # inches of a panel's side


def plot_attention(
    weights: Tensor,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    title: str | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draws a heat map of attention weights, one panel a head.

    Rows are queries, columns keys; all panels share one colour scale from 0 to the largest weight.

    Args:
        weights: ``[M, N]``, or ``[heads, M, N]``, of any floating dtype, on any device.
        rows: M labels of the queries, such as the words of the output.
        columns: N labels of the keys, such as the words of the input; they are at the top.
        title: the title of the figure.
        names: titles of the panels; by default ``head 0``, ``head 1`` ... if there are several.

    Returns:
        A :class:`matplotlib.figure.Figure`: show it in a notebook, or save it with
        ``.savefig("attention.png")``. It belongs to no window and need not be closed.

    Raises:
        ValueError: weights do not have 2 or 3 dims, or the number of labels is not that of rows,
            columns or heads.
        ImportError: matplotlib is not installed.

    Labels may be Chinese, Japanese or Korean if a font for them is installed. Otherwise a warning
    says how to get one.

    Example:
        >>> words, q = "the cat sat".split(), torch.randn(1, 4, 3, 8)
        >>> _, weights = fastattn.scaled_dot_product_attention(q, q, q, return_weights="full")
        >>> fastattn.plot_attention(weights[0], words, words).savefig("attention.png")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_attention needs matplotlib: pip install 'fastattn[plot]'"
        ) from error
    panels = _panels(weights, rows, columns, names)
    heads, M, N = panels.shape
    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across) if heads else 1
    width, height = (min(max(n * CELL, SMALLEST), LARGEST) for n in (N, M))
    figure = Figure((across * width + 1.8, down * height + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    if names is None and heads > 1:
        names = [f"head {n}" for n in range(heads)]
    options: dict[str, Any] = dict(vmin=0.0, vmax=float(panels.max()) if panels.numel() else 1.0)
    font = _font([*(rows or ()), *(columns or ()), *(names or ()), title or ""])
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    image = None
    for n, axis in enumerate(axes):
        if n >= heads:
            axis.set_axis_off()
            continue
        image = axis.imshow(panels[n].numpy(), aspect="auto", cmap="viridis", **options)
        _label(axis, rows, columns, font)
        if names is not None:
            axis.set_title(names[n], fontsize=9, **font)
    if title is not None:
        figure.suptitle(title, **font)
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    return figure


def _panels(
    weights: Tensor,
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    names: Sequence[str] | None,
) -> Tensor:
    """The weights as float32 [heads, M, N] on the CPU."""
    if not isinstance(weights, Tensor):
        raise arguments.no_tensor("weights", weights)
    if weights.dim() not in (2, 3) or (weights.dim() == 3 and weights.shape[0] == 0):
        raise ValueError(f"weights: expected [M, N] or [heads, M, N], got {list(weights.shape)}")
    panels = weights.detach().to("cpu", torch.float32)
    panels = panels[None] if panels.dim() == 2 else panels
    labelled = (("names", names), ("rows", rows), ("columns", columns))
    for (name, labels), size in zip(labelled, panels.shape, strict=True):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{name}: expected {size} labels for these weights, got {len(labels)}")
    return panels


def _label(
    axis: Any, rows: Sequence[str] | None, columns: Sequence[str] | None, font: dict
) -> None:
    axis.tick_params(length=0, labelsize=9)
    if rows is not None:
        axis.set_yticks(range(len(rows)), labels=list(rows), **font)
    else:
        axis.set_ylabel("query")
    if columns is not None:
        # Words are slanted, so that they do not overlap; single characters are upright.
        lean = 0 if all(len(c) <= 2 for c in columns) else 60
        axis.xaxis.tick_top()
        axis.set_xticks(range(len(columns)), labels=list(columns), rotation=lean,
                        ha="left" if lean else "center", **font)  # fmt: skip
    else:
        axis.set_xlabel("key")


def _font(labels: Sequence[str]) -> dict[str, Any]:
    """The font option for these labels. Warns if no installed font has their letters."""
    if not any(_is_cjk(letter) for label in labels for letter in label):
        return {}
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    found = [name for name in CJK_FONTS if name in installed]
    if not found:
        warnings.warn(
            "no font with Chinese, Japanese or Korean letters is installed: labels will be boxes. "
            "On Debian: apt install fonts-wqy-zenhei",
            stacklevel=3,
        )
        return {}
    return {"fontfamily": [found[0], "DejaVu Sans"]}


def _is_cjk(letter: str) -> bool:
    """Kana, ideographs, Hangul and full-width forms."""
    code = ord(letter)
    return 0x2E80 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7AF or 0xF900 <= code <= 0xFFEF
