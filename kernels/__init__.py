"""Triton kernels and their launchers; installed as ``fastattn.kernels``.

Folders are storeys: ``tile`` has the device code that every score shares, and ``score`` tiles of
scores and their gradients. ``loop`` has the kernels with their launchers, and ``host`` the operands
and the tile sizes. Importing a module imports Triton; importing this package does not.
"""
