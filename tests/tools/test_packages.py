"""Other packages as peers of the benchmark: the same problem, and what is said where one is not."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from fastattn import testing

pytestmark = pytest.mark.slow


def forward_row(case):
    """(the row of a case, after its peers were checked, its workload)."""
    from bench import peers, suite

    work = peers.build(case, compiled=False)
    row = suite._new_row(case, work.backend, "forward", 1)
    suite._check_others(work, [row])
    return row, work


@pytest.mark.parametrize("package", ["onnxruntime", "OpenVINO"])
def test_an_installed_package_computes_the_same(package):
    from bench.cases import PEERS_CASES

    pytest.importorskip(package.lower())
    offered = 0
    for case in (c.tiny() for c in PEERS_CASES):
        row, work = forward_row(case)
        if package in work.implementations:
            assert row.peer_errors[package] <= 1, case.name
            offered += 1
    assert offered >= 5


def test_gpu_packages_get_their_layout_and_masks(monkeypatch):
    """Both want [B, M, H, D]. Their stand-ins compute it with torch."""
    from bench import cases, packages

    def flash_attn_func(q, k, v, causal):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(
            1, 2
        )

    def memory_efficient_attention(q, k, v, attn_bias):
        return flash_attn_func(q, k, v, attn_bias == "lower triangle")

    ops = dict(
        memory_efficient_attention=memory_efficient_attention,
        LowerTriangularMask=lambda: "lower triangle",
    )
    flash = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    xformers = types.SimpleNamespace(ops=types.SimpleNamespace(**ops))
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "xformers", xformers)
    found = []
    for case in (c.tiny() for c in cases.PEERS_GPU_CASES if c.keys == "all"):
        t = cases.draw(case)
        plain, truth = testing.plain(case.problem, t)["out"], testing.exact(case.problem, t)["out"]
        for name, call in packages._on_gpu(case, [t.q, t.k, t.v]).items():
            testing.assert_within_budget(call(), plain, truth, f"{case.name} {name}")
            found.append(name)
    assert found.count("flash-attn") > found.count("xformers") > 0  # which has no groups


def test_a_package_that_is_missing_is_a_reason(monkeypatch):
    from bench import measure
    from bench.cases import named

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    row, work = forward_row(named("dense-others").tiny())
    assert "onnxruntime" not in row.peer_errors
    calls = {"onnxruntime": work.step("onnxruntime", "forward")}
    timings, failed = measure.interleave(calls, 0.001, "cpu", apart=True)
    assert not timings
    assert failed["onnxruntime"].startswith("ModuleNotFoundError")


def test_a_package_with_another_result_is_not_timed(monkeypatch):
    from bench import packages, suite
    from bench.cases import named

    case = named("causal-others").tiny()
    no_mask = {"OpenVINO": lambda: F.scaled_dot_product_attention(*inputs)}
    monkeypatch.setattr(packages, "calls", lambda case, t, qkv: inputs.extend(qkv) or no_mask)
    inputs: list[torch.Tensor] = []
    row, work = forward_row(case)
    assert row.peer_errors["OpenVINO"] > suite.FARTHEST
    assert row.skipped["OpenVINO"].startswith("another result")
    row.error_ratios = {"out": 0.0}
    suite._time(work, row, 0.001, "cpu", lambda doing, done: None)
    assert row.timings.keys() == {"fastattn", "torch SDPA"}


# ---- packed documents, softcap and sinks ----


def test_peers_of_the_extras_compute_the_same():
    from bench import check, peers
    from bench.cases import EXTRAS_CASES

    for case in EXTRAS_CASES:
        work = peers.build(case.tiny(), compiled=False)
        checker = check.Checker(work)
        for name in work.implementations.keys() - {peers.WITHOUT}:
            for direction, ratios in checker.error_ratios(name).items():
                assert check.worst(ratios) <= 1, f"{case.name} {direction} {name} {ratios}"
        if case.keys == "packed":
            assert len(work.implementations) == 4


def test_a_padded_batch_lies_where_its_documents_do():
    """The device `meta` stands for a GPU: it takes no tensor of the CPU either."""
    from bench import peers
    from bench.cases import named

    case = named("packed-4k-100").tiny()
    leaves = {n: torch.empty(1, 2, 64, 16, device="meta") for n in "qkv"}
    (padded,) = peers._padded_batch(case, leaves).values()
    assert padded.call().is_meta
    assert padded.padding.filled.is_meta


@pytest.mark.parametrize("mean", [100, 512])
def test_documents_fill_the_length(mean):
    from bench import packed

    found = packed.lengths(32768, mean)
    assert sum(found) == 32768
    assert min(found) > 0
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.25)
