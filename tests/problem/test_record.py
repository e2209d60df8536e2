"""The record: its text, its tensors, its band; bits of dropout."""

import pytest
import torch

from fastattn import Mask
from fastattn.problem import Dropout, Problem, validate
from fastattn.problem.record import _philox4x32


def problem(mask, M, N, B=2, H=2):
    q, kv = torch.zeros(B, H, M, 4), torch.zeros(B, H, N, 4)
    return validate.build("dot", q, kv, kv, mask=mask).p


def test_window_of_a_band_follows_its_diagonal():
    assert problem(Mask(window=(2, 1)), 4, 9).band() == (-2, 1)
    assert problem(Mask(causal="top_left", window=(2, 1)), 4, 9).band() == (-2, 0)
    assert problem(Mask(causal="bottom_right", window=(2, 1)), 4, 9).band() == (3, 5)
    assert problem(Mask(causal="bottom_right"), 9, 4).band() == (None, -5)
    assert problem(Mask(window=(-1, -1)), 4, 9).band() == (None, None)


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
    assert str(problem(Mask(kv_len=torch.tensor([3, 3])), 3, 5)) in lines  # values are not shown


def test_record_travels_without_its_tensors():
    q = torch.zeros(2, 1, 3, 4)
    mask = Mask("top_left", None, torch.tensor([1, 2]), torch.ones(3, 3, dtype=torch.bool))
    p = validate.build("dot", q, q, q, mask=mask, dropout_p=0.5, seed=7).p
    bare = p.with_tensors(*[None] * len(p.tensors()))
    assert set(bare.tensors()) == {None}
    assert bare.dropout.p == 0.5
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
    record, _ = dropout_record(high << 32 | low)
    words = tuple(torch.tensor(int(word, 16)) for word in counter.split())
    found = _philox4x32(record.dropout.seed, words)
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
