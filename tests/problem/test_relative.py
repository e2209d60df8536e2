"""Biases of head and distance: what their numbers are, which calls take them, what is refused."""

import math

import pytest
import torch
from helpers import BACKENDS, SCORES, assert_same_bits, attend, inputs

import fastattn
from fastattn import ALiBi, Mask, RelativeBias
from fastattn.backends import registry
from fastattn.problem import relative, validate

H = 2
SLOPES = torch.tensor([0.5, 0.125])
TABLE = torch.linspace(-1, 2, 7 * H).view(7, H)


def distances(M, N, offset=0):
    return torch.arange(N) - torch.arange(M)[:, None] - offset


def biases(offset=0):
    """One of each kind by name, and its matrix as the definition has it."""
    return {
        "alibi": (ALiBi(SLOPES, offset), lambda d: -SLOPES[:, None, None] * d.abs()),
        "relative": (
            RelativeBias(TABLE, torch.arange(7), offset),
            lambda d: TABLE[d.clamp(-3, 3) + 3].permute(2, 0, 1),
        ),
    }


KINDS = pytest.mark.parametrize("kind", biases())


@KINDS
@pytest.mark.parametrize(("M", "N"), [(5, 9), (9, 5), (1, 7), (7, 1), (0, 3), (3, 0), (1, 1)])
def test_numbers(kind, M, N):
    bias, formula = biases(offset=-2)[kind]
    assert torch.equal(bias.to_dense(M, N)[0], formula(distances(M, N, -2)))


def test_a_line_and_its_matrix_are_transposes():
    line, x = torch.randn(2, 3, 1, 10), torch.randn(2, 3, 4, 7)
    assert relative.is_line(line, 4, 7)
    assert not relative.is_line(line, 1, 10)  # the row of a single query
    a = (relative.spread(line, 4, 7) * x).sum()
    torch.testing.assert_close((line * relative.diagonal_sums(x)).sum(), a)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (16, 100), (8, 1000), (33, 129)])
def test_t5_buckets(count, most, bidirectional):
    """Bucket exact + k begins at exact * (most / exact)^(k / coarse), here in whole numbers."""
    size = count // 2 if bidirectional else count
    exact = size // 2
    coarse = size - exact

    def bucket(d):
        far = abs(d) if bidirectional else max(-d, 0)
        steps = [k for k in range(coarse) if far**coarse * exact**k >= exact**coarse * most**k]
        own = far if far < exact else exact + max(steps)
        return own + (size if bidirectional and d > 0 else 0)

    found = RelativeBias.t5_buckets(count, most, bidirectional=bidirectional)
    assert found.tolist() == [bucket(d) for d in range(-most, most + 1)]


def test_t5_buckets_of_another_default_dtype():
    expected, before = RelativeBias.t5_buckets(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(RelativeBias.t5_buckets(), expected)
    finally:
        torch.set_default_dtype(before)


# ---- calls ----


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("score", SCORES)
@KINDS
def test_is_the_matrix(kind, score, backend):
    call = inputs(score, M=33, N=70)
    bias = biases(offset=3)[kind][0]
    mask = Mask(causal="bottom_right")
    found = attend(**call, bias=bias, mask=mask, backend=backend)
    dense = attend(**call, bias=bias.to_dense(33, 70), mask=mask, backend=backend)
    torch.testing.assert_close(found, dense)


@KINDS
def test_other_functions(kind):
    bias = biases()[kind][0]
    q, k, v = inputs().values()
    for score in ("dot", "cosine", "gaussian"):
        found, dense = (
            fastattn.attention(q, k, v, score=score, bias=b) for b in (bias, bias.to_dense(5, 7))
        )
        torch.testing.assert_close(found, dense)


def test_without_a_head_dim():
    q, k, v, w = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3), torch.randn(4)
    bias = ALiBi(torch.tensor([0.5]))
    found = fastattn.additive_attention(q, k, v, w, bias=bias)
    dense = fastattn.additive_attention(q, k, v, w, bias=bias.to_dense(5, 7)[:, 0])
    torch.testing.assert_close(found, dense)


@KINDS
def test_documents(kind):
    bias = biases()[kind][0]
    q, k, v = (torch.randn(12, H, 4) for _ in range(3))
    found = fastattn.varlen_attention(q, k, v, [0, 5, 5, 12], is_causal=True, bias=bias)
    for lo, hi in ((0, 5), (5, 12)):
        one = [x[lo:hi].transpose(0, 1) for x in (q, k, v)]
        alone = fastattn.scaled_dot_product_attention(*one, is_causal=True, bias=bias)
        torch.testing.assert_close(found[lo:hi].transpose(0, 1), alone)
    same = fastattn.varlen_attention(
        q, k, v, [0, 5, 12], torch.tensor([0, 5, 12]).int(), is_causal=True, bias=bias
    )
    torch.testing.assert_close(same, found)
    with pytest.raises(ValueError, match=r"^bias: a line .* leave cu_seqlens_k out"):
        fastattn.varlen_attention(q, k, v, [0, 5, 12], [0, 6, 12], bias=bias)


def test_jagged():
    documents = [torch.randn(n, H, 4) for n in (3, 6)]
    x = torch.nested.nested_tensor(documents, layout=torch.jagged).transpose(1, 2)
    bias = ALiBi(SLOPES)
    found = fastattn.scaled_dot_product_attention(x, x, x, bias=bias).unbind()
    for one, out in zip(documents, found, strict=True):
        q = one.transpose(0, 1)
        torch.testing.assert_close(out, fastattn.scaled_dot_product_attention(q, q, q, bias=bias))


@KINDS
def test_decoding_sees_the_last_row(kind):
    q, k, v = inputs(M=7, N=7).values()
    whole = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, bias=biases()[kind][0])
    last = fastattn.scaled_dot_product_attention(
        q[:, :, 6:], k, v, bias=biases(offset=7 - 1)[kind][0]
    )
    torch.testing.assert_close(last, whole[:, :, 6:])
    few = fastattn.scaled_dot_product_attention(
        q[:, :, 4:], k, v, mask=Mask(causal="bottom_right"), bias=biases(offset=7 - 3)[kind][0]
    )
    torch.testing.assert_close(few, whole[:, :, 4:])


def test_memory_is_that_of_a_line():
    q = torch.empty(1, H, 1000, 4)
    made = validate.build("dot", q, q, q, bias=RelativeBias(TABLE, torch.arange(7))).bias
    assert made.untyped_storage().nbytes() == H * 1999 * 4


# ---- derivatives ----


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_repeat(threads, set_threads):
    call = inputs(B=3, M=100, N=700)

    def gradients(count):
        set_threads(count)
        table, slopes = TABLE.clone().requires_grad_(), SLOPES.clone().requires_grad_()
        for bias in (ALiBi(slopes), RelativeBias(table, torch.arange(7))):
            attend(**call, bias=bias).square().sum().backward()
        return {"table": table.grad, "slopes": slopes.grad}

    assert_same_bits(gradients(threads), gradients(1))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("shape", [(1, 1), (1, H), (2, 1), (2, H)])
def test_an_operator_takes_lines_that_broadcast(shape, backend):
    """Functions give every sample and head a line."""
    if backend == "eager":
        pytest.skip("has no operator")
    dtype = torch.float16 if backend == "cuda" else torch.float32
    q, k, v = (torch.randn(2, H, n, 4).to(dtype) for n in (70, 33, 33))
    line = torch.randn(*shape, 1, 102, requires_grad=True)
    dense = relative.spread(line, 70, 33)
    p = validate.build("dot", q, k, v).p
    results = []
    for b in (line, dense):
        out, _, _, stats = registry.get(backend).forward(p, q, k, v, None, b.detach())
        grads = registry.get(backend).backward(
            p, q, k, v, None, b.detach(), out, stats, torch.ones_like(out), None, None, True
        )
        results.append((out, grads[4]))
    (out, found), (dense_out, grad) = results
    torch.testing.assert_close(out, dense_out)
    torch.testing.assert_close(found, torch.autograd.grad(dense, line, grad)[0])


@KINDS
def test_derivatives(kind):
    call = inputs(B=1, M=2, N=3, D=2, dtype=torch.float64, grad=True)
    x = (SLOPES if kind == "alibi" else TABLE).double().requires_grad_()

    def function(q, k, v, x):
        bias = ALiBi(x) if kind == "alibi" else RelativeBias(x, torch.arange(7))
        return attend(q, k, v, bias=bias, mask=Mask(causal="bottom_right"))

    assert torch.autograd.gradcheck(function, (*call.values(), x), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (*call.values(), x))


def test_vmap():
    q, k, v = inputs(M=5, N=7).values()
    slopes = torch.stack([SLOPES, 2 * SLOPES])

    def loss(slopes, q):
        return attend(q, k, v, bias=ALiBi(slopes)).square().sum()

    found = torch.vmap(torch.func.grad(loss))(slopes, torch.stack([q, q]))
    wanted = torch.stack([torch.func.grad(loss)(x, q) for x in slopes])
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic):
    torch._dynamo.reset()
    table = TABLE.clone().requires_grad_()

    def step(q, k, v, slopes, table):
        far = fastattn.scaled_dot_product_attention(q, k, v, bias=ALiBi(slopes, k.shape[2]))
        bias = RelativeBias(table, torch.arange(7))
        return far + fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, bias=bias)

    args = *inputs(M=5, N=7, grad=True).values(), SLOPES.clone().requires_grad_(), table
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found, wanted = compiled(*args), step(*args)
    torch.testing.assert_close(found, wanted)
    pulled = [torch.autograd.grad(x.square().sum(), args) for x in (found, wanted)]
    for a, b in zip(*pulled, strict=True):
        torch.testing.assert_close(a, b)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (ALiBi(torch.ones(3)), ValueError, r"bias.slopes: expected 2 heads, got \[3\]"),
        (ALiBi(torch.ones(5, H)), ValueError, r"bias.slopes: expected 2 heads, got \[5, 2\]"),
        (ALiBi(torch.ones(H).double()), TypeError, r"bias.slopes: expected dtype float32"),
        (RelativeBias(TABLE, torch.arange(9)), ValueError, r"rows of a table of 7, got 0 to 8"),
        (RelativeBias(TABLE.T, torch.arange(1)), ValueError, r"bias.table: expected 2 heads"),
        (ALiBi, TypeError, r"bias: expected a Tensor, an ALiBi or a RelativeBias, got type"),
        (0.5, TypeError, r"bias: expected a Tensor, an ALiBi or a RelativeBias, got float"),
    ],
)  # fmt: skip
def test_bad_biases(bias, error, message):
    with pytest.raises(error, match=message):
        attend(**inputs(), bias=bias)


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (ALiBi, (1.0,), TypeError, r"bias.slopes: expected a Tensor, got float"),
        (ALiBi, ([0.5, 0.25],), TypeError, r"bias.slopes: expected a Tensor, got list"),
        (ALiBi, (torch.ones(()),), ValueError, r"bias.slopes: expected \[H\] or \[B, H\]"),
        (ALiBi, (SLOPES, 0.5), TypeError, r"bias.offset: expected an int, got float"),
        (ALiBi, (SLOPES, 2**70), ValueError, r"bias.offset: expected an int of 32 bits"),
        (ALiBi, (SLOPES, True), TypeError, r"bias.offset: expected an int, got bool"),
        (RelativeBias, ("x", torch.arange(7)), TypeError, r"bias.table: expected a Tensor, got s"),
        (RelativeBias, (TABLE[0], torch.arange(7)), ValueError, r"bias.table: expected \[buckets"),
        (RelativeBias, (TABLE, torch.arange(6)), ValueError, r"bias.buckets: .* \[2 R \+ 1\]"),
        (RelativeBias, (TABLE, torch.ones(7)), TypeError, r"bias.buckets: .* integers, got torch"),
        (RelativeBias, (TABLE, torch.arange(7, device="meta")), ValueError,
         r"bias.buckets: expected the device of the table, cpu, got meta"),
    ],
)  # fmt: skip
def test_bad_biases_when_they_are_made(make, given, error, message):
    with pytest.raises(error, match=message):
        make(*given)


def test_a_parameter_is_checked_again_where_it_is_used():
    bias = ALiBi(torch.ones(H))
    bias.slopes.resize_(1, 1, H)
    with pytest.raises(ValueError, match=r"bias.slopes: expected \[H\] or \[B, H\]"):
        bias.to_dense(2, 2)


def test_a_proxy_stands_for_a_tensor():
    def call(q, slopes):
        return fastattn.scaled_dot_product_attention(q, q, q, bias=ALiBi(slopes))

    q = torch.randn(1, H, 3, 4)
    traced = torch.fx.symbolic_trace(call)
    assert torch.equal(traced(q, SLOPES), call(q, SLOPES))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (dict(max_distance=2**40), ValueError),
        (dict(count=True), TypeError),
        (dict(count=3), ValueError),
        (dict(max_distance=8), ValueError),
        (dict(bidirectional=1), TypeError),
    ],
)
def test_bad_buckets(call, error):
    with pytest.raises(error, match=f"^{next(iter(call))}: expected"):
        RelativeBias.t5_buckets(**call)


def test_minus_infinity_masks():
    q, k, v = inputs(M=3, N=70).values()
    table = TABLE.clone()
    table[3:] = -math.inf
    k[:, :, 3:] = v[:, :, 3:] = math.nan  # every query drops all keys from its own on
    out = attend(q, k, v, bias=RelativeBias(table, torch.arange(7)))
    assert not out[:, :, 0].any()
    assert out.isfinite().all()
