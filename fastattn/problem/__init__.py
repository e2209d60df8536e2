"""The attention problem: its record, its checks, its definition in plain PyTorch."""

from fastattn.problem.mask import Alignment, Mask
from fastattn.problem.record import Dropout, Origin, Problem, Score, Weights

__all__ = ["Alignment", "Dropout", "Mask", "Origin", "Problem", "Score", "Weights"]
