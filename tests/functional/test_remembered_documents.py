"""Masks of documents are made once for equal offsets, and never serve others."""

import pytest
import torch
from helpers import spied

import fastattn
from fastattn.problem import intervals, jagged

T, H, D = 9, 2, 4


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """How often limits were made of offsets."""
    monkeypatch.setattr(jagged, "_made", ())
    return spied(monkeypatch, intervals, "documents")


def packed(grad=False):
    return torch.randn(T, H, D, requires_grad=grad)


def expected(x, ends, causal):
    parts = zip([0, *ends], ends, strict=False)
    heads = (x[a:b].transpose(0, 1)[None] for a, b in parts)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([sdpa(y, y, y, is_causal=causal)[0].transpose(0, 1) for y in heads])


def attend(x, offsets, causal=True, **options):
    return fastattn.varlen_attention(x, x, x, offsets, is_causal=causal, **options)


def test_equal_offsets_have_one_mask(made):
    x = packed()
    for offsets in (torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9])):
        torch.testing.assert_close(attend(x, offsets), expected(x, [4, 9], True))
    assert len(made) == 1
    attend(x, torch.tensor([0, 4, 9], dtype=torch.int32), causal=True)
    torch.testing.assert_close(
        attend(x, torch.tensor([0, 4, 9]), causal=False), expected(x, [4, 9], False)
    )
    attend(x, torch.tensor([0, 4, 9]), window=(1, 0))
    assert len(made) == 4  # another dtype, alignment or window
    for _ in range(2):
        attend(x, [0, 4, 9])
        attend(x, (0, 4, 9))
    assert len(made) == 4  # as the first tensor
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        attend(x, [0, 4.0, 9])


def test_offsets_that_change_in_place_make_another(made):
    """Also where torch cannot tell, as the memory is NumPy's."""
    numbers = torch.tensor([0, 4, 9]).numpy()
    x, offsets = packed(), torch.from_numpy(numbers)
    attend(x, offsets)
    version = offsets._version
    numbers[1] = 6
    assert offsets._version == version
    torch.testing.assert_close(attend(x, offsets), expected(x, [6, 9], True))


def test_keys_of_their_own(made):
    x, offsets = packed(), torch.tensor([0, 4, 9])
    others = torch.tensor([0, 6, 9])
    for _ in range(2):
        apart = fastattn.varlen_attention(x, x, x, offsets, others)
        same = fastattn.varlen_attention(x, x, x, offsets)
        assert not torch.equal(apart, same)
    assert len(made) == 2


def test_a_mask_of_inference_mode_serves_training(made):
    offsets = torch.tensor([0, 4, 9])
    with torch.inference_mode():
        attend(packed(), offsets)
    x = packed(grad=True)
    attend(x, offsets).sum().backward()
    assert x.grad is not None
    assert len(made) == 1


def test_what_does_not_fit_is_an_error_after_a_call_that_did(made):
    x, offsets = packed(), torch.tensor([0, 4, 9])
    attend(x, offsets)
    with pytest.raises(ValueError, match="expected to end within the 8 rows"):
        attend(x[:8], offsets)
    with pytest.raises(TypeError, match="window"):
        attend(x, offsets, window=(1, 0, 0))
    with pytest.raises(TypeError, match="window"):
        attend(x, offsets, window=1)
    with pytest.raises(ValueError, match="not to decrease"):
        attend(x, torch.tensor([0, 9, 4]))
    for beyond in (2**70, -1):
        with pytest.raises(ValueError, match="cu_seqlens_q: expected"):
            attend(x, [0, beyond])


def test_few_are_kept(monkeypatch):
    x = packed()
    monkeypatch.setattr(jagged, "_MOST_ROWS", T - 1)
    attend(x, torch.tensor([0, T]))
    assert not jagged._made
    monkeypatch.setattr(jagged, "_MOST_ROWS", T)
    for n in range(1, T):
        attend(x, torch.tensor([0, n, T]))
    assert len(jagged._made) == jagged._MOST_MADE


def test_jagged_tensors_share_it(made):
    lengths = [4, 5]
    x = torch.nested.nested_tensor([torch.randn(n, H, D) for n in lengths], layout=torch.jagged)
    for _ in range(2):
        q = x.transpose(1, 2)
        fastattn.scaled_dot_product_attention(q, q, q)
    assert len(made) == 1
