"""The command line of every program, and its random seeds."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parent.parent


def parse(name: str, about: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Options ``smoke``, ``seed`` and ``out`` (a folder, made if it is not there)."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=about)
    parser.add_argument(
        "--smoke", action="store_true", help="a few seconds on tiny data that needs no download"
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, parameters and dropout")
    parser.add_argument(
        "--out",
        type=Path,
        default=EXAMPLES / name / "results",
        help="folder for pictures and result.json (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def set_seed(seed: int) -> None:
    """Makes what follows repeatable: parameters, dropout, sampling."""
    random.seed(seed)
    torch.manual_seed(seed)
