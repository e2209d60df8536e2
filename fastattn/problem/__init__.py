"""The attention problem: its record, its checks, its definition in plain PyTorch."""

from fastattn.problem.mask import Alignment, Mask
from fastattn.problem.record import Dropout, Origin, Problem, Score, Weights
from fastattn.problem.relative import ALiBi, RelativeBias

__all__ = [
    "ALiBi", "Alignment", "Dropout", "Mask", "Origin", "Problem", "RelativeBias", "Score",
    "Weights",
]  # fmt: skip
