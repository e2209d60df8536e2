"""Garbage in masked or unused memory reaches no result; NaN in use reaches exactly its users."""

import math

import pytest
import torch
from helpers import SCORES, assert_same_bits, attend, everything, inputs

from fastattn import Mask, testing
from fastattn.problem import validate

B, H, M, N, D, E = 2, 2, 9, 21, 4, 3
scores = pytest.mark.parametrize("score", SCORES)
# The last value is always finite. It would make the additive score choose another computation.
GARBAGE = [math.nan, math.inf, -math.inf, 3e38, 1e4]
garbage = pytest.mark.parametrize("garbage", GARBAGE)

j = torch.arange(N)
# Masks that leave whole keys unused: options, and [B, N] or [N] bool of the used keys.
MASKS = {
    "kv-len": (dict(mask=Mask(kv_len=torch.tensor([5, 17]))), j < torch.tensor([[5], [17]])),
    "kv-len-0": (dict(mask=Mask(kv_len=torch.tensor([0, 21]))), j < torch.tensor([[0], [21]])),
    "kv-begin": (dict(mask=Mask(kv_begin=[5, 17])), j >= torch.tensor([[5], [17]])),
    "intervals": (
        dict(mask=Mask(kv_begin=[[7, 3, 20, 9] * 2 + [21]], kv_len=[[9, 5, 20, 12] * 2 + [21]])),
        (j > 2) & (j < 12) & (j != 5) & (j != 6),
    ),
    "causal": (dict(is_causal=True), j < M),
    "window": (dict(mask=Mask(window=(3, 2))), j < M + 2),
    "window-right": (dict(mask=Mask("bottom_right", (4, -1))), j > N - M - 5),
    "keep": (dict(mask=Mask(keep=j % 3 != 1)), j % 3 != 1),
    "keep-dense": (dict(mask=Mask(keep=(j % 3 != 1).expand(B, H, M, N).clone())), j % 3 != 1),
    "bias": (dict(bias=torch.where(j % 4 == 2, -math.inf, 0.3)), j % 4 != 2),
    "float-mask": (dict(attn_mask=torch.where(j < 6, 0.0, -math.inf).expand(M, N)), j < 6),
    "both": (dict(mask=Mask(kv_len=torch.tensor([18, 9]), keep=j > 2), is_causal=True),
             (j > 2) & (j < M)),
}  # fmt: skip
masks = pytest.mark.parametrize("name", MASKS)


def cast(named, dtype):
    """The float tensors of a call in another dtype; unchanged for None."""
    return {
        name: x.to(dtype) if dtype and isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in named.items()
    }


def spoilt(call, used, value):
    """The call with `value` in all elements of unused keys and values."""
    unused = ~used.expand(B, N)[:, None].expand(B, H, N)
    call = {name: x.clone() for name, x in call.items()}
    call["key"][unused] = call["value"][unused] = value
    return call


def assert_unchanged(run, backend, value):
    """run(backend, value, dtype) does not depend on value.

    Results are equal to the last bit. GPU kernels take a careful way where they find garbage: their
    results are within the budget.
    """
    clean, found = run(backend, 0.0, None), run(backend, value, None)
    assert clean["out"].isfinite().all()
    if backend in ("eager", "cpu"):
        assert_same_bits(found, clean)
        return
    truth = run("eager", 0.0, torch.float64)
    for name, x in found.items():
        testing.assert_within_budget(x, clean[name], truth[name], name)


@masks
@garbage
@scores
def test_unused_keys_reach_nothing(backend, score, name, garbage):
    options, used = MASKS[name]
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)

    def run(backend, value, dtype):
        return everything(
            cast(spoilt(call, used, value), dtype), backend=backend, **cast(options, dtype)
        )

    assert_unchanged(run, backend, garbage)


# Spread of the keys: moderate, large, and so large that each pair needs its own exponential.
@pytest.mark.parametrize("spread", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("name", ["kv-len", "keep", "bias"])
def test_garbage_chooses_no_way_of_computing_tanh(isa, name, spread):
    """Additive tiles are computed in one of three ways. The keys that their rows keep decide."""
    M, N = 130, 200
    used = (torch.arange(N) < 195) & (torch.arange(N) % 7 != 3)
    keep = (torch.rand(B, H, M, N) < 0.8) & used
    options = {
        "kv-len": dict(mask=Mask(kv_len=torch.tensor([195, 130]), keep=used)),
        "keep": dict(mask=Mask(keep=keep)),
        "bias": dict(bias=torch.where(used, 0.5, -math.inf).expand(M, N)),
    }[name]
    call = inputs("additive", B, H, M=M, N=N, D=D, E=E)
    call["key"] *= spread
    clean = everything(call, backend="cpu", **options)
    for value in (6.0, 20.0, 1e4, math.inf, math.nan):
        spoilt_call = call | {"key": call["key"].masked_fill(~used[:, None], value)}
        assert_same_bits(everything(spoilt_call, backend="cpu", **options), clean)


def test_far_keys_of_other_rows_are_not_noticed_for_threads(isa, set_threads):
    """The number of row blocks that a task takes through a tile of keys depends on the threads."""
    call = inputs("additive", B, H, M=300, N=128, D=D, E=E)
    call["key"][:, :, 50] = 20.0  # kept by the first block of rows only
    lengths = torch.where(torch.arange(300) < 64, 128, 30).expand(B, 300)
    found = []
    for threads in (1, 16):
        set_threads(threads)
        found.append(everything(call, mask=Mask(kv_len=lengths), backend="cpu"))
    assert_same_bits(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@masks
@scores
def test_unused_keys_reach_nothing_in_half(backend, score, name, dtype):
    options, used = MASKS[name]
    options = {n: x.to(dtype) if n == "bias" else x for n, x in options.items()}
    call = inputs(score, B, H, M=M, N=N, D=D, E=E, dtype=dtype)

    def run(backend, value, dtype):
        return everything(
            cast(spoilt(call, used, value), dtype), backend=backend, **cast(options, dtype)
        )

    for value in (math.nan, torch.finfo(dtype).max):
        assert_unchanged(run, backend, value)


@masks
@scores
def test_unused_keys_reach_no_second_derivative(score, name):
    options, used = MASKS[name]
    call = inputs(score, B, H, M=M, N=N, D=D, E=E, dtype=torch.float64)
    options = {n: x.double() if n in ("bias", "attn_mask") else x for n, x in options.items()}

    def second(value):
        leaves = {n: x.requires_grad_() for n, x in spoilt(call, used, value).items()}
        loss = attend(**leaves, **options).square().sum()
        first = torch.autograd.grad(loss, leaves.values(), create_graph=True)
        loss = sum(torch.nan_to_num(g).square().sum() for g in first)
        return dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))

    assert_same_bits(second(math.nan), second(0.0))


@garbage
@scores
def test_queries_without_keys_reach_nothing(backend, score, garbage):
    kv_len = torch.randint(1, N, (B, M))
    kv_len[:, ::3] = 0

    def run(value):
        call = inputs(score, B, H, M=M, N=N, D=D, E=E)
        call["query"][:, :, ::3] = value
        return everything(call, mask=Mask(kv_len=kv_len), backend=backend)

    torch.manual_seed(0)
    clean = run(0.0)
    torch.manual_seed(0)
    assert_same_bits(run(garbage), clean)


@garbage
@scores
def test_queries_without_keys_reach_nothing_beside_heads_without_a_mask(backend, score, garbage):
    """Keys that several heads share: one of these masks nothing."""
    keep = torch.ones(1, 2, 3, N, dtype=torch.bool)
    keep[0, 0, 1] = False

    def run(value):
        call = inputs(score, 1, 2, Hkv=1, M=3, N=N, D=D, E=E)
        call["query"][0, 0, 1] = value
        return everything(call, mask=Mask(keep=keep), backend=backend)

    torch.manual_seed(0)
    clean = run(0.0)
    torch.manual_seed(0)
    assert_same_bits(run(garbage), clean)


def surrounded(x, value):
    """x as a part of a larger tensor, with `value` everywhere else."""
    padded = x.new_full([s + 3 for s in x.shape], value)
    view = padded[tuple(slice(1, 1 + s) for s in x.shape)]
    return view.copy_(x)


@pytest.mark.parametrize("sizes", [(9, 21, 4, 3), (1, 70, 17, 5), (33, 65, 31, 40)], ids=str)
@scores
def test_memory_around_slices_is_not_used(backend, score, sizes):
    m, n, d, e = sizes
    call = inputs(score, B, H, M=m, N=n, D=d, E=e)
    call |= {"bias": torch.randn(H, m, n)}
    keep, grad_out = torch.rand(B, H, m, n) < 0.8, torch.randn(B, H, m, e)
    kv_len = torch.randint(0, n + 1, (B, m))

    def run(value):
        around = {name: surrounded(x, value) for name, x in call.items()}
        mask = Mask(keep=surrounded(keep, True), kv_len=surrounded(kv_len, n))
        named = {name: x for name, x in around.items() if name != "bias"}
        upstream = surrounded(grad_out, value)
        return everything(named, upstream, bias=around["bias"], mask=mask, backend=backend)

    assert_same_bits(run(math.nan), run(0.0))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@scores
def test_a_bias_is_masked_where_another_is(backend, score, garbage):
    """attn_mask or bias holds the -inf, and the other one holds garbage there."""
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    hidden = torch.rand(M, N) < 0.4
    mask, bias = torch.randn(M, N).masked_fill(hidden, -math.inf), torch.randn(H, M, N)
    spoilt_bias = bias.masked_fill(hidden, garbage)
    clean = everything(call, attn_mask=mask, bias=bias, backend=backend)
    found = everything(call, attn_mask=mask, bias=spoilt_bias, backend=backend)
    assert_same_bits(found, clean)
    other = everything(call, attn_mask=spoilt_bias, bias=mask, backend=backend)
    for name in set(clean) - {"grad_bias"}:
        torch.testing.assert_close(other[name], clean[name])
    assert not other["grad_bias"].isnan().any()


# ---- NaN in use ----


def kept_by(options):
    q, kv = torch.zeros(B, H, M, D), torch.zeros(B, H, N, D)
    p = validate.build("dot", q, kv, kv, **options).p
    return p.kept().expand(B, H, M, N)


SPARSE = dict(
    mask=Mask(keep=(torch.arange(M)[:, None] + 2 * j) % 5 < 2, kv_len=torch.tensor([9, 21]))
)


def compare(score, backend, name, index, **options):
    """(clean results, results with one NaN, the pairs that are kept)."""
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    clean = everything(call, backend=backend, **SPARSE, **options)
    call[name][index] = math.nan
    return clean, everything(call, backend=backend, **SPARSE, **options), kept_by(SPARSE)


def assert_nan_exactly(found, clean, where, name):
    where = where.expand(found.shape)
    assert found[where].isnan().all(), f"{name}: not NaN where it must be"
    torch.testing.assert_close(found[~where], clean[~where], msg=lambda m: f"{name}: {m}")


@scores
def test_nan_in_a_key_reaches_the_rows_that_keep_it(backend, score):
    clean, found, kept = compare(score, backend, "key", (1, 0, 3, 2))
    users = torch.zeros(B, H, M, dtype=torch.bool)
    users[1, 0] = kept[1, 0, :, 3]
    assert 0 < users.sum() < M
    for name in ("out", "grad_query"):
        assert_nan_exactly(found[name], clean[name], users[..., None], name)
    assert_nan_exactly(found["lse"], clean["lse"], users, "lse")
    # Keys that a row with NaN keeps have NaN gradients; others must not.
    spoilt_keys = (kept & users[..., None]).any(2)
    for name in ("grad_key", "grad_value"):
        assert_nan_exactly(found[name], clean[name], spoilt_keys[..., None], name)


def assert_nan_in_a_query_stays_in_its_row(backend, score, **options):
    clean, found, kept = compare(score, backend, "query", (0, 1, 4, 0), **options)
    row = torch.zeros(B, H, M, dtype=torch.bool)
    row[0, 1, 4] = True
    assert kept[0, 1, 4].any()
    for name in ("out", "grad_query"):
        assert_nan_exactly(found[name], clean[name], row[..., None], name)
    keys = (kept & row[..., None]).any(2)
    for name in ("grad_key", "grad_value"):
        assert_nan_exactly(found[name], clean[name], keys[..., None], name)


@scores
def test_nan_in_a_query_stays_in_its_row(backend, score):
    assert_nan_in_a_query_stays_in_its_row(backend, score)


@scores
def test_nan_in_a_query_stays_in_its_row_under_a_softcap(backend, score):
    assert_nan_in_a_query_stays_in_its_row(backend, score, softcap=2.0)


# Quiet and signalling NaN of either sign, and memory with all bytes 0xff.
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1])
@pytest.mark.parametrize("name", ["query", "key", "bias"])
@scores
def test_nan_of_any_bits_stays_nan(isa, score, name, bits):
    # Exponentials are assembled from bits.
    call = inputs(score, B, H, M=M, N=N, D=D, E=E) | {"bias": torch.zeros(B, H, M, N)}
    call[name].view(torch.int32)[..., 3, :] = bits
    hit = attend(**call, backend="cpu").isnan()
    rows = torch.arange(M) == 3 if name != "key" else torch.ones(M, dtype=torch.bool)
    assert_same_bits({"hit": hit}, {"hit": rows[:, None].expand(B, H, M, E)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_whose_scores_are_minus_infinity_has_no_gradient(backend, dtype):
    call = inputs("dot", B, H, M=M, N=N, D=D, E=E, dtype=dtype)
    call["query"] = call["query"].abs() + 0.1
    call["key"][:, :, 3] = -math.inf
    found = everything(call, backend=backend)
    assert (found["grad_key"][:, :, 3] == 0).all()
    assert (found["grad_value"][:, :, 3] == 0).all()


@scores
def test_nan_in_a_query_spares_the_keys_past_the_length(backend, score):
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    call["query"][0, 1, 4, 0] = math.nan
    options, used = MASKS["kv-len"]
    found = everything(call, backend=backend, **options)
    unused = ~used[:, None].expand(B, H, N)
    assert found["out"][0, 1, 4].isnan().all()
    for name in ("grad_key", "grad_value"):
        assert (found[name][unused] == 0).all(), name


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@scores
def test_nan_or_infinity_in_a_value_reaches_its_column_in_the_rows_that_keep_it(
    backend, score, special
):
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    clean = attend(**call, backend=backend, **SPARSE)
    call["value"][1, 1, 6, 2] = special
    found = attend(**call, backend=backend, **SPARSE)
    where = torch.zeros(B, H, M, E, dtype=torch.bool)
    where[1, 1, :, 2] = kept_by(SPARSE)[1, 1, :, 6]
    assert 0 < where.sum() < M
    torch.testing.assert_close(found[where], torch.full_like(found[where], special), equal_nan=True)
    torch.testing.assert_close(found[~where], clean[~where])


@pytest.mark.parametrize("rows", [M, 40])  # which the CPU reads in place, or packs
@scores
def test_nan_reaches_the_rows_that_keep_it_where_its_weight_is_0(backend, score, rows):
    """Whatever other rows of a tile keep. A key that no row keeps stays apart."""
    call, upstream = inputs(score, B, H, M=rows, N=N, D=D, E=E), torch.randn(B, H, rows, E)
    kept = torch.ones(rows, N, dtype=torch.bool)
    kept[::2, 6] = kept[:, 7] = kept[4] = False
    call["value"][..., 6:8, 2] = upstream[..., 4:6, 1] = math.nan
    options = dict(bias=torch.where(j == 6, -1e4, 0.0), mask=Mask(keep=kept), backend=backend)
    found = everything(call, upstream, **options)
    assert torch.equal(found["out"][..., 2].isnan(), kept[:, 6].expand(B, H, rows))
    assert torch.equal(found["grad_value"][..., 1].isnan(), kept[5].expand(B, H, N))


@scores
def test_nan_in_a_bias_stays_in_its_row(backend, score):
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    bias = torch.zeros(B, H, M, N)
    clean = everything(call, bias=bias, backend=backend)
    spoilt_bias = bias.clone()
    spoilt_bias[0, 0, 2, 5] = math.nan
    found = everything(call, bias=spoilt_bias, backend=backend)
    row = torch.zeros(B, H, M, dtype=torch.bool)
    row[0, 0, 2] = True
    for name in ("out", "grad_query"):
        assert_nan_exactly(found[name], clean[name], row[..., None], name)


@scores
def test_nan_upstream_stays_in_its_row(backend, score):
    call = inputs(score, B, H, M=M, N=N, D=D, E=E)
    upstream = torch.randn(B, H, M, E)
    clean = everything(call, upstream, backend=backend, **SPARSE)
    spoilt_upstream = upstream.clone()
    spoilt_upstream[1, 0, 4] = math.nan
    found = everything(call, spoilt_upstream, backend=backend, **SPARSE)
    row = torch.zeros(B, H, M, dtype=torch.bool)
    row[1, 0, 4] = True
    assert_nan_exactly(found["grad_query"], clean["grad_query"], row[..., None], "grad_query")
    keys = (kept_by(SPARSE) & row[..., None]).any(2)
    for name in ("grad_key", "grad_value"):
        assert_nan_exactly(found[name], clean[name], keys[..., None], name)
