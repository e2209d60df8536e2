"""Attention of a decoder over what an encoder made: one head, step by step or all at once."""
