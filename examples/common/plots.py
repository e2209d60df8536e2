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
    """An empty figure of so many inches that belongs to no window."""
    made = Figure((width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path, dpi: int = 80) -> None:
    """Writes a PNG small enough to be kept in a repository."""
    with warnings.catch_warnings():
        # plot_attention has said once that no font has these letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        made.savefig(path, dpi=dpi, pil_kwargs={"optimize": True})


def use_chinese_font() -> None:
    """Makes the Noto Sans SC of the package zhplot known to matplotlib, where it is installed."""
    spec = importlib.util.find_spec("zhplot")
    if spec is None or spec.origin is None:
        return
    for font in (Path(spec.origin).parent / "fonts").glob("*.ttf"):
        font_manager.fontManager.addfont(font)
