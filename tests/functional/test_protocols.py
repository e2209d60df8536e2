"""What torch passes instead of plain tensors: its own masks, proxies, fake tensors."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import SCORES, assert_close, attend, inputs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from fastattn import Mask, MultiheadAttention, replace_attention

B, H, M, N, D = 2, 2, 5, 7, 4
scores = pytest.mark.parametrize("score", SCORES)


# ---- torch.nn.attention.bias.CausalBias: a Tensor whose memory is never written ----

ALIGNED = [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")]
aligned = pytest.mark.parametrize(("make", "alignment"), ALIGNED)


@aligned
@scores
def test_causal_bias_is_the_causal_mask(backend, score, make, alignment):
    call = inputs(score)
    options = dict(backend=backend, mask=Mask(kv_len=torch.tensor([3, 7])))
    found = attend(**call, attn_mask=make(M, N), **options)
    kept = torch.ones(M, N, dtype=torch.bool).tril(0 if alignment == "top_left" else N - M)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, attend(**call, attn_mask=kept, **options))


def test_causal_bias_beside_a_window_with_its_alignment():
    q, k, v = inputs().values()
    mask = Mask(causal="bottom_right", window=(2, -1))
    found = attend(q, k, v, attn_mask=causal_lower_right(M, N), mask=mask)
    assert torch.equal(found, attend(q, k, v, mask=mask))


@aligned
def test_causal_bias_as_torch_has_it(make, alignment):
    q, k, v = inputs(M=8, N=8, E=4).values()
    wide = [x.double() for x in (q, k, v)]
    truth = F.scaled_dot_product_attention(*wide, attn_mask=make(8, 8))
    peer = F.scaled_dot_product_attention(q, k, v, attn_mask=make(8, 8))
    ours = fastattn.scaled_dot_product_attention(q, k, v, attn_mask=make(8, 8))
    assert_close([ours], [peer], [truth])


@pytest.mark.parametrize("score", ["cosine", "gaussian"])
def test_causal_bias_beside_other_scores(score):
    q, k, v = (x.half() for x in inputs().values())
    found = fastattn.attention(q, k, v, score=score, attn_mask=causal_upper_left(M, N))
    assert torch.equal(found, fastattn.attention(q, k, v, score=score, is_causal=True))


@pytest.mark.slow
def test_causal_bias_is_compiled():
    call = inputs()

    def run(q, k, v):
        return fastattn.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(M, N))

    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(compiled(*call.values()), run(*call.values()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(attn_mask=causal_upper_left(N, M)), ValueError, r"CausalBias of \[5, 7\], got \[7"),
        (dict(attn_mask=causal_lower_right(M, N), is_causal=True), ValueError, "give one of them"),
        (dict(attn_mask=causal_upper_left(M, N), mask=Mask("bottom_right")), ValueError, "give o"),
        (dict(attn_mask=causal_lower_right(M, N), mask=Mask(window=(1, 1))), ValueError,
         r"write mask=Mask\(causal='bottom_right', window="),
        (dict(bias=causal_upper_left(M, N)), TypeError, r"bias: .* got CausalBias.*mask=fastatt"),
        (dict(mask=Mask(keep=causal_upper_left(M, N))), TypeError, r"mask.keep: .* got CausalBias"),
    ],
)  # fmt: skip
def test_causal_bias_that_does_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        attend(**inputs(), **options)


class Opaque(torch.Tensor):
    """A subclass whose value is not in its memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """A subclass whose value is in its memory."""


def test_opaque_subclasses_are_no_masks():
    for make in (
        lambda x: dict(attn_mask=x.bool()),
        lambda x: dict(bias=x),
        lambda x: dict(mask=Mask(keep=x.bool())),
        lambda x: dict(mask=Mask(kv_len=x[0, :B].long())),
    ):
        with pytest.raises(TypeError, match=r"expected a Tensor, got Opaque.*plain tensor"):
            attend(**inputs(), **make(torch.zeros(M, N).as_subclass(Opaque)))


def test_plain_subclasses_and_parameters_are_masks():
    call, mask = inputs(), torch.randn(M, N)
    expected = attend(**call, attn_mask=mask)
    assert torch.equal(attend(**call, attn_mask=nn.Parameter(mask)), expected)
    found = attend(**call, attn_mask=mask.as_subclass(Named))
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    named = {name: x.as_subclass(Named) for name, x in call.items()}
    assert type(attend(**named, attn_mask=mask)) is Named


# ---- torch.fx ----


class Functions(nn.Module):
    """Every public function, with typical arguments of a model."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, q, k, lengths):
        mask = Mask(kv_len=lengths)
        one = fastattn.scaled_dot_product_attention(
            q, k, k, is_causal=True, scale=q.shape[-1] ** -0.5, mask=mask
        )
        two, weights = fastattn.additive_attention(q, k, k, self.weight, return_weights="mean")
        three = fastattn.attention(q, k, k, score="cosine", mask=mask)
        return one + two + three, weights


def test_symbolic_trace_keeps_the_functions_as_calls():
    model, lengths = Functions(), torch.tensor([4, 7])
    q, k, _ = inputs().values()
    traced = torch.fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert called >= {
        fastattn.scaled_dot_product_attention, fastattn.additive_attention, fastattn.attention
    }  # fmt: skip
    for ours, expected in zip(
        copy.deepcopy(traced)(q, k, lengths), model(q, k, lengths), strict=True
    ):
        assert torch.equal(ours, expected)


def test_a_type_that_takes_torchs_functions_takes_ours():
    class Takes:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func, len(args), kwargs["is_causal"]

    x = torch.zeros(1, 1, 2, 2)
    for name in ("query", "key", "value", "attn_mask", "bias"):
        call = dict(query=x, key=x, value=x) | {name: Takes()}
        found = fastattn.scaled_dot_product_attention(**call, is_causal=True)
        assert found == (fastattn.scaled_dot_product_attention, 3, True)
    names = "query", "key", "value", "weight", "bandwidth", "attn_mask", "bias", "sink"
    for score, name in itertools.product(fastattn.scores.SCORES, names):
        call = dict(query=x, key=x, value=x) | {name: Takes()}
        found = fastattn.attention(**call, score=score, is_causal=True)
        assert found == (fastattn.attention, 3, True)


# ---- fake tensors, and modes that trace ----


@scores
def test_kv_len_without_values(score):
    with FakeTensorMode():
        call = inputs(score)
        lengths = torch.empty(B, dtype=torch.int64)
        assert attend(**call, mask=Mask(kv_len=lengths)).shape == (B, H, M, 3)
    assert attend(**call, mask=Mask(kv_len=lengths)).shape == (B, H, M, 3)


@scores
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_kv_len_under_make_fx(score, mode):
    call, lengths = inputs(score), torch.tensor([4, 7])

    def run(lengths, *args):
        return attend(*args, mask=Mask(kv_len=lengths))

    traced = make_fx(run, tracing_mode=mode)(lengths, *call.values())
    for other in (lengths, torch.tensor([0, 2])):
        torch.testing.assert_close(traced(other, *call.values()), run(other, *call.values()))


# ---- fastattn.MultiheadAttention in place of torch's ----


def test_torch_script_where_our_class_stands_in_torch_nn(monkeypatch):
    torchs = nn.MultiheadAttention
    monkeypatch.setattr(nn, "MultiheadAttention", MultiheadAttention)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x, x, x)[0], model(x, x, x)[0])
    plain = nn.ModuleList([torchs(8, 2)])
    assert replace_attention(plain) == 1
    assert type(plain[0]) is MultiheadAttention


# ---- forward mode under torch.compile ----


def test_forward_mode_breaks_a_compiled_graph():
    """Its tangent would be zero: torch.compile does not trace the rule of a Function."""
    q, k, v = inputs().values()

    def run(x, tangent):
        def call(x):
            return fastattn.scaled_dot_product_attention(x, k, v)

        return torch.func.jvp(call, (x,), (tangent,))[1]

    tangent = torch.randn_like(q)
    with pytest.raises(Exception, match="outside torch"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(q, tangent)
    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager")(q, tangent)
    torch.testing.assert_close(found, run(q, tangent))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dual_numbers_in_a_compiled_call_are_no_silent_zeros(backend):
    q, k, v = inputs().values()

    def run(x, tangent):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            out = fastattn.scaled_dot_product_attention(dual, k, v) + dual
            return forward_ad.unpack_dual(out).tangent

    torch._dynamo.reset()
    with pytest.raises(NotImplementedError):
        torch.compile(run, backend=backend)(q, torch.randn_like(q))


# ---- explain() ----


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_explain_explains_nested_tensors():
    x = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)])
    said = str(fastattn.explain(x, x, x))
    assert "to_padded_tensor" in said
    assert "kv_len" in said


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", range(3))
def test_nested_tensors_are_refused_in_our_words(place):
    tensors = [torch.zeros(1, 2, 3, 4)] * 3
    tensors[place] = torch.nested.nested_tensor([torch.zeros(2, 3, 4)])
    with pytest.raises(TypeError, match="expected a dense strided tensor, got a nested tensor"):
        fastattn.scaled_dot_product_attention(*tensors)


def test_explain_takes_all_that_the_call_takes():
    q = torch.zeros(1, 2, 3, 4)
    said = fastattn.explain(
        q, is_causal=True, return_lse=True, backend="eager", dropout_p=0.5, seed=math.isqrt(9)
    )
    assert said.backend == "eager"
    assert fastattn.explain(q.double(), backend="cpu").backend is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in str(fastattn.explain(q, q.bfloat16()))
    for options, message in (
        (dict(backend="fpga"), "backend: expected 'auto'"),
        (dict(causal=True), "'causal': write is_causal"),
        (dict(return_lse=1), "return_lse: expected a bool"),
        (dict(sink=torch.zeros(3)), r"sink: expected \[2\], one for each head, got \[3\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            fastattn.explain(q, **options)
    with pytest.raises(TypeError, match="query: expected a Tensor, got int"):
        fastattn.explain(3)


@pytest.mark.parametrize("score", ["scaled_dot", "dot", "cosine", "gaussian", "additive"])
def test_explain_takes_the_scores_of_attention(score):
    q, kernel = torch.zeros(1, 2, 3, 4), score if score in ("gaussian", "additive") else "dot"
    own = {"weight": torch.zeros(2, 4)} if score == "additive" else {}
    said = fastattn.explain(q, score=score, **own)
    assert said.title.startswith(f"{kernel} attention: B=1 H=2 ")
    assert said.backend == fastattn.explain(q, **own).backend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(score="cosinus"), "score: expected one of 'scaled_dot'"),
        (dict(score="additive"), "weight: the additive score needs one"),
        (dict(score="cosine", bandwidth=1.0), "bandwidth: only the gaussian score has one"),
        (dict(weight=torch.zeros(4), scale=2.0), "scale: the additive score has none"),
    ],
)
def test_explain_refuses_what_attention_refuses(options, message):
    q = torch.zeros(1, 2, 3, 4)
    for call in (fastattn.attention, fastattn.explain, fastattn.autotune):
        if call is not fastattn.attention or "score" in options:
            with pytest.raises(ValueError, match=message):
                call(q, q, q, **options)
