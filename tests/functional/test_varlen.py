"""varlen_attention: packed documents equal a loop over documents in plain PyTorch."""

import inspect
import itertools
import math

import pytest
import torch
from helpers import SCORES, assert_close

import fastattn
from fastattn import testing

SMALL = [0, 5, 5, 9, 12], [0, 3, 4, 10, 10]  # documents without queries, and without keys
LARGE = [0, 70, 71, 200, 260], [0, 70, 71, 200, 260]  # more than a tile of the kernels
TAIL = 3  # rows past the last document
MASKS = [(False, None), (True, None), (False, (2, 1)), (True, (3, -1)), (False, (-1, 0))]


def draw(score, offsets, H=4, Hkv=2, D=8, E=6, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """{query, key, value[, weight]} with NaN past the last document."""
    T, S = (x[-1] + TAIL for x in offsets)
    shapes = {"query": (T, H, D), "key": (S, Hkv, D), "value": (S, Hkv, E)}
    made = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    for x in made.values():
        x[-TAIL:] = math.nan
    return made | ({"weight": torch.randn(H, D).to(dtype)} if score == "additive" else {})


def documents(made, offsets, is_causal=False, window=None):
    """The formula, one document after the other: (out ``[T, H, E]``, lse ``[H, T]``)."""
    outs, lses = [], []
    ends = zip(*map(itertools.pairwise, offsets), strict=True)
    for (begin_q, end_q), (begin, end) in ends:
        q = made["query"][begin_q:end_q].transpose(0, 1)
        k, v = (made[name][begin:end].transpose(0, 1) for name in ("key", "value"))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        keep = kept(q.shape[1], k.shape[1], is_causal, window)
        out, lse = dense(q, k, v, made.get("weight"), keep)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    H, E = outs[0].shape[1:]
    outs.append(outs[0].new_zeros(TAIL, H, E))
    lses.append(lses[0].new_full((H, TAIL), -math.inf))
    return torch.cat(outs), torch.cat(lses, -1)


def dense(q, k, v, w, keep):
    """One document; a row without keys gives 0 and -inf."""
    if w is None:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
    else:
        scores = ((q[:, :, None] + k[:, None]).tanh() * w[:, None, None]).sum(-1)
    some = keep.any(-1)
    scores = scores.masked_fill(~keep & some[:, None], -math.inf)
    lse = scores.logsumexp(-1).masked_fill(~some, -math.inf)
    return (scores.softmax(-1) * some[:, None]) @ v, lse


def kept(M, N, is_causal, window):
    distance = torch.arange(N) - torch.arange(M)[:, None] - (N - M)
    left, right = window or (-1, -1)
    keep = torch.ones(M, N, dtype=torch.bool)
    keep &= (distance >= -left) | (left < 0)
    keep &= (distance <= right) | (right < 0)
    return keep & (distance <= 0) if is_causal else keep


def packed(made, offsets, **options):
    return fastattn.varlen_attention(
        **made, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], enable_gqa=True,
        return_lse=True, **options,
    )  # fmt: skip


def derived(function, made, *args, **options) -> list[torch.Tensor]:
    """Both results, and the gradients of a function of both."""
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    out, lse = function(leaves, *args, **options)
    finite = lse.masked_fill(lse == -math.inf, 0.0).double()
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    loss = (out.double() * upstream.to(torch.bfloat16)).sum() + finite.sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


def check(backend, made, offsets, **masks):
    """Returns the results that are within the budget of the formula.

    The ulp of a gradient is that of the largest gradient, since some cancel.
    """
    wide = {name: x.double() for name, x in made.items()}
    ours = derived(packed, made, offsets, backend=backend, **masks)
    peer, truth = (derived(documents, x, offsets, **masks) for x in (made, wide))
    assert_close(ours[:2], peer[:2], truth[:2])
    scale = max(map(testing.largest, truth[2:]))
    for name, *grads in zip(made, ours[2:], peer[2:], truth[2:], strict=True):
        testing.assert_within_budget(*grads, name=f"grad_{name}", scale=scale)
    return ours


@pytest.mark.parametrize(("is_causal", "window"), MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_packed_is_a_loop_over_documents(backend, score, is_causal, window):
    made = draw(score, SMALL)
    out, lse, *grads = check(backend, made, SMALL, is_causal=is_causal, window=window)
    assert not out[-TAIL:].any()
    assert (lse[:, -TAIL:] == -math.inf).all()
    assert not any(g[-TAIL:].any() for g in grads[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
def test_long_documents(backend, score, dtype):
    check(backend, draw(score, LARGE, dtype=dtype), LARGE, is_causal=True, window=(40, -1))


@pytest.mark.parametrize("score", SCORES)
def test_offsets_of_any_kind(score):
    made = draw(score, SMALL)
    expected = packed(made, SMALL, is_causal=True)
    for kind in (tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        got = packed(made, [kind(x) for x in SMALL], is_causal=True)
        assert all(map(torch.equal, got, expected))


def test_lists_are_on_the_cpu_whatever_the_default_device():
    made = draw("dot", LARGE)
    bias = fastattn.ALiBi(torch.rand(made["query"].shape[1]))
    same = [LARGE[0], list(LARGE[0])]
    expected = packed(made, same, bias=bias)
    with torch.device("meta"):
        assert all(map(torch.equal, packed(made, same, bias=bias), expected))


def test_documents_that_cannot_be_read():
    q, offsets = torch.zeros(12, 2, 8, device="meta"), torch.zeros(3, dtype=torch.int32).to("meta")
    bias = fastattn.ALiBi(torch.zeros(2, device="meta"))
    assert fastattn.varlen_attention(q, q, q, offsets, offsets, bias=bias).shape == q.shape
    with pytest.raises(ValueError, match="leave cu_seqlens_k out"):
        fastattn.varlen_attention(q, q, q, offsets, offsets.clone(), bias=bias)


def test_keys_have_the_documents_of_the_queries():
    made = draw("dot", LARGE)
    got = fastattn.varlen_attention(*made.values(), LARGE[0], enable_gqa=True)
    assert torch.equal(got, packed(made, LARGE)[0])
    assert got.is_contiguous()


def test_longest_lengths_have_no_effect():
    made = draw("dot", SMALL)
    got = fastattn.varlen_attention(*made.values(), *SMALL, 1, 1, enable_gqa=True)
    assert torch.equal(got, packed(made, SMALL)[0])


def test_one_weight_for_all_heads():
    made = draw("additive", SMALL)
    w = made["weight"][0]
    got = packed(made | {"weight": w}, SMALL)
    expected = packed(made | {"weight": w.expand(4, 8)}, SMALL)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("score", SCORES)
def test_other_options(score):
    """The mask of the same documents gives the same in the functions below."""
    made = draw(score, SMALL)
    options = dict(bias=torch.randn(4, 15, 13), softcap=2.0, sink=torch.randn(4), dropout_p=0.3)
    options |= dict(seed=1, return_lse=True)
    mask = fastattn.Mask.documents(*SMALL, length=15)
    q, k, v = (made[x].transpose(0, 1)[None] for x in ("query", "key", "value"))
    for kind in ("full", "mean"):
        out, weights, lse = fastattn.attention(
            q, k, v, score="additive" if "weight" in made else "scaled_dot", mask=mask,
            weight=made.get("weight"), enable_gqa=True, return_weights=kind, **options,
        )  # fmt: skip
        got = fastattn.varlen_attention(
            **made, cu_seqlens_q=SMALL[0], cu_seqlens_k=SMALL[1], enable_gqa=True,
            return_weights=kind, **options,
        )  # fmt: skip
        assert all(map(torch.equal, got, (out[0].transpose(0, 1), weights[0], lse[0])))
        assert not weights[0, ..., :5, 3:].any()


@pytest.mark.slow
@pytest.mark.parametrize(("score", "kind"), [("dot", torch.tensor), ("additive", list)])
def test_compiles_in_one_graph(score, kind):
    made, offsets = draw(score, SMALL), [kind(x) for x in SMALL]
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    got = derived(compiled, made, offsets, is_causal=True)
    for ours, expected in zip(got, derived(packed, made, offsets, is_causal=True), strict=True):
        torch.testing.assert_close(ours, expected)


def test_symbolic_trace_keeps_the_call():
    def call(q):
        return fastattn.varlen_attention(q, q, q, [0, 3, 8], is_causal=True, window=(1, -1))

    graph = torch.fx.symbolic_trace(call)
    assert fastattn.varlen_attention in [node.target for node in graph.graph.nodes]
    q = torch.randn(8, 2, 4)
    assert torch.equal(graph(q), call(q))


def test_arguments_stand_in_the_order_of_torch():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs = list(inspect.signature(varlen.varlen_attn).parameters)[:7]
    ours = list(inspect.signature(fastattn.varlen_attention).parameters)[:7]
    assert [x.replace("seqlens", "seq").replace("seqlen_", "") for x in ours] == theirs


class Packed(torch.nn.Module):
    def forward(self, x, cu_seqlens):
        return fastattn.varlen_attention(x, x, x, cu_seqlens, is_causal=True)


def assert_serves_any_documents(program):
    """Others than those that it was made of: more, and one alone."""
    for offsets in ([0, 2, 2, 9], [0, 4]):
        x, cu_seqlens = torch.randn(9, 2, 4), torch.tensor(offsets)
        torch.testing.assert_close(program(x, cu_seqlens), Packed()(x, cu_seqlens))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace():
    """Sizes are tensors there."""
    assert_serves_any_documents(torch.jit.trace(Packed(), (X, torch.tensor([0, 2, 5]))))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_any_documents(strict):
    rows, count = (torch.export.Dim(name, min=2, max=99) for name in ("rows", "count"))
    program = torch.export.export(
        Packed(), (X, torch.tensor([0, 2, 5])), dynamic_shapes=({0: rows}, {0: count}),
        strict=strict,
    )  # fmt: skip
    assert_serves_any_documents(program.module())


X, ONE = torch.zeros(5, 2, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(X[None], X, X, [0, 5]), ValueError, r"query: .*\[T, H, D\], .* the batch dim"),
        (lambda f: f(X, X, None, [0, 5]), TypeError, "value: expected a Tensor, got NoneType"),
        (lambda f: f(X, X, X, None), TypeError, "cu_seqlens_q: expected integers"),
        (lambda f: f(X, X, X, torch.ones(2)), TypeError, "cu_seqlens_q: .*got torch.float32"),
        (lambda f: f(X, X, X, [[0, 5]]), ValueError, "cu_seqlens_q: expected 1 dim"),
        (lambda f: f(X, X, X, [1, 5]), ValueError, "cu_seqlens_q: expected to begin with 0"),
        (lambda f: f(X, X, X, [0, 6]), ValueError, "cu_seqlens_q: .* 5 rows of query, got 6"),
        (lambda f: f(X, X[:4], X[:4], [0, 5]), ValueError, "cu_seqlens_q: .* 4 rows of key, got 5"),
        (lambda f: f(X, X, X, [0, 5], [0, 6]), ValueError, "cu_seqlens_k: .* 5 rows of key, got 6"),
        (lambda f: f(X, X, X, [0, 5], "05", bias=fastattn.ALiBi(torch.ones(2))), TypeError,
         "cu_seqlens_k: expected integers"),
        (lambda f: f(X, X, X, [0, 5], [0, 2, 5]), ValueError, "as many documents"),
        (lambda f: f(X, X, X, torch.zeros(2, dtype=torch.int32, device="meta")), ValueError,
         "cu_seqlens_q: expected a tensor on cpu, got one on meta"),
        (lambda f: f(X, X, X[:4], [0, 4]), ValueError, "expected the same length"),
        (lambda f: f(X, X[:, :1].double(), X, [0, 5]), TypeError, "key: expected the dtype"),
        (lambda f: f(torch.cat([X, X], 1), X, X, [0, 5]), ValueError, "enable_gqa=True"),
        (lambda f: f(X, X, X, [0, 5], is_causal=1), TypeError, "is_causal: expected a bool"),
        (lambda f: f(X, X, X, [0, 5], window=3), TypeError, r"window: expected \(left, right\)"),
        (lambda f: f(X, X, X, [0, 5], weight=ONE, scale=1.0), ValueError, r"write weight \* scale"),
        (lambda f: f(X, X, X, [0, 5], weight=3), TypeError, "weight: expected a Tensor"),
        (lambda f: f(X, X, X, [0, 5], backend="fpga"), ValueError, "backend: expected 'auto'"),
        (lambda f: f(X, X, X, [0, 5], causal=True), TypeError, "write is_causal=True$"),
        (lambda f: f(X, X, X, [0, 5], window_size=(3, 0)), TypeError, r"write window=\(left"),
        (lambda f: f(X, X, X, [0, 5], softmax_scale=1.0), TypeError, "write scale=$"),
        (lambda f: f(X, X, X, cu_seqlens_q=[0, 5], max_k=5), TypeError, "write max_seqlen_k=$"),
        (lambda f: f(X, X, X, [0, 5], attn_mask=X), TypeError, r"write bias=, or .*Mask.documents"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(fastattn.varlen_attention)
