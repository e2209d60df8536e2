"""The schemas of all operators: the one text, which Python and the compiled library share.

setup.py compiles ``COMPILED`` into _C.abi3.so, which defines these operators when it is loaded: a
program exported from torch then needs that file and no Python. ``ops.py`` defines what is missing.
Nothing is imported here, as the build has no torch to import.
"""

_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor? w, Tensor? bias, "
    "Tensor? kv_len, Tensor? keep, Tensor? seed, "
    "SymInt? band_lo, SymInt? band_hi, float scale, float dropout_p, int weights"
)
_FORWARD = f"({_PROBLEM}) -> (Tensor out, Tensor lse, Tensor weights, Tensor stats)"
_BACKWARD = (
    f"({_PROBLEM}, Tensor out, Tensor stats, Tensor grad_out, Tensor? grad_lse, "
    "Tensor? grad_weights, bool bias_needs_grad) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_bias)"
)


def pair(prefix: str) -> dict[str, str]:
    """The operators of a backend, forward and backward, by name."""
    return {f"{prefix}forward": _FORWARD, f"{prefix}backward": _BACKWARD}


# What surrounds attention, at inference on CPUs.
PROJECTIONS = {
    "linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "self_attention": (
        "(Tensor x, Tensor in_weight, Tensor? in_bias, Tensor out_weight, Tensor? out_bias, "
        "int num_heads, float scale, int weights, bool batch_first) "
        "-> (Tensor out, Tensor weights)"
    ),
}
# Which instruction set the CPU kernels use, which this machine runs, widest first, and forcing one
# of these ("auto": the widest that CPUID shows).
CPU_ISA = {
    "cpu_isa": "() -> str",
    "cpu_isas": "() -> str[]",
    "select_cpu_isa": "(str name) -> bool",
}
# The path of a forward pass through the CPU kernels, in words: csrc/binding/path.h.
CPU_PATH = {
    "cpu_path": (
        "(int B, int H, int Hkv, int M, int N, bool additive, bool bias, bool keep_by_row, "
        "bool dropout, bool weights, int band_lo, int band_hi) -> str"
    ),
}
# The CUDA library implements cuda_forward and cuda_backward, and comes beside _C.abi3.so.
COMPILED = pair("") | pair("cuda_") | PROJECTIONS | CPU_ISA | CPU_PATH
