"""What runs on the host: operands, launches, tile configurations."""
