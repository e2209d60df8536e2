"""Nothing waits for the device. GPUs: graphs and streams; elsewhere: the dispatched operators."""

import pytest
import torch
from helpers import SCORES, attend, inputs
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.backends import triton
from fastattn.problem import arguments

SIZES = {"tiles": 40, "few": 3}  # queries; few queries have their own kernels
every_size = pytest.mark.parametrize("M", SIZES.values(), ids=SIZES)
every_score = pytest.mark.parametrize("score", SCORES)


def problem(score, M, device):
    """Inputs, and options that use every kernel: lists of blocks, dropout, a bias, weights."""
    call = inputs(score, M=M, N=70, D=8, E=5)
    call = {name: x.to(device).requires_grad_() for name, x in call.items()}
    keep = (torch.rand(2, 1, M, 70) < 0.7).to(device)
    bias = torch.randn(1, 2, M, 70).to(device).requires_grad_()
    lengths = torch.tensor([70, 50], dtype=torch.int32, device=device)
    return call, bias, fastattn.Mask(keep=keep, kv_len=lengths)


def step(call, bias, mask, seed):
    """Outputs and gradients, without a graph: a capture may not wait for the stream of another."""
    results = attend(
        **call, bias=bias, mask=mask, dropout_p=0.3, seed=seed, backend="triton",
        return_weights="mean", return_lse=True,
    )  # fmt: skip
    loss = results[0].square().sum() + results[1].square().sum()
    grads = torch.autograd.grad(loss, [*call.values(), bias])
    return [*(x.detach() for x in results), *grads]


class NoWaiting(TorchDispatchMode):
    """Refuses operators that copy from the device, or whose result's shape depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        if name == "_to_copy":
            assert (kwargs or {}).get("device") is None, "a copy between devices"
        return function(*args, **(kwargs or {}))


@every_size
@every_score
def test_no_operation_waits_for_the_device(score, M, device, monkeypatch):
    """Of validation and autograd. aot.py shows on meta tensors that launchers read no values."""
    monkeypatch.setattr(arguments, "can_read", lambda x: False)  # as for tensors on a GPU
    call, bias, mask = problem(score, M, device)
    seed = torch.tensor(5, device=device)
    with NoWaiting():
        step(call, bias, mask, seed)
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        bias.sum().item()


@every_size
@every_score
def test_repeated_calls_compute_the_same(score, M, device):
    """On a GPU the third one is launched from a plan; see kernels/host/prepared.py."""
    call, bias, mask = problem(score, M, device)
    seed = torch.tensor(5, device=device)
    want = step(call, bias, mask, seed)
    for _ in range(3 if device.type == "cuda" else 1):
        call = {name: x.detach().clone().requires_grad_() for name, x in call.items()}
        got = step(call, bias, mask, seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_size
@every_score
def test_a_graph_replays_forward_and_backward_with_new_dropout(score, M, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    call, bias, mask = problem(score, M, device)
    seed = torch.tensor(5, device=device)
    want = {n: step(call, bias, mask, torch.tensor(n, device=device)) for n in (5, 6, 5, 6)}
    assert not torch.equal(want[5][0], want[6][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(call, bias, mask, seed)
    for n in (6, 5):
        seed.fill_(n)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want[n], strict=True))


@every_score
def test_a_graph_draws_a_seed_at_every_replay(score, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    call, bias, mask = problem(score, 40, device)
    step(call, bias, mask, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(call, bias, mask, None)
    graph.replay()
    first = got[0].clone()
    graph.replay()
    assert not torch.equal(first, got[0])


@every_score
def test_kernels_run_on_the_stream_of_the_caller(score, device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    call, bias, mask = problem(score, 40, device)
    seed = torch.tensor(5, device=device)
    want = step(call, bias, mask, seed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)  # another stream would be done before the copy
        late = {name: (x.detach() * 1.0).requires_grad_() for name, x in call.items()}
        got = step(late, bias, mask, seed)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    triton.current_device(torch.device("cuda:1"))
    triton.current_device(torch.device("cpu"))
    assert entered == [torch.device("cuda:1")]


@every_score
def test_kernels_run_on_the_second_of_two_devices(score, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for n in range(2):
        torch.manual_seed(0)
        call, bias, mask = problem(score, 40, torch.device("cuda", n))
        results.append(step(call, bias, mask, torch.tensor(5, device=f"cuda:{n}")))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))
