"""When calls take the path of warpgroups: by name, or where the self-check found it right."""

import ctypes

import host_build
import pytest
import shim_backend
import torch
from hopper import CPU, explained, found_right, heads, products, takes_wgmma
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import Mask, scaled_dot_product_attention, self_check
from fastattn.backends import cuda, health, operators, registry, wgmma
from fastattn.backends.health import Check, Verdict
from fastattn.problem import call_cache, validate

pytestmark = [
    pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler"),
    pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU counts no products"),
]

HALVES = torch.float16, torch.bfloat16


# ---- auto ----


def test_triton_serves_until_the_check_has_run(triton, monkeypatch):
    q = heads()
    with monkeypatch.context() as capturing:
        capturing.setattr(health, "must_wait", lambda: True)
        assert not takes_wgmma(triton, q)
        found = explained(q)
        assert (found.backend, found.path) == ("triton", None)
        assert f"cuda: path sm_80: {wgmma.UNCHECKED}" in found.notes
        assert registry.WHY["dot"] in found.notes
    for _ in range(3):  # the first makes the check, the third comes from the cache of calls
        assert takes_wgmma(triton, q)
    assert health.verdict(wgmma.CHECK, CPU) is None
    found = explained(q)
    assert (found.backend, found.path) == ("cuda", "wgmma")
    assert "cuda: path wgmma: the self-check found it right on this device" in found.notes
    assert registry.WGMMA_FIRST in found.notes
    health.forget()  # another process reads the file
    wgmma.choose(CPU, False)
    assert takes_wgmma(triton, heads(41))


@pytest.fixture
def made(triton, monkeypatch, tmp_path):
    """The checks that calls make, on a GPU without verdicts; all are right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    health.forget()
    checks = []
    monkeypatch.setattr(
        health, "runner", lambda check, device: checks.append(check) or Verdict(None, lasting=False)
    )
    return checks


def test_triton_is_checked_when_it_serves(triton, made):
    """For its check Triton compiles kernels, which takes 20 s on a GPU that is new to it."""
    q, odd = heads(), torch.randn(1, 2, 40, 65).half()[..., :64]
    for _ in range(2):
        assert takes_wgmma(triton, q)
    assert made == [wgmma.CHECK]
    for _ in range(2):
        assert not takes_wgmma(triton, odd, q, q)
    assert made == [wgmma.CHECK, Check("triton", "dot", "float16", "plain")]
    call_cache.forget()
    assert not takes_wgmma(triton, heads().requires_grad_(), softcap=5.0)
    assert takes_wgmma(triton, heads(41))


def test_triton_is_checked_when_it_returns_weights(triton, made):
    q = heads().requires_grad_()
    assert takes_wgmma(triton, q, return_weights="mean")
    assert made == [wgmma.CHECK]
    check = Check("triton", "dot", "float16", "weights")
    with torch.no_grad():  # a call that is known, and one that is not
        assert not takes_wgmma(triton, q, return_weights="mean")
        assert made == [wgmma.CHECK, check]
        health.forget()
        call_cache.forget()
        assert not takes_wgmma(triton, q, return_weights="mean")
    assert made[2:] == [check, wgmma.CHECK]


def test_without_triton_the_usual_kernels_are_checked_first(triton, made):
    triton.unsupported = lambda p: ["Triton is not installed"]
    q = heads()
    scaled_dot_product_attention(q, q, q)
    assert Check("cuda", "dot", "float16", "") in made


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "fake"])
def test_tensors_without_memory_go_to_triton(triton, transform, recwarn):
    found_right()

    def attend(x):
        return scaled_dot_product_attention(x, x, x)

    if transform == "vmap":
        torch.func.vmap(attend)(torch.randn(3, 1, 2, 40, 64).half())
    elif transform == "grad":
        torch.func.grad(lambda x: attend(x).float().sum())(heads())
    elif transform == "jvp":
        torch.func.jvp(attend, (heads(),), (heads(),))
    else:
        with FakeTensorMode():
            assert attend(heads()).shape == (1, 2, 40, 64)
    assert not [w for w in recwarn if "data pointer" in str(w.message)]


def test_a_wrong_path_is_left_alone(triton, monkeypatch):
    monkeypatch.setattr(health, "runner", lambda check, device: Verdict("its error is 7 times"))
    assert not wgmma.is_right(CPU, may_check=True)
    assert health.verdict(wgmma.CHECK, CPU) == "its error is 7 times"
    q = heads()
    assert not takes_wgmma(triton, q)
    assert not takes_wgmma(triton, q, backend="cuda")
    found = explained(q)
    assert found.backend == "triton"
    assert "cuda: path sm_80: wgmma: its error is 7 times" in found.notes
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    call_cache.forget()
    wrong = "FASTATTN_CUDA_PATH=wgmma: its error is 7 times"
    with (
        pytest.warns(RuntimeWarning, match=f"'cuda' for such calls: {wrong}"),
        pytest.raises(ValueError, match=f"'cuda' cannot do this problem: {wrong}"),
    ):
        scaled_dot_product_attention(q, q, q, backend="cuda")
    assert not takes_wgmma(triton, heads(16), q, q, backend="cuda")  # which never takes the path


def test_gradients_take_it(triton):
    found_right()
    q = heads().requires_grad_()
    for _ in range(2):  # the second time from the cache of calls
        assert takes_wgmma(triton, q)
    found = explained(q)
    assert (found.backend, found.path) == ("cuda", "wgmma")
    assert registry.WGMMA_FIRST in found.notes
    before = products()
    scaled_dot_product_attention(q, q, q).sum().backward()  # whose gradient is expanded
    assert products() - before > 3 * 2  # two products forward, seven backward


def test_gradients_of_a_softcap_stay_with_triton(triton):
    found_right()
    q = heads().requires_grad_()
    assert not takes_wgmma(triton, q, softcap=5.0)
    found = explained(q, softcap=5.0)
    assert (found.backend, found.path) == ("triton", None)
    assert registry.WGMMA_WAITS in found.notes
    with torch.no_grad():  # the same call
        assert takes_wgmma(triton, q, softcap=5.0)
        assert explained(q, softcap=5.0).backend == "cuda"


@pytest.mark.parametrize("weights", ["mean", "full"])
def test_returned_weights_take_it_with_a_gradient_alone(triton, monkeypatch, weights):
    found_right()
    q, options = heads(), dict(return_weights=weights)
    for x, takes in (q, False), (q.clone().requires_grad_(), True), (q, False):
        for _ in range(2):  # the second time from the cache of calls
            assert takes_wgmma(triton, x, **options) == takes
        found = explained(x, **options)
        expected = ("cuda", "wgmma") if takes else ("triton", None)
        assert (found.backend, found.path) == expected
        assert (registry.WGMMA_FIRST if takes else registry.WGMMA_WEIGHTS) in found.notes
    assert takes_wgmma(triton, q, backend="cuda", **options)
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    assert takes_wgmma(triton, q, **options)


def test_returned_weights_beside_a_softcap_stay_with_triton(triton):
    found_right()
    for q in heads(), heads().requires_grad_():
        options = dict(return_weights="mean", softcap=5.0)
        assert not takes_wgmma(triton, q, **options)
        found = explained(q, **options)
        assert found.backend == "triton"
        assert registry.WHY["dot"] in found.notes


def test_named_backends_stay(triton):
    found_right()
    q = heads()
    assert not takes_wgmma(triton, q, backend="triton")
    assert takes_wgmma(triton, q, backend="cuda")
    found = explained(q, backend="cuda")
    assert (found.backend, found.path) == ("cuda", "wgmma")
    assert explained(q, backend="triton").backend == "triton"


def odd_calls():
    q = heads()
    odd = torch.randn(1, 2, 40, 65).half()[..., :64]
    return {
        "up to 16 queries": (heads(16), q, q),
        "strides of q in steps": (odd, q, q),
        "strides of k, v in steps": (q, odd, odd),
        "strides of v in steps": (q, q, torch.randn(1, 2, 64, 40).half().mT),
        "strides of k in steps": (q, q[:, :1].expand(1, 2, 40, 64), q),
        "strides of q, k in steps": (heads(40, 12), heads(40, 12), q),
        "q, k in steps of 16 bytes, and": (q[..., :1], q[..., :1], q),  # no stride of columns
        "a size is 0": (q, q, q[..., :0]),
    }


@pytest.mark.parametrize("why", odd_calls())
def test_what_cannot_take_it_goes_to_triton(triton, why):
    found_right()
    assert takes_wgmma(triton, heads())  # of the same sizes: that is remembered without strides
    tensors = odd_calls()[why]
    assert not takes_wgmma(triton, *tensors)
    assert not takes_wgmma(triton, *tensors, backend="cuda")  # the kernels say so too
    found = explained(*tensors)
    assert (found.backend, found.path) == ("triton", None)
    assert any(note.startswith("cuda: path sm_80: ") and why in note for note in found.notes)
    found = explained(*tensors, backend="cuda")
    assert (found.backend, found.path) == ("cuda", "sm_80")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("a bias", dict(attn_mask=torch.zeros(40, 40).half())),
        ("dropout", dict(dropout_p=0.5)),
        ("a limit for each row", dict(mask=Mask(kv_len=torch.full((1, 40), 30)))),
    ],
)
def test_triton_keeps_what_was_not_found_faster(triton, monkeypatch, what, options):
    found_right()
    q = heads()
    for _ in range(2):  # the second time from the cache of calls
        assert not takes_wgmma(triton, q, **options)
    assert takes_wgmma(triton, q, mask=Mask(causal="top_left", kv_len=[30]))
    assert takes_wgmma(triton, q, attn_mask=torch.ones(1, 1, 1, 40).bool(), is_causal=True)
    assert takes_wgmma(triton, q, attn_mask=torch.ones(40, 40).bool())
    assert takes_wgmma(triton, q, backend="cuda", **options)
    found = explained(q, **options)
    assert found.backend == "triton"
    assert registry.WGMMA_MASKS.format(what) in found.notes
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    call_cache.forget()
    assert takes_wgmma(triton, q, **options)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_another_gpu_has_no_such_path(triton, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(health, "runner", lambda *args: Verdict(None))
    assert not wgmma.is_right(CPU, may_check=True)
    assert health.verdict(wgmma.CHECK, CPU) == health.UNKNOWN
    q = heads()
    assert not takes_wgmma(triton, q)
    assert "cuda: path sm_80: wgmma needs compute capability 9.0" in explained(q).notes


def test_softcaps_take_it(triton):
    found_right()
    q = heads()
    assert takes_wgmma(triton, q, softcap=5.0)
    assert explained(q, softcap=5.0).path == "wgmma"


def test_modes(triton, monkeypatch):
    q = heads()
    monkeypatch.setattr(health, "runner", lambda *args: Verdict(None))
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "force")
    assert takes_wgmma(triton, q, backend="cuda")
    assert takes_wgmma(triton, q)
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
    call_cache.forget()
    assert not takes_wgmma(triton, q)
    assert "cuda: path sm_80: FASTATTN_SELF_CHECK=0, and wgmma waits for the self-check" in (
        explained(q).notes
    )


def test_who_runs_the_chosen_backend_takes_the_path_too(triton):
    """As devices do that share a call."""
    found_right()
    q, before = heads(), products()
    p = validate.build("dot", q, q, q).p
    assert registry.select(p, "cuda") == "cuda"
    cuda.forward(p, q, q, q, None, None)
    assert products() > before


def test_a_choice_under_fake_tensors(triton):
    """The operator that chooses has no fake kernel, and needs none."""
    found_right()
    with FakeTensorMode() as mode:
        q = mode.from_tensor(heads())
        assert registry.select(validate.build("dot", q, q, q).p, "cuda") == "cuda"
    assert takes_wgmma(triton, heads(), backend="cuda")


# ---- by name ----


def test_the_name_takes_it_after_a_check(triton, monkeypatch):
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    checked = []
    monkeypatch.setattr(health, "runner", lambda *args: checked.append(args) or Verdict(None))
    q = heads()
    assert takes_wgmma(triton, q, backend="cuda")
    assert checked == [(wgmma.CHECK, CPU)]
    assert "cuda: path wgmma: FASTATTN_CUDA_PATH names it" in explained(q).notes


def test_a_device_beyond_the_last_has_no_choice(triton):
    operators.choose_wgmma(64, True)
    operators.choose_wgmma(-1, True)
    assert not takes_wgmma(triton, heads(), backend="cuda")


def test_the_device_of_the_tensors_decides(triton):
    """Whatever device is current, as 0 is here."""
    simulator = ctypes.CDLL(str(shim_backend.library()))
    try:
        for chosen in 0, 1:
            wgmma.choose(torch.device("cuda", chosen))
            for device in 0, 1:
                simulator.shim_place_tensors(device)
                assert takes_wgmma(triton, heads(), backend="cuda") == (device == chosen)
            operators.choose_wgmma(chosen, False)
    finally:
        simulator.shim_place_tensors(0)
        operators.choose_wgmma(1, False)


# ---- the check ----


def test_the_check_takes_the_path_and_leaves_it(triton):
    before = products()
    assert self_check.run(wgmma.CHECK, CPU) == Verdict(None)
    assert products() > before
    assert not takes_wgmma(triton, heads(), backend="cuda")


def test_the_check_covers_both_dtypes_and_all_kinds():
    cases = self_check.cases_of(wgmma.CHECK, CPU)
    assert {case.dtype for case in cases} == set(HALVES)
    more = self_check.WARPGROUPS, self_check.many_tiles(CPU)
    sizes = [*self_check.PROBLEMS.values(), self_check.WHOLE, *more]
    assert len(cases) == 2 * sum(map(len, sizes))
    long = [case for case in cases if case.N > 4 * 128]  # beyond the ring of four tiles
    kernels = [(64, False), (128, False), (256, False), (128, True), (256, True)]
    width = {case: max(64, 1 << (max(case.D, case.E) - 1).bit_length()) for case in long}
    found = {(width[case], bool(case.softcap), case.dtype) for case in long}
    assert found == {(*kernel, t) for kernel in kernels for t in HALVES}
    runs = [case for case in long if case.keep_run]  # of keys: tiles left out, and whole ones
    assert {case.dtype for case in runs if not case.softcap} == set(HALVES)
    by_row = {(case.D, case.dtype) for case in long if case.kv_len == "sorted"}
    assert by_row == {(size, t) for size in (64, 128) for t in HALVES}


@pytest.mark.parametrize("score", ["dot", "additive", "gaussian"])
def test_the_usual_kernels_are_found_right(triton, score):
    dtype, before = "float32" if score != "dot" else "bfloat16", products()
    assert self_check.run(Check("cuda", score, dtype, ""), CPU) == Verdict(None)
    assert products() == before
