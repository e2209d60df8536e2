"""Triton kernels and their launchers; installed as ``fastattn.kernels``."""
