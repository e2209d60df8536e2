"""Two forms of one problem give one result. This file contains no formula of attention.

Results are equal to the last bit if both forms are the same work for the kernels. Elsewhere the
second form must meet the error budget of the first: a mask, for example, that of a problem without
one.
"""

import dataclasses
import functools
import math

import pytest
import torch

import fastattn
from fastattn import Mask, testing
from fastattn.testing import Case, Tensors, assert_same_bits

pytestmark = pytest.mark.usefixtures("extension")

SCORES = ("dot", "additive", "cosine", "gaussian")
# One query, less than a tile, full tiles, tiles and tails: with and without dropout.
SIZES = [
    dict(M=1, N=70, D=8),
    dict(M=1, N=600, D=33, dropout_p=0.3),
    dict(M=7, N=13, D=5, dropout_p=0.3),
    dict(M=64, N=128, D=16),
    dict(M=33, N=130, D=40, dropout_p=0.3),
    dict(M=70, N=65, D=24, dtype=torch.bfloat16),
]
PROBLEMS = [
    Case("-".join(map(str, sizes.values())), score, H=4, Hkv=2, E=9, weights="full", lse=True,
         **sizes)
    for score in SCORES for sizes in SIZES
]  # fmt: skip
FORWARD = ("out", "weights", "lse")
# Up to this many keys, one task makes their gradients. More are cut by the number of heads.
CHUNK = 192
problems = pytest.mark.parametrize("case", PROBLEMS, ids=str)


change = dataclasses.replace


def problems_with(**changes):
    """The problems with other features."""
    cases = [change(case, **changes) for case in PROBLEMS]
    return pytest.mark.parametrize("case", cases, ids=str)


def masked(t: Tensors, **how) -> Tensors:
    return change(t, mask=Mask(**how))


@functools.cache
def drawn(case: Case) -> Tensors:
    return testing.make(case)


def run(case: Case, t: Tensors) -> dict[str, torch.Tensor]:
    return testing.run(case, t, "cpu")


def without(results: dict, *names: str) -> dict:
    return {name: x for name, x in results.items() if name not in names}


def named(case: Case, t: Tensors) -> dict:
    """The arguments of ``fastattn.attention`` that depend on the score, but q, k and v."""
    own = {"additive": dict(weight=t.w), "gaussian": dict(bandwidth=t.bandwidth)}
    grouped = {} if case.score == "additive" else dict(enable_gqa=True)
    score = "scaled_dot" if case.score == "dot" else case.score
    return dict(score=score, **grouped, **own.get(case.score, {}))


def assert_budget(case: Case, t: Tensors, found: dict, others: dict | None = None) -> None:
    """The results of another form, some maybe missing, meet the budget of this problem.

    With ``others``, they differ from those by no more than this budget, either.
    """
    oracle = testing.oracle(case, t)
    for name, x in found.items():
        truth, peer, scale = oracle[name]
        if others is not None:
            y = others[name]
            apart = torch.where(x == y, truth, truth + x.double() - y.double())
            testing.assert_within_budget(apart, peer, truth, f"{case} {name}, of others", scale)
        testing.assert_within_budget(x, peer, truth, f"{case} {name}", scale)


def assert_alike(case: Case, t: Tensors, found: dict, expected: dict) -> None:
    """The same bits. Of AMX the same numbers: its tiles depend on the mask, and parts on sizes."""
    if torch.ops.fastattn.cpu_isa().startswith("amx"):
        assert_budget(case, t, found, expected)
    else:
        assert_same_bits(found, expected)


# ---- masks with the same meaning ----


def ones(*shape: int):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("way", [
    lambda c, t: masked(t, keep=ones(c.B, c.H, c.M, c.N)),
    lambda c, t: masked(t, keep=ones(c.N)),
    lambda c, t: masked(t, kv_len=torch.full((c.B,), c.N)),
    lambda c, t: masked(t, kv_len=torch.full((c.B, c.M), c.N)),
    lambda c, t: masked(t, kv_begin=torch.zeros(1, c.M, dtype=torch.int64)),
    lambda c, t: masked(t, window=(c.M, c.N)),
    lambda c, t: masked(t, window=(-1, -1)),
    lambda c, t: change(t, attn_mask=ones(c.M, c.N)),
], ids=["keep", "keep-n", "lengths", "lengths-m", "begins", "window", "open", "dense"])  # fmt: skip
@problems
def test_a_mask_that_keeps_all_is_none(case, way):
    t = drawn(case)
    assert_alike(case, t, run(case, way(case, t)), run(case, t))


def pairs(case: Case, *shape: int):
    """True for two pairs in three, always for the first key."""
    rng = torch.Generator().manual_seed(case.seed)
    kept = torch.rand(shape, generator=rng) < 0.67
    kept[..., 0] = True
    return kept


@pytest.mark.parametrize("dims", ["bhmn", "mn", "n"])
@problems
def test_minus_infinity_masks_as_false_does(case, dims):
    t = drawn(case)
    sizes = dict(b=case.B, h=case.H, m=case.M, n=case.N)
    keep = pairs(case, *(sizes[d] for d in dims))
    added = torch.zeros(keep.shape, dtype=case.dtype).masked_fill(~keep, -math.inf)
    ways = [
        masked(t, keep=keep), change(t, attn_mask=keep), change(t, attn_mask=added),
        change(t, bias=added),
    ]  # fmt: skip
    first, same, *biased = (without(run(case, x), "grad_bias", "grad_attn_mask") for x in ways)
    assert_same_bits(same, first)
    assert_same_bits(*biased)
    # A score that a bias is added to is scaled before, and others are scaled as differences.
    assert_budget(case, masked(t, keep=keep), biased[0])


@problems_with(bias="hmn")
def test_a_float_attn_mask_is_a_bias(case):
    t = drawn(case)
    found = run(case, change(t, bias=None, attn_mask=t.bias))
    found["grad_bias"] = found.pop("grad_attn_mask")
    assert_same_bits(found, run(case, t))


@pytest.mark.parametrize("name", ["causal", "bottom-right", "window", "both", "kv-len"])
@problems
def test_an_interval_of_keys_is_as_it_is_drawn(case, name):
    """Against a keep mask made with tril and triu."""
    M, N, full = case.M, case.N, ones(case.M, case.N)
    lengths = torch.linspace(0, N, case.B * M).round().long().view(case.B, M)
    mask, keep = {
        "causal": (Mask("top_left"), full.tril()),
        "bottom-right": (Mask("bottom_right"), full.tril(N - M)),
        "window": (Mask(window=(9, 20)), full.tril(20).triu(-9)),
        "both": (Mask("bottom_right", window=(30, -1)), full.tril(N - M).triu(N - M - 30)),
        "kv-len": (Mask(kv_len=lengths), (torch.arange(N) < lengths[..., None])[:, None]),
    }[name]
    t = masked(drawn(case), keep=keep)
    assert_alike(case, t, run(case, change(t, mask=mask)), run(case, t))


@problems
def test_is_causal_is_the_mask_of_that_name(case):
    t = drawn(case)
    call = functools.partial(fastattn.attention, t.q, t.k, t.v, **named(case, t))
    assert torch.equal(call(is_causal=True), call(mask=Mask("top_left")))


@problems
def test_a_length_is_that_of_the_keys(case):
    """Masked keys act as if they did not exist."""
    t, left = drawn(case), case.N // 2 + 1
    found = run(case, masked(t, kv_len=torch.full((case.B,), left)))
    for name, dim in (("weights", 3), ("grad_k", 2), ("grad_v", 2)):
        found[name], rest = found[name].tensor_split([left], dim)
        assert not rest.any()
    k, v, grad_weights = t.k[:, :, :left], t.v[:, :, :left], t.grad_weights[..., :left]
    short = change(t, k=k, v=v, grad_weights=grad_weights)
    assert_budget(change(case, N=left), short, found)


# ---- problems that are the same in another order, or in parts ----


@problems_with(bias="bhmn", keep="bhmn")
def test_keys_have_no_order(case):
    case = change(case, dropout_p=0.0)  # dropout depends on the index
    t = drawn(case)
    order = torch.randperm(case.N)
    back = order.argsort()
    found = run(case, change(
        t, k=t.k[:, :, order], v=t.v[:, :, order], bias=t.bias[..., order],
        mask=Mask(keep=t.mask.keep[..., order]), grad_weights=t.grad_weights[..., order],
    ))  # fmt: skip
    found |= {n: found[n][..., back] for n in ("weights", "grad_bias")}
    found |= {n: found[n][:, :, back] for n in ("grad_k", "grad_v")}
    assert_budget(case, t, found)


@problems_with(dropout_p=0.0)
def test_a_row_alone_is_as_among_others(case):
    t = drawn(case)
    among, single = run(case, t), change(case, M=1)
    for i in sorted({0, case.M // 2, case.M - 1}):
        names = ("q", "grad_out", "grad_weights", "grad_lse")
        one = change(t, **{n: getattr(t, n)[:, :, i : i + 1] for n in names})
        assert_budget(single, one, run(single, one))
        parts = {n: among[n][:, :, i : i + 1] for n in (*FORWARD, "grad_q")}
        assert_budget(single, one, parts)


def part(t: Tensors, of) -> Tensors:
    """``of(x)`` for each tensor except the additive weight and the bandwidth."""
    return change(t, **{
        n: of(x) for n, x in vars(t).items() if isinstance(x, torch.Tensor) and x.dim() > 2
        and n != "bandwidth"
    })  # fmt: skip


@problems_with(dropout_p=0.0, kv_len="rows")
def test_a_batch_entry_alone_is_as_among_others(case):
    t = drawn(case)
    together = without(run(case, t), "grad_w", "grad_bandwidth")
    for b in range(case.B):
        one = part(t, lambda x, b=b: x[b : b + 1])
        one = masked(one, kv_len=t.mask.kv_len[b : b + 1])
        alone = without(run(change(case, B=1), one), "grad_w", "grad_bandwidth")
        assert_same_bits(alone, {name: x[b : b + 1] for name, x in together.items()})


@problems_with(dropout_p=0.0, Hkv=4)
def test_a_head_alone_is_as_among_others(case):
    t = drawn(case)
    together = run(case, t)
    for h in range(case.H):
        one = part(t, lambda x, h=h: x[:, h : h + 1])
        w, bandwidth = (x if x is None else x[h : h + 1] for x in (t.w, t.bandwidth))
        one = change(one, w=w, bandwidth=bandwidth)
        shared = ("grad_w", "grad_bandwidth")
        single = change(case, H=1, Hkv=1)
        parts = {n: x[h : h + 1] if n in shared else x[:, h : h + 1] for n, x in together.items()}
        if case.N <= CHUNK:
            assert_same_bits(run(single, one), parts)
        else:
            assert_budget(single, one, run(single, one))
            assert_budget(single, one, parts)


@problems
def test_shared_keys_are_repeated_keys(case):
    t = drawn(case)
    group = case.H // case.Hkv
    k, v = (x.repeat_interleave(group, dim=1) for x in (t.k, t.v))
    found = run(change(case, Hkv=case.H), change(t, k=k, v=v))
    for name in ("grad_k", "grad_v"):  # a sum of rounded gradients is rounded more often
        shares = found.pop(name).double().unflatten(1, (case.Hkv, group))
        truth, peer, scale = testing.oracle(case, t)[name]
        scale += testing.largest(shares.abs().sum(2))
        testing.assert_within_budget(shares.sum(2).to(case.dtype), peer, truth, name, scale)
    assert_budget(case, t, found)


@pytest.mark.parametrize("power", [-6, 5])
@problems
def test_the_size_of_the_values_goes_through(case, power):
    """A power of 2 changes no digit of outputs, or of gradients proportional to the values."""
    factor = 2.0**power
    t = drawn(case)
    # The other upstream gradients are not scaled.
    t = change(t, grad_weights=t.grad_weights * 0, grad_lse=t.grad_lse * 0)
    expected = run(case, t)
    for name in ("out", "grad_q", "grad_k", "grad_w", "grad_bandwidth"):
        if name in expected:
            expected[name] = expected[name] * factor
    t = change(t, v=t.v * factor)
    assert_alike(case, t, run(case, t), expected)


# ---- the same work in another way ----


@functools.lru_cache(maxsize=1)  # each instruction set in turn is compared with it
def run_baseline(case: Case) -> dict[str, torch.Tensor]:
    isa = torch.ops.fastattn.cpu_isa()
    assert torch.ops.fastattn.select_cpu_isa("baseline")
    found = run(case, drawn(case))
    assert torch.ops.fastattn.select_cpu_isa(isa)
    return found


@problems_with(causal="bottom_right", keep="hmn", bias="bmn")
def test_every_instruction_set_agrees(case, isa):
    """Two right results may differ by two budgets. Those of AVX2 differ by one at most."""
    t = drawn(case)
    others = run_baseline(case) if isa == "avx2" else None  # wider sets: not tried
    assert_budget(case, t, run(case, t), others)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sizes", [(67, 130), (1, 2600), (600, 20)], ids=str)
def test_the_number_of_threads_changes_no_bit(score, sizes, set_threads):
    M, N = sizes
    case = Case("threads", score, B=3, H=4, Hkv=2, D=24, E=20, M=M, N=N, bias="hmn",
                kv_len="batch", kv_begin="sorted", dropout_p=0.2, weights="mean",
                lse=True)  # fmt: skip
    t, found = drawn(case), []
    for n in (1, 2, 4):
        set_threads(n)
        found.append(run(case, t))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


@problems
def test_dropout_drops_the_same_on_every_backend(case):
    t = drawn(case)
    dropped = [testing.run(case, t, backend)["weights"] == 0 for backend in ("cpu", "eager")]
    assert torch.equal(*dropped)
    assert dropped[0].any() == (case.dropout_p > 0)


@problems
def test_what_needs_no_gradient_is_as_if_it_did(case):
    """Inference runs other code, and a call that is known runs other code again."""
    t = drawn(case)
    expected = run(case, t)
    options = dict(return_weights="full", return_lse=True, **named(case, t))
    if case.dropout_p:
        options |= dict(dropout_p=case.dropout_p, seed=testing.DROPOUT_SEED)
    with torch.no_grad():
        for _ in range(2):
            found = fastattn.attention(t.q, t.k, t.v, **options)
            found = dict(zip(FORWARD, found, strict=True))
            assert_same_bits(found, {n: expected[n] for n in FORWARD})
