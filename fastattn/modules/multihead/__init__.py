"""nn.MultiheadAttention's shape: several heads, projections, a cache."""
