"""Additive attention, backward: sdpa_bwd.py's kernels around the gradients of score.py's tiles.

    dq_id = 4 w_d sum_j dS_ij t_ijd     dk_jd = 4 w_d sum_i dS_ij t_ijd     t = (1 - tanh^2) / 4
    dw_d = sum_ij dS_ij tanh(q_id + k_jd)                  dS, dV, dbias: as for every score

A program of dq (dkdv) owns a block of queries (keys) and adds a tile's rows of sums, one dim after
the other, to its part of a workspace laid out like E (F); dw is such a sum for every query, added
up when all is done. So nothing is shared, and every sum has one order.
"""

from __future__ import annotations

import torch

from .additive_fwd import additive_terms
from .launch import Call
from .sdpa_bwd import launch_sdpa_bwd


def launch_additive_bwd(call: Call, *saved):
    """(grad_q, grad_k, grad_v, grad_w, grad_bias) of the backward operator; absent: empty."""
    terms = additive_terms(call, finite=True)
    if terms.w_ptr is not None:
        sums = [torch.zeros_like(x) for x in (terms.e_ptr, terms.f_ptr, terms.e_ptr)]
        terms = terms._replace(grad_q_ptr=sums[0], grad_k_ptr=sums[1], grad_w_ptr=sums[2])
    grad_q, grad_k, grad_v, grad_w, grad_bias = launch_sdpa_bwd(call, *saved, terms=terms)
    grad_w = call.q.new_zeros(call.B, call.H, call.D, dtype=torch.float32)
    if terms.w_ptr is not None:
        grad_q.copy_(terms.grad_q_ptr[:, :, : call.D, : call.M].mT)
        grad_k.copy_(terms.grad_k_ptr[:, :, : call.D, : call.N].mT)
        torch.sum(terms.grad_w_ptr[:, :, : call.D, : call.M], -1, out=grad_w)
    return grad_q, grad_k, grad_v, grad_w, grad_bias
