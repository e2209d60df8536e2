"""fastattn inside other people's code, none of which is imported before it is needed."""

from fastattn.integrations import flash_attn, sdpa, transformers

__all__ = ["flash_attn", "sdpa", "transformers"]
