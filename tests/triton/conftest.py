"""Runs the kernels on a GPU, or else in Triton's interpreter, which then checks every address.

Triton chooses when a kernel is defined, so TRITON_INTERPRET stays set until all kernels are
imported.
"""

import bisect
import dataclasses
import functools
import importlib
import math
import os
import pkgutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Carrier
from torch.utils import _pytree as pytree

import fastattn.kernels
from fastattn.backends import registry
from fastattn.backends import triton as backend

if not backend.INSTALLED:
    pytest.skip("needs Triton", allow_module_level=True)
INTERPRETED = not torch.cuda.is_available()
HERE = Path(__file__).parent


def _repair_interpreter():
    """Repairs what Triton's interpreter gets wrong or does slowly.

    It multiplies the bits of bf16 numbers in dot. It truncates where the hardware rounds to nearest
    even. It leaves a constexpr in a tuple wrapped. It patches the language again in every call of a
    device function, which takes milliseconds. Products are summed in the order of the inner dim, as
    on a GPU. BLAS uses another order for each shape; with logits of 1e4, S and the transposed S of
    backward would differ. It ignores the precision of products. Of NaN and a number, its minimum
    and maximum are NaN, unasked, where the hardware gives the number. A float argument stays a
    float64 number, and so does what is computed of it alone. Where a mask leaves out a load, and no
    other number is named, it gives 0; a GPU gives anything, as NaN and -1 here. It checks the shape
    of a block, and prints it, in every operation, which takes a quarter of the time.
    """
    import triton.experimental.gluon  # noqa: F401 - the first launch would import it, and checks the variable
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.language import semantic
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def as_fp32(x):
        if x.dtype.scalar == tl.bfloat16:
            return _bf16_to_fp32(x.data)
        return x.data.astype(np.float32, copy=False)

    def create_dot(self, a, b, d, precision, max_num_imprecise_acc):
        x, y, product = as_fp32(a), as_fp32(b), _half_dot
        if a.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
            x, y = _fp32_to_tf32(x), _fp32_to_tf32(y)
        elif a.dtype.scalar == tl.float32:
            assert precision == ir.INPUT_PRECISION.IEEE, precision
            product = _fp32_dot
        return interpreter.TensorHandle(product(x, y, d.data), tl.float32)

    def cast_impl(self, src, to):
        if src.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_fp32_to_bf16(src.data), tl.bfloat16)
        return cast(self, src, to)

    load = builder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *options):
        if other is None and not mask.data.all():
            kind = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            anything = np.full(ptrs.data.size * dtype.itemsize, 255, np.uint8).view(dtype)
            other = interpreter.TensorHandle(anything.reshape(ptrs.data.shape), kind)
        return load(self, ptrs, mask, other, *options)

    builder.create_masked_load = create_masked_load
    builder.create_dot = create_dot
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.cast_impl = builder.create_fp_trunc = cast_impl

    convert = interpreter._implicit_cvt

    def argument(arg):
        if isinstance(arg, tl.constexpr):
            return arg.value
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(arg)

    interpreter._implicit_cvt = argument

    # It computes assertions about overflows, but only checks them in its debug mode.
    the_builder = interpreter.interpreter_builder
    the_builder.options = dataclasses.replace(the_builder.options, sanitize_overflow=False)
    scalar_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: (
        np.dtype(np.uint64) if type.scalar.is_ptr() else scalar_dtype(type.scalar)
    )

    @functools.cache
    def sizes(*shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(n) for n in shape])

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(*(type.shape if type.is_block() else ()))

    tl.tensor.__init__ = init_tensor
    init_block = tl.block_type.__init__

    @functools.cache
    def checked(*shape):
        block = types.SimpleNamespace()
        init_block(block, tl.int1, [*shape])
        return {"shape": block.shape, "numel": block.numel}

    tl.block_type.__init__ = lambda self, element_ty, shape: vars(self).update(
        checked(*shape), element_ty=element_ty
    )
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value

    patch_lang = interpreter._patch_lang
    both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch_lang(both)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(
        *args, **options
    )


def _check_addresses():
    """Makes the interpreter refuse loads and stores outside the memory of a launch's tensors."""
    from triton.runtime import interpreter

    begins, ends = [], []
    executor, memory = interpreter.GridExecutor, interpreter._interpreter
    to_host = executor._init_args_hst

    def note(self, *given):
        host = to_host(self, *given)
        tensors = (x for x in pytree.tree_leaves(host) if isinstance(x, torch.Tensor))
        storages = (x.untyped_storage() for x in tensors)
        spans = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages})
        begins[:], ends[:] = zip(*spans, strict=True)
        return host

    def check(ptrs, mask, size):
        used = ptrs[mask]
        if used.size:
            first, last = int(used.min()), int(used.max())
            n = bisect.bisect_right(begins, first) - 1
            end = ends[n] if n >= 0 else 0
            assert last + size <= end, "an address outside the kernel's tensors"

    def load(ptrs, mask, other, dtype):
        check(ptrs, mask, dtype.itemsize)
        return memory.load(ptrs, mask, other, dtype)

    def store(ptrs, value, mask):
        check(ptrs, mask, value.itemsize)
        return memory.store(ptrs, value, mask)

    executor._init_args_hst = note
    interpreter._interpreter = types.SimpleNamespace(load=load, store=store)


def _fp32_dot(a, b, c):
    for k in range(a.shape[1]):
        c = c + a[:, k, None] * b[None, k, :]
    return c


def _half_dot(a, b, c):
    """Adds like tensor cores: 16 exact products at a time."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for k in range(0, a.shape[1], 16):
        c = (c + a[:, k : k + 16] @ b[k : k + 16]).astype(np.float32)
    return c


def _fp32_to_tf32(x):
    """10 bits of mantissa, rounded to nearest."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x1000) & 0xFFFFE000).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def _bf16_to_fp32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _fp32_to_bf16(x):
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    _repair_interpreter()
    _check_addresses()
for _module in pkgutil.walk_packages(fastattn.kernels.__path__, "fastattn.kernels."):
    importlib.import_module(_module.name)


def pytest_collection_finish():
    """Test files with their own kernels are imported by now; nothing else is interpreted."""
    if INTERPRETED:
        os.environ.pop("TRITON_INTERPRET", None)


def pytest_collection_modifyitems(items):
    """On a GPU, every test that runs kernels is a GPU test. Some files here run none."""
    for item in items:  # this hook gets the items of all folders
        runs_kernels = HERE in item.path.parents and "device" in getattr(item, "fixturenames", ())
        if not INTERPRETED and runs_kernels:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def carried(device, monkeypatch):
    """Test tensors are on the CPU. The backend copies them to the kernels' device, and back."""
    monkeypatch.setitem(registry.BACKENDS, "triton", Carrier(backend, device))
