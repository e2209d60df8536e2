"""Sentiment of Chinese reviews: a classifier on self-attention over characters."""
