"""What each mask keeps: by loops, by the pictures of the docstrings, and beside dense masks."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from helpers import SCORES, attend, inputs

from fastattn import Mask, scaled_dot_product_attention
from fastattn.problem import validate

SIZES = [(1, 1), (1, 6), (6, 1), (3, 5), (5, 3), (4, 4), (0, 3), (3, 0)]
KEEP_SHAPES = list(itertools.product((1, 2), (1, 2), (1, 3), (1, 5)))
WINDOWS = [None, (-1, -1), (0, 0), (1, 2), (2, -1), (-1, 0), (9, 9)]


def materialized(mask, M, N, B=2, H=2):
    found = mask.to_dense(M, N, B, H)
    assert found.dtype == torch.bool
    assert found.shape == (B, H, M, N)
    return found


def kept_by_loops(mask, M, N, B=2, H=2):
    """The words of Mask's docstring, pair by pair."""
    kept = torch.zeros(B, H, M, N, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(B), range(H), range(M), range(N)):
        d = i + N - M if mask.causal == "bottom_right" else i
        keeps = mask.causal is None or j <= d
        if mask.window is not None:
            left, right = mask.window
            keeps &= (left == -1 or j >= d - left) and (right == -1 or j <= d + right)
        for limit, keeps_key in ((mask.kv_len, j.__lt__), (mask.kv_begin, j.__ge__)):
            if limit is not None:
                row = limit[b % len(limit)]
                keeps &= keeps_key(int(row if row.dim() == 0 else row[i]))
        if mask.keep is not None:
            keeps &= bool(mask.keep.expand(B, H, M, N)[b, h, i, j])
        kept[b, h, i, j] = bool(keeps)
    return kept


@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_band_is_what_the_docstring_says(M, N, causal, window):
    mask = Mask(causal=causal, window=window)
    assert torch.equal(materialized(mask, M, N), kept_by_loops(mask, M, N))


@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("name", ["kv_len", "kv_begin"])
@pytest.mark.parametrize("dims", ["b", "bm", "1m"])
def test_limits_are_what_the_docstring_says(M, N, name, dims):
    shape = [{"b": 2, "1": 1, "m": M}[letter] for letter in dims]
    limit = torch.randint(0, N + 1, shape)
    kept = kept_by_loops(Mask(**{name: limit}), M, N)
    assert torch.equal(materialized(Mask(**{name: limit}), M, N), kept)
    if limit.numel():
        assert torch.equal(materialized(Mask(**{name: limit.tolist()}), M, N), kept)


@pytest.mark.parametrize("shape", KEEP_SHAPES, ids=str)
def test_keep_broadcasts(shape):
    mask = Mask(keep=torch.rand(shape) < 0.5)
    assert torch.equal(materialized(mask, 3, 5), kept_by_loops(mask, 3, 5))


def test_all_fields_are_anded():
    parts = dict(
        causal="bottom_right",
        window=(3, -1),
        kv_len=torch.tensor([4, 6]),
        keep=torch.rand(2, 1, 5, 7) < 0.7,
        kv_begin=torch.tensor([[0, 1, 2, 1, 0]]),
    )
    together = materialized(Mask(**parts), 5, 7)
    assert torch.equal(together, kept_by_loops(Mask(**parts), 5, 7))
    # The window hangs on the diagonal of `causal`, so these two are one part.
    band = Mask(causal=parts.pop("causal"), window=parts.pop("window"))
    masks = [band, *(Mask(**{name: part}) for name, part in parts.items())]
    separate = [materialized(mask, 5, 7) for mask in masks]
    assert torch.equal(together, torch.stack(separate).all(0))


def pictures(documented) -> list[torch.Tensor]:
    """The pictures of a docstring, from left to right, [M, N] bool."""
    lines = [x.strip() for x in documented.__doc__.splitlines() if re.fullmatch(r"[x. ]+", x)]
    rows = [re.split(r"\s{2,}", line) for line in lines if line]
    return [
        torch.tensor([[c == "x" for c in row.split()] for row in picture])
        for picture in zip(*rows, strict=True)
    ]


CU = [0, 2, 5]
IDS = [7, 7, 2, 2, 2]
# What is documented, and the masks of its pictures.
DRAWN = {
    "Mask": (Mask, [
        Mask(causal="top_left"), Mask(causal="bottom_right"), Mask(window=(1, 1)),
        Mask(kv_len=[2]), Mask(kv_begin=[3]),
    ]),
    "local_blocks": (Mask.local_blocks, [Mask.local_blocks(2, 5, before=n) for n in (0, 1)]),
    "documents": (Mask.documents, [
        Mask.documents(lengths=[2, 3]), Mask.documents(CU, causal=True),
        Mask.documents(torch.tensor(CU), window=(1, 0)),
    ]),
    "segments": (Mask.segments, [
        Mask.segments(IDS), Mask.segments([IDS], causal=True),
        Mask.segments(torch.tensor(IDS), window=(1, 0)),
    ]),
    "prefix": (Mask.prefix, [Mask.prefix([3], length=5)]),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_the_docstrings_show_what_is_kept(name):
    documented, masks = DRAWN[name]
    for mask, picture in zip(masks, pictures(documented), strict=True):
        assert torch.equal(materialized(mask, *picture.shape, B=1, H=1)[0, 0], picture), mask


@pytest.mark.parametrize("radius", [0, 1, 3, 9])
def test_local(radius):
    kept = materialized(Mask.local(radius), 7, 7)[0, 0]
    for i, j in itertools.product(range(7), range(7)):
        assert kept[i, j] == (abs(i - j) <= radius)
    with pytest.raises(ValueError, match="radius"):
        Mask.local(-1)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 1), (2, 1)])
@pytest.mark.parametrize("block", [1, 2, 3, 9])
def test_local_blocks(block, before, after):
    mask = Mask.local_blocks(block, 8, before=before, after=after)
    kept = materialized(mask, 8, 8)[0, 0]
    for i, j in itertools.product(range(8), range(8)):
        assert kept[i, j] == (-before <= j // block - i // block <= after)
    for bad, message in (((0, 8), "block: expected 1"), ((2, -1), "length: expected 0")):
        with pytest.raises(ValueError, match=message):
            Mask.local_blocks(*bad)


def test_local_blocks_attend_as_samples_of_their_own(backend):
    """Blocks cut out of the sequence and attended one by one."""
    q, k, v = torch.randn(3, 2, 4, 96, 16).unbind(0)
    mask = Mask.local_blocks(32, 96)
    found = scaled_dot_product_attention(q, k, v, mask=mask, backend=backend)
    cut = [x.unflatten(2, (3, 32)).transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*cut, backend=backend)
    torch.testing.assert_close(found, expected.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3))
    causal = scaled_dot_product_attention(q, k, v, is_causal=True, mask=mask, backend=backend)
    torch.testing.assert_close(causal[:, :, ::32], v[:, :, ::32])  # the first of each block


def documents_by_loops(lengths, lengths_k, length, alignment, window):
    """The words of the docstring of documents, [length, keys]: a dense mask a document."""
    kept = torch.zeros(length, sum(lengths_k), dtype=torch.bool)
    i = j = 0
    for m, n in zip(lengths, lengths_k, strict=True):
        band = Mask(alignment, window) if alignment else Mask(window=window)
        shift = 0 if alignment == "top_left" else n - m
        if alignment is None and window is not None:  # Mask's own is d = i without a causal mask
            left, right = (99 if x < 0 else x for x in window)
            d = torch.arange(m)[:, None] + shift
            key = torch.arange(n)[None]
            kept[i : i + m, j : j + n] = (d - left <= key) & (key <= d + right)
        else:
            kept[i : i + m, j : j + n] = band.to_dense(m, n)[0, 0]
        i, j = i + m, j + n
    return kept


@pytest.mark.parametrize("alignment", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths_k", [[3, 0, 1, 4], [5, 2, 1, 0]], ids=str)
def test_documents(lengths_k, window, alignment):
    lengths = [3, 0, 1, 4]
    cu, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, lengths_k))
    options = dict(causal=alignment or False, window=window, length=10)
    found = materialized(Mask.documents(cu, cu_k, **options), 10, 8)[0, 0]
    assert torch.equal(found, documents_by_loops(lengths, lengths_k, 10, alignment, window))
    if lengths == lengths_k:
        again = materialized(Mask.documents(lengths=lengths, **options), 10, 8)[0, 0]
        assert torch.equal(again, found)
    if alignment == "bottom_right":
        again = Mask.documents(cu, cu_k, **options | {"causal": True})
        assert torch.equal(materialized(again, 10, 8)[0, 0], found)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_segments(window, causal):
    ids = torch.tensor([[0, 0, 0, 1, 1, 4], [3, 3, 3, 3, 3, 3], [5, 4, 3, 2, 1, 0]])
    band = Mask("top_left" if causal else None, window).to_dense(6, 6)
    expected = (ids[:, :, None] == ids[:, None])[:, None] & band
    mask = Mask.segments(ids, causal=causal, window=window)
    assert torch.equal(materialized(mask, 6, 6, B=3, H=1), expected)


def test_prefix():
    kept = materialized(Mask.prefix([0, 2, 4], 4), 4, 4, B=3)
    for b, i, j in itertools.product(range(3), range(4), range(4)):
        assert kept[b, 0, i, j] == (j <= i or j < 2 * b)
    assert Mask.prefix([], 4).kv_len.shape == (0, 4)
    with pytest.raises(ValueError, match="got -1 to 3"):
        Mask.prefix([-1, 3], length=5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_limits_of_a_type_that_cannot_hold_the_number_of_keys(dtype):
    """Where their values cannot be read, they are clamped."""
    unread = torch.func.vmap(validate.within, (None, 0, None))
    for n, within in itertools.product((128, 256, 300, 32768, 65536), (validate.within, unread)):
        assert within("kv_len", torch.tensor([3, 120], dtype=dtype), n).tolist() == [3, 120]


EMPTY = {
    "documents": lambda: Mask.documents(lengths=[]),
    "no-tokens": lambda: Mask.documents([0, 0]),
    "segments": lambda: Mask.segments([]),
    "prefix": lambda: Mask.prefix([0], 0),
    "local_blocks": lambda: Mask.local_blocks(2, 0),
}


@pytest.mark.parametrize("name", EMPTY)
def test_masks_of_nothing(name):
    assert materialized(EMPTY[name](), 0, 0, B=1).shape == (1, 2, 0, 0)


@pytest.mark.parametrize("score", SCORES)
def test_packed_documents_are_as_each_alone(backend, score):
    lengths = [70, 0, 1, 90, 30]
    call = inputs(score, B=1, M=200, N=191, D=8)
    mask = Mask.documents(lengths=lengths, causal=True, length=200)
    out = attend(**call, mask=mask, backend=backend)
    assert (out[:, :, 191:] == 0).all()
    begin = 0
    for n in lengths:
        rows = slice(begin, begin + n)
        alone = {name: x if name == "weight" else x[:, :, rows] for name, x in call.items()}
        expected = attend(**alone, is_causal=True, backend=backend)
        torch.testing.assert_close(out[:, :, rows], expected)
        begin += n


WRONG = {
    "neither": (lambda: Mask.documents(), ValueError, "cu_seqlens or lengths, got neither"),
    "both": (
        lambda: Mask.documents(CU, lengths=[5]),
        ValueError,
        "cu_seqlens or lengths, got both",
    ),
    "floats": (lambda: Mask.documents([0.0, 2.0]), TypeError, "cu_seqlens: expected integers"),
    "bools": (lambda: Mask.documents(lengths=[True]), TypeError, "lengths: expected integers"),
    "devices": (
        lambda: Mask.documents(torch.tensor(CU), torch.tensor(CU, device="meta")),
        ValueError,
        "cu_seqlens_k: expected a tensor on cpu, got one on meta",
    ),
    "number": (lambda: Mask.documents(lengths=5), TypeError, "lengths: .*a list, got int"),
    "none": (lambda: Mask.documents(lengths=[None]), TypeError, "lengths: expected integers.*None"),
    "huge": (lambda: Mask.prefix([2**70], 5), ValueError, "lengths: expected integers.*Overflow"),
    "far": (lambda: Mask.documents(lengths=[2**40]), ValueError, "lengths: .* at most 2147483647"),
    "far-sum": (
        lambda: Mask.documents(lengths=[2**31 - 1] * 2),
        ValueError,
        "lengths: the last position",
    ),
    "far-wrapped": (
        lambda: Mask.documents(lengths=[2**62] * 4, length=5),
        ValueError,
        "lengths: .* at most",
    ),
    "far-keys": (lambda: Mask.documents(CU, [0, 2, 2**40]), ValueError, "cu_seqlens_k: .*at most"),
    "far-length": (lambda: Mask.documents(CU, length=2**40), ValueError, "length: .*at most"),
    "far-prefix": (lambda: Mask.prefix([1], 2**40), ValueError, "length: expected at most"),
    "far-blocks": (lambda: Mask.local_blocks(4, 8, after=2**62), ValueError, "after: .*at most"),
    "dims": (lambda: Mask.documents([CU]), ValueError, r"cu_seqlens: expected 1 dim, got \[1, 3\]"),
    "no-offsets": (lambda: Mask.documents([]), ValueError, r"cu_seqlens: expected \[n \+ 1\]"),
    "first": (lambda: Mask.documents([1, 2]), ValueError, "begin with 0"),
    "descending": (lambda: Mask.documents([0, 3, 2]), ValueError, "not to decrease"),
    "negative": (lambda: Mask.documents(lengths=[2, -1]), ValueError, "lengths: .*got -1"),
    "counts": (lambda: Mask.documents(CU, [0, 2]), ValueError, "cu_seqlens_k: .*as many"),
    "short": (lambda: Mask.documents(CU, length=4), ValueError, "length: expected at least"),
    "alignment": (lambda: Mask.documents(CU, causal="left"), ValueError, "causal: expected one of"),
    "window": (lambda: Mask.documents(CU, window=3), TypeError, "window: expected"),
    "ids": (lambda: Mask.segments([1, 2, 1]), ValueError, r"ids: .*got \[1, 2, 1\]"),
    "ids-dims": (lambda: Mask.segments(torch.zeros(1, 2, 3).int()), ValueError, "ids: expected"),
    "ids-causal": (lambda: Mask.segments(IDS, causal="top_left"), TypeError, "causal: .*bool"),
    "prefix": (lambda: Mask.prefix([6], 5), ValueError, r"lengths: .*\[0, 5\], got 6 to 6"),
    "prefix-length": (lambda: Mask.prefix([3], -1), ValueError, "length: expected 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("make", [
    lambda cu: Mask.documents(cu, causal=True, window=(2, -1), length=6),
    lambda cu: Mask.segments(cu, causal=True),
    lambda cu: Mask.prefix(cu, 6),
], ids=["documents", "segments", "prefix"])  # fmt: skip
def test_constructors_compile(make):
    """In one graph: nothing waits for values."""

    def limits(cu):
        mask = make(cu)
        return [x for x in (mask.kv_begin, mask.kv_len) if x is not None]

    compiled, cu = torch.compile(limits, backend="eager", fullgraph=True), torch.tensor([0, 2, 5])
    assert all(torch.equal(a, b) for a, b in zip(compiled(cu), limits(cu), strict=True))


def test_constructors_take_torchs_default_device():
    with torch.device("meta"):
        masks = Mask.local_blocks(2, 5), Mask.segments([7, 2]), Mask.prefix([1], 2)
    assert {mask.kv_len.device.type for mask in masks} == {"meta"}


@pytest.mark.parametrize("mask", [Mask(kv_len=[5, 2]), Mask(window=(1, 0))])
def test_lists_of_a_mask_go_where_the_inputs_are(mask):
    call = inputs(M=5, N=5)
    expected = attend(**call, mask=mask)
    with torch.device("meta"):
        assert torch.equal(attend(**call, mask=mask), expected)


def test_lists_go_where_they_are_told():
    device = "meta"
    for mask in (
        Mask.local_blocks(2, 5, device=device),
        Mask.documents([0, 2], length=2, device=device),
        Mask.segments([7, 2], device=device),
        Mask.prefix([1], 2, device=device),
    ):
        assert mask.kv_len.device.type == device


def test_masks_move_to_a_device():
    mask = Mask("top_left", (2, 3), torch.tensor([1]), torch.ones(1, 3).bool(), [0])
    moved = mask.to("meta")
    assert (moved.causal, moved.window, moved.kv_begin) == ("top_left", (2, 3), [0])
    assert moved.kv_len.device.type == moved.keep.device.type == "meta"
    assert mask.kv_len.device.type == "cpu"


def test_dense_masks_are_checked():
    assert Mask().to_dense(2, 3).all()
    lengths = Mask(kv_len=torch.tensor([1, 2]))
    with torch.device("meta"):
        assert Mask().to_dense(2, 3).is_meta
        found = lengths.to_dense(1, 3, B=2)  # where its lengths are
    assert found[:, 0, 0].tolist() == [[True, False, False], [True, True, False]]
    for sizes, message in (((2, -1), "N: expected 0"), ((2, 3), r"mask.kv_len: expected \[1\]")):
        with pytest.raises(ValueError, match=message):
            lengths.to_dense(*sizes)
    with pytest.raises(TypeError, match="M: expected an int"):
        lengths.to_dense(2.0, 3)


def test_masks_are_copied_and_pickled_with_their_tensors():
    keep = torch.rand(2, 1, 3, 5) < 0.5
    mask = Mask("top_left", (2, 3), torch.tensor([1, 2]), keep, torch.tensor([0, 1]))
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (twin.causal, twin.window) == (mask.causal, mask.window)
        assert torch.equal(twin.kv_len, mask.kv_len)
        assert torch.equal(twin.kv_begin, mask.kv_begin)
        assert torch.equal(twin.keep, mask.keep)
        assert twin.keep.data_ptr() != mask.keep.data_ptr()
