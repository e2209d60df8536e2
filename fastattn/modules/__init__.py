"""nn.Modules on fastattn's attention functions."""

from fastattn.modules.additive import AdditiveAttention, MultiheadAdditiveAttention
from fastattn.modules.hard import HardAttention, HardChoice
from fastattn.modules.kv_cache import KVCache
from fastattn.modules.local import LocalAttention
from fastattn.modules.location import AlignmentState, LocationSensitiveAttention, coverage_loss
from fastattn.modules.luong import LuongAttention
from fastattn.modules.multihead import MultiheadAttention
from fastattn.modules.replace import replace_attention
from fastattn.modules.self_attention import SelfAttention
from fastattn.modules.similarity import CosineAttention, NadarayaWatson

__all__ = [
    "AdditiveAttention",
    "AlignmentState",
    "CosineAttention",
    "HardAttention",
    "HardChoice",
    "KVCache",
    "LocalAttention",
    "LocationSensitiveAttention",
    "LuongAttention",
    "MultiheadAdditiveAttention",
    "MultiheadAttention",
    "NadarayaWatson",
    "SelfAttention",
    "coverage_loss",
    "replace_attention",
]
