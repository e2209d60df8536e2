"""The operators called directly: bad arguments raise, and nothing reads out of bounds."""

import math

import pytest
import torch

from fastattn.problem.record import SCORES, WEIGHTS
from fastattn.problem.schemas import Call, Saved

pytestmark = pytest.mark.usefixtures("extension")

B, H, HKV, M, N, D, E = 2, 4, 2, 5, 7, 3, 6


def arguments(**changes) -> Call:
    """A good call of forward, except for the changes."""
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, HKV, N, D), torch.randn(B, HKV, N, E)
    return Call(q, k, v)._replace(**changes)


def upstream(**changes) -> Saved:
    """The further arguments of backward, for a good call."""
    out, grad_out = torch.randn(2, B, H, M, E).unbind()
    return Saved(out, torch.rand(B, H, M, 2), grad_out)._replace(**changes)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


FEW = torch.zeros(1, 1, 1, 1)
BAD = {
    "q-3d": dict(q=torch.randn(H, M, D)),
    "k-3d": dict(k=torch.randn(HKV, N, D)),
    "q-k-dim": dict(k=torch.randn(B, HKV, N, D + 1)),
    "k-v-length": dict(v=torch.randn(B, HKV, N + 1, E)),
    "v-shorter": dict(v=torch.randn(B, HKV, N - 1, E)),
    "k-v-heads": dict(v=torch.randn(B, HKV + 1, N, E)),
    "heads-ratio": dict(k=torch.randn(B, 3, N, D), v=torch.randn(B, 3, N, E)),
    "no-kv-heads": dict(k=torch.randn(B, 0, N, D), v=torch.randn(B, 0, N, E)),
    "batch": dict(k=torch.randn(B + 1, HKV, N, D)),
    "batch-of-1": dict(k=torch.randn(1, HKV, N, D)),
    "int": dict(q=torch.ones(B, H, M, D).int()),
    "float64": dict(q=torch.randn(B, H, M, D).double()),
    "k-half": dict(k=torch.randn(B, HKV, N, D).half()),
    "v-half": dict(v=torch.randn(B, HKV, N, E).half()),
    "w-of-dot": dict(w=torch.randn(H, D)),
    "w-missing": dict(score=SCORES["additive"]),
    "w-1d": dict(w=torch.randn(D), score=SCORES["additive"]),
    "w-3d": dict(w=torch.randn(B, H, D), score=SCORES["additive"]),
    "w-heads": dict(w=torch.randn(H + 1, D), score=SCORES["additive"]),
    "w-dim": dict(w=torch.randn(H, D + 1), score=SCORES["gaussian"]),
    "w-batch": dict(w=torch.ones(B + 1, H, D), score=SCORES["gaussian"]),
    "bias-3d": dict(bias=torch.randn(H, M, N)),
    "bias-shape": dict(bias=torch.randn(B, H, M, N + 1)),
    "bias-int": dict(bias=torch.ones(B, H, M, N).int()),
    "kv-len-64": dict(kv_len=ints(B, 1, dtype=torch.int64)),
    "kv-len-1d": dict(kv_len=ints(B)),
    "kv-len-shape": dict(kv_len=ints(B, M + 1)),
    "kv-len-batch": dict(kv_len=ints(B + 1, M)),
    "kv-begin-64": dict(kv_begin=ints(B, 1, dtype=torch.int64)),
    "kv-begin-shape": dict(kv_begin=ints(B, M + 1)),
    "keep-bytes": dict(keep=torch.ones(B, H, M, N).byte()),
    "keep-float": dict(keep=torch.ones(B, H, M, N)),
    "keep-shape": dict(keep=torch.ones(B, H, M + 1, N).bool()),
    "keep-3d": dict(keep=torch.ones(H, M, N).bool()),
    "seed-32": dict(seed=ints(1), dropout_p=0.5),
    "seed-two": dict(seed=ints(2, dtype=torch.int64), dropout_p=0.5),
    "dropout": dict(seed=ints(1, dtype=torch.int64), dropout_p=1.5),
    "dropout-nan": dict(seed=ints(1, dtype=torch.int64), dropout_p=math.nan),
    "dropout-without-seed": dict(dropout_p=0.5),
    "origin-j": dict(seed=ints(1, dtype=torch.int64), dropout_p=0.5, origin_j=6),
    "softcap": dict(softcap=-1.0),
    "softcap-nan": dict(softcap=math.nan),
    "weights": dict(weights=len(WEIGHTS)),
    "weights-below": dict(weights=-1),
    "weights-far": dict(weights=2**32),
    "score": dict(score=len(SCORES)),
    "score-below": dict(score=-1),
    "score-far": dict(score=2**32),
    "dims": dict(q=FEW.expand(1, 1, 1, 2**59), k=FEW.expand(1, 1, 1, 2**59), v=FEW),
    "keys": dict(q=FEW, k=FEW.expand(1, 1, 1152 * 2**51, 1), v=FEW.expand(1, 1, 1152 * 2**51, 1)),
}

BAD_UPSTREAM = {
    "out": dict(out=torch.randn(B, H, M, E + 1)),
    "grad-out-rows": dict(grad_out=torch.randn(B, H, M - 1, E)),
    "grad-out-heads": dict(grad_out=torch.randn(B, HKV, M, E)),
    "grad-out-3d": dict(grad_out=torch.randn(H, M, E)),
    "grad-out-half": dict(grad_out=torch.randn(B, H, M, E).half()),
    "stats-rows": dict(stats=torch.randn(B, H, M - 1, 2)),
    "stats-one": dict(stats=torch.randn(B, H, M)),
    "stats-three": dict(stats=torch.randn(B, H, M, 3)),
    "stats-double": dict(stats=torch.randn(B, H, M, 2).double()),
    "grad-lse": dict(grad_lse=torch.randn(B, H, M + 1)),
    "grad-lse-double": dict(grad_lse=torch.randn(B, H, M).double()),
    "no-bias": dict(bias_needs_grad=True),
}


@pytest.mark.parametrize("name", BAD)
def test_forward_rejects(name):
    with pytest.raises(RuntimeError, match="fastattn: "):
        torch.ops.fastattn.forward(*arguments(**BAD[name]))


@pytest.mark.parametrize("name", BAD)
def test_backward_rejects(name):
    with pytest.raises(RuntimeError, match="fastattn: "):
        torch.ops.fastattn.backward(*arguments(**BAD[name]), *upstream())


@pytest.mark.parametrize("name", BAD_UPSTREAM)
def test_backward_rejects_upstream(name):
    more = upstream(**BAD_UPSTREAM[name])
    with pytest.raises(RuntimeError, match="fastattn: "):
        torch.ops.fastattn.backward(*arguments(), *more)


def test_backward_rejects_gradients_of_weights_in_another_dtype():
    more = upstream(grad_weights=torch.randn(B, H, M, N).half())
    with pytest.raises(RuntimeError, match="expected grad_weights of the dtype of q"):
        torch.ops.fastattn.backward(*arguments(weights=WEIGHTS["full"]), *more)


@pytest.mark.parametrize("weights", ["full", "mean"])
def test_backward_rejects_gradients_of_other_weights(weights):
    for shape in [(B, H, M, N + 1), (B, M, N + 1), (B, H, M), (H, M, N)]:
        more = upstream(grad_weights=torch.randn(shape))
        with pytest.raises(RuntimeError, match="fastattn: grad_weights"):
            torch.ops.fastattn.backward(*arguments(weights=WEIGHTS[weights]), *more)


@pytest.mark.parametrize(
    "sink",
    [torch.zeros(H + 1), torch.zeros(B + 1, H), torch.zeros(B, 1), torch.zeros(1, B, H),
     torch.tensor(0.0), torch.zeros(H, dtype=torch.float64)],
    ids="heads batch one-head 3d 0d float64".split(),
)  # fmt: skip
def test_wrong_sinks(sink):
    with pytest.raises(RuntimeError, match="fastattn: sink"):
        torch.ops.fastattn.forward(*arguments(), sink=sink)
    with pytest.raises(RuntimeError, match="fastattn: sink"):
        torch.ops.fastattn.backward(*arguments(), *upstream(sink=sink))


def test_forward_rejects_a_sink_whose_memory_was_freed():
    sink = torch.zeros(H)
    sink.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"fastattn: sink: .* whose storage was freed"):
        torch.ops.fastattn.forward(*arguments(), sink=sink)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_any_strides(dtype):
    """Of heads, and of samples too; the log-sum-exp has them in it."""
    call, sinks = arguments(), torch.randn(H, 2, B).to(dtype)
    _, lse, *_ = torch.ops.fastattn.forward(*call)
    for sink in (sinks[:, 0, 0], sinks[:, 1].mT):
        out, beside, *_ = torch.ops.fastattn.forward(*call, sink=sink)
        want = torch.logaddexp(lse, sink.float()[..., None])
        torch.testing.assert_close(beside, want)
        plain, *_ = torch.ops.fastattn.forward(*call)
        torch.testing.assert_close(out, plain * (lse - want).exp()[..., None])


GIVEN = {
    "bias": torch.randn(B, H, M, N),
    "keep": torch.ones(B, H, M, N).bool(),
    "kv_len": ints(B, 1),
    "kv_begin": ints(B, 1),
    "seed": ints(1, dtype=torch.int64),
}


@pytest.mark.parametrize("left", [0, 1], ids=["all", "but one byte"])
@pytest.mark.parametrize("name", ["q", "k", "v", *GIVEN])
def test_forward_rejects_memory_that_was_freed(name, left):
    """A mask that is not there must not be a mask that is not given."""
    call = arguments(dropout_p=0.5, seed=ints(1, dtype=torch.int64))
    x = GIVEN.get(name, getattr(call, name)).clone()
    x.untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match=f"fastattn: {name}: .* whose storage was freed"):
        torch.ops.fastattn.forward(*call._replace(**{name: x}))


@pytest.mark.parametrize("name", ["out", "stats", "grad_out"])
def test_backward_rejects_memory_that_was_freed(name):
    more = upstream()
    x = getattr(more, name).clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"fastattn: {name}: .* whose storage was freed"):
        torch.ops.fastattn.backward(*arguments(), *more._replace(**{name: x}))


def test_a_good_call_passes():
    out, lse, weights, stats = torch.ops.fastattn.forward(*arguments(weights=WEIGHTS["mean"]))
    assert (out.shape, lse.shape, weights.shape) == ((B, H, M, E), (B, H, M), (B, M, N))
    assert stats.shape == (B, H, M, 2)
    torch.ops.fastattn.backward(*arguments(weights=WEIGHTS["mean"]), *upstream())


def test_backward_takes_any_strides():
    strided = dict(stats=torch.rand(B, H, M, 4)[..., ::2], grad_lse=torch.randn(B, H, M, 2)[..., 0])
    dense = {name: x.contiguous() for name, x in strided.items()}
    call, saved = arguments(), upstream()
    found, want = (
        torch.ops.fastattn.backward(*call, *saved._replace(**given)) for given in (strided, dense)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("length", [-1, -(2**31), N + 1, 2**31 - 1])
def test_lengths_out_of_range_are_clamped(length):
    """The operator cannot read values that may be on a device; they must not break it."""
    lengths = torch.tensor([[length], [3]], dtype=torch.int32)
    call = arguments()
    for name in ("kv_len", "kv_begin"):
        clamped = torch.ops.fastattn.forward(*call._replace(**{name: lengths.clamp(0, N)}))
        found = torch.ops.fastattn.forward(*call._replace(**{name: lengths}))
        assert all(torch.equal(a, b) for a, b in zip(found, clamped, strict=True))


BANDS = [
    (-(2**62), 2**62), (2**62, None), (None, -(2**62)), (3, -3),
    (-(2**63), 2**63 - 1), (2**63 - 1, None), (None, -(2**63)),
]  # fmt: skip


@pytest.mark.parametrize("band", BANDS)
def test_any_band_is_safe(band):
    lo, hi = band
    out, lse, *_ = torch.ops.fastattn.forward(*arguments(band_lo=lo, band_hi=hi))
    i, j = torch.arange(M)[:, None], torch.arange(N)
    kept = torch.ones(M, N, dtype=torch.bool)
    kept = kept if lo is None else kept & (j - i >= lo)
    kept = kept if hi is None else kept & (j - i <= hi)
    assert torch.equal(lse.isinf()[0, 0], ~kept.any(1))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["", "avx1024", "AVX2", "auto "])
def test_an_unknown_isa_is_refused_and_changes_nothing(name):
    before = torch.ops.fastattn.cpu_isa()
    assert not torch.ops.fastattn.select_cpu_isa(name)
    assert torch.ops.fastattn.cpu_isa() == before
