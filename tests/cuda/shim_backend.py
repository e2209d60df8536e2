"""A backend like those in fastattn/backends: the CUDA kernels, run on the CPU by the shim.

Registered under the name "cuda_on_cpu", it goes through everything other backends go through.
"""

from __future__ import annotations

import ctypes
import functools
import os

import host_build
import torch
from torch import Tensor

from fastattn import ops
from fastattn.problem import Problem

NAME = "cuda_on_cpu"
KIND = os.environ.get("FASTATTN_TEST_SHIM", "plain")  # "sanitized" in a process made for it


# ---- csrc/common/params.h ----


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("strides", ctypes.c_int64 * 4),
    ]


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "B H Hkv M N D E"),
        ("scale", ctypes.c_float),
        *fields(View, "q k v w bias"),
        *fields(ctypes.c_int64, "band_lo band_hi"),
        ("kv_len", ctypes.c_void_p),
        ("kv_len_strides", ctypes.c_int64 * 2),
        ("keep", ctypes.c_void_p),
        ("keep_strides", ctypes.c_int64 * 4),
        # DropoutParams, which begins at a multiple of 8 bytes
        ("dropout_enabled", ctypes.c_bool),
        ("dropout_threshold", ctypes.c_uint32),
        ("dropout_scale", ctypes.c_float),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_seed_ptr", ctypes.c_void_p),
        ("weights_mode", ctypes.c_int32),
    ]


class ForwardParams(AttentionParams):
    _fields_ = [
        ("out", View),
        *fields(ctypes.c_void_p, "lse stats"),
        ("weights", View),
        ("workspace", ctypes.c_void_p),
    ]


class BackwardParams(AttentionParams):
    _fields_ = [
        ("out", View),
        ("stats", ctypes.c_void_p),
        ("grad_out", View),
        ("grad_lse", ctypes.c_void_p),
        *fields(View, "grad_weights grad_q grad_k grad_v"),
        ("grad_w", ctypes.c_void_p),
        ("grad_bias", View),
        ("bias_sizes", ctypes.c_int64 * 4),
        ("workspace", ctypes.c_void_p),
    ]


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def strides(x: Tensor) -> list[int]:
    """0 where a dim broadcasts."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def view(x: Tensor | None) -> View:
    """[B, H, rows, columns]."""
    if x is None:
        return View()
    return View(x.data_ptr(), DTYPES[x.dtype], (ctypes.c_int64 * 4)(*strides(x)))


def weights_view(p: Problem, x: Tensor | None) -> View:
    """Mean weights have no head dim."""
    if x is None or p.weights == "none":
        return View()
    return view(x if p.weights == "full" else x.unsqueeze(1))


def fill_problem(params, p: Problem, q, k, v, w, bias) -> None:
    for name in "B H Hkv M N D E scale".split():
        setattr(params, name, getattr(p, name))
    params.q, params.k, params.v, params.bias = view(q), view(k), view(v), view(bias)
    params.w = view(None if w is None else w[None, :, None])
    low, high = p.mask.band(p.M, p.N)
    params.band_lo = -(2**60) if low is None else low
    params.band_hi = 2**60 if high is None else high
    if p.mask.kv_len is not None:
        params.kv_len = p.mask.kv_len.data_ptr()
        params.kv_len_strides = (ctypes.c_int64 * 2)(*strides(p.mask.kv_len))
    if p.mask.keep is not None:
        params.keep = p.mask.keep.data_ptr()
        params.keep_strides = (ctypes.c_int64 * 4)(*strides(p.mask.keep))
    if p.dropout is not None:
        params.dropout_enabled = True
        params.dropout_threshold = p.dropout.threshold
        params.dropout_scale = p.dropout.scale
        params.dropout_seed_ptr = (
            p.dropout.seed.data_ptr()
        )  # on the device, as a GPU's backend does
    params.weights_mode = ("none", "full", "mean").index(p.weights)


# ---- calls ----


@functools.cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(host_build.library("kernels", KIND)))
    for direction, params in ("forward", ForwardParams), ("backward", BackwardParams):
        size_of = getattr(library, f"size_of_{direction}_params")
        size_of.restype = ctypes.c_int64
        assert size_of() == ctypes.sizeof(params), "the structs above are not those of params.h"
        getattr(library, f"{direction}_workspace_bytes").restype = ctypes.c_int64
        getattr(library, direction).restype = ctypes.c_char_p
    library.unsupported.restype = ctypes.c_char_p
    return library


def call(direction: str, params) -> None:
    library = load()
    bytes = getattr(library, f"{direction}_workspace_bytes")(ctypes.byref(params))
    workspace = torch.empty(bytes, dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    error = getattr(library, direction)(ctypes.byref(params))
    if error is not None:
        raise RuntimeError(error.decode())


# ---- fastattn.registry.Backend ----


def unsupported(p: Problem) -> list[str]:
    if p.dtype not in DTYPES:
        return [f"no kernels for {p.dtype}"]
    params = AttentionParams(D=p.D, E=p.E)
    params.q.dtype = DTYPES[p.dtype]
    params.w.data = 1 if p.score == "additive" else None
    reason = load().unsupported(ctypes.byref(params))
    return [reason.decode()] if reason else []


def forward(p: Problem, q, k, v, w, bias):
    params = ForwardParams()
    fill_problem(params, p, q, k, v, w, bias)
    out, weights = ops.empty_bmhe(p, q), q.new_empty(p.weights_shape())
    lse = torch.empty(p.B, p.H, p.M)
    stats = torch.empty(p.B, p.H, p.M, 2)
    params.out, params.weights = view(out), weights_view(p, weights)
    params.lse, params.stats = lse.data_ptr(), stats.data_ptr()
    call("forward", params)
    return out, lse, weights, stats


def backward(
    p: Problem, q, k, v, w, bias, out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad
):
    params = BackwardParams()
    fill_problem(params, p, q, k, v, w, bias)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    grad_w = None if w is None else torch.empty(p.B, p.H, p.D)
    grad_bias = torch.empty_like(bias) if bias_needs_grad else None
    grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
    stats = stats.contiguous()
    params.out, params.grad_out = view(out), view(grad_out)
    params.stats = stats.data_ptr()
    params.grad_lse = None if grad_lse is None else grad_lse.data_ptr()
    params.grad_weights = weights_view(p, grad_weights)
    params.grad_q, params.grad_k, params.grad_v = map(view, grads)
    params.grad_w = None if grad_w is None else grad_w.data_ptr()
    params.grad_bias = view(grad_bias)
    if grad_bias is not None:
        params.bias_sizes = (ctypes.c_int64 * 4)(*grad_bias.shape)
    call("backward", params)
    return *grads, grad_w, grad_bias
