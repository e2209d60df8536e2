"""Keys split in chunks: those that no row keeps have no task, and change no bit."""

import pytest
import torch

import fastattn
from fastattn import ALiBi, Mask, testing

CHUNK = 1152  # kChunkKeys of csrc/cpu/choose.h
B, H, N, D = 3, 4, 5 * CHUNK - 100, 16
# The first and the last key of each sample; None: no key.
KEPT = {
    "few": [(0, 100), (0, 1), (0, CHUNK)],
    "first of the second": [(0, CHUNK + 1), (0, 3), (0, 3)],
    "in the middle": [(2 * CHUNK + 7, 3 * CHUNK), (3 * CHUNK - 1, 4 * CHUNK), (3000, 3001)],
    "last": [(N - 1, N), (N - 3, N), (4 * CHUNK, N)],
    "far apart": [(N - 1, N), (0, 1), (2000, 2001)],
    "none of one sample": [None, (2 * CHUNK, 2 * CHUNK + 9), None],
    "none": [None, None, None],
    "all": [(0, N), (5, N), (0, N - 5)],
}


def attend(score, *args, **options):
    if score == "additive":
        return fastattn.additive_attention(*args, torch.ones(H, D), **options)
    return fastattn.scaled_dot_product_attention(*args, enable_gqa=True, **options)


@pytest.mark.parametrize(
    ("score", "M", "Hkv"), [("dot", 1, H), ("dot", 1, 2), ("dot", 9, H), ("additive", 1, H)]
)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("weights", [None, "mean"])
def test_the_same_bits_without_them(isa, score, M, Hkv, name, weights):
    q, k, v = (torch.randn(B, h, n, D) for h, n in ((H, M), (Hkv, N), (Hkv, N)))
    options = dict(return_lse=True, return_weights=weights)
    begins, ends = torch.tensor([x or (N, N) for x in KEPT[name]]).T
    with testing.poisoned():
        results = attend(score, q, k, v, mask=Mask(kv_begin=begins, kv_len=ends), **options)
    for b, kept in enumerate(KEPT[name]):
        out, *others, lse = (x[b] for x in results)
        if kept is None:
            assert not out.any()
            assert (lse == -torch.inf).all()
            assert not any(x.any() for x in others)
            continue
        first, last = kept[0] // CHUNK * CHUNK, (kept[1] + CHUNK - 1) // CHUNK * CHUNK
        own = [x[b : b + 1] for x in (q, k[:, :, first:last], v[:, :, first:last])]
        limits = Mask(kv_begin=begins[b, None] - first, kv_len=ends[b, None] - first)
        want, *others_want, lse_want = (x[0] for x in attend(score, *own, mask=limits, **options))
        assert torch.equal(out, want)
        assert torch.equal(lse, lse_want)
        for x, y in zip(others, others_want, strict=True):
            assert torch.equal(x[:, first:last], y)
            assert not x[:, :first].any()
            assert not x[:, last:].any()


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_a_window_of_few_queries(isa, causal):
    q, k, v = torch.randn(1, H, 9, D), *torch.randn(2, 1, H, N, D)
    mask = Mask(causal=causal, window=(100, 0))
    found = fastattn.scaled_dot_product_attention(q, k, v, mask=mask)
    begin = max(0, N - 9 - 100) if causal == "bottom_right" else 0
    part = k[:, :, begin : begin + 109], v[:, :, begin : begin + 109]
    want = fastattn.scaled_dot_product_attention(q, *part, mask=mask)
    torch.testing.assert_close(found, want)


def test_a_chunk_without_keys_of_a_row_says_nothing_of_its_maximum(isa):
    """The bias rises with the distance, and would be far above all keys that the row keeps."""
    q, k, v = torch.randn(1, H, 9, D), torch.randn(1, H, N, D), torch.ones(1, H, N, D)
    mask = Mask(kv_len=torch.tensor([[100] * 8 + [N]]))
    bias = ALiBi(torch.full((H,), -0.5))
    found = fastattn.scaled_dot_product_attention(q, k, v, mask=mask, bias=bias, backend="cpu")
    torch.testing.assert_close(found, torch.ones_like(found))


def test_an_additive_tile_has_the_same_keys_in_both_passes(isa):
    """Keys far from 0 change how the scores of their tile are rounded, and chunks cut no tile."""
    q, k, v = torch.randn(1, 1, 33, 64), torch.randn(1, 1, 600, 64), torch.randn(1, 1, 600, 8)
    k[:, :, 128:192] *= 4
    keep = torch.ones(33, 600, dtype=torch.bool)
    keep[0] = torch.arange(600) == 200
    grad_out = torch.zeros(1, 1, 33, 8)
    grad_out[:, :, 0] = 1
    v.requires_grad_()
    weight = torch.randn(1, 64) * 1e3
    out = fastattn.additive_attention(q, k, v, weight, mask=Mask(keep=keep), backend="cpu")
    (grad,) = torch.autograd.grad(out, v, grad_out)
    torch.testing.assert_close(grad[:, :, 200], torch.ones(1, 1, 8))
