"""Every case of the grid on every backend within the error budget, and tests of the budget.

Once as a whole, and once in blocks: cut at odd places, run, merged.
"""

import dataclasses

import pytest
import torch
from helpers import BACKENDS

from fastattn import testing
from fastattn.testing import GRID, Case, checks

WAYS = {"whole": testing.check, "blocks": testing.check_blocks}


# The case varies last: all backends, in both ways, share one reference computation of it.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_case(case, backend, way):
    WAYS[way](case, backend)


# ---- what the grid must hold ----


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_grid_has_every_size(score):
    cases = [c for c in GRID if c.score == score]
    assert {c.M for c in cases} | {c.N for c in cases} >= {0, 1, 15, 63, 65, 127, 1000}
    assert {0, 1} <= {c.D for c in cases} & {c.E for c in cases}
    assert {0} <= {c.B for c in cases} & {c.H for c in cases}
    assert {c.dtype for c in cases} == {torch.float32, torch.float16, torch.bfloat16}


@pytest.mark.parametrize(
    "feature",
    [
        lambda c: c.M != c.N,
        lambda c: c.H != c.Hkv == 1,
        lambda c: c.H != c.Hkv > 1,
        lambda c: c.D != c.E,
        lambda c: c.layout == "sliced",
        lambda c: c.layout == "expanded",
        lambda c: c.empty_rows,
        lambda c: c.kv_len == "batch",
        lambda c: c.kv_len == "rows",
        lambda c: c.kv_begin == "batch",
        lambda c: c.kv_begin == c.kv_len == "rows",
        lambda c: c.kv_begin == c.kv_len == "sorted",
        lambda c: c.bias_inf,
        lambda c: c.bias == "relative",
        lambda c: c.dropout_p == 1.0,
        lambda c: c.garbage is not None,
        lambda c: c.attn_mask and c.attn_mask_dtype == torch.bool,
        lambda c: c.mask_layout != "bhmd",
        lambda c: c.layout == "unaligned",
        lambda c: c.layout == "bhdm",
        lambda c: c.E > 128,
        lambda c: c.bias_dtype not in (None, c.dtype),
        lambda c: c.H != c.Hkv and c.dropout_p,
        lambda c: c.H != c.Hkv and c.weights == "mean",
        lambda c: 1 < c.M <= 8 and c.keep,
        lambda c: 8 < c.M <= 12 and c.D >= 64,  # in place on some processors
    ],
)
def test_grid_has_every_feature(feature):
    assert {c.score for c in GRID if feature(c)} == {"dot", "additive", "gaussian"}


def test_grid_has_whole_tiles_of_every_magnitude():
    plain = {(c.N, c.magnitude**2) for c in GRID if c.name.startswith("plain-") and c.weights}
    found = {(N, round(logit)) for N, logit in plain}
    assert found >= {(N, logit) for N in (64, 128) for logit in (1e2, 1e4, 1e6, 1e10)}


def test_case_names_are_unique():
    assert len({str(c) for c in GRID}) == len(GRID)


def test_kv_len_of_the_grid_has_a_zero():
    t = testing.make(next(c for c in GRID if c.kv_len == "batch"))
    assert t.mask.kv_len.min() == 0 < t.mask.kv_len.max()


def test_sliced_layout_has_nan_between():
    q = testing.make(next(c for c in GRID if c.layout == "sliced")).q
    gaps = q.as_strided((q.numel(),), (2,), q.storage_offset() + 1)
    assert gaps.isnan().any()


# ---- the budget ----


def results(error=0.0):
    truth = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    plain = truth.float()
    return plain + error, plain, truth


def test_budget_allows_a_few_ulp():
    testing.assert_within_budget(*results(4 * torch.finfo(torch.float32).eps))


@pytest.mark.parametrize("error", [1e-5, float("nan"), float("inf")])
def test_budget_rejects(error):
    with pytest.raises(AssertionError, match="of the budget"):
        testing.assert_within_budget(*results(error))


def test_budget_rejects_a_missing_nan():
    ours, plain, truth = results()
    truth[0] = float("nan")
    with pytest.raises(AssertionError, match="of the budget"):
        testing.assert_within_budget(ours, plain, truth)


def test_budget_rejects_another_shape():
    ours, plain, truth = results()
    with pytest.raises(AssertionError, match="shape"):
        testing.assert_within_budget(ours[:1], plain, truth)


def test_check_sees_a_wrong_gradient(monkeypatch):
    right = testing.run

    def wrong(*args, **options):
        found = right(*args, **options)
        found["grad_k"][0, 0, 0] += 1e-4
        return found

    monkeypatch.setattr(checks, "run", wrong)
    with pytest.raises(AssertionError, match="grad_k"):
        testing.check(Case("wrong"), "eager")


def test_poisoned_memory_is_nan():
    with testing.poisoned():
        assert torch.empty(100).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_half_grid_has_the_hard_cases():
    half = {c.name for c in GRID if c.dtype != torch.float32}
    assert half >= {"large-logits", "huge", "opposite-60", "all-masks", "bias-inf", "layout-sliced"}


def test_seed_of_a_case_is_its_own():
    a, b = Case("one"), dataclasses.replace(Case("one"), name="two")
    assert torch.equal(testing.make(a).q, testing.make(a).q)
    assert not torch.equal(testing.make(a).q, testing.make(b).q)
