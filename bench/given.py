"""Types of the commands' options. A wrong one ends a command before it measures anything."""

import argparse
import math


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text}")
    return int(text)


def seconds(text: str) -> float:
    return _between(text, math.inf, "seconds, more than 0")


def share(text: str) -> float:
    return _between(text, 1, "a share between 0 and 1")


def _between(text: str, end: float, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < end:
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text}")
    return number
