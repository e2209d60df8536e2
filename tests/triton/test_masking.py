"""Tiles, ranges and lists of blocks against the definition, Problem.kept."""

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from fastattn.kernels.host.launch import Call
from fastattn.kernels.tile import block_lists, masking
from fastattn.problem import Mask, Problem

B, H, M, N = 2, 2, 40, 50
BLOCK_M, BLOCK_N = 16, 8
ROWS, COLS = triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N)
rng = torch.Generator().manual_seed(0)


def lengths(*shape):
    return torch.randint(0, N + 1, shape, generator=rng, dtype=torch.int32)


def blocky(*shape):
    """A mask with skipped, full and partial tiles, and some single masked pairs."""
    coarse = torch.rand(*shape[:2], ROWS, COLS, generator=rng) < 0.5
    fine = coarse.repeat_interleave(BLOCK_M, 2).repeat_interleave(BLOCK_N, 3)
    return fine[:, :, :M, :N] & (torch.rand(*shape, generator=rng) < 0.99)


MASKS = {
    "none": Mask(),
    "causal": Mask("top_left"),
    "bottom-right": Mask("bottom_right"),
    "window": Mask(window=(9, 3)),
    "window-left": Mask(window=(20, -1)),
    "window-far": Mask(window=(100, 200)),
    "causal-window": Mask("bottom_right", window=(12, -1)),
    "empty-window": Mask(window=(0, 0)),
    "kv-len": Mask(kv_len=torch.tensor([[0], [21]], dtype=torch.int32)),
    "kv-len-causal": Mask("top_left", kv_len=torch.tensor([[33], [50]], dtype=torch.int32)),
    "kv-len-rows": Mask(kv_len=lengths(B, M)),
    "kv-begin": Mask(kv_begin=torch.tensor([[50], [21]], dtype=torch.int32)),
    "kv-begin-causal": Mask("top_left", kv_begin=torch.tensor([[7], [16]], dtype=torch.int32)),
    "intervals": Mask(kv_begin=lengths(B, M), kv_len=lengths(1, M)),
    "documents": Mask(
        kv_begin=lengths(1, M).sort().values // 2, kv_len=lengths(1, M).sort().values
    ),
    "keep": Mask(keep=blocky(B, H, M, N)),
    "keep-mn": Mask("top_left", keep=blocky(1, 1, M, N)),
    "keep-rows": Mask(keep=torch.rand(1, H, M, 1, generator=rng) < 0.5),
    "all": Mask("top_left", (30, -1), lengths(B, M), blocky(B, 1, M, N), lengths(B, M) // 4),
}
KEEP_STRIDES = [f"keep_stride_{dim}" for dim in "bhmn"]
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def call_of(mask, bias=None, device="cpu"):
    """A Call, and the pairs that its mask keeps, [B, H, M, N]."""
    p = Problem("dot", B, H, H, M, N, 4, 4, torch.float32, torch.device("cpu"), mask=mask)
    kept = p.kept().expand(B, H, M, N)
    q, k = torch.zeros(B, H, M, 4), torch.zeros(B, H, N, 4)
    operands = (q, k, k, None, bias, *p.operands)
    return Call.of(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in operands)), kept


def tiles(kept, past_rows=True, past_keys=False):
    """[B, H, ROWS, COLS, BLOCK_M * BLOCK_N]: the pairs of each tile, with padding."""
    padded = torch.full((B, H, ROWS * BLOCK_M, COLS * BLOCK_N), past_keys)
    padded[:, :, M:] = past_rows
    padded[:, :, :M, :N] = kept
    return padded.view(B, H, ROWS, BLOCK_M, COLS, BLOCK_N).transpose(3, 4).flatten(4)


def some_pair(kept):
    return tiles(kept, past_rows=False).any(-1)


@triton.jit
def keep_kernel(out_ptr, mask, H, M, N, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(0)
    b, h = head // H, head % H
    i, j = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    begin, end = masking.row_range(mask, b, i, M, N)
    keep = masking.keep_tile(mask, b, h, i, j, begin, end, M)
    tl.store(out_ptr + head * BM * BN + i * BN + j, keep.to(tl.int8))


@every_mask
def test_keep_tile_is_the_mask(mask, device):
    call, kept = call_of(mask, device=device)
    out = torch.empty(B * H, 64, 64, dtype=torch.int8, device=device)
    keep_kernel[(B * H,)](out, masking.mask_args(call), H, M, N, BM=64, BN=64)
    out = out.view(B, H, 64, 64).cpu()
    assert torch.equal(out[:, :, :M, :N] != 0, kept)
    assert not out[:, :, M:].any()
    assert not out[:, :, :, N:].any()


@pytest.mark.parametrize("short", ["read", "written"])
def test_the_interpreter_refuses_addresses_outside_of_tensors(short, device):
    if device.type == "cuda":
        pytest.skip("looks into the interpreter")
    mask = masking.mask_args(call_of(MASKS["keep"])[0])
    out = torch.empty(B * H * 64 * 64 - (short == "written"), dtype=torch.int8)
    if short == "read":
        mask = mask._replace(keep_ptr=mask.keep_ptr.flatten()[: mask.keep_ptr.numel() // 2].clone())
    with pytest.raises(InterpreterError, match="outside the kernel's tensors"):
        keep_kernel[(B * H,)](out, mask, H, M, N, BM=64, BN=64)


@triton.jit
def range_kernel(out_ptr, mask, M, N, BM: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr):
    b, block = tl.program_id(0), tl.program_id(1)
    if COLUMNS:
        found = masking.q_range(mask, b, block * BN, M, N, BM, BN)
    else:
        found = masking.kv_range(mask, b, block * BM, M, N, BM, BN)
    to = out_ptr + (b * tl.num_programs(1) + block) * 4
    tl.store(to, found[0])
    tl.store(to + 1, found[1])
    tl.store(to + 2, found[2])
    tl.store(to + 3, found[3])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@every_mask
def test_ranges_hold_every_kept_pair_and_full_blocks_are_full(mask, columns, device):
    mask = dataclasses.replace(mask, keep=None)
    call, kept = call_of(mask, device=device)
    if masking.needs_lists(call, columns):
        pytest.skip("not an interval of rows: lists serve")
    lines, length = (COLS, ROWS) if columns else (ROWS, COLS)
    out = torch.empty(B, lines, 4, dtype=torch.int32, device=device)
    range_kernel[(B, lines)](
        out, masking.mask_args(call), M, N, BM=BLOCK_M, BN=BLOCK_N, COLUMNS=columns
    )
    some = some_pair(kept)
    if columns:  # keys past the last one do not affect a key block's own gradients, but rows may
        full, some = tiles(kept, past_rows=False, past_keys=True).all(-1).mT, some.mT
    else:
        full = tiles(kept).all(-1)
    full, some = full[:, 0], some[:, 0]
    for b, line in itertools.product(range(B), range(lines)):
        begin, full_begin, full_end, end = out[b, line].tolist()
        assert begin <= full_begin <= full_end <= end
        visited = [n for n in range(length) if some[b, line, n]]
        assert all(begin <= n < end for n in visited)
        assert end - begin <= max(visited, default=-1) - min(visited, default=0) + 1
        assert all(full[b, line, n] for n in range(full_begin, full_end))
        assert full_end - full_begin == sum(full[b, line, begin:end].tolist())


@pytest.fixture(params=[None, 2], ids=["", "read-in-parts"])
def read_at_once(request, monkeypatch):
    """How many blocks the kernels that make lists read at a time; None: enough for all here."""
    if request.param is None:
        return
    real = block_lists.launch

    def launch(kernel, programs):
        def run(*args, **options):
            options |= {"CHUNK": request.param} if "CHUNK" in options else {}
            return real(kernel, programs)(*args, **options)

        return run

    monkeypatch.setattr(block_lists, "launch", launch)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@every_mask
@pytest.mark.usefixtures("read_at_once")
def test_lists_are_the_classes_of_tiles(mask, columns, device):
    call, kept = call_of(mask, device=device)
    lists = block_lists.block_lists(call, masking.mask_args(call), BLOCK_M, BLOCK_N, columns)
    if lists.ptr is None:
        assert mask.keep is None
        return
    assert_lists(lists, kept, torch.ones_like(kept), columns)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(B, 1, M, N), (1, H, M, N), (1, 1, 1, N)], ids=str)
def test_a_broadcast_bias_is_scanned(shape, columns, device):
    bias = torch.zeros(shape)
    bias[..., :9] = -torch.inf  # a skipped tile and a partial one
    bias[..., 20:24] = 0.5  # partial ones
    bias[..., 24:32] = -0.5
    call, kept = call_of(Mask("top_left"), bias, device)
    lists = block_lists.block_lists(call, masking.mask_args(call), BLOCK_M, BLOCK_N, columns)
    full = (bias == 0).expand(B, H, M, N)
    assert_lists(lists, kept & (bias != -torch.inf), full, columns)


def test_a_bias_of_every_head_is_not_scanned():
    call, _ = call_of(Mask(), torch.zeros(B, H, M, N))
    assert not masking.scans_bias(call)
    assert block_lists.block_lists(call, masking.mask_args(call), BLOCK_M, BLOCK_N).ptr is None


def test_the_list_of_a_column_beyond_32_bits(device):
    """The class of the last row block lies 2^31 bytes behind that of the first."""
    rows, cols = 2049, 1 << 20
    try:
        memory = torch.zeros(2**31 + rows * cols, dtype=torch.int8, device=device)
    except RuntimeError:
        pytest.skip("needs 4.3 GB of address space")
    classes = memory[2**31 :]  # an offset that wraps around would be in front of it
    classes[(rows - 1) * cols] = block_lists.FULL.value
    blocks, counts = (torch.empty(n, dtype=torch.int32, device=device) for n in (rows + 1, 2))
    block_lists.launch(block_lists.compact_kernel, 1)(
        classes, blocks, counts, rows, cols, CHUNK=1024, COLUMNS=True
    )
    assert counts.tolist() == [0, 1]
    assert blocks[0] == rows - 1


def assert_lists(lists, kept, plain, columns):
    """Compares with classes from PyTorch: partial blocks come first, each kind ascending."""
    full = tiles(kept & plain).all(-1)
    classes = torch.where(some_pair(kept), torch.where(full, 2, 1), 0)
    if columns:
        classes = classes.transpose(2, 3)
    lines = classes.shape[2]
    blocks, counts = lists.ptr.cpu(), lists.counts_ptr.cpu()
    for b, h, line in itertools.product(range(B), range(H), range(lines)):
        at = b * lists.stride_b + h * lists.stride_h + line
        want = [torch.where(classes[b, h, line] == kind)[0].tolist() for kind in (1, 2)]
        assert counts[at].tolist() == [len(w) for w in want]
        assert blocks[at, : len(want[0]) + len(want[1])].tolist() == want[0] + want[1]


def far_apart(x, dim, before=0):
    """x in memory of its own, and its strides: one is within 32 bits, its products are not.

    ``before``: numbers of memory before it, where a product of 32 bits would be.
    """
    strides = list(x.contiguous().stride())
    strides[dim] = 2**31 // (x.shape[dim] - 1) + x.numel()
    size = before + 2**31 + 3 * x.numel() * x.shape[dim]
    try:
        memory = torch.empty(size, dtype=x.dtype, device=x.device)  # most pages stay untouched
    except RuntimeError:
        pytest.skip(f"needs {size * x.element_size() / 1e9:.1f} GB of address space")
    memory.as_strided(x.shape, strides, before).copy_(x)
    return memory[before:], strides


@pytest.mark.parametrize("dim", range(4), ids=["batch", "head", "row", "key"])
def test_a_dense_mask_beyond_32_bits(dim, device):
    call, _ = call_of(Mask(), device=device)
    keep = (torch.rand(4, 4, 4, 4, generator=rng) < 0.5).to(device, torch.uint8)
    memory, strides = far_apart(keep, dim, before=2**31)
    given = dict(zip(KEEP_STRIDES, strides, strict=True))
    mask = masking.mask_args(call)._replace(keep_ptr=memory, **given)
    out = torch.empty(keep.shape, dtype=torch.int8, device=device)
    keep_kernel[(16,)](out, mask, 4, 4, 4, BM=4, BN=4)
    assert out.equal(keep.to(torch.int8))


@pytest.mark.parametrize("dim", range(2), ids=["batch", "row"])
@pytest.mark.parametrize("limit", ["kv_len", "kv_begin"])
def test_limits_beyond_32_bits(limit, dim, device):
    call, _ = call_of(Mask(), device=device)
    shape = (4, 4) if dim else (4, 1)
    keys = torch.randint(0, 5, shape, generator=rng, dtype=torch.int32).to(device)
    memory, (stride_b, stride_m) = far_apart(keys, dim)
    names = (f"{limit}_{name}" for name in ("ptr", "stride_b", "stride_m"))
    given = dict(zip(names, (memory, stride_b, stride_m if dim else None), strict=True))
    out = torch.empty(4, 4, 4, dtype=torch.int8, device=device)
    keep_kernel[(4,)](out, masking.mask_args(call)._replace(**given), 1, 4, 4, BM=4, BN=4)
    j, bound = torch.arange(4, device=device), keys[..., None]
    want = (j < bound) if limit == "kv_len" else (j >= bound)
    assert out.bool().equal(want.expand(4, 4, 4))


def test_lengths_from_user_memory_are_clamped(device):
    """Nothing checks kv_len on a GPU. For any value in it, no key past the last one is read."""
    bad = torch.tensor([[-7], [1_000_000]], dtype=torch.int32)

    def ranges(mask):
        call, _ = call_of(mask, device=device)
        out = torch.empty(B, ROWS, 4, dtype=torch.int32, device=device)
        range_kernel[(B, ROWS)](
            out, masking.mask_args(call), M, N, BM=BLOCK_M, BN=BLOCK_N, COLUMNS=False
        )
        return out

    for rows in (1, M):
        ends = ranges(Mask(kv_len=bad.expand(B, rows)))
        assert ends[0, :, 3].eq(ends[0, :, 0]).all()
        assert ends[1, :, 3].eq(COLS).all()
        begins = ranges(Mask(kv_begin=bad.expand(B, rows)))
        assert begins[0, :, 0].eq(0).all()
        assert begins[1, :, 3].eq(begins[1, :, 0]).all()
