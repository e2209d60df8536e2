"""nn.Modules on fastattn's attention functions."""

from fastattn.modules.additive import AdditiveAttention, MultiheadAdditiveAttention
from fastattn.modules.multihead import MultiheadAttention
from fastattn.modules.replace import replace_attention

__all__ = [
    "AdditiveAttention",
    "MultiheadAdditiveAttention",
    "MultiheadAttention",
    "replace_attention",
]
