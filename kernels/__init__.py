"""Triton kernels and their launchers; installed as ``fastattn.kernels``.

``tiles``, ``masking``, ``softmax`` and ``dropout`` hold the device code that every score shares,
``launch`` and ``config`` its host side; ``{sdpa,additive}_{fwd,bwd}`` hold kernels and launchers.
Importing any of them imports Triton; importing this package does not.
"""
