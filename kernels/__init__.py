"""Triton kernels and their launchers; installed as ``fastattn.kernels``.

``tiles``, ``masking``, ``softmax`` and ``dropout`` hold the device code that every score shares,
``score`` the tiles of scores themselves, ``launch`` and ``config`` the host side;
``sdpa_{fwd,bwd}`` hold the kernels and launchers, ``additive_{fwd,bwd}`` what goes around them.
Importing any of them imports Triton; importing this package does not.
"""
