"""The loops over tiles, forward and backward, and their launchers."""
