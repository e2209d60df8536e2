"""Attention by similarity: cosine, and kernel regression."""
