"""examples/kernel_regression runs in its smoke size and equals plain PyTorch."""

from __future__ import annotations

import copy

import torch
from programs import META, gradients, pictures, smoke

from fastattn import NadarayaWatson
from fastattn.testing import assert_within_budget


def test_learned_beats_fixed_beats_average(tmp_path):
    result = smoke("kernel_regression", tmp_path)
    assert pictures(tmp_path) == {"curve.png", "gaps.png", "weights.png"}
    for series in ("curve", "gaps"):
        average, fixed, learned, _ = result[series]["errors"].values()
        assert learned < fixed < average


def test_plain_twin():
    from examples.kernel_regression import model

    x, y = torch.rand(40, 3), torch.randn(40)
    others = model.far_apart(40, 2)
    bandwidth = [0.3, 0.5, 2.0]
    ours = NadarayaWatson(bandwidth, learnable=True)
    peer = model.PlainNadarayaWatson(bandwidth, learnable=True)
    truth = copy.deepcopy(peer).double()
    exact = dict(queries=x.double(), keys=x.double(), values=y.double(), attn_mask=others)
    given = dict(queries=x, keys=x, values=y, attn_mask=others)
    assert_within_budget(ours(**given), peer(**given), truth(**exact))
    grads = [gradients(model.loss(m, x, y, others), m)["log_bandwidth"] for m in (ours, peer)]
    exact_grad = gradients(model.loss(truth, x.double(), y.double(), others), truth)
    assert_within_budget(*grads, exact_grad["log_bandwidth"])


def test_who_helps_to_learn():
    from examples.kernel_regression.model import far_apart

    assert far_apart(3, 0).tolist() == [
        [False, True, True],
        [True, False, True],
        [True, True, False],
    ]
    assert far_apart(5, 1).sum(dim=1).tolist() == [3, 2, 2, 2, 3]


def test_gaps_hold_out_every_point_once():
    from examples.kernel_regression import data

    series = data.waves(100, gap_weeks=5, every_weeks=20)
    assert len(series.test_y) == 25
    times = torch.cat([series.t, series.test_t]).sort().values
    assert len(times.unique()) == 100
    assert series.t[0] == times[0]


def test_on_another_device():
    from examples.kernel_regression import data
    from examples.kernel_regression.model import PlainNadarayaWatson, far_apart, loss

    series = data.waves(100, gap_weeks=5, every_weeks=20).to(META)
    others = far_apart(len(series.y), 2).to(META)
    for kind in (NadarayaWatson, PlainNadarayaWatson):
        model = kind([1.0, 1.0, 1.0], learnable=True).to(META)
        loss(model, series.x, series.y, others).backward()
        assert model(series.test_x, series.x, series.y).is_meta
