"""torch.compile, torch.export, autocast, and opcheck on the operators."""

import io

import pytest
import torch
import torch._dynamo.testing
from helpers import SCORES, attend, inputs
from torch import nn

import fastattn
from fastattn import Mask, MultiheadAttention
from fastattn.problem import record
from fastattn.testing import error

pytestmark = pytest.mark.slow
scores = pytest.mark.parametrize("score", SCORES)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FEATURES = {
    "plain": {},
    "band": dict(mask=Mask("bottom_right", (2, -1)), return_weights="full", return_lse=True),
    "tensors": dict(kv_len=True, keep=True, kv_begin=True, bias=True),
    "softcap": dict(softcap=0.5, return_lse=True),
    "sink": dict(sink=True, return_weights="full", return_lse=True),
    "dropout": dict(dropout_p=0.3, seed=5, return_weights="mean", is_causal=True),
}


@pytest.fixture
def backend(backend, request):
    """Skips what the backend does not support. In code that is compiled it is too late for that."""
    score = request.node.callspec.params.get("score", "dot")
    attend(**inputs("dot" if score == "dot" else "additive"), backend=backend)
    return backend


def function(name, backend):
    """A training step as a user would compile it: f(**tensors) -> results."""
    tensors = ("kv_len", "keep", "kv_begin", "bias", "sink")
    options = {k: v for k, v in FEATURES[name].items() if k not in tensors}
    mask = options.pop("mask", Mask())

    def step(kv_len=None, keep=None, kv_begin=None, **named):
        if kv_len is not None or keep is not None:
            named["mask"] = Mask(mask.causal, mask.window, kv_len, keep, kv_begin)
        elif record.kinds(mask):
            named["mask"] = mask
        return attend(**named, backend=backend, **options)

    return step


def arguments(score, name, **sizes):
    M, N = sizes.get("M", 5), sizes.get("N", 7)
    named = inputs(score, grad=True, **sizes)
    extra = FEATURES[name]
    if extra.get("bias"):
        named["bias"] = torch.randn(2, M, N, requires_grad=True)
    if extra.get("sink"):
        named["sink"] = torch.randn(2, requires_grad=True)
    if extra.get("kv_len"):
        named["kv_len"] = torch.tensor([0, N - 1])
    if extra.get("kv_begin"):
        named["kv_begin"] = torch.arange(M)[None] // 2
    if extra.get("keep"):
        named["keep"] = torch.rand(M, N) < 0.8
    return named


def results_and_grads(step, named):
    results = step(**named)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [x for x in named.values() if x.requires_grad]
    return [*results, *torch.autograd.grad(sum(r.square().sum() for r in results), leaves)]


def assert_compiled_agrees(compiled, step, named):
    eager, ours = results_and_grads(step, named), results_and_grads(compiled, named)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize(
    ("score", "name"), [*(("dot", name) for name in FEATURES), ("additive", "tensors")]
)
def test_compiles_to_one_graph(backend, score, name):
    step = function(name, backend)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    named = arguments(score, name)
    assert_compiled_agrees(compiled, step, named)


def test_compiles_with_inductor(backend):
    """Code is generated around the operator, for one training step of a small module."""
    step = function("tensors", backend)

    def layer(query, key, value, **named):
        return step(query=query * 2, key=key + 1, value=value, **named).relu()

    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    assert_compiled_agrees(compiled, layer, arguments("dot", "tensors"))


def count_compilations(step, calls, **options):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter, **options)
    for named in calls:
        torch.testing.assert_close(compiled(**named), step(**named))
    return counter.frame_count


@scores
def test_dynamic_shapes_compile_once(backend, score):
    step = function("plain", backend)
    # All sizes differ in the first call: equal sizes would become one symbol.
    sizes = [dict(B=B, M=M, N=N) for B, M, N in [(8, 5, 7), (3, 6, 9), (4, 9, 6), (2, 8, 8)]]
    calls = [arguments(score, "plain", **s) for s in sizes]
    assert count_compilations(step, calls, dynamic=True) == 1


@pytest.mark.parametrize("mask", ["none", "dense"])
def test_lengths_of_a_relative_bias_compile_once(backend, mask):
    """Beside a dense float mask, and in eager code, a line of numbers becomes a matrix."""
    dense = mask == "dense"

    def step(q, mask):
        bias = fastattn.ALiBi(torch.tensor([0.5, 0.25]))
        return attend(q, q, q, attn_mask=mask if dense else None, bias=bias, backend=backend)

    calls = [dict(q=torch.randn(3, 2, n, 8), mask=torch.randn(n, n)) for n in (5, 7, 4, 9)]
    assert count_compilations(step, calls, dynamic=True) == 1


@pytest.mark.parametrize("given", [dict(lengths=[2, 4]), dict(cu_seqlens=(0, 2, 6))], ids=str)
def test_documents_of_a_list_have_no_length_to_read(backend, given):
    def step(q):
        return attend(q, q, q, mask=Mask.documents(**given), backend=backend)

    q = torch.randn(1, 2, 6, 8)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(q), step(q))


def test_a_scale_may_depend_on_sizes(backend):
    def step(q):
        return attend(q, q, q, scale=q.shape[-1] ** -0.5, backend=backend)

    calls = [dict(q=torch.randn(2, 3, 5, D)) for D in (8, 12, 7)]
    assert count_compilations(step, calls, dynamic=True) <= 3


@pytest.mark.parametrize(("score", "grouped"), [("dot", False), ("gaussian", False), ("dot", True)])
def test_any_number_of_heads_compiles_once(backend, score, grouped):
    """It is the batch size of calls with 3 dims."""

    def step(q, k):
        options = {"enable_gqa": grouped} if score == "dot" else {"score": score}
        return fastattn.attention(q, k, k, **options, backend=backend)

    heads = [(3 * n, n) if grouped else (n, n) for n in (5, 2, 3, 6)]
    calls = [dict(q=torch.randn(n, 7, 8), k=torch.randn(m, 9, 8)) for n, m in heads]
    assert count_compilations(step, calls, dynamic=True) == 1


@pytest.mark.parametrize("name", ["B", "H", "D"])
@scores
def test_dynamic_shapes_where_one_is_1(backend, score, name):
    """A size of 1 is a number, even if the other sizes are symbols."""
    compiled = torch.compile(
        function("plain", backend), fullgraph=True, backend="aot_eager", dynamic=True
    )
    named = inputs(score, **(dict(B=5, H=2, M=3, N=7, D=4, E=6) | {name: 1}))
    torch.testing.assert_close(compiled(**named), attend(**named, backend=backend))


def test_automatic_dynamic_shapes_settle(backend):
    """The second shape makes the sizes dynamic; later shapes compile nothing."""
    step = function("tensors", backend)
    calls = [arguments("dot", "tensors", M=M, N=N) for M, N in [(5, 7), (6, 9), (10, 8), (12, 11)]]
    assert count_compilations(step, calls) <= 2


def test_one_tensor_as_query_key_and_value(backend):
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    call = lambda x: fastattn.scaled_dot_product_attention(x, x, x, backend=backend)  # noqa: E731
    results = []
    for run in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        out = run(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize("alike", [3, 2, 1])
def test_unbatched_inputs_of_a_module_compile_once(alike):
    """``alike``: how many of query, key and value are one tensor."""
    module = MultiheadAttention(8, 2).eval()

    def step(x, y):
        return module(x, *((x, x) if alike == 3 else (y, y) if alike == 2 else (x + y, y)))[0]

    calls = [dict(x=torch.randn(n, 8), y=torch.randn(n, 8)) for n in (7, 9, 4, 12)]
    assert count_compilations(step, calls, dynamic=True) == 1


def test_gradients_under_vmap_are_left_to_eager_code(backend):
    """torch.compile would lose them: it drops the rule for vmap."""
    func, q = torch.func, torch.randn(3, 2, 5, 4)

    def call(x):
        return attend(x, x, x, backend=backend)

    def loss(x):
        return call(x).square().sum()

    mapped = func.vmap(call)
    for step in (func.vmap(func.grad(loss)), func.grad(lambda x: mapped(x).square().sum())):
        torch.testing.assert_close(torch.compile(step, backend="aot_eager")(q), step(q))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="call vmap outside torch"):
            torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    with torch.no_grad():
        compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q), mapped(q))


def test_mask_values_do_not_recompile(backend):
    def step(q, n):
        return attend(q, q, q, mask=Mask(kv_len=n), backend=backend)

    q = torch.randn(2, 2, 5, 4)
    calls = [dict(q=q, n=torch.tensor([1, n])) for n in (0, 2, 5)]
    assert count_compilations(step, calls) == 1


def test_calls_outside_do_not_recompile(backend):
    """What they leave in the table of known calls is none of compiled code's business."""
    q = torch.randn(2, 2, 5, 4)

    def outside(M):
        x = torch.randn(1, 2, M, 4)
        attend(x, x, x, bias=fastattn.ALiBi(torch.ones(2)), backend=backend)

    outside(6)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: attend(x, x, x, backend=backend), backend=counter)
    for M in (7, 8, 9):
        compiled(q)
        outside(M)
    assert counter.frame_count == 1


def test_dynamic_shapes_backward(backend):
    step = function("tensors", backend)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for M, N in [(5, 7), (9, 6)]:
        assert_compiled_agrees(compiled, step, arguments("additive", "tensors", M=M, N=N))


@torch.no_grad()
def test_a_module_for_any_number_of_tokens():
    """Without compilation, few tokens are multiplied in another way."""
    module = MultiheadAttention(12, 2, batch_first=True).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for B, N in [(2, 3), (3, 10), (4, 20)]:
        x = torch.randn(B, N, 12)
        torch.testing.assert_close(compiled(x, x, x)[0], module(x, x, x)[0])


def test_dropout_without_a_seed_draws_anew_when_compiled(backend):
    q = torch.ones(1, 1, 8, 4)

    def step(q):
        return attend(q, q, q, dropout_p=0.5, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(q), compiled(q)
    torch.manual_seed(3)
    assert torch.equal(compiled(q), first)
    assert not torch.equal(first, second)


# ---- export ----


class Block(nn.Module):
    def __init__(self, score, backend):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4)) if score == "additive" else None
        self.backend = backend

    def forward(self, query, key, value, kv_len):
        return attend(
            query, key, value, self.weight, mask=Mask(kv_len=kv_len), backend=self.backend
        )


@scores
def test_export_round_trip(backend, score):
    block = Block(score, backend)
    q, k, v = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)
    args = (q, k, v, torch.tensor([3, 7])) if score == "additive" else (
        q[:, None], k[:, None], v[:, None], torch.tensor([3, 7]))  # fmt: skip
    keys = torch.export.Dim("keys", min=2, max=100)
    dynamic = ({}, {args[1].dim() - 2: keys}, {args[2].dim() - 2: keys}, {})
    program = torch.export.export(block, args, dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(*args), block(*args))
    longer = (args[0], *(torch.cat([x, x], -2) for x in args[1:3]), torch.tensor([14, 9]))
    torch.testing.assert_close(loaded(*longer), block(*longer))


def test_export_with_any_number_of_queries():
    """The order of backends may depend on that number, and must put no guard on it."""

    class Block(nn.Module):
        def forward(self, query, key, weight):
            return fastattn.additive_attention(query, key, key, weight)

    args = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(4)
    queries = torch.export.Dim("queries", min=2, max=100)
    program = torch.export.export(Block(), args, dynamic_shapes=({1: queries}, {}, {}))
    for M in (5, 40):
        query = torch.randn(2, M, 4)
        found = program.module()(query, *args[1:])
        torch.testing.assert_close(
            found, fastattn.additive_attention(query, *args[1:2] * 2, args[2])
        )


# ---- autocast ----


@scores
def test_autocast_computes_in_its_dtype(backend, score):
    named = inputs(score, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(**named, backend=backend)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert {x.grad.dtype for x in named.values()} == {torch.float32}
    half = {name: x.detach().bfloat16() for name, x in named.items()}
    assert error(out, attend(**half, backend=backend)) == 0


def test_autocast_leaves_float64_and_mixed_dtypes_meet(backend):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4).bfloat16()
        assert attend(q, k, k, backend=backend).dtype == torch.bfloat16
        double = torch.randn(1, 2, 5, 4, dtype=torch.float64)
        assert attend(double, double, double).dtype == torch.float64


def test_autocast_takes_a_float32_mask(backend):
    mask = torch.randn(5, 7, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(**inputs(), attn_mask=mask, backend=backend)
    out.float().square().sum().backward()
    assert mask.grad.dtype == torch.float32
    assert mask.grad.abs().max() > 0


def test_autocast_off_inside(backend):
    named = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        found = attend(**named, backend=backend)
    assert torch.equal(found, attend(**named, backend=backend))
