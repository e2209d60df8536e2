"""Attention in the form of nn.MultiheadAttention: several heads, projections, a cache."""
