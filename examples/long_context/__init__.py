"""A language model of characters whose context is cut over processes."""
