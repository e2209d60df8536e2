"""Results as a table on the screen and as result.json in the results folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench import machine


def table(rows: list[dict]) -> str:
    """Rows with the same keys, aligned: the first column to the left, the others to the right."""
    cells = [list(rows[0]), *([_show(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(cells[0]))]
    aligned = [
        "  ".join(
            text.rjust(width) if n else text.ljust(width)
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(aligned)


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def comparison(measured: dict[str, dict]) -> str:
    """The table of what :func:`examples.common.compare.side_by_side` returns."""
    return table(
        [
            {
                "": name,
                "ms": f"{row['ms']:.2f} ±{100 * row['spread']:.0f}%",
                "extra MiB": f"{row['mib']:.1f}",
            }
            for name, row in measured.items()
        ]
    )


def load(folder: Path) -> dict:
    """The result that an earlier run saved; empty if there was none."""
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(result: dict, folder: Path, device: torch.device) -> None:
    """Writes result.json: the result, and the machine and versions behind it."""
    about = machine.describe(device)
    text = json.dumps(result | {"measured_with": about}, indent=2, ensure_ascii=False)
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")
