"""The command line of every program, and its random seeds."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from examples.common import devices

EXAMPLES = Path(__file__).resolve().parent.parent


def parser(name: str, about: str, one_device: bool = True) -> argparse.ArgumentParser:
    """The options of every program: ``smoke``, ``seed``, ``out``, and ``device`` if it has one."""
    made = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=about)
    made.add_argument(
        "--smoke", action="store_true", help="a few seconds on tiny data that needs no download"
    )
    made.add_argument("--seed", type=seed, default=0, help="of data, parameters and dropout")
    if one_device:
        made.add_argument(
            "--device",
            type=devices.device,
            default=devices.default(),
            help="cpu, cuda or cuda:N (default: cuda where there is a GPU; here %(default)s)",
        )
    made.add_argument(
        "--out",
        type=Path,
        help=f"folder for pictures and result.json (default: examples/{name}/results, or "
        f"build/examples/{name} with --smoke)",
    )
    made.set_defaults(name=name)
    return made


def seed(text: str) -> int:
    """The number of ``--seed``: torch takes 64 bits."""
    number = int(text)
    if not -(2**63) <= number < 2**63:  # programs add the number of a run
        raise argparse.ArgumentTypeError(f"expected 64 bits, got {text}")
    return number


def parse(made: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The given options. Makes the folder ``out`` if it does not exist.

    A smoke run leaves the results of a real one alone.
    """
    given = made.parse_args(argv)
    if given.out is None:
        smoke = EXAMPLES.parent / "build/examples" / given.name
        given.out = smoke if given.smoke else EXAMPLES / given.name / "results"
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        made.error(f"--out: {error}")
    return given


def set_seed(seed: int) -> None:
    """Makes parameters, dropout and sampling repeatable from here on."""
    random.seed(seed)
    torch.manual_seed(seed)
