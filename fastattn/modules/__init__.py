"""nn.Modules on fastattn's attention functions."""

from fastattn.modules.decoder.additive import AdditiveAttention
from fastattn.modules.decoder.hard import HardAttention, HardChoice
from fastattn.modules.decoder.local import LocalAttention
from fastattn.modules.decoder.location import (
    AlignmentState,
    LocationSensitiveAttention,
    coverage_loss,
)
from fastattn.modules.decoder.luong import LuongAttention
from fastattn.modules.multihead.additive import MultiheadAdditiveAttention
from fastattn.modules.multihead.attention import MultiheadAttention
from fastattn.modules.multihead.kv_cache import KVCache
from fastattn.modules.multihead.replace import replace_attention
from fastattn.modules.multihead.self_attention import SelfAttention
from fastattn.modules.similarity.cosine import CosineAttention
from fastattn.modules.similarity.nadaraya_watson import NadarayaWatson

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
