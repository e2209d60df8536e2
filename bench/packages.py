"""What other packages offer for a case, where they are installed.

On a CPU, onnxruntime and OpenVINO: one operator in a graph of its own, on our arrays and as many
threads. On a GPU, flash-attn and xformers. Everything that happens once happens at the first call:
the import, the graph, and another layout of an array that an operator wants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import Case
from fastattn import testing

ONNXRUNTIME, OPENVINO = "onnxruntime", "OpenVINO"
FLASH_ATTN, XFORMERS = "flash-attn", "xformers"
NAMES = {ONNXRUNTIME, OPENVINO, FLASH_ATTN, XFORMERS}
KEYS = ("all", "padding", "lengths")  # the masks that all of them know, beside the causal one


def calls(case: Case, t: testing.Tensors, qkv: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """The packages that know the problem. A call raises ImportError if its package is missing."""
    p = case.problem
    if case.keys not in KEYS or p.bias or p.causal not in (None, "top_left"):
        return {}
    if qkv[0].is_cuda:
        return _on_gpu(case, qkv)
    with_openvino = {OPENVINO: _lazy(_openvino, case, t)}
    if p.dtype is not torch.float32 or p.H != p.Hkv:
        return with_openvino
    return {ONNXRUNTIME: _lazy(_onnxruntime, case, t), **with_openvino}


def _lazy(make: Callable[..., Callable[[], Tensor]], *args) -> Callable[[], Tensor]:
    made = functools.cache(lambda: make(*args))
    return lambda: made()()


def _lengths(case: Case, t: testing.Tensors) -> Tensor | None:
    """How many keys each sample keeps, int32 [B]; None for all."""
    if case.keys == "all":
        return None
    if t.mask.keep is not None:
        return t.mask.keep[:, 0, 0].sum(-1, dtype=torch.int32)
    return torch.as_tensor(t.mask.kv_len, dtype=torch.int32)


# ---- on a CPU ----


def _onnxruntime(case: Case, t: testing.Tensors) -> Callable[[], Tensor]:
    """MultiHeadAttention of the domain com.microsoft. It takes queries as [B, M, H D]."""
    import onnxruntime
    from onnx import TensorProto, helper

    p, lengths = case.problem, _lengths(case, t)
    arrays = {"q": t.q.transpose(1, 2).flatten(2).contiguous(), "k": t.k, "v": t.v}
    names = list(arrays) if lengths is None else [*arrays, "", "lengths"]
    arrays |= {} if lengths is None else {"lengths": lengths}
    kinds = {torch.float32: TensorProto.FLOAT, torch.int32: TensorProto.INT32}
    inputs = [helper.make_tensor_value_info(n, kinds[x.dtype], x.shape) for n, x in arrays.items()]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [p.B, p.M, p.H * p.E])
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft",
                            num_heads=p.H, unidirectional=int(p.causal is not None))  # fmt: skip
    graph = helper.make_graph([node], "attention", inputs, [output])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # Else its threads would go on spinning, on the cores of whatever is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {n: x.numpy() for n, x in arrays.items()}

    def call() -> Tensor:
        (out,) = session.run(None, feed)
        return torch.from_numpy(out).view(p.B, p.M, p.H, p.E).transpose(1, 2)

    return call


def _openvino(case: Case, t: testing.Tensors) -> Callable[[], Tensor]:
    """ScaledDotProductAttention, in the dtype of the case throughout."""
    import openvino
    from openvino import opset13 as ops

    p, lengths = case.problem, _lengths(case, t)
    half = p.dtype is torch.bfloat16
    kind = openvino.Type.bf16 if half else openvino.Type.f32
    arrays, kinds = [t.q, _per_head(t.k, p.H), _per_head(t.v, p.H)], [kind] * 3
    if lengths is not None:
        arrays.append((torch.arange(p.N) < lengths[:, None])[:, None, None])
        kinds.append(openvino.Type.boolean)
    inputs = [ops.parameter(list(x.shape), kind) for x, kind in zip(arrays, kinds, strict=True)]
    node = ops.scaled_dot_product_attention(*inputs, causal=p.causal is not None)
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32", "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False,
    }  # fmt: skip
    compiled = openvino.Core().compile_model(openvino.Model([node], inputs), "CPU", settings)
    request = compiled.create_infer_request()
    for n, (x, kind) in enumerate(zip(arrays, kinds, strict=True)):
        words = x.view(torch.int16) if x.dtype is torch.bfloat16 else x  # NumPy has no bfloat16
        request.set_input_tensor(n, openvino.Tensor(words.numpy(), list(x.shape), kind))

    def call(_borrowed: list[Tensor] = arrays) -> Tensor:  # whose memory the request reads
        request.infer()
        out = request.get_output_tensor(0).data.view("int16" if half else "float32")
        return torch.from_numpy(out).view(p.dtype).view(p.B, p.H, p.M, p.E)

    return call


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values of every query head, in memory: the operator has no groups."""
    return x.repeat_interleave(heads // x.shape[1], 1).contiguous()


# ---- on a GPU; not run on one yet ----


def _on_gpu(case: Case, qkv: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    p = case.problem
    if case.keys != "all" or p.dtype is torch.float32:
        return {}
    # Both take and return [B, M, H, D]. flash-attn's causal mask ends with the last key.
    causal, given = p.causal is not None, [x.transpose(1, 2) for x in qkv]
    found: dict[str, Callable[[], Tensor]] = {}
    if not causal or p.M == p.N:
        found[FLASH_ATTN] = lambda: _flash_attn(given, causal)
    if p.H == p.Hkv:
        found[XFORMERS] = lambda: _xformers(given, causal)
    return found


def _flash_attn(given: list[Tensor], causal: bool) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(*given, causal=causal).transpose(1, 2)


def _xformers(given: list[Tensor], causal: bool) -> Tensor:
    from xformers import ops

    mask = ops.LowerTriangularMask() if causal else None
    return ops.memory_efficient_attention(*given, attn_bias=mask).transpose(1, 2)
