"""fastattn.autotune: its steps, what it remembers, and that kernels then use it."""

import contextlib
import itertools
import json
import math
import warnings

import pytest
import torch
from triton import OutOfResources

import fastattn
from fastattn import cache_file, tuning
from fastattn.backends import cuda, health, triton, wgmma
from fastattn.backends.health import Verdict
from fastattn.kernels.host import config, tuned
from fastattn.kernels.host.config import Config
from fastattn.kernels.host.launch import Call
from fastattn.kernels.loop import forward, grad_query
from fastattn.kernels.tile.strided import Spec
from fastattn.problem.record import WEIGHTS
from fastattn.problem.validate import build

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder. This machine counts as a device whose times are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "_machine", lambda device: "a device")
    tuned._remembered.cache_clear()
    yield tmp_path / "fastattn" / "autotune.json"
    tuned._remembered.cache_clear()


def distance(best: Config):
    """A measure: the number of steps between the configuration on trial and ``best``."""

    def measure(call):
        ((_, current),) = tuned._trial.items()
        return sum(abs(math.log2(a / b)) for a, b in zip(current, best, strict=True))

    return measure


def choose(kernel, D=8, E=8, kind="plain"):
    return config.choose(kernel, CPU, torch.float32, D, E, kind)


@pytest.fixture
def q(device):
    if device.type == "cuda":
        pytest.skip("times are made up, on tensors of the interpreter")
    return torch.randn(1, 2, 20, 8)


OPTIONS = {
    "dot": {},
    "additive": dict(weight=torch.ones(8)),
    "gaussian": dict(score="gaussian", bandwidth=2.0),
}


@pytest.mark.parametrize("score", OPTIONS)
def test_kernels_use_what_was_best(cache, q, score):
    best = Config(32, 16, 8, 2)
    query = q[0] if score == "additive" else q
    found = fastattn.autotune(query, measure=distance(best), **OPTIONS[score])
    kernels = [config.row_name(score, kernel) for kernel in ("fwd", "dq", "dkdv", "tile")]
    assert list(found.values()) == [best] * 4
    assert [choose(kernel) for kernel in kernels] == [best] * 4
    assert json.loads(cache.read_text()) == {"a device": {n: list(best) for n in found}}
    assert best not in [choose(config.row_name(other, "fwd")) for other in {*OPTIONS} - {score}]
    assert choose(kernels[0], kind="rich") != best
    assert choose(kernels[0], 16, 16) == best  # the tiles of 8
    assert best not in (choose(kernels[0], 64), choose(kernels[0], 8, 17))  # larger tiles


def test_a_wide_bias_is_of_a_kind_of_its_own(q):
    """A row that was measured with a bias in half precision may not fit a float32 one."""
    best, half = Config(32, 16, 8, 2), q.half()
    bias = torch.zeros(1, 2, 20, 20)
    found = [
        fastattn.autotune(half, attn_mask=x, measure=distance(best)) for x in (bias.half(), bias)
    ]
    assert not found[0].keys() & found[1].keys()
    kinds = [Call(half, half, half, bias=x).kind for x in (bias.half(), bias, None)]
    assert kinds == ["single", "wide_bias", "plain"]
    assert Call(q, q, q, bias=bias).kind == "single"


def test_two_features_are_rich(q):
    """Each may have tiles that have no registers for two."""
    bias = torch.zeros(1, 2, 20, 20)
    features = (dict(bias=bias), dict(dropout_p=0.1), dict(weights=WEIGHTS["mean"]))
    assert {Call(q, q, q, **x).kind for x in features} == {"single"}
    pairs = (x | y for x, y in itertools.combinations(features, 2))
    assert {Call(q, q, q, **x).kind for x in pairs} == {"rich"}
    row = config.TABLE["dkdv"]["sm_90", 2][64]
    assert row.single.BLOCK_N > row.rich.BLOCK_N


def test_a_softcap_is_of_a_kind_of_its_own_unless_it_is_rich(q):
    """Backward keeps a slope for each score, and a table's row may be too large for them."""
    assert [Call(q, q, q, softcap=2.0, dropout_p=p).kind for p in (0.0, 0.1)] == ["curved", "rich"]
    row = config.TABLE["dkdv"]["sm_90", 2][128]
    assert row.curved.BLOCK_M < row.plain.BLOCK_M


def test_results_stay_what_they_were(q):
    before = fastattn.scaled_dot_product_attention(q, q, q, backend="triton")
    fastattn.autotune(q, measure=distance(Config(32, 16, 8, 2)))
    after = fastattn.scaled_dot_product_attention(q, q, q, backend="triton")
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("score", OPTIONS)
def test_few_queries_have_kernels_of_their_own(q, score):
    best = Config(16, 16, 8, 2)
    query, key = (q[0, :, :1], q[0]) if score == "additive" else (q[:, :, :1], q)
    found = fastattn.autotune(query, key, key, measure=distance(best), **OPTIONS[score])
    kernels = {
        "dot": ["decode", "decode_dq", "decode_dkdv", "tile"],
        "additive": ["additive_decode", "additive_decode_bwd", "additive_tile"],
        "gaussian": ["gaussian_decode", "gaussian_dq", "gaussian_dkdv", "gaussian_tile"],
    }[score]
    assert [name.split(",")[0] for name in found] == kernels
    assert [choose(kernel) for kernel in kernels] == [best] * len(kernels)
    assert best not in (choose("fwd"), choose("dq"), choose("additive_fwd"), choose("gaussian_fwd"))


def test_a_problem_may_stand_for_the_call(q):
    p = build("dot", q, q, q).p
    best = choose("fwd")
    assert set(fastattn.autotune(p, measure=distance(best)).values()) == {best}


def test_another_device_is_not_forgotten(cache, monkeypatch):
    tuned.remember(CPU, {"fwd": Config(64, 64, 4, 1)})
    monkeypatch.setattr(tuned, "_machine", lambda device: "another")
    tuned.remember(CPU, {"fwd": Config(16, 16, 4, 1)})
    tuned.remember(CPU, {"dq": Config(16, 32, 4, 1)})
    assert json.loads(cache.read_text()) == {
        "a device": {"fwd": [64, 64, 4, 1]},
        "another": {"fwd": [16, 16, 4, 1], "dq": [16, 32, 4, 1]},
    }


def test_what_was_found_is_kept_as_soon_as_it_is(cache, q):
    """An interrupt loses the kernel at hand alone."""
    measured = []

    def measure(call):
        ((name, _),) = tuned._trial.items()
        measured.append(name)
        if len({*measured}) == 2:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        fastattn.autotune(q, measure=measure)
    assert list(json.loads(cache.read_text())["a device"]) == measured[:1]


def test_a_folder_that_cannot_be_written_loses_nothing(q, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    best = Config(32, 16, 8, 2)
    with pytest.warns(UserWarning, match="later processes do not know what autotune found"):
        found = fastattn.autotune(q, measure=distance(best))
    assert {choose(name.split(",")[0]) for name in found} == {best}


def test_without_a_home_folder_nothing_is_remembered(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache_file.Path, "home", no_home)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.lookup(CPU, "x") is None
    with pytest.warns(UserWarning, match="no home"):
        tuned.remember(CPU, {"x": Config(16, 16, 4, 1)})
    assert tuned.lookup(CPU, "x") == Config(16, 16, 4, 1)


def no_home():
    raise RuntimeError("no home")


def test_the_path_of_warpgroups_is_checked_as_well(q, monkeypatch):
    checked = []
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "1")
    monkeypatch.setattr(wgmma, "has_capability", lambda device: True)
    monkeypatch.setattr(cuda, "LIBRARY_ERROR", None)
    monkeypatch.setattr(health, "machine", lambda device: "Hopper")
    monkeypatch.setattr(
        health, "runner", lambda check, device: checked.append(check) or Verdict("it hangs")
    )
    health.forget()
    fastattn.autotune(q, measure=lambda call: 1.0)
    assert checked == [wgmma.CHECK]
    assert health.verdict(wgmma.CHECK, q.device) == "it hangs"
    health.forget()


def test_times_are_of_the_device_of_the_problem(q, monkeypatch):
    current, seen = [], []

    @contextlib.contextmanager
    def device_of(device):
        current.append(device)
        yield
        current.pop()

    def measure(call):
        seen.append([*current])
        return 1.0

    monkeypatch.setattr(triton, "current_device", device_of)
    fastattn.autotune(q, measure=measure)
    assert seen
    assert all(devices == [q.device] for devices in seen)


def test_what_cannot_run_is_passed_by():
    start = Config(64, 64, 4, 1)

    def time_of(c):
        return math.inf if c.BLOCK_M > 64 else 1 / c.BLOCK_M / c.BLOCK_N

    # Blocks larger than 128 have no workspace.
    assert tuning._descend(start, time_of) == Config(64, 128, 4, 1)
    assert tuning._descend(start, lambda c: -min(c.num_stages, 9)).num_stages == tuned.MOST_STAGES
    with_error = tuning._timer("fwd", lambda: None, lambda call: 1 / 0)
    assert with_error(start) == math.inf
    with pytest.raises(RuntimeError, match="no configuration runs"):
        tuning._descend(start, with_error)


class TooLarge:
    """A kernel that no device has room for in ``config``."""

    def __init__(self, kernel, config):
        self.kernel, self.config = kernel, config

    def __getitem__(self, grid):
        def launch(*args, **options):
            [spec] = [x for x in args if isinstance(x, Spec)]
            if (spec.BLOCK_M.value, spec.BLOCK_N.value) == self.config[:2]:
                raise OutOfResources(300_000, 232_448, "shared memory")
            self.kernel[grid](*args, **options)

        return launch


def test_a_row_that_does_not_fit_is_forgotten(cache, q, monkeypatch):
    """A call of the same head sizes may need more memory than the one that was measured."""
    names = [tuned.name(kernel, q.dtype, 16, 16, "plain") for kernel in ("fwd", "dq", "dkdv")]
    large = Config(128, 128, 8, 4)
    tuned.remember(CPU, dict.fromkeys(names, large))
    for module, kernel in (forward, "sdpa_fwd_kernel"), (grad_query, "sdpa_bwd_dq_kernel"):
        monkeypatch.setattr(module, kernel, TooLarge(getattr(module, kernel), large))
    q.requires_grad_()
    with pytest.warns(UserWarning, match=f"forgetting what autotune found: {names[0]}: out of"):
        out = fastattn.scaled_dot_product_attention(q, q, q, backend="triton")
    with pytest.warns(UserWarning, match=names[1]):
        out.sum().backward()
    right = fastattn.scaled_dot_product_attention(q, q, q, backend="eager")
    torch.testing.assert_close(out, right)
    assert json.loads(cache.read_text()) == {"a device": {names[2]: [*large]}}
    assert choose("dkdv") == large != choose("fwd")


def test_a_row_on_trial_or_of_the_table_falls_back_to_none(q, monkeypatch):
    start = choose("fwd")
    monkeypatch.setattr(forward, "sdpa_fwd_kernel", TooLarge(forward.sdpa_fwd_kernel, start))
    name = tuned.name("fwd", q.dtype, 16, 16, "plain")
    for trial in contextlib.nullcontext(), tuned.trial(name, start):
        with trial, pytest.raises(OutOfResources):
            fastattn.scaled_dot_product_attention(q, q, q, backend="triton")


def test_each_neighbour_can_be_compiled():
    tables = (table.values() for table in config.TABLE.values())
    rows = (row for sizes in itertools.chain(*tables) for row in sizes.values())
    for c in {*itertools.chain(*rows)}:
        neighbours = tuning._neighbours(c)
        assert len({*neighbours} - {c}) == len(neighbours)
        assert {n.num_warps for n in neighbours} <= {*tuned.WARPS}
        assert any(n.num_warps != c.num_warps for n in neighbours)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a device": 1}',
        '{"a device": {"x": [1, 2]}}',
        '{"a": {"x": [0, 1, 1, 1]}}',
        '{"a": {"x": [16, 24, 4, 1]}}',
        '{"a": {"x": [256, 16, 4, 1]}}',
        '{"a": {"x": [16, 16, 7, 1]}}',
        '{"a": {"x": [16, 16, 4, 9]}}',
        "[" * 100_000,
    ],
)
def test_a_broken_file_is_ignored_aloud(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.warns(UserWarning, match="autotune did not write"):
        assert tuned.lookup(CPU, "x") is None
    with warnings.catch_warnings():  # it warns only once
        warnings.simplefilter("error")
        assert choose("fwd") == config.TABLE["fwd"]["interpreter", 4][64].plain


def test_a_call_that_triton_cannot_do_raises_its_reasons():
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        fastattn.autotune(q)
