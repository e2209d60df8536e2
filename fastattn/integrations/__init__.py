"""fastattn inside other people's code. Each module is imported by who wants it."""
