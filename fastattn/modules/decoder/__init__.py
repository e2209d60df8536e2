"""Attention of a decoder to encoder states: one head, step by step or all steps at once."""
