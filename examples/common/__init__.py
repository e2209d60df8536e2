"""What the example programs share: options and seeds, comparison, tables, pictures."""
