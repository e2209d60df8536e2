"""Small pictures: figures without a window, and a font with Chinese letters."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"truth": "0.35", "average": "tab:gray", "fixed": "tab:orange", "learned": "tab:blue"}


def figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches. It belongs to no window."""
    made = Figure((width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path, dpi: int = 80) -> None:
    """Writes a PNG that is small enough for a repository."""
    with warnings.catch_warnings():
        # plot_attention has already warned that no font has these letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        made.savefig(path, dpi=dpi, pil_kwargs={"optimize": True})


def use_chinese_font() -> None:
    """Makes matplotlib use Noto Sans SC from the package zhplot, if installed."""
    spec = importlib.util.find_spec("zhplot")
    if spec is None or spec.origin is None:
        return
    for font in (Path(spec.origin).parent / "fonts").glob("*.ttf"):
        font_manager.fontManager.addfont(font)
