"""Bad calls raise the right error and say what was expected; unusual good calls work."""

import math

import numpy as np
import pytest
import torch

import fastattn
from fastattn import ALiBi, Mask, additive_attention, attention, scaled_dot_product_attention
from fastattn.problem import validate

B, H, M, N, D, E = 2, 4, 5, 7, 3, 6
NAN = math.nan


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def q():
    return x(B, H, M, D)


def k():
    return x(B, H, N, D)


def v():
    return x(B, H, N, E)


def kv_len(*values, dtype=torch.int64):
    return dict(mask=Mask(kv_len=torch.tensor(values, dtype=dtype)))


SPARSE = torch.zeros(M, D).to_sparse()
NESTED = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(2, D)], layout=torch.jagged)
META = torch.zeros(B, H, N, D, device="meta")

Type, Value = TypeError, ValueError

# (query, key, value): the error, and a part of its message
BAD_TENSORS = {
    "list": ([[1.0]], k(), v(), Type, r"query: expected a Tensor, got list"),
    "none": (q(), None, v(), Type, r"key: expected a Tensor, got NoneType"),
    "int-dtype": (q().int(), k(), v(), Type, r"query: expected float16.*got torch.int32"),
    "complex": (q().cfloat(), k(), v(), Type, r"query: expected float16.*complex64"),
    "mixed-dtype": (q(), k().half(), v(), Type, r"key: .*torch.float32, got torch.float16"),
    "mixed-value": (q(), k(), v().double(), Type, r"value: .*float32, got torch.float64"),
    "device": (q(), META, v(), Value, r"key: expected the device of query, cpu, got meta"),
    "sparse": (SPARSE, x(N, D), x(N, E), Type, r"query: expected a dense strided tensor"),
    "nested": (NESTED, x(2, N, D), x(2, N, E), Type, r"query: expected a dense strided"),
    "one-dim": (x(D), x(N, D), x(N, E), Value, r"query: expected at least 2 dims"),
    "no-dims": (q(), k(), x(), Value, r"value: expected at least 2 dims"),
    "head-dim": (q(), x(B, H, N, D + 1), v(), Value, r"same last dim, got \[2, 4, 5, 3\]"),
    "length": (q(), k(), x(B, H, N + 1, E), Value, r"key and value: expected the same length"),
    "batch": (q(), x(3, H, N, D), v(), Value, r"expected batch dims that broadcast"),
    "batch-value": (q(), k(), x(3, H, N, E), Value, r"expected batch dims that broadcast"),
    "heads": (q(), x(B, 2, N, D), x(B, 2, N, E), Value, r"as many key as query heads"),
    "kv-heads": (q(), k(), x(B, 2, N, E), Value, r"key and value: .* number of heads"),
    "no-kv-heads": (q(), x(B, 0, N, D), x(B, 0, N, E), Value, r"query has 4 heads, key 0"),
}

# options of a good call: the error, and a part of its message
BAD_OPTIONS = {
    "heads-ratio": (dict(enable_gqa=True), Value, r"multiple of the key heads"),
    "dropout-negative": (dict(dropout_p=-0.1), Value, r"between 0 and 1, got -0.1"),
    "dropout-above": (dict(dropout_p=1.5), Value, r"between 0 and 1, got 1.5"),
    "dropout-nan": (dict(dropout_p=NAN), Value, r"between 0 and 1, got nan"),
    "dropout-bool": (dict(dropout_p=True), Type, r"dropout_p: expected a float, got bool"),
    "dropout-type": (dict(dropout_p="half"), Type, r"dropout_p: expected a float, got str"),
    "scale-nan": (dict(scale=NAN), Value, r"scale: expected -1e30 to 1e30, got nan"),
    "scale-large": (dict(scale=-1e300), Value, r"scale: expected -1e30 to 1e30, got -1e\+300"),
    "scale-int": (dict(scale=10**400), Value, r"scale: expected -1e30 to 1e30, got 1000"),
    "scale-type": (dict(scale=x(1)), Type, r"scale: .* got Tensor: multiply query by it"),
    "scale-bool": (dict(scale=True), Type, r"scale: expected a float or None, got bool$"),
    "scale-numpy-bool": (dict(scale=np.True_), Type, r"scale: expected a float or None, got bool"),
    "causal-type": (dict(is_causal=1), Type, r"is_causal: expected a bool, got int"),
    "gqa-type": (dict(enable_gqa=x(2)), Type, r"enable_gqa: expected a bool, got Tensor"),
    "lse-type": (dict(return_lse=x(2)), Type, r"return_lse: expected a bool, got Tensor"),
    "backend": (dict(backend="fpga"), Value, r"backend: expected 'auto' or one of .*'fpga'"),
    "backend-list": (dict(backend=["cpu"]), Value, r"backend: expected .*got \['cpu'\]"),
    "weights": (dict(return_weights="sum"), Value, r"return_weights: .*'mean', 'full'"),
    "weights-tensor": (dict(return_weights=x(2)), Value, r"return_weights: expected one of"),
    "weights-bool": (dict(return_weights=True), Value, r"return_weights: expected one of"),
    "seed-type": (dict(dropout_p=0.5, seed=1.5), Type, r"seed: expected an int"),
    "seed-bool": (dict(dropout_p=0.5, seed=True), Type, r"seed: expected an int.* got bool"),
    "seed-large": (dict(dropout_p=0.5, seed=2**64), Value, r"seed: expected 64 bits"),
    "seed-unused": (dict(seed=2**64), Value, r"seed: expected 64 bits"),
    "seed-small": (dict(dropout_p=0.5, seed=-(2**63) - 1), Value, r"seed: expected 64 bits"),
    "seed-int32": (dict(dropout_p=0.5, seed=x(1).int()), Value, r"seed: expected one int64"),
    "seed-two": (dict(dropout_p=0.5, seed=x(2).long()), Value, r"seed: expected one int64"),
    "mask-type": (dict(mask=torch.ones(M, N).bool()), Type, r"mask: .*tensors go to attn_mask"),
    "mask-causal": (dict(mask=Mask(causal="left")), Value, r"mask.causal: expected one of"),
    "causal-both": (
        dict(is_causal=True, mask=Mask(causal="bottom_right")), Value, r"give one of them"),
    "window-float": (dict(mask=Mask(window=(1.0, 2))), Type, r"mask.window: expected"),
    "window-bool": (dict(mask=Mask(window=(True, True))), Type, r"mask.window: expected"),
    "window-below": (dict(mask=Mask(window=(-2, 0))), Value, r"mask.window: expected -1"),
    "attn-mask-type": (dict(attn_mask=[[1]]), Type, r"attn_mask: expected a Tensor, got list"),
    "attn-mask-int": (
        dict(attn_mask=x(M, N).int()), Type, r"dtype bool.*: write attn_mask.bool\(\), True"),
    "attn-mask-half": (dict(attn_mask=x(M, N).half()), Type, r"attn_mask: .*got torch.float16"),
    "attn-mask-shape": (dict(attn_mask=x(N, M)), Value, r"attn_mask: .*to \[2, 4, 5, 7\]"),
    "attn-mask-padding": (
        dict(attn_mask=x(B, N)), Value,
        r"for key padding write attn_mask\[:, None, None, :\], or mask=Mask\(kv_len=lengths\)"),
    "attn-mask-no-heads": (dict(attn_mask=x(B, M, N)), Value, r"write attn_mask\[:, None\]"),
    "attn-mask-torchs": (
        dict(attn_mask=x(B * H, M, N)), Value, r"write attn_mask.unflatten\(0, \(2, 4\)\)"),
    "attn-mask-dims": (dict(attn_mask=x(1, B, H, M, N)), Value, r"attn_mask: expected a shape"),
    "attn-mask-larger": (dict(attn_mask=x(B, 2 * H, M, N)), Value,
                         r"^attn_mask: expected a shape.* got \[2, 8, 5, 7\]$"),
    "attn-mask-nested": (dict(attn_mask=NESTED), Type, r"attn_mask: .*dense strided tensor"),
    "bias-sparse": (dict(bias=SPARSE), Type, r"bias: expected a dense strided tensor, got layout"),
    "attn-mask-device": (
        dict(attn_mask=torch.zeros(M, N, device="meta")), Value, r"attn_mask: .*device"),
    "keep-float": (
        dict(mask=Mask(keep=x(M, N))), Type, r"mask.keep: expected dtype bool.*attn_mask or bias"),
    "keep-int": (
        dict(mask=Mask(keep=x(M, N).long())), Type, r"mask.keep: .*: write keep.bool\(\), True"),
    "keep-padding": (
        dict(mask=Mask(keep=x(B, N).bool())), Value, r"write keep\[:, None, None, :\]"),
    "keep-shape": (dict(mask=Mask(keep=x(3, N).bool())), Value, r"mask.keep: expected a shape"),
    "bias-bool": (dict(bias=x(M, N).bool()), Type, r"bias: .* float32, got .*goes to attn_mask"),
    "bias-shape": (dict(bias=x(2, M, N)), Value, r"bias: expected a shape that broadcasts"),
    "kv-len-negative": (kv_len(-1, 3), Value, r"mask.kv_len: .*\[0, 7\], got -1 to 3"),
    "kv-len-large": (kv_len(0, N + 1), Value, r"mask.kv_len: .*\[0, 7\], got 0 to 8"),
    "kv-len-float": (kv_len(1.0, 2.0, dtype=None), Type, r"mask.kv_len: expected dtype int32"),
    "kv-len-bool": (kv_len(True, False, dtype=None), Type, r"mask.kv_len: expected dtype int32"),
    "kv-len-list": (dict(mask=Mask(kv_len=[1.0, 2.0])), Type, r"mask.kv_len: .* got torch.float32"),
    "kv-len-ragged": (dict(mask=Mask(kv_len=[[1], [1, 2]])), Value, r"mask.kv_len: .* of length 1"),
    "kv-len-int": (dict(mask=Mask(kv_len=3)), Type, r"kv_len: expected integers, .* got int"),
    "kv-begin-large": (
        dict(mask=Mask(kv_begin=[0, N + 1])), Value, r"mask.kv_begin: .*\[0, 7\], got 0 to 8"),
    "kv-begin-shape": (
        dict(mask=Mask(kv_begin=[1, 2, 3])), Value, r"kv_begin: .*\[2, 5\], got \[3\]"),
    "kv-len-shape": (kv_len(1, 2, 3), Value, r"mask.kv_len: .*\[2\] or \[2, 5\], got \[3\]"),
    "kv-len-heads": (
        dict(mask=Mask(kv_len=x(B, H).int())), Value, r"mask.kv_len: expected \[2\] or"),
    "kv-len-device": (
        dict(mask=Mask(kv_len=torch.zeros(B, device="meta").int())), Value, r"kv_len: .*device"),
}  # fmt: skip


# Other libraries' names of our arguments, and our names.
NAMES = {
    "causal": "is_causal=True, or mask=",
    "softmax_scale": "scale=",
    "need_weights": "return_weights='mean'",
    "window_size": "mask=fastattn.Mask\\(window=",
    "key_padding_mask": "mask=fastattn.Mask\\(kv_len=",
    "dropout": "dropout_p=",
    "attention_mask": "attn_mask=",
    "return_attn_probs": "return_weights='full'",
    "sliding_window": "mask=fastattn.Mask\\(window=",
    "position_bias": "bias=",
    "alibi_slopes": "bias=fastattn.ALiBi\\(slopes",
    "cu_seqlens_q": "mask=fastattn.Mask.documents\\(cu_seqlens_q",
    "score_mod": "softcap=, bias=",
    "p": "dropout_p=",
    "window": "mask=fastattn.Mask\\(window=",
    "kv_len": "mask=fastattn.Mask\\(kv_len=",
    "kv_begin": "mask=fastattn.Mask\\(kv_begin=",
    "keep": "mask=fastattn.Mask\\(keep=",
    "return_aux": "return_lse=True",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries(name):
    for call in (
        lambda **options: scaled_dot_product_attention(q(), k(), v(), **options),
        lambda **options: attention(q(), k(), v(), score="cosine", **options),
        lambda **options: fastattn.explain(q(), k(), v(), **options),
    ):
        with pytest.raises(
            TypeError, match=rf"unexpected keyword argument '{name}': write {NAMES[name]}"
        ):
            call(**{name: 1})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scores'$"):
        scaled_dot_product_attention(q(), k(), v(), scores=1)


def test_block_masks():
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    for name in ("attn_mask", "mask", "bias"):
        with pytest.raises(TypeError, match=rf"{name}: .* BlockMask: write mask=fastattn.Mask\("):
            scaled_dot_product_attention(q(), k(), v(), **{name: block})


def test_padding_mask_of_inputs_without_heads():
    with pytest.raises(ValueError, match=r"for key padding write attn_mask\[:, None, :\]"):
        additive_attention(x(B, M, D), x(B, N, D), x(B, N, E), x(D), attn_mask=x(B, N))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Mask.local(True), "radius"),
        (lambda: Mask.local(1.5), "radius"),
        (lambda: Mask.local_blocks(True, 4), "block"),
        (lambda: Mask.local_blocks(2, 4, before=True), "before"),
        (lambda: attention(q(), k(), v(), score="gaussian", bandwidth=True), "bandwidth"),
        (lambda: fastattn.CosineAttention(True), "scale"),
        (lambda: fastattn.CosineAttention(dropout=True), "dropout"),
        (lambda: fastattn.NadarayaWatson(True), "bandwidth"),
        (lambda: fastattn.KVCache(capacity=True), "capacity"),
        (lambda: fastattn.LocalAttention(4, window=True), "window"),
        (lambda: fastattn.SelfAttention(True, 1), "hidden_dim"),
        (lambda: fastattn.LocationSensitiveAttention(4, 4, 4, window=(True, 2)), "window"),
    ],
)
def test_a_bool_is_no_number(make, name):
    with pytest.raises(TypeError, match=rf"{name}: expected"):
        make()


@pytest.mark.parametrize("bad", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(bad):
    query, key, value, error, message = bad
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name):
    options, error, message = BAD_OPTIONS[name]
    heads = 3 if name == "heads-ratio" else H
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(q(), x(B, heads, N, D), x(B, heads, N, E), **options)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (None, TypeError, r"weight: expected a Tensor, got NoneType"),
        (x(D).double(), TypeError, r"weight: expected the dtype of query"),
        (x(D + 1), ValueError, r"weight: expected \[3\] or \[1, 3\] to fit query, got \[4\]"),
        (x(H + 1, D), ValueError, r"weight: expected \[3\] or \[4, 3\] to fit query, got \[5, 3\]"),
        (x(1, H, D), ValueError, r"weight: expected \[D\] or \[H, D\], got \[1, 4, 3\]"),
        (x(), ValueError, r"weight: expected \[D\] or \[H, D\], got \[\]"),
        (x(D).to("meta"), ValueError, r"weight: expected the device of query"),
        ([1.0] * D, TypeError, r"weight: expected a Tensor, got list"),
    ],
)
def test_bad_weight(weight, error, message):
    with pytest.raises(error, match=message):
        additive_attention(q(), k(), v(), weight)


def test_weight_with_heads_needs_a_head_dim():
    with pytest.raises(ValueError, match=r"query: a weight \[H, D\] needs \[..., H, M, D\]"):
        additive_attention(x(M, D), x(N, D), x(N, E), x(H, D))


@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.parametrize("score", ["cosine", "gaussian"])
def test_bad_tensors_of_other_scores(score, name):
    query, key, value, error, message = BAD_TENSORS[name]
    with pytest.raises(error, match=message):
        attention(query, key, value, score=score, enable_gqa=name == "no-kv-heads")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(score="euclid"), "score: expected one of 'scaled_dot', .*'euclid'"),
        (dict(score="dot", scale=2.0), "scale: the dot score has none$"),
        (dict(score="gaussian", scale=2.0), "scale: the gaussian score has none$"),
        (dict(score="additive"), "weight: the additive score needs one"),
        (dict(score="cosine", weight=x(D)), "weight: only the additive score has one"),
        (dict(score="dot", bandwidth=1.0), "bandwidth: only the gaussian score has one"),
        *(
            (dict(score="gaussian", bandwidth=n), f"bandwidth: expected 1e-30 to 1e30, .* got {n}")
            for n in (0.0, -1.0, NAN, 1e-50, 10**31)
        ),
        (dict(score="gaussian", bandwidth=x(N)), r"expected .* \[2, 4, 1, 3\], got \[7\]"),
        (dict(score="gaussian", bandwidth=x(H, 1)), r"bandwidth: .* got \[4, 1\]"),
    ],
)
def test_bad_score(options, message):
    with pytest.raises(ValueError, match=message):
        attention(q(), k(), v(), **options)


def test_additive_has_no_scale():
    with pytest.raises(TypeError, match="scale"):
        additive_attention(q(), k(), v(), x(D), scale=2.0)


def test_explain_checks_its_arguments():
    with pytest.raises(ValueError, match="same last dim"):
        fastattn.explain(q(), x(B, H, N, D + 1), v())


# ---- good calls ----


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(B,), (B, M)])
def test_kv_len_of_any_integer_type_becomes_int32_rows(dtype, shape):
    lengths = torch.full(shape, 3, dtype=dtype)
    rows = validate.build("dot", q(), k(), v(), mask=Mask(kv_len=lengths)).p.mask.kv_len
    assert rows.dtype == torch.int32
    assert rows.shape == (B, 1 if shape == (B,) else M)
    assert (rows == 3).all()


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("width", [2**60, 2**63 - 1, 2**63, 10**30])
def test_a_window_past_every_size_is_no_bound(backend, width, causal):
    call = [torch.randn_like(t) for t in (q(), k(), v())]
    for window in ((width, width), (0, width), (width, 0), (-1, width)):
        small = Mask(causal, tuple(min(n, 99) for n in window))
        found = scaled_dot_product_attention(*call, mask=Mask(causal, window), backend=backend)
        expected = scaled_dot_product_attention(*call, mask=small, backend=backend)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_kv_len_may_have_the_batch_dims(lead):
    tensors = [x(*lead, H, n, d) for n, d in ((M, D), (N, D), (N, E))]
    for shape in (lead, (math.prod(lead),), (*lead, M), (math.prod(lead), M)):
        built = validate.build("dot", *tensors, mask=Mask(kv_len=torch.full(shape, 2)))
        assert built.p.mask.kv_len.shape[0] == built.p.B
    built = validate.build("dot", *tensors, mask=Mask(kv_len=torch.full((1, M), 2)))
    assert built.p.mask.kv_len.shape == (1, M)


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, attention])
def test_lists_of_no_sample_and_of_no_row(backend, attend):
    tensors = x(0, H, M, D), x(0, H, N, D), x(0, H, N, E)
    mask = Mask(kv_len=[], kv_begin=[])
    assert attend(*tensors, mask=mask, backend=backend).shape == (0, H, M, E)
    mask = Mask(kv_len=[[], []], kv_begin=[[], []])
    assert attend(x(B, H, 0, D), k(), v(), mask=mask, backend=backend).shape == (B, H, 0, E)
    segments = Mask.segments([[], []])
    assert segments.kv_len.shape == (2, 0)


def test_kv_len_that_could_be_of_samples_or_of_rows():
    """Batch dims [1, M] and limits [1, M]: neither reading is taken silently."""
    tensors = [x(1, M, H, M, n) for n in (D, D, E)]
    lengths = torch.arange(M)[None]
    for mask in (Mask(kv_len=lengths), Mask.local_blocks(2, M), Mask.documents(lengths=[2, M - 2])):
        with pytest.raises(ValueError, match=r"may be of 5 samples or of 5 rows: write .flatten"):
            validate.build("dot", *tensors, mask=mask)
    with pytest.raises(ValueError, match="may be of 5 samples or of 5 rows"):
        additive_attention(*(t[:, :, 0] for t in tensors), x(D), mask=Mask.local_blocks(2, M))
    for way, shape in ((lengths.flatten(), (M, 1)), (lengths.expand(M, M), (M, M))):
        built = validate.build("dot", *tensors, mask=Mask(kv_len=way))
        assert built.p.mask.kv_len.shape == shape
    one = validate.build("dot", *(t[:, :1, :, :1] for t in tensors), mask=Mask(kv_len=[[1]]))
    assert one.p.mask.kv_len.tolist() == [[1]]  # one sample, one row: both readings are the same


def test_no_copy_of_key_or_value():
    wide = x(B, N, 2, D).transpose(1, 2)
    built = validate.build("dot", q(), wide, wide, enable_gqa=True)
    assert built.k.data_ptr() == built.v.data_ptr() == wide.data_ptr()
    assert built.p.Hkv == 2
    one = validate.build("dot", q(), k()[:, :1], v()[:, :1])
    assert one.p.Hkv == 1


def test_masks_and_bias_are_not_expanded():
    built = validate.build("dot", q(), k(), v(), attn_mask=x(M, 1), mask=Mask(keep=x(N).bool()))
    assert built.bias.shape == (1, 1, M, 1)
    assert built.p.mask.keep.shape == (1, 1, 1, N)


def test_dropout_0_is_no_dropout():
    assert validate.build("dot", q(), k(), v(), dropout_p=0, seed=3).p.dropout is None


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(kind):
    p = validate.build("dot", q(), k(), v(), scale=kind(2), softcap=kind(3), dropout_p=kind(1)).p
    assert (p.scale, p.softcap, p.dropout.p) == (2.0, 3.0, 1.0)
    assert {type(p.scale), type(p.softcap), type(p.dropout.p)} == {float}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_are_whole_numbers(kind):
    one, three, seed = kind(1), kind(3), kind(5)
    for mask, same in [
        (Mask(window=(three, 1)), Mask(window=(3, 1))),
        (Mask.local(three), Mask.local(3)),
        (Mask.local_blocks(three, kind(M), before=one), Mask.local_blocks(3, M, before=1)),
        (Mask.documents([0, 3], length=kind(M)), Mask.documents([0, 3], length=M)),
        (Mask.prefix([3], kind(M)), Mask.prefix([3], M)),
    ]:
        options = dict(dropout_p=0.5, seed=seed, mask=mask, bias=ALiBi(torch.ones(H), three))
        p = validate.build("dot", q(), q(), q(), **options).p
        assert torch.equal(mask.to_dense(kind(M), M), same.to_dense(M, M))
        assert {type(n) for n in p.mask.window or ()} <= {int}
        assert p.dropout.seed == 5
    assert torch.equal(
        ALiBi(torch.ones(H), three).to_dense(three, 4), ALiBi(torch.ones(H), 3).to_dense(3, 4)
    )


def test_bools_of_numpy_are_bools():
    p = validate.build("dot", q(), q(), q(), is_causal=np.True_, enable_gqa=np.False_).p
    assert p.mask.causal == "top_left"
    for causal in (np.True_, np.False_):
        for mask in Mask.documents([0, 3], causal=causal), Mask.segments([7] * 3, causal=causal):
            assert mask.to_dense(3, 3).all() == (not causal)


@pytest.mark.parametrize(
    ("seed", "stored"), [(2**64 - 1, -1), (2**63, -(2**63)), (2**63 - 1, 2**63 - 1), (-5, -5)]
)
def test_seeds_are_64_bits(seed, stored):
    dropout = validate.build("dot", q(), k(), v(), dropout_p=0.5, seed=seed).p.dropout
    assert dropout.seed.item() == stored
