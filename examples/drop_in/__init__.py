"""Pretrained transformers as they are, their attention replaced."""
