"""The self-check: a wrong backend is found once, says why, and serves no call."""

import contextlib
import threading
import time
import warnings

import pytest
import torch
from fake_gpu import CPU, EAGER, backend, call, new_process, verdicts
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import cache_file, scaled_dot_product_attention
from fastattn.backends import health, registry
from fastattn.problem import call_cache, validate

pytestmark = pytest.mark.usefixtures("fake_gpu")


def wrong_output(*args):
    out, *others = EAGER.forward(*args)
    return out * 1.05, *others


def nan_output(*args):
    out, *others = EAGER.forward(*args)
    out[..., -1, -1] = torch.nan
    return out, *others


def wrong_lse(*args):
    out, lse, *others = EAGER.forward(*args)
    return out, lse + 0.05, *others


def short_output(*args):
    out, *others = EAGER.forward(*args)
    return out[:, :, :-1], *others


def short_gradient(*args):
    grad_q, grad_k, *others = EAGER.backward(*args)
    return grad_q, grad_k[:, :, :-1], *others


def wrong_gradient(*args):
    grad_q, grad_k, *others = EAGER.backward(*args)
    return grad_q, grad_k * 1.05, *others


def raises(*args):
    raise RuntimeError("no such instruction\nmore of it")


def no_memory(*args):
    raise torch.OutOfMemoryError("10 MiB")


def test_a_right_backend_is_checked_once(install):
    fake = install(backend())
    assert fastattn.explain(torch.zeros(1, 2, 3, 4), backend="eager").reasons["fake"] == []
    assert fake.calls == 0
    call("fake")
    checked = fake.calls
    assert checked > 1
    call()
    call(shape=(1, 2, 5, 4))
    assert fake.calls == checked + 2
    assert verdicts() == {"fake/dot/float32/": None}
    new_process()
    call()
    assert fake.calls == checked + 3


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (backend(wrong_output), "out of"),
        (backend(nan_output), "error is inf times"),
        (backend(wrong_lse), "lse of"),
        (backend(backward=wrong_gradient), "grad_k of"),
    ],
    ids=["output", "nan", "lse", "gradient"],
)
def test_a_backend_that_lies_warns_once_and_serves_nothing(install, lie, what):
    install(lie)
    with pytest.warns(RuntimeWarning, match=what) as caught:
        call()
    assert len(caught) == 1
    assert caught[0].filename == call.__code__.co_filename
    calls = lie.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        found = fastattn.explain(torch.zeros(1, 2, 3, 4))
    assert lie.calls == calls
    assert found.backend == "eager"
    assert what in found.reasons["fake"][0]
    with pytest.raises(ValueError, match=f"'fake' cannot do this problem.*{what}.*SELF_CHECK"):
        call("fake")
    new_process()
    with pytest.warns(RuntimeWarning, match=what):
        call()
    assert lie.calls == calls  # the file says it


def test_calls_that_went_there_do_not_go_there_again(install):
    """One kind of calls is right, and another is found wrong."""
    fake = install(backend())
    call()
    health.keep(health.Check("fake", "dot", "float32", "rich"), CPU, "wrong")
    calls = fake.calls
    with pytest.warns(RuntimeWarning, match="wrong"):
        call()
    assert fake.calls == calls


def test_every_verdict_is_news_to_calls_that_are_known():
    for reason in (None, "wrong"):
        call_cache.keep(("a call",), "its backend")
        health.keep(health.Check("any", "dot", "float32", ""), CPU, reason, False)
        assert call_cache.look_up(("a call",)) is None
    health.forget()


def test_a_backend_that_raises_is_checked_again_by_the_next_process(install):
    fake = install(backend(raises))
    with pytest.warns(RuntimeWarning, match="it raises RuntimeError: no such instruction;"):
        call()
    assert not cache_file.path(health.FILE).exists()
    new_process()
    fake = install(backend())
    call()
    assert fake.calls > 1


@pytest.mark.parametrize(
    "lie", [backend(short_output), backend(backward=short_gradient)], ids=["output", "gradient"]
)
def test_results_of_another_shape_are_wrong(install, lie):
    install(lie)
    with pytest.warns(RuntimeWarning, match="it raises .*(shape|size)"):
        call()
    assert fastattn.explain(torch.zeros(1, 2, 3, 4)).backend == "eager"


def test_no_memory_is_no_verdict(install, recwarn):
    fake = install(backend(no_memory))
    with pytest.raises(torch.OutOfMemoryError):  # the call's own
        call()
    assert fake.calls == 2
    with pytest.raises(torch.OutOfMemoryError):
        call()
    assert fake.calls == 3  # and no check at every call
    assert not recwarn.list
    assert not cache_file.path(health.FILE).exists()


def test_a_fault_of_the_check_itself_breaks_no_call(install, monkeypatch):
    fake = install(backend())
    monkeypatch.setattr(health, "runner", lambda check, device: 1 / 0)
    call()
    assert fake.calls == 1


def test_scores_and_dtypes_have_verdicts_of_their_own(install):
    install(backend())
    q, w = torch.randn(1, 2, 3, 4), torch.randn(2, 4)
    fastattn.additive_attention(q, q, q, w)
    scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), q.bfloat16())
    assert set(verdicts()) == {"fake/additive/float32/", "fake/dot/bfloat16/"}


def test_a_backend_that_compiles_is_checked_on_the_kernels_of_the_call(install, monkeypatch):
    monkeypatch.setattr(registry, "COMPILING", ("fake",))
    install(backend())
    call()
    call(shape=(1, 2, 20, 4), return_weights="mean")
    call(shape=(1, 2, 16, 65), bias=torch.zeros(16, 16))
    call(shape=(1, 2, 20, 129))
    call("fake", shape=(1, 2, 20, 4), bias=torch.zeros(20, 20))
    assert set(verdicts()) == {
        "fake/dot/float32/bias",
        "fake/dot/float32/plain decoding",
        "fake/dot/float32/weights",
        "fake/dot/float32/bias decoding D<=128",
        "fake/dot/float32/plain D<=256",
    }


def test_products_of_tf32_are_checked_as_such(install):
    install(backend())
    before = torch.backends.cuda.matmul.fp32_precision
    for name in ("tf32", "ieee"):
        try:
            torch.backends.cuda.matmul.fp32_precision = name
            call()
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
        call_cache.forget()
    assert verdicts() == {"fake/dot/TF32/": None, "fake/dot/float32/": None}


def test_the_newest_verdict_counts(monkeypatch):
    check = health.Check("fake", "dot", "float32", "")
    about = check, CPU, False
    health.keep(check, CPU, "wrong")
    assert health.reason(*about) == "wrong"
    health.forget()
    assert health.reason(*about) == "wrong"  # the file says it
    health.keep(check, CPU, None)
    assert health.reason(*about) is None
    health.forget()
    health.keep(check, CPU, "it raises", lasting=False)
    assert health.reason(*about) == "it raises"  # the file says that it is right
    assert health.reason(check, torch.device("meta"), False) is None
    for other in ({"backend": "other"}, {"score": "additive"}, {"dtype": "float16"}):
        assert health.reason(check._replace(**other), CPU, False) is None


# ---- when nothing runs ----


def test_not_on_cpus(install, monkeypatch):
    monkeypatch.setattr(health, "DEVICES", ("cuda",))
    monkeypatch.setattr(health, "reason", None)
    fake = install(backend())
    call()
    assert fake.calls == 1


def test_a_named_mode(install, monkeypatch):
    lie = install(backend(wrong_output))
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
    call()
    assert lie.calls == 1
    call_cache.forget()
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "1")
    with pytest.warns(RuntimeWarning):
        call()
    new_process()
    mended = install(backend())
    with pytest.warns(RuntimeWarning):
        call()
    assert mended.calls == 0
    new_process()
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "force")
    call()
    assert mended.calls > 1
    assert verdicts() == {"fake/dot/float32/": None}
    call_cache.forget()
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "yes")
    with pytest.raises(ValueError, match="FASTATTN_SELF_CHECK: expected '0', '1' or 'force'"):
        call()


def test_a_capture_postpones_the_check(install, monkeypatch):
    lie = install(backend(wrong_output))
    with monkeypatch.context() as patch:
        patch.setattr(health, "_captures", lambda: True)
        call()
        assert lie.calls == 1
    with pytest.warns(RuntimeWarning):
        call()  # the same call, which is not remembered
    assert lie.calls > 2


def test_the_current_stream_captures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert health.must_wait()


def test_the_stream_that_graphs_take_by_default_captures(monkeypatch):
    inside = []

    @contextlib.contextmanager
    def stream(number):
        inside.append(number)
        yield
        inside.clear()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside == [3])
    assert not health.must_wait()
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", 3)
    assert health.must_wait()


def test_fake_tensors_and_compilers_run_no_check(install):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = install(backend())
    with FakeTensorMode():
        call()
    assert fake.calls == 1
    assert chosen_while_compiling() == "fake"
    assert not health._found
    call()
    assert health._found


def test_modes_of_real_tensors_run_the_check(install):
    """Such as those that count operations, or choose what a checkpoint keeps."""
    lie = install(backend(wrong_output))
    with FlopCounterMode(display=False), pytest.warns(RuntimeWarning, match="out of"):
        call()
    assert verdicts()["fake/dot/float32/"].startswith("its error is")
    calls = lie.calls
    call()
    assert lie.calls == calls


def test_a_compiler_knows_what_is_wrong(install):
    lie = install(backend(wrong_output))
    with pytest.warns(RuntimeWarning):
        call()
    calls = lie.calls
    assert chosen_while_compiling() == "eager"
    assert lie.calls == calls


def chosen_while_compiling():
    names = list(registry.BACKENDS)
    p = validate.build("dot", *[torch.zeros(1, 2, 3, 4)] * 3).p
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def number(x):
        name = registry.select(p)
        others = registry.may_remember(p, name), registry.faster_forward(p, "auto", name)
        return x + names.index(name) if others == (False, None) else x + 9

    return names[int(number(torch.zeros(1)))]


def call_of(q):
    return scaled_dot_product_attention(q, q, q)


def test_transforms_autocast_and_inference_mode_do_not_reach_the_check(install):
    install(backend())
    q = torch.randn(3, 1, 2, 3, 4)
    torch.func.vmap(torch.func.grad(lambda q: call_of(q).sum()))(q)
    assert verdicts() == {"fake/dot/float32/": None}
    new_process()
    with torch.inference_mode(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        call_of(q[0])
    assert verdicts() == {"fake/dot/float32/": None, "fake/dot/float16/": None}


def test_random_numbers_of_the_caller_stay(install):
    install(backend())
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    q = torch.ones(1, 2, 3, 4)
    scaled_dot_product_attention(q, q, q)
    assert torch.equal(torch.randn(4), expected)


def test_one_of_many_threads_makes_the_check(install):
    slow = install(backend(lambda *args: (time.sleep(0.002), EAGER.forward(*args))[1]))
    made, runner = [], health.runner

    def counted(check, device):
        made.append(threading.get_ident())
        return runner(check, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "runner", counted)
        threads = [threading.Thread(target=call) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1
    assert made[0] not in [thread.ident for thread in threads]
    assert slow.calls > 6


def test_an_interrupt_ends_the_wait_and_not_the_check(install, monkeypatch):
    """Other checks wait for the thread that was left, and its verdict stands."""
    began, runs = threading.Event(), []

    def runner(check, device):
        runs.append(check)
        began.set()
        time.sleep(0.3)
        return health.Verdict("wrong")

    def interrupt(thread, timeout=None):
        assert began.wait(20)
        raise KeyboardInterrupt

    check = health.Check("fake", "dot", "float32", "")
    monkeypatch.setattr(health, "runner", runner)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            health.settle(check, CPU)
    assert health.verdict(check, CPU) == health.UNKNOWN
    health.settle(check, CPU)
    assert runs == [check]
    assert health.verdict(check, CPU) == "wrong"


def test_a_check_settles_no_other(monkeypatch):
    """The thread of a check would wait for itself."""
    one, other = (health.Check("fake", "dot", x, "") for x in ("float32", "float16"))
    monkeypatch.setattr(
        health, "runner", lambda check, device: health.Verdict(health.settle(other, device))
    )
    thread = threading.Thread(target=health.settle, args=(one, CPU), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert health.verdict(one, CPU) is None
    assert health.verdict(other, CPU) == health.UNKNOWN


def test_a_check_makes_no_check(install):
    """Not even where a backend calls a public function."""

    def through(p, q, k, v, w, bias, sink):
        fastattn.explain(q, k, v)
        assert health.is_checking()
        return EAGER.forward(p, q, k, v, w, bias, sink)

    fake = install(backend(through))
    registry.select(validate.build("dot", *[torch.zeros(1, 2, 3, 4)] * 3).p)
    assert verdicts() == {"fake/dot/float32/": None}
    assert fake.calls


def test_a_known_verdict_costs_a_lookup(install, monkeypatch):
    install(backend())
    call()
    for name in ("_make", "_read", "_write"):
        monkeypatch.setattr(health, name, None)
    call_cache.forget()
    call()
    for name in ("reason", "settle", "_load", "verdict"):
        monkeypatch.setattr(health, name, None)
    call()  # known by the cache of calls
    monkeypatch.undo()
