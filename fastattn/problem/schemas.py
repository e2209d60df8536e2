"""The schemas of all operators, shared by Python and the compiled library.

:class:`Call` lists the operands of attention for all of Python, and the schemas are made from it.

setup.py compiles ``COMPILED`` into _C.abi3.so, which defines these operators when it is loaded. A
program exported from torch then needs that file and no Python. ``operators.py`` defines what is
missing. C++ gets the records too: see ``GENERATED``. The build has no torch, so none is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Call(NamedTuple):
    """The operands of a forward operator, and the first operands of its backward operator.

    Canonical shapes: q ``[B, H, M, D]``, k ``[B, Hkv, N, D]``, v ``[B, Hkv, N, E]``, w ``[H, D]``
    (of the gaussian also ``[B, H, D]``), bias and keep ``[B|1, H|1, M|1, N|1]``, kv_len and
    kv_begin int32 ``[B|1, M|1]``, seed int64 ``[]``. A key j of a query i is within the band if
    ``i + band_lo <= j <= i + band_hi``. A bias ``[B|1, H|1, 1, M + N - 1]`` of several queries is a
    line, in which (i, j) is at ``j - i + M - 1``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None = None
    bias: Tensor | None = None
    kv_len: Tensor | None = None
    keep: Tensor | None = None
    kv_begin: Tensor | None = None
    seed: Tensor | None = None
    band_lo: int | None = None
    band_hi: int | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    origin_b: int = 0  # the indices of dropout's bits begin here
    origin_h: int = 0
    origin_i: int = 0
    origin_j: int = 0  # a multiple of 4
    weights: int = 0  # a value of record.WEIGHTS
    score: int = 0  # a value of record.SCORES
    wide: bool = False  # out, and the gradients of q, k and v, are float32


class Saved(NamedTuple):
    """The further operands of a backward operator: results of forward, and their gradients."""

    out: Tensor
    stats: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None = None
    grad_weights: Tensor | None = None
    bias_needs_grad: bool = False
    sink: Tensor | None = None  # that of forward, whose gradient is then a result


class ModuleCall(NamedTuple):
    """The operands of attention and both projections around it, at inference on CPUs.

    A mask broadcasts to [B, H, M, N]: True keeps a pair, and a number is added to its score. Keys
    and values are memory, [B, H, room, D], that has ``past`` of them. New ones are written behind,
    and attention is then causal. Without ``adds`` only queries are projected, and nothing is
    written. Without such memory, keys are made of ``key``, or of ``x``, and values of ``value``, or
    of the input of keys. With ``is_causal`` query i then sees keys up to i.
    """

    x: Tensor
    in_weight: Tensor
    in_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    num_heads: int
    scale: float
    weights: int  # a value of record.WEIGHTS
    batch_first: bool
    mask: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    past: int = 0
    adds: bool = True
    key: Tensor | None = None
    value: Tensor | None = None
    is_causal: bool = False


def split_forward(args: tuple) -> tuple[Call, Tensor | None]:
    """The arguments of a forward operator: the operands, and a sink if one is given."""
    n = len(Call._fields)
    return Call(*args[:n]), args[n] if len(args) > n else None


def split_backward(args: tuple) -> tuple[Call, Saved]:
    """The arguments of a backward operator."""
    n = len(Call._fields)
    return Call(*args[:n]), Saved(*args[n:])


# The names of types in schemas and in C++. Bounds of a band depend on sizes, which may be symbols.
_TYPES = {
    "Tensor": ("Tensor", "Tensor"),
    "Tensor | None": ("Tensor?", "OptTensor"),
    "int | None": ("SymInt?", "std::optional<int64_t>"),
    "int": ("int", "int64_t"),
    "float": ("float", "double"),
    "bool": ("bool", "bool"),
}


def _fields(record: type, language: int) -> list[tuple[str, str]]:
    """(type, name) of the fields of a record."""
    fields = record.__annotations__.items()
    return [(_TYPES[annotation.__forward_arg__][language], name) for name, annotation in fields]


def operands(record: type) -> str:
    """The fields of a record as a schema lists them."""
    return ", ".join(map(" ".join, _fields(record, 0)))


def struct(name: str, record: type[NamedTuple]) -> str:
    """A record as a C++ struct, and the function that takes one from the arguments of a call."""
    defaults, fields = record._field_defaults, _fields(record, 1)

    def default(field: str) -> str:
        value = defaults.get(field)
        given = "" if value is None else str(value).lower()
        return f" = {{{given}}}" if field in defaults else ""

    members = "".join(f"  {kind} {field}{default(field)};\n" for kind, field in fields)
    taken = "".join(f"    from.take<{kind}>(),  // {field}\n" for kind, field in fields)
    return (
        f"struct {name} {{\n{members}}};\n"
        f"inline {name} take_{name.lower()}(Arguments& from) {{\n  return {{\n{taken}  }};\n}}\n"
    )


# A sink [H] or [B, H] is one more logit of every row, without a value.
_FORWARD = (
    f"({operands(Call)}, Tensor? sink=None) "
    "-> (Tensor out, Tensor lse, Tensor weights, Tensor stats)"
)
_BACKWARD = (
    f"({operands(Call)}, {operands(Saved)}=None) "  # the last one is the sink
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_bias, "
    "Tensor grad_sink)"
)


def pair(prefix: str) -> dict[str, str]:
    """The operators of a backend, forward and backward, by name."""
    return {f"{prefix}forward": _FORWARD, f"{prefix}backward": _BACKWARD}


_WRITTEN = {"keys": "Tensor(a!)?", "values": "Tensor(b!)?"}
_MODULE_OPERANDS = ", ".join(
    f"{_WRITTEN.get(name, kind)} {name}"
    + (f"={ModuleCall._field_defaults[name]}" if name in ModuleCall._field_defaults else "")
    for kind, name in _fields(ModuleCall, 0)
)
# Operators without a backward pass.
SINGLE = {
    "multi_head_attention": f"({_MODULE_OPERANDS}) -> (Tensor out, Tensor weights)",
    # x [T, E] times weight [F, E] transposed, plus bias [F]: [T, F].
    "linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
}
# The instruction set of the CPU kernels; those that run here, widest first; and forcing one of them
# ("auto": the widest that CPUID shows). And from how many multiply-adds on ``linear`` takes less
# time than F.linear.
OF_THE_MACHINE = {
    "cpu_isa": "() -> str",
    "cpu_isas": "() -> str[]",
    "select_cpu_isa": "(str name) -> bool",
    "linear_from": "(ScalarType dtype) -> (int, int)",
    # The path of a forward pass through the CPU kernels, in words: csrc/binding/path.h. And forcing
    # one, as FASTATTN_CPU_PATH does ("auto": none).
    "cpu_path": (
        "(int B, int H, int Hkv, int M, int N, int D, ScalarType dtype, bool contiguous_keys, "
        "int score, bool bias, bool keep_by_row, bool dropout, bool weights, int band_lo, "
        "int band_hi) -> str"
    ),
    "select_cpu_path": "(str name) -> bool",
    # A loop of csrc/cpu/entry/limits.cpp, on every thread; returns what they did together.
    "cpu_loop": "(Tensor memory, int loop, int rounds) -> float",
}
# Whether a device computes the dot product by products of warpgroups, where it can. The
# CUDA library implements it, and exported programs do not use it: operators.py defines it.
CUDA_CHOOSE = {"cuda_choose_wgmma": "(int device, bool chosen) -> ()"}
# The CUDA library implements cuda_forward and cuda_backward, and comes beside _C.abi3.so.
COMPILED = pair("") | pair("cuda_") | SINGLE | OF_THE_MACHINE
# What csrc/binding includes, by file name.
GENERATED = {
    "schemas.inc": "".join(f'"{name}{schema}",\n' for name, schema in COMPILED.items()),
    "operands.inc": struct("Operands", Call) + struct("Saved", Saved),
}


def write(folder: Path) -> None:
    """Writes those files that have changed."""
    for name, text in GENERATED.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
