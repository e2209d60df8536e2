"""Tiles of scores and of their gradients."""
