"""How many tiles the backward pass in CUDA C++ visits, counted by the simulator.

The dot product makes dK and dV by tiles of keys. Each must visit the query tiles that keep a key
of it, and no others: the work on packed documents grows with their pairs, and not with the square
of their sum.
"""

import ctypes

import host_build
import pytest
import shim_backend
import torch
from helpers import attend, inputs

from fastattn import ALiBi, Mask
from fastattn.distributed import Layout
from fastattn.problem import validate

pytestmark = pytest.mark.skipif(
    shim_backend.ON_GPU or not host_build.compiler(), reason="no simulator"
)

TILE = 64
N = 270
LENGTHS = [60, 20, 1, 90, 0, 69, 30]


def rows_of_a_rank(rank):
    """Causal attention of a rank's rows, which are two pieces of the sequence, over all keys."""
    positions = Layout.zigzag(N, 2, unit=4).positions(rank)
    return Mask(kv_len=positions[None] + 1)


def limits(begin, end):
    return Mask(kv_begin=begin[None].int(), kv_len=end[None].int())


i = torch.arange(N)
again = i // TILE % 3 * TILE  # tiles of queries in no order, which keep a tile of keys each
MASKS = {
    "none": Mask(),
    "causal": Mask(causal="top_left"),
    "window": Mask(window=(70, 5)),
    "lengths": Mask(kv_len=[130, N], kv_begin=[70, 200]),
    "documents": Mask.documents(lengths=LENGTHS),
    "causal documents": Mask.documents(lengths=LENGTHS, causal=True),
    "windows in documents": Mask.documents(lengths=LENGTHS, window=(40, 0)),
    "zigzag 0": rows_of_a_rank(0),
    "zigzag 1": rows_of_a_rank(1),
    "intervals": limits((i - 90).clamp(0), (i // 2 + 70).clamp(max=N)),
    "in no order": limits(again, again + TILE),
    "empty rows": limits(i, i),
}
SCORES = {  # (score, options, kernels of keys and values)
    "dot": ("dot", {}, 1),
    "capped": ("dot", {"softcap": 3.0}, 2),
    "additive": ("additive", {}, 0),  # one pass makes all gradients
}


@pytest.fixture
def backend(monkeypatch):
    return shim_backend.install(monkeypatch)


def visited() -> torch.Tensor:
    """Tiles so far: inside the mask, outside."""
    library = ctypes.CDLL(str(shim_backend.library()))
    library.shim_visited.restype = ctypes.c_uint64
    return torch.tensor([library.shim_visited(outside) for outside in (0, 1)])


def problem(score: str, mask: Mask) -> dict[str, torch.Tensor]:
    limit = mask.kv_len
    by_row = isinstance(limit, torch.Tensor) and limit.dim() == 2
    M, B = (limit.shape[1], 1) if by_row else (N, 1 if limit is None else len(limit))
    dtype = torch.float16 if score == "dot" else torch.float32
    return inputs(score, B=B, H=2, Hkv=1, M=M, N=N, D=4, E=4, dtype=dtype, grad=True)


def kept_tiles(call: dict, mask: Mask) -> torch.Tensor:
    """Whether a tile keeps some pair: [B, tiles of queries, tiles of keys]."""
    p = validate.build("dot", call["query"], call["key"], call["value"], mask=mask).p
    kept = torch.as_tensor(p.kept()).expand(p.B, 1, p.M, p.N)[:, 0].float()
    return torch.nn.functional.max_pool2d(kept[:, None], TILE, ceil_mode=True)[:, 0] > 0


def spanned(kept: torch.Tensor) -> int:
    """Tiles between the first and the last one that is kept, in each row of tiles."""
    behind = kept.int().cummax(-1).values
    return int((behind * kept.flip(-1).int().cummax(-1).values.flip(-1)).sum())


def visited_by_backward(call: dict, backend: str, **options) -> list[int]:
    out = attend(**call, backend=backend, **options)
    before = visited()
    out.sum().backward()
    return (visited() - before).tolist()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_keys_visit_the_queries_that_keep_them(backend, score, name):
    score, options, kernels = SCORES[score]
    call = problem(score, MASKS[name])
    kept = kept_tiles(call, MASKS[name])
    inside, outside = visited_by_backward(call, backend, mask=MASKS[name], **options)
    H, by_queries, by_keys = 2, spanned(kept), int(kept.sum())
    assert inside == H * (by_queries + kernels * by_keys)
    assert outside == H * kernels * (spanned(kept.mT) - by_keys)
    assert (outside > 0) == (name == "in no order" and kernels > 0)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_the_gradient_of_a_line_passes_by_other_documents(backend, score):
    kernels = SCORES[score][2]
    mask = MASKS["causal documents"]
    call = problem(score, mask)
    kept = kept_tiles(call, mask)
    slopes = torch.tensor([0.5, 0.1], requires_grad=True)
    inside, outside = visited_by_backward(call, backend, mask=mask, bias=ALiBi(slopes))
    H, by_keys = 2, int(kept.sum())
    assert inside == H * (spanned(kept) + (kernels + 1) * by_keys)
    assert outside == H * (kept.numel() - by_keys)
