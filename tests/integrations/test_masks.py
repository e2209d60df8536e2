"""The masks that models of transformers get: structured, and the same as its own dense ones."""

import copy
import dataclasses
import itertools

import pytest
import torch

masking_utils = pytest.importorskip(
    "transformers.masking_utils", reason="make test-integrations has transformers"
)

from fastattn.integrations.transformers import mask  # noqa: E402
from fastattn.problem import Mask  # noqa: E402

B, M = 2, 7
LEFT = torch.tensor([0, 2])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 0, 1, 2, 3]])


def packed(function):
    """As create_causal_mask() makes it."""
    segments = masking_utils.find_packed_sequence_indices(POSITIONS)
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # not in 5.17
    return masking_utils.and_masks(
        remap(function, POSITIONS) if remap else function,
        masking_utils.packed_sequence_mask_function(segments),
    )


CAUSAL, BOTH_WAYS = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
SLIDING = masking_utils.sliding_window_causal_mask_function(3)
FUNCTIONS = {
    "causal": CAUSAL,
    "both-ways": BOTH_WAYS,
    "sliding": SLIDING,
    "sliding-both-ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": masking_utils.chunked_causal_mask_function(3, LEFT),
    "packed": packed(CAUSAL),
    "packed-sliding": packed(SLIDING),
}
# (keys, position of the first query, position of the first key): no cache, a cache, a static one
# that is empty, one that is not, one whose length a tensor holds, and one that slides.
SIZES = [(7, 0, 0), (10, 3, 0), (12, 0, 0), (12, 3, 0), (12, torch.tensor(3), 0), (9, 6, 4)]
PADDING = {
    "none": lambda n: None,
    "left": lambda n: torch.arange(n) >= LEFT[:, None],
    "right": lambda n: torch.arange(n) < n - LEFT[:, None],
    "holes": lambda n: torch.rand(B, n, generator=torch.Generator().manual_seed(n)) < 0.7,
}


def both(name, size, padding="none", **options):
    """(ours, transformers' dense one)."""
    N, q_offset, kv_offset = size
    call = dict(
        batch_size=B, q_length=M, kv_length=N, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=FUNCTIONS[name], attention_mask=PADDING[padding](N + kv_offset),
        device=torch.device("cpu"), allow_is_bidirectional_skip=True,
    )  # fmt: skip
    dense = masking_utils.sdpa_mask(
        **call | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    )
    return mask(**call | options), dense


def numbers(x):
    """How many a mask holds."""
    parts = (getattr(x, field.name) for field in dataclasses.fields(x))
    return sum(part.numel() for part in parts if isinstance(part, torch.Tensor))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_as_dense(name, padding):
    for size in SIZES[:1] if "packed" in name else SIZES:
        ours, dense = both(name, size, padding, allow_is_causal_skip="packed" not in name)
        if name == "both-ways" and padding == "none":
            assert ours is None
            continue
        assert isinstance(ours, Mask)
        kept = ours.to_dense(M, size[0], B)
        assert torch.equal(kept, dense.expand_as(kept)), size
        assert numbers(ours) <= 2 * B * M + B * size[0]


def test_plain_masks_hold_nothing():
    for name, size in itertools.product(("causal", "sliding"), SIZES[:3]):
        assert numbers(both(name, size)[0]) == 0


def test_tensors_where_they_are_wanted():
    size = SIZES[0]
    for name, options in (
        ("causal", dict(allow_is_causal_skip=False)),
        ("both-ways", dict(allow_is_bidirectional_skip=False)),
    ):
        ours, dense = both(name, size, "left", **options)
        assert torch.equal(ours, dense)
    ours, _ = both("causal", size, "left", q_length=1, q_offset=6)
    assert ours.shape == (B, 1, 1, M)


def test_a_tensor_where_it_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: False)  # torch 2.14
    assert torch.equal(*both("causal", SIZES[0], allow_is_bidirectional_skip=False))


def test_rules_of_ones_own_are_dense():
    FUNCTIONS["own"] = lambda b, h, i, j: (i + j) % 2 == 0
    FUNCTIONS["mixed"] = masking_utils.and_masks(CAUSAL, FUNCTIONS["own"])
    FUNCTIONS["either"] = masking_utils.or_masks(CAUSAL, FUNCTIONS["own"])
    FUNCTIONS["blocks"] = masking_utils.blockwise_overlay(torch.zeros(B, M, dtype=torch.long))
    try:
        for name in ("own", "mixed", "either", "blocks"):
            ours, dense = both(name, SIZES[0], "left", allow_is_causal_skip=False)
            assert torch.equal(ours, dense)
    finally:
        for name in ("own", "mixed", "either", "blocks"):
            del FUNCTIONS[name]


@pytest.mark.parametrize("padding", ["none", "left"])
def test_made_once(padding):
    made, dense = both("causal", SIZES[0], padding)
    assert mask(B, M, M, attention_mask=made) is made
    assert made.ndim == 4
    assert made.shape == dense.shape
    assert made.contiguous() is made
    assert torch.equal(made[:, :, -2:], dense[:, :, -2:])
    scores = torch.zeros(B, 1, M, M)
    kept = dense.expand_as(scores)
    assert torch.equal(scores + made == 0, kept)  # as models add it to scores of their own
    assert torch.equal(made + scores == 0, kept)
    assert torch.equal(torch.add(made, scores) == 0, kept)
    for f in (
        lambda x: ~x,
        lambda x: torch.cat([x, x], -1),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: torch.nn.functional.pad(x, (1, 1), value=True),
        lambda x: x.flip(dims=(-1,)).to(x.dtype),
    ):
        assert torch.equal(f(made), f(dense))
    assert copy.copy(made).shape == made.shape
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        made.other  # noqa: B018
