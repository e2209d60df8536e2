"""Errors and warnings are those of nn.MultiheadAttention."""

import warnings

import pytest
import torch
from torch import nn

from fastattn import KVCache, MultiheadAttention


def one_sample(module, x):
    return x[:1] if module.batch_first else x[:, :1]


def bool_mask(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def changed(module, **attributes):
    for name, x in attributes.items():
        setattr(module, name, x)
    return module


ROW = nn.Parameter(torch.zeros(1, 1, 8))
BAD_CALLS = {  # for embed_dim 8, 2 heads; x is (5, 3, 8)
    "1d query": lambda m, x: m(x[0, 0], x, x),
    "2d key": lambda m, x: m(x, x[0], x),
    "unbatched and batched": lambda m, x: m(x[0], x, x),
    "embedding dim": lambda m, x: m(x[..., :4], x, x),
    "key and value lengths": lambda m, x: m(x, x, x[:4]),
    "key features": lambda m, x: m(x, x[..., :4], x[..., :4]),
    "batch sizes": lambda m, x: m(x, one_sample(m, x), one_sample(m, x)),
    "query dtype": lambda m, x: m(x.double(), x.double(), x.double()),
    "integer query": lambda m, x: m(x.long(), x.long(), x.long()),
    "key dtype": lambda m, x: m(x, x.double(), x.double()),
    "integer attn_mask": lambda m, x: m(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int32)),
    "integer padding": lambda m, x: m(x, x, x, torch.ones(3, 5, dtype=torch.uint8)),
    "2d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(5, 4)),
    "3d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(3, 5, 5)),
    "4d attn_mask": lambda m, x: m(x, x, x, attn_mask=bool_mask(3, 2, 5, 5)),
    "unbatched 3d attn_mask": lambda m, x: m(x[0], x[0], x[0], attn_mask=bool_mask(1, 3, 3)),
    "padding length": lambda m, x: m(x, x, x, bool_mask(3, 4)),
    "padding batch": lambda m, x: m(x, x, x, bool_mask(2, 5)),
    "1d padding": lambda m, x: m(x, x, x, bool_mask(5)),
    "hint without mask": lambda m, x: m(x, x, x, is_causal=True),
    "hint, mask shape": lambda m, x: m(x, x, x, attn_mask=bool_mask(4), is_causal=True),
    "changed heads": lambda m, x: changed(m, num_heads=3)(x, x, x),
    "bias_k alone": lambda m, x: changed(m, bias_k=ROW, bias_v=None)(x, x, x),
    "bias_v alone": lambda m, x: changed(m, bias_k=None, bias_v=ROW)(x, x, x),
}


# Here torch's text depends on strides, or comes from the next operation.
ONLY_THE_TYPE = (
    "query dtype", "key dtype", "integer query", "batch sizes", "bias_k alone", "bias_v alone",
)  # fmt: skip


@pytest.mark.parametrize("variant", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_those_of_torch(name, batch_first, variant):
    x = torch.randn(5, 3, 8)
    errors = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            BAD_CALLS[name](cls(8, 2, batch_first=batch_first, **variant), x)
        errors.append((caught.type, str(caught.value)))
    assert errors[0][0] is errors[1][0]
    if name not in ONLY_THE_TYPE:
        assert errors[0][1] == errors[1][1]


# torch's own error names an attribute that the object lacks.
NO_TENSORS = {
    "query": lambda m, x: m(x.numpy(), x, x),
    "key": lambda m, x: m(x, None, x),
    "value": lambda m, x: m(x, x, "x"),
    "key_padding_mask": lambda m, x: m(x, x, x, [[True]]),
    "attn_mask": lambda m, x: m(x, x, x, attn_mask=True, cache=KVCache()),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_a_type_error(module, x, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a Tensor, got "):
        NO_TENSORS[name](module, x)


def test_one_object_that_is_no_tensor_is_a_type_error(module):
    for x in (None, "x", 3):
        with pytest.raises(TypeError, match=r"^query: expected a Tensor, got "), torch.no_grad():
            module.eval()(x, x, x)


@pytest.mark.parametrize(
    "shapes", [((4, 2, 7), (4, 2, 6)), ((4, 2, 5), (4, 2, 7)), ((4, 2, 5), (3, 2, 6))]
)
def test_errors_of_separate_projections(shapes):
    query, key, value = torch.randn(5, 2, 8), *(torch.randn(s) for s in shapes)
    errors = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises(AssertionError) as caught:
            cls(8, 2, kdim=5, vdim=6)(query, key, value)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("arguments", [(0, 1), (8, 0), (-8, 2), (8, 3)])
def test_constructor_errors(arguments):
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(*arguments)
    with pytest.raises(theirs.type) as ours:
        MultiheadAttention(*arguments)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_float_mask_of_another_dtype(module, x, mask_dtype, need_weights):
    for cls in (module, nn.MultiheadAttention(8, 2, batch_first=True)):
        with pytest.raises(RuntimeError, match=r"dtype"):
            cls(x, x, x, attn_mask=torch.zeros(5, 5, dtype=mask_dtype), need_weights=need_weights)


def test_mismatched_mask_kinds_warn(module, x):
    for m in (module, nn.MultiheadAttention(8, 2, batch_first=True)):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
            m(x, x, x, bool_mask(2, 5), attn_mask=torch.zeros(5, 5))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m(x, x, x, bool_mask(2, 5), attn_mask=bool_mask(5, 5))
