"""Tests for every backend, on the Triton kernels: those that the interpreter runs quickly."""

import math

import pytest
import torch
from helpers import SCORES
from properties import garbage
from properties.blocks import (  # noqa: F401
    test_a_block_drops_what_the_whole_drops,
    test_wide_results_are_float32,
)
from properties.extremes import (  # noqa: F401
    test_a_large_bias_in_a_whole_row_leaves_it_uniform,
    test_a_scale_below_the_numbers_of_float32,
    test_a_scale_far_above_the_softcap,
    test_errors_of_additive_weights_that_are_alike_do_not_add_up,
    test_gradients_under_a_large_bias,
    test_infinity_in_a_bias_is_nan_in_its_row_alone,
    test_logits_beyond_half_accumulate_in_float32,
)
from properties.garbage import (  # noqa: F401
    test_a_key_whose_scores_are_minus_infinity_has_no_gradient,
    test_nan_in_a_bias_stays_in_its_row,
    test_nan_in_a_key_reaches_the_rows_that_keep_it,
    test_nan_in_a_query_spares_the_keys_past_the_length,
    test_nan_in_a_query_stays_in_its_row,
    test_nan_or_infinity_in_a_value_reaches_its_column_in_the_rows_that_keep_it,
    test_nan_upstream_stays_in_its_row,
)
from properties.sinks import (  # noqa: F401
    test_a_row_without_keys_has_no_gradient_but_of_its_log_sum_exp,
    test_a_sink_adds_no_rounding_of_the_log_sum_exp,
    test_sinks_far_above_and_below_every_score,
    test_sinks_of_samples_and_of_any_strides,
    test_the_largest_sinks_are_numbers,
    test_without_keys_the_log_sum_exp_is_the_sink,
)

from fastattn.kernels.loop import additive_backward
from fastattn.problem.schemas import Call, Saved


@pytest.fixture
def backend(device, carried, monkeypatch):
    if device.type == "cuda":
        pytest.skip("on a GPU these run where they are written")
    monkeypatch.setattr(additive_backward, "FEW_QUERIES", 0)  # the sizes here are for tiles
    return "triton"


@pytest.mark.parametrize("name", garbage.MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_nan_in_unused_keys_reaches_nothing(backend, score, name):
    garbage.test_unused_keys_reach_nothing(backend, score, name, math.nan)


@pytest.mark.parametrize("name", garbage.MASKS)
def test_nan_in_unused_keys_reaches_nothing_of_few_queries(backend, name, monkeypatch):
    """The additive score's backward has a kernel for few queries."""
    monkeypatch.setattr(additive_backward, "FEW_QUERIES", 16)
    garbage.test_unused_keys_reach_nothing(backend, "additive", name, math.nan)


@pytest.mark.parametrize(
    "test",
    [test_nan_upstream_stays_in_its_row, test_nan_in_a_query_stays_in_its_row,
     test_nan_in_a_bias_stays_in_its_row, test_nan_in_a_key_reaches_the_rows_that_keep_it],
)  # fmt: skip
def test_nan_among_few_queries_stays_in_its_row(test, backend, monkeypatch):
    monkeypatch.setattr(additive_backward, "FEW_QUERIES", 16)
    test(backend, "additive")


# ---- operators that are called directly ----

B, H, M, N, D = 3, 2, 5, 7, 4


def shaped(**changed):
    x = torch.zeros
    call = Call(x(B, H, M, D), x(B, 1, N, D), x(B, 1, N, 3))
    return call._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        (dict(q=torch.zeros(B, M, D)), ValueError, "expected 4 dims"),
        (dict(q=torch.zeros(B, H, M, D).double()), TypeError, "q: expected one of"),
        (dict(v=torch.zeros(B, 1, N, 257)), ValueError, "expected at most 256 features, got 4 and"),
        (dict(v=torch.zeros(B, 1, N - 1, 3)), ValueError, r"v: expected \[3, 1, 7, 3\]"),
        (dict(k=torch.zeros(B, 1, N, D + 1)), ValueError, r"k: expected \[3, 1, 7, 4\]"),
        (dict(k=torch.zeros(B, 1, N, D).half()), TypeError, "k: expected torch.float32"),
        (dict(k=torch.zeros(B, 3, N, D)), ValueError, "q: expected a multiple of 3 heads"),
        (dict(w=torch.zeros(H, D + 1), score=1), ValueError, r"w: expected \[2, 4\]"),
        (dict(w=torch.zeros(B, H, D), score=1), ValueError, r"w: expected \[2, 4\]"),
        (dict(w=torch.zeros(H, D)), ValueError, "w: expected one for every score but"),
        (dict(score=1), ValueError, "w: expected one for every score but"),
        (dict(bias=torch.zeros(1, 1, M, N + 1)), ValueError, "bias: expected .* broadcasts"),
        (dict(keep=torch.zeros(1, 1, M, N)), TypeError, "keep: expected torch.bool"),
        (dict(kv_len=torch.zeros(2, 1).int()), ValueError, r"kv_len: expected \[3, 5\]"),
        (dict(kv_begin=torch.zeros(B, 1)), TypeError, "kv_begin: expected torch.int32"),
        (dict(seed=torch.zeros(2).long()), ValueError, "seed: expected"),
    ],
)
def test_operands_that_do_not_fit_raise(changed, error, match):
    with pytest.raises(error, match=match):
        torch.ops.fastattn.triton_forward(*shaped(**changed))


def test_results_that_do_not_fit_raise(backend):
    call = shaped()
    out, _, _, stats = torch.ops.fastattn.triton_forward(*call)
    right = Saved(out, stats, torch.zeros_like(out))
    torch.ops.fastattn.triton_backward(*call, *right)
    for name, x in (("out", out[:1]), ("stats", stats[..., :1]), ("grad_out", out[..., :1]),
                    ("grad_lse", stats[:1, ..., 0])):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: expected"):
            torch.ops.fastattn.triton_backward(*call, *right._replace(**{name: x}))
