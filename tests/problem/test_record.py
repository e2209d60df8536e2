"""The record: what each mask keeps, by loops and by its docstring's pictures; dropout's bits."""

import copy
import itertools
import pickle
import re

import pytest
import torch

from fastattn import Mask, scaled_dot_product_attention
from fastattn.problem import Dropout, Problem, validate
from fastattn.problem.record import _philox4x32

SIZES = [(1, 1), (1, 6), (6, 1), (3, 5), (5, 3), (4, 4), (0, 3), (3, 0)]
KEEP_SHAPES = list(itertools.product((1, 2), (1, 2), (1, 3), (1, 5)))
WINDOWS = [None, (-1, -1), (0, 0), (1, 2), (2, -1), (-1, 0), (9, 9)]


def problem(mask, M, N, B=2, H=2):
    q, kv = torch.zeros(B, H, M, 4), torch.zeros(B, H, N, 4)
    return validate.build("dot", q, kv, kv, mask=mask).p


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
        if mask.kv_len is not None:
            keeps &= j < (mask.kv_len[b] if mask.kv_len.dim() == 1 else mask.kv_len[b, i])
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
@pytest.mark.parametrize("per_row", [False, True])
def test_kv_len_is_what_the_docstring_says(M, N, per_row):
    kv_len = torch.randint(0, N + 1, (2, M) if per_row else (2,))
    mask = Mask(kv_len=kv_len)
    assert torch.equal(materialized(mask, M, N), kept_by_loops(mask, M, N))


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
    )
    together = materialized(Mask(**parts), 5, 7)
    assert torch.equal(together, kept_by_loops(Mask(**parts), 5, 7))
    # The window hangs on the diagonal of `causal`, so these two are one part.
    band = Mask(causal=parts.pop("causal"), window=parts.pop("window"))
    masks = [band, *(Mask(**{name: part}) for name, part in parts.items())]
    separate = [materialized(mask, 5, 7) for mask in masks]
    assert torch.equal(together, torch.stack(separate).all(0))


def test_the_docstring_shows_what_is_kept():
    """Reads the pictures out of Mask's docstring."""
    rows = [
        line for line in Mask.__doc__.splitlines() if re.fullmatch(r"\s*([x.] ?)+\s*[x. ]*", line)
    ]
    rows = [re.split(r"\s{2,}", line.strip()) for line in rows if line.strip()]
    assert [len(row) for row in rows] == [4, 4, 4]
    masks = [
        Mask(causal="top_left"),
        Mask(causal="bottom_right"),
        Mask(window=(1, 1)),
        Mask(kv_len=torch.tensor([2])),
    ]
    for mask, picture in zip(masks, zip(*rows, strict=True), strict=True):
        drawn = torch.tensor([[c == "x" for c in row.split()] for row in picture])
        assert torch.equal(materialized(mask, 3, 5, B=1, H=1)[0, 0], drawn), mask


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


def test_window_of_a_band_follows_its_diagonal():
    assert problem(Mask(window=(2, 1)), 4, 9).band() == (-2, 1)
    assert problem(Mask(causal="top_left", window=(2, 1)), 4, 9).band() == (-2, 0)
    assert problem(Mask(causal="bottom_right", window=(2, 1)), 4, 9).band() == (3, 5)
    assert problem(Mask(causal="bottom_right"), 9, 4).band() == (None, -5)
    assert problem(Mask(window=(-1, -1)), 4, 9).band() == (None, None)


def test_dense_masks_are_checked():
    assert Mask().to_dense(2, 3).all()
    lengths = Mask(kv_len=torch.tensor([1, 2]))
    assert lengths.to_dense(1, 3, B=2)[:, 0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
    ]
    for sizes, message in (((2, -1), "N: expected 0"), ((2, 3), r"mask.kv_len: expected \[1\]")):
        with pytest.raises(ValueError, match=message):
            lengths.to_dense(*sizes)
    with pytest.raises(TypeError, match="M: expected an int"):
        lengths.to_dense(2.0, 3)


def test_masks_are_copied_and_pickled_with_their_tensors():
    mask = Mask("top_left", (2, 3), torch.tensor([1, 2]), torch.rand(2, 1, 3, 5) < 0.5)
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (twin.causal, twin.window) == (mask.causal, mask.window)
        assert torch.equal(twin.kv_len, mask.kv_len)
        assert torch.equal(twin.keep, mask.keep)
        assert twin.keep.data_ptr() != mask.keep.data_ptr()


# ---- the record ----


def test_str_names_dims_and_tells_problems_apart():
    p = validate.build("dot", *torch.zeros(3, 2, 2, 3, 4), mask=Mask("top_left"), dropout_p=0.5).p
    assert str(p) == (
        "dot attention: B=2 H=2 Hkv=2 M=3 N=3 D=4 E=4, float32 on cpu, mask top_left, dropout"
    )
    lines = {
        str(problem(Mask(), 3, 5)),
        str(problem(Mask(), 5, 3)),
        str(problem(Mask(causal="top_left"), 3, 5)),
        str(problem(Mask(causal="bottom_right"), 3, 5)),
        str(problem(Mask(kv_len=torch.tensor([1, 2])), 3, 5)),
    }
    assert len(lines) == 5
    assert str(problem(Mask(kv_len=torch.tensor([3, 3])), 3, 5)) in lines  # values do not matter


def test_record_travels_without_its_tensors():
    q = torch.zeros(2, 1, 3, 4)
    mask = Mask("top_left", None, torch.tensor([1, 2]), torch.ones(3, 3, dtype=torch.bool))
    p = validate.build("dot", q, q, q, mask=mask, dropout_p=0.5, seed=7).p
    bare = p.with_tensors(None, None, None)
    assert bare.tensors() == (None, None, None)
    assert bare.dropout_p == 0.5
    again = bare.with_tensors(*p.tensors())
    assert str(again) == str(p)
    assert torch.equal(again.kept(), p.kept())
    assert torch.equal(again.dropout.bits(again), p.dropout.bits(p))


@pytest.mark.parametrize("record", [Mask(), Dropout(0.5, None), problem(Mask(), 1, 1)])
def test_records_are_frozen(record):
    name = next(iter(vars(record)))
    with pytest.raises(AttributeError):
        setattr(record, name, None)


def test_accumulation_type():
    def record(dtype):
        return Problem("dot", 1, 1, 1, 1, 1, 1, 1, dtype, torch.device("cpu"))

    assert record(torch.float64).acc_dtype == torch.float64
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert record(dtype).acc_dtype == torch.float32


# ---- dropout's bits ----

# Random123's kat_vectors: philox4x32 with 7 rounds; counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    low, high = (int(word, 16) for word in key.split())
    seed = validate._as_int64(high << 32 | low)
    words = tuple(torch.tensor(int(word, 16)) for word in counter.split())
    found = _philox4x32(torch.tensor(seed), words)
    assert " ".join(f"{word.item():08x}" for word in found) == expected


def dropout_record(seed, p=0.5, B=2, H=3, M=4, N=10):
    q, kv = torch.zeros(B, H, M, 1), torch.zeros(B, H, N, 1)
    record = validate.build("dot", q, kv, kv, dropout_p=p, seed=seed).p
    return record, record.dropout.bits(record)


def test_bits_are_philox_of_the_indices():
    _, bits = dropout_record(seed=0x0123456789ABCDEF)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 9), (1, 0, 2, 5), (0, 2, 1, 3)]:
        counter = tuple(torch.tensor(n) for n in (j // 4, i, h, b))
        words = _philox4x32(torch.tensor(0x0123456789ABCDEF), counter)
        assert bits[b, h, i, j] == words[j % 4]


def test_bits_do_not_depend_on_the_shape():
    _, large = dropout_record(seed=5, B=3, H=4, M=6, N=13)
    _, small = dropout_record(seed=5, B=2, H=2, M=5, N=7)
    assert torch.equal(large[:2, :2, :5, :7], small)


@pytest.mark.parametrize("p", [0.0, 1e-10, 0.1, 0.5, 0.999])
def test_threshold_drops_that_share(p):
    assert Dropout(p, None).threshold == int(p * 2**32)
    assert Dropout(p, None).scale == 1 / (1 - p)


def test_dropping_everything_needs_no_infinity():
    everything = Dropout(1.0, None)
    assert everything.scale == 0.0
    assert everything.threshold < 2**32
    record, _ = dropout_record(seed=1, p=1.0)
    assert (record.dropout.factors(record, torch.float32) == 0).all()
