"""Pretrained transformers, unchanged except for their attention."""
