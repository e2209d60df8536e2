"""Scaled dot-product attention, backward, from the saved (m, 1 / l): no M x N matrix is stored.

    P = 2^(s - m) / l     W = F * P (F: dropout factors)     dP = F * (dO V^T + dW)
    dS = P * (dP - delta)     delta_i = sum_j P_ij dP_ij - dlse_i = dO_i . O_i + (W . dW)_i - dlse_i
    dV = W^T dO     dK = scale dS^T Q     dQ = scale dS K     dbias = dS, summed where it broadcasts

    delta:  for (b, h, row block): dO . O; with dW also a pass over the keys
    dq:     for (b, h, row block):       Q, dO, dQ stay; K, V stream by      3 products a tile
            (few queries: and for a chunk of the keys; a merge adds the chunks up, in order)
    dkdv:   for (b, key head, key block): K, V, dK, dV stay; Q, dO of the group's heads stream by; 4
            (heads wider than 128: dK and dV one after the other, 5)
    dbias:  for (tile of the bias): dS of all (b, h) that share it, in order
    dsink:  for (b, h): delta of all rows, each with the sink's share of the row

Every result has one owner. So there are no atomics, and every run gives the same bits. The cost is
7 products, where atomics would need 5. dkdv works on transposed tiles. The first products then
leave P^T and dS^T in the registers where the second products read them. Dao, "FlashAttention-2:
faster attention with better parallelism and work partitioning", 2023.
"""

from __future__ import annotations

import math

import torch

from ..host.launch import Call, Saved, as_rows, empty_gradients, heads_as_rows, per_head_weights
from ..score.score import DOT_PRODUCT, Terms
from ..tile.masking import bias_view, mask_args
from ..tile.strided import view
from .grad_bias import launch_dbias
from .grad_delta import launch_delta, launch_sink_grad
from .grad_key import launch_dkdv
from .grad_query import launch_dq
from .gradient import Backward


def launch_sdpa_bwd(call: Call, saved: Saved, terms: Terms = DOT_PRODUCT):
    """(grad_q, grad_k, grad_v, grad_w, grad_bias, grad_sink) of the backward operator.

    What is absent is empty.
    """
    grads = empty_gradients(call)
    grad_w = call.q.new_empty(0, dtype=torch.float32)
    grad_bias = call.q.new_empty(0)
    if math.prod(call.shape) == 0:
        if saved.bias_needs_grad:
            grad_bias = call.bias.new_zeros(call.bias.shape)
        zeros = [x.zero_() for x in grads]
        return *zeros, grad_w, grad_bias, launch_sink_grad(call, saved, None)
    given = call, saved
    # A bias has heads of its own, and keys outside a band have gradients of 0.
    if not saved.bias_needs_grad and call.band == (None, None):
        call = heads_as_rows(call)
        saved = saved._replace(out=as_rows(saved.out, call), grad_out=as_rows(saved.grad_out, call))
    t, mask, drop = backward_args(call, saved, terms)
    launch_dq(call, t, mask, drop, as_rows(grads[0], call))
    launch_dkdv(call, t, mask, drop, *grads[1:])
    if saved.bias_needs_grad:
        grad_bias = launch_dbias(call, t, mask, drop)
    return *grads, grad_w, grad_bias, launch_sink_grad(*given, t[-1].delta_ptr)


def backward_args(call: Call, saved: Saved, terms: Terms):
    """(t, mask, drop) that the kernels take; launches the one that fills delta."""
    B, H, M, _ = call.shape
    share = 1.0 / H if call.weights_mode == "mean" else 1.0
    gw = per_head_weights(call, saved.grad_weights)
    delta = call.q.new_empty(B, H, M, dtype=torch.float32)
    # The sum that makes the exponent of a small weight is off by 2^-20, too much for fp32 results.
    folds = call.bias is None and call.q.dtype != torch.float32
    t = (
        view(call.q), view(call.k), view(call.v), terms, bias_view(call),
        view(saved.grad_out), view(gw), Backward(
            None if gw is None else share, saved.stats, torch.empty_like(delta) if folds else None,
            delta, call.logit_scale,
        ),
    )  # fmt: skip
    mask, drop = mask_args(call), call.dropout
    launch_delta(call, t, mask, drop, saved.out, saved.grad_lse)
    return t, mask, drop
