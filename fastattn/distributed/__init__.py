"""Attention over more than one device, on torch.distributed."""

from fastattn.distributed.comm import count_bytes
from fastattn.distributed.context import context_parallel_attention, shard, unshard
from fastattn.distributed.layout import Layout
from fastattn.distributed.parallel import parallelize

__all__ = [
    "Layout",
    "context_parallel_attention",
    "count_bytes",
    "parallelize",
    "shard",
    "unshard",
]
