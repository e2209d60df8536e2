"""Pictures of attention weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
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
CJK = (
    (0x1100, 0x11FF), (0x2E80, 0x9FFF), (0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0xFE30, 0xFE4F),
    (0xFF00, 0xFFEF), (0x20000, 0x3FFFF),
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
        weights: ``[M, N]``, or ``[heads, M, N]``, of any floating dtype, on any device. NaN is left
            blank: a row without keys in PyTorch.
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
        TypeError: the weights are no tensor, or a label or the title is no text.
        ImportError: matplotlib is not installed.

    A label is shown as it is written, dollar signs too. It may be Chinese, Japanese or Korean if a
    font for that is installed. Otherwise a warning says how to get one.

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
    panels = _panels(weights)
    heads, M, N = panels.shape
    rows, columns = _texts("rows", rows, M), _texts("columns", columns, N)
    names = _texts("names", names, heads)
    if title is not None and not isinstance(title, str):
        raise _no_text("title", title)
    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across)
    width, height = (min(max(n * CELL, SMALLEST), LARGEST) for n in (N, M))
    figure = Figure((across * width + 1.8, down * height + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    if names is None and heads > 1:
        names = [f"head {n}" for n in range(heads)]
    finite = panels[panels.isfinite()]
    options: dict[str, Any] = dict(vmin=0.0, vmax=float(finite.max()) if finite.numel() else 1.0)
    font = _font([*(rows or ()), *(columns or ()), *(names or ()), title or ""])
    style = {"parse_math": False, **font}
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for n, axis in enumerate(axes):
        if n >= heads:
            axis.set_axis_off()
            continue
        axis.imshow(panels[n].numpy(), aspect="auto", cmap="viridis", **options)
        _label(axis, rows, columns, style)
        if names is not None:
            axis.set_title(names[n], fontsize=9, **style)
    if title is not None:
        figure.suptitle(title, **style)
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.8, label="weight")
    return figure


def _panels(weights: Tensor) -> Tensor:
    """The weights as float32 [heads, M, N] on the CPU."""
    if not isinstance(weights, Tensor):
        raise arguments.no_tensor("weights", weights)
    if weights.is_nested:
        raise ValueError("weights: expected [M, N] or [heads, M, N]: write weights.unbind()[n]")
    if weights.dim() not in (2, 3) or (weights.dim() == 3 and weights.shape[0] == 0):
        raise ValueError(f"weights: expected [M, N] or [heads, M, N], got {list(weights.shape)}")
    panels = weights.detach().to("cpu", torch.float32)
    return panels[None] if panels.dim() == 2 else panels


def _texts(name: str, labels: Iterable[str] | None, size: int) -> list[str] | None:
    """The labels of one side, as many as it has."""
    if labels is None:
        return None
    if not isinstance(labels, Iterable):
        raise TypeError(f"{name}: expected {size} labels, got {type(labels).__name__}")
    texts = list(labels)
    for text in texts:
        if not isinstance(text, str):
            raise _no_text(name, text)
    if len(texts) != size:
        raise ValueError(f"{name}: expected {size} labels for these weights, got {len(texts)}")
    return texts


def _no_text(name: str, x: object) -> TypeError:
    return TypeError(f"{name}: expected text, got {type(x).__name__}: write str(x)")


def _label(
    axis: Any, rows: Sequence[str] | None, columns: Sequence[str] | None, style: dict
) -> None:
    axis.tick_params(length=0, labelsize=9)
    if rows is not None:
        axis.set_yticks(range(len(rows)), labels=rows, **style)
    else:
        axis.set_ylabel("query")
    if columns is not None:
        # Words are slanted, so that they do not overlap; single characters are upright.
        lean = 0 if all(len(c) <= 2 for c in columns) else 60
        axis.xaxis.tick_top()
        axis.set_xticks(range(len(columns)), labels=columns, rotation=lean,
                        ha="left" if lean else "center", **style)  # fmt: skip
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
    return any(first <= ord(letter) <= last for first, last in CJK)
