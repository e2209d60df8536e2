"""What mutate.py plants: a text of a CUDA kernel and a wrong one in its place."""

from __future__ import annotations

from dataclasses import dataclass

# Compiled again: the mistakes are in one of these files or its headers. Its test finds them.
TESTS = {
    "dot/forward.cu": "test_cuda_sdpa.py",
    "dot/backward.cu": "test_cuda_sdpa.py",
    "dot/forward_wgmma.cu": "test_cuda_wgmma.py",
    "dot/backward_wgmma.cu": "test_cuda_wgmma.py",
    "dot/dense_tiles.cu": "test_wgmma_dense_masks.py",
    "additive/forward.cu": "test_cuda_additive.py",
    "additive/gradients.cu": "test_cuda_additive.py",
    "additive/gradient_sums.cu": "test_cuda_additive.py",
    "additive/delta.cu": "test_cuda_additive.py",
    "additive/few_queries.cu": "test_cuda_additive.py",
    "additive/grad_bias.cu": "test_cuda_additive.py",
    "additive/prepare.cu": "test_cuda_additive.py",
    "tile/bias_parts.cu": "test_cuda_sdpa.py",
    "tile/line.cu": "test_cuda_sdpa.py",
    "tile/merge.cu": "test_cuda_sdpa.py",
    "tile/sink.cu": "test_cuda_sdpa.py",
    "tile/spans.cu": "test_cuda_sdpa.py",
}


@dataclass(frozen=True)
class Mistake:
    name: str
    file: str
    right: str
    wrong: str
    found_by: str  # a text in pytest's output
    kind: str = "plain"
    source: str = "dot/forward.cu"
    test: str = ""  # that of the source by default
    tests: str = "test_corner"  # of them, for pytest's -k


def of_warpgroups(name: str, right: str, wrong: str, found_by: str, file="wgmma_block.cuh"):
    """A mistake in the kernel of copies, barriers and products of warpgroups."""
    return Mistake(name, f"dot/{file}", right, wrong, found_by, source="dot/forward_wgmma.cu")


def of_large_heads(name: str, right: str, wrong: str) -> Mistake:
    """A mistake in the kernel that computes what these leave, of heads over 128."""
    test = TESTS["dot/forward_wgmma.cu"]
    return Mistake(name, "dot/forward.cu", right, wrong, "AssertionError", test=test)


def of_grads(name: str, right: str, wrong: str, found_by: str, file="wgmma_grads.cuh"):
    """The same in the backward pass."""
    return Mistake(name, f"dot/{file}", right, wrong, found_by, source="dot/backward_wgmma.cu")


def of_copies(name: str, right: str, wrong: str, file="turns.cuh", found_by="AssertionError"):
    """A mistake in the loop of dQ, or of dK and dV, with its copies ahead."""
    name, file, source = f"copies: {name}", f"dot/{file}", "dot/backward.cu"
    return Mistake(name, file, right, wrong, found_by, source=source)


def of_halves(name: str, right: str, wrong: str, source: str, file="additive/half_products.cuh"):
    """A mistake in the additive score's products of 16-bit types."""
    return Mistake(f"halves: {name}", file, right, wrong, "AssertionError", source=source)


def of_one_pass(name: str, right: str, wrong: str, file="gradients.cu", source="gradients.cu"):
    """A mistake in the gradients of additive attention."""
    file, source = f"additive/{file}", f"additive/{source}"
    return Mistake(f"one pass: {name}", file, right, wrong, "AssertionError", source=source)


def of_parts(name: str, right: str, wrong: str) -> Mistake:
    """The same where parts are added up."""
    return of_one_pass(name, right, wrong, "gradient_sums.cu", "gradient_sums.cu")


def of_file(name: str, file: str, right: str, wrong: str, tests: str, source="") -> Mistake:
    """A mistake that these tests find, in a source or in a header of one."""
    return Mistake(name, file, right, wrong, "AssertionError", source=source or file, tests=tests)


def of_dense(name: str, right: str, wrong: str, file="dense_tiles.cu", source="dense_tiles.cu"):
    """A mistake in what is found of a dense mask, or in what is made of that."""
    name, file, source = f"dense masks: {name}", f"dot/{file}", f"dot/{source}"
    test = TESTS["dot/dense_tiles.cu"]
    return Mistake(name, file, right, wrong, "Error", source=source, test=test, tests="")


def of_limits(name: str, file: str, right: str, wrong: str, source: str, found_by="AssertionError"):
    """A mistake in what is done with limits that vary by row."""
    name, test = f"limits of rows: {name}", "test_whole_tiles.py"
    return Mistake(name, file, right, wrong, found_by, source=source, test=test, tests="")
