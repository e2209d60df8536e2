"""Random problems, always the same ones; past failures; and tests of the fuzzer itself."""

import math

import pytest
import torch

pytest.importorskip("hypothesis", reason="random problems are drawn with hypothesis")

import fuzz
from hypothesis import HealthCheck, Phase, given, settings

from fastattn import testing
from fastattn.backends import cpu, direct
from fastattn.problem import call_cache
from fastattn.testing import Case, checks, runners

pytestmark = pytest.mark.usefixtures("extension")

# The same problems on every machine; `make fuzz` draws new ones each time.
the_same = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
)  # fmt: skip


def splits_keys(case):
    if case.N <= 1000 or case.dtype is torch.float64:
        return False
    return "chunks" in cpu.path(runners._kept(case, testing.make(case))[0])


@pytest.mark.slow
def test_random_problems():
    """Every feature is in some of them."""
    drawn = []

    @settings(the_same, max_examples=1000)
    @given(fuzz.cases(), fuzz.isas(), fuzz.calls())
    def check(case, isa, calls):
        drawn.append(case)
        fuzz.check(case, isa, calls)

    check()
    assert {c.score for c in drawn} == {"dot", "additive", "cosine", "gaussian"}
    features = [
        lambda c: 0 in (c.M, c.N), lambda c: 0 in (c.D, c.E), lambda c: 0 in (c.B, c.H),
        lambda c: c.M == 1 and c.N > 128, lambda c: c.M > 64 and c.N > 64,
        lambda c: c.H > c.Hkv > 1, splits_keys,
        lambda c: c.causal, lambda c: c.window, lambda c: c.kv_len == "batch",
        lambda c: c.kv_len == "rows", lambda c: c.keep, lambda c: c.bias and c.bias_inf,
        lambda c: c.bias == "alibi", lambda c: c.bias == "relative" and c.bias_offset,
        lambda c: c.attn_mask and c.attn_mask_dtype == torch.bool,
        lambda c: c.attn_mask and c.attn_mask_dtype != torch.bool and c.bias,
        lambda c: c.dropout_p, lambda c: c.weights == "full", lambda c: c.weights == "mean",
        lambda c: c.lse, lambda c: c.garbage is not None and c.keep, lambda c: c.magnitude > 1,
        lambda c: c.kv_begin == "batch", lambda c: c.kv_begin in ("rows", "sorted"),
        lambda c: c.sink == -math.inf, lambda c: c.sink is not None and c.lse,
        lambda c: c.softcap, lambda c: c.scale and c.scale < 0, lambda c: c.opposite,
        lambda c: c.bandwidth == "", lambda c: "b" in c.bandwidth, lambda c: "d" in c.bandwidth,
        lambda c: c.bias and c.bias_dtype not in (None, c.dtype),
        lambda c: c.empty_rows and c.keep, lambda c: c.empty_rows and c.bias and c.bias_inf,
    ]  # fmt: skip
    for number, feature in enumerate(features):
        assert sum(1 for c in drawn if feature(c)) >= 5, f"feature {number} is hardly drawn"
    for name in ("dtype", "layout", "mask_layout"):
        assert len({getattr(c, name) for c in drawn}) >= 4


half, nan = torch.float16, math.nan
one = dict(B=1, H=1, Hkv=1, drawn=True)
# Problems that failed once, as found and shrunk.
FOUND = {
    "backward weighs logits otherwise": Case("0", **one, M=3, N=16, D=3, E=3, magnitude=20.0),
    "cosine: NaN in a masked key": Case(
        "0", "cosine", **one, M=1, N=3, D=3, E=3, causal="top_left", garbage=nan),
    "cosine: NaN in rows without keys": Case(
        "0", "cosine", **one, M=3, N=3, D=3, E=3, kv_len="batch", garbage=nan),
    "cosine: vectors of subnormal length": Case(
        "115", "cosine", B=1, Hkv=1, M=200, N=3, D=1, E=3, dtype=half),
    "attn_mask of -inf, NaN in bias": Case(
        "e", attn_mask="bmn", attn_mask_dtype=torch.float32, bias="hmn", garbage=nan),
    "float64: a sum of two float32 biases": Case(
        "0", **one, M=3, N=3, D=3, E=3, dtype=torch.float64, bias="", bias_grad=False,
        bias_dtype=torch.float32, attn_mask="bn", attn_mask_dtype=torch.float32),
    "gaussian: half attn_mask": Case(
        "0", "gaussian", attn_mask="mn", attn_mask_dtype=half, dtype=half),
    "gaussian: scores of a row that are close": Case(
        "0", "gaussian", **one, M=3, N=128, D=3, E=3, magnitude=3.0),
    "gaussian: NaN and the gradient of the bandwidth": Case(
        "0", "gaussian", **one, M=3, N=3, D=3, E=3, causal="top_left", kv_len="batch", lse=True,
        garbage=nan),
    "tanh that is absolutely right only": Case(
        "0", "additive", **one, M=3, N=3, D=3, E=3, magnitude=1e-3, lse=True),
    "slopes that a softcap has no digits of": Case(
        "0", **one, M=3, N=3, D=3, E=3, softcap=1.0, magnitude=20.0),
    "one chain of 256 products": Case(
        "0", **one, M=63, N=15, D=256, E=3, magnitude=5.0),
    "one chain of 128 products": Case(
        "102", drawn=True, H=3, Hkv=1, M=63, N=16, D=2, E=128, causal="top_left", sink=0.0),
    "alibi: float64 scores and float32 slopes": Case(
        "0", **one, M=3, N=3, D=3, E=3, dtype=torch.float64, causal="top_left", bias="alibi",
        bias_offset=1, bias_grad=False, bias_dtype=torch.float32),
    "alibi: the gradient without keys": Case("0", **one, M=3, N=0, D=3, E=3, bias="alibi"),
    "alibi: a bias of large logits": Case("0", **one, M=3, N=128, D=3, E=3, bias="alibi"),
    "sums of gradients below the normal numbers": Case(
        "751", "additive", **one, M=1, N=300, D=0, E=129, dtype=half, bias="relative"),
    "alibi: one query": Case("1", **one, M=1, N=70, D=3, E=1, bias="alibi"),
    "gaussian: products of 129 in a sum that cancels": Case(
        "2", "gaussian", drawn=True, B=3, M=3, N=4, D=127, E=129, bandwidth=""),
    "slopes that tanh has no digits of": Case(
        "0", "additive", **one, M=3, N=3, D=3, E=3, magnitude=1e4),
    "dO . V of the one key that counts cancels": Case(
        "132", Hkv=1, M=129, N=4, D=32, E=33, window=(0, -1), kv_len="rows", bias="bhm",
        bias_inf=True, magnitude=5.0, drawn=True),
    "a sink: dO . O cancels": Case(
        "0", "gaussian", M=1, N=4, D=1, E=2, dtype=torch.bfloat16, sink=-8.0, magnitude=30.0,
        drawn=True),
    "a sink leaves weights below the normal numbers": Case(
        "112", B=3, H=1, Hkv=1, M=17, N=2, D=64, E=2, causal="top_left", kv_len="batch",
        bias="alibi", bias_offset=200, bias_grad=False, bias_dtype=torch.float32, scale=-3.0,
        sink=0.0, magnitude=1e-30, drawn=True),
    "float64: dO . V and dO . O round apart": Case(
        "377", drawn=True, B=1, M=16, N=65, D=64, E=256, dtype=torch.float64, weights="full",
        layout="expanded", magnitude=20.0),
    "a sink: a log-sum-exp that is rounded": Case(
        "0", "gaussian", **one, M=3, N=64, D=3, E=3, softcap=30.0, sink=0.0, magnitude=1e4),
    "a sink: its gradient": Case(
        "2", "cosine", drawn=True, B=3, H=6, M=150, N=128, D=9, E=7, sink=-8.0),
    "one key and dropout: the peer is exact": Case(
        "22", drawn=True, B=1, M=1, N=5, D=1, E=16, causal="top_left", dropout_p=0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(isa, name):
    fuzz.check(FOUND[name], isa)


# ---- the fuzzer itself ----


def test_draws_do_not_depend_on_what_is_imported():
    assert len(fuzz.providers._get_local_constants()) == 0


MASKED = Case("wrong", M=6, N=9, causal="bottom_right", window=(2, -1), kv_len="rows",
              weights="full", lse=True, garbage=nan)  # fmt: skip


@pytest.mark.parametrize(("name", "index"), [
    ("out", (0, 0, 0)),  # a row without keys
    ("grad_q", (0, 0, 0)),
    ("grad_k", (0, 0, 0)),  # a key that no row keeps
    ("weights", (1, 0, 0, 8)),  # a masked pair
    ("weights", (1, ..., 0)),  # sums
    ("grad_v", (1, ..., 0)),
])  # fmt: skip
def test_invariants_see_what_the_budget_allows(name, index):
    t = testing.make(MASKED)
    right = testing.run(MASKED, t)
    testing.assert_invariants(MASKED, t, right)
    wrong = right[name].clone()
    wrong[index] += 3e-6 if ... in index else 1e-9
    with pytest.raises(AssertionError, match=name):
        testing.assert_invariants(MASKED, t, right | {name: wrong})


def test_garbage_may_change_no_bit(monkeypatch):
    testing.check(MASKED)
    right = testing.run

    def wrong(case, t, *args, **options):
        found = right(case, t, *args, **options)
        if t.k.isnan().any():
            found["out"] = torch.nextafter(found["out"], found["out"] + 1)
        return found

    monkeypatch.setattr(checks, "run", wrong)
    with pytest.raises(AssertionError, match="out differs"):
        testing.check(MASKED)


@pytest.mark.slow
def test_a_failure_is_shrunk_to_a_program(monkeypatch, capsys):
    right = testing.run

    def wrong(case, *args, **options):
        found = right(case, *args, **options)
        if case.keep is not None and case.M > 3:
            found["grad_v"] = found["grad_v"] + 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(checks, "run", wrong)
        assert fuzz.main(["--problems", "200", "--seed", "2"]) == 1
    printed = capsys.readouterr().out
    assert "AssertionError" in printed
    program = printed[printed.index("import math, torch") :].split("\n\n")[0]
    assert "keep=''" in program
    assert "causal" not in program
    exec(program, {})  # passes, because nothing is wrong now


def test_so_many_problems_from_a_seed(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(fuzz, "check", lambda *problem: seen.append(problem))
    for _ in range(2):
        assert fuzz.main(["--problems", "150", "--seed", "7"]) == 0
    assert "seed 7" in capsys.readouterr().out
    assert len(seen) == 300
    assert list(map(repr, seen[:150])) == list(map(repr, seen[150:]))
    assert {calls for _, _, calls in seen} == {1, 4}


def test_a_plan_that_keeps_values_fails(monkeypatch):
    """The first results of a plan come again, with those of one problem for another."""
    case, run, kept = Case("plan", kv_len="rows"), direct.run, {}

    def stale(call):
        found = run(call)
        if type(found) is list:  # of a plan, for a gradient
            (trained, results, stats), tensors = found[0], found[1:]
            found[0] = trained, kept.setdefault("out", results.clone()), stats
            assert len(tensors) == 4
        return found

    fuzz.check(case, "auto", calls=4)
    monkeypatch.setattr(direct, "run", stale)
    fuzz.check(case, "auto")
    kept.clear()
    with pytest.raises(AssertionError, match=r"plan-3.* out: error"):
        fuzz.check(case, "auto", calls=4)
    program = fuzz.program(case, "auto", calls=4)
    assert program.count("check(Case") == 4
    call_cache.forget()
    kept.clear()
    with pytest.raises(AssertionError, match=r"plan-3.* out: error"):
        exec(program, {})
