"""Attention and both its projections as one operator, at inference."""

import pytest
import torch
import torch.nn.functional as F

from fastattn import testing
from fastattn.problem.record import WEIGHTS

pytestmark = pytest.mark.usefixtures("extension")

multi_head_attention = torch.ops.fastattn.multi_head_attention
B, N, E, H, D = 2, 5, 6, 2, 4
# Numbers of tokens that Intel processors multiply with the weight on the left, and neighbours.
TOKENS = (1, 7, 8, 15, 16, 17, 48, 49, 130)


def whole(weights="none", batch_first=True, dtype=torch.float32, bias=True, **changes):
    """The arguments of a call of multi_head_attention. The head size is not E / H."""
    rows = 3 * H * D
    good = dict(
        x=torch.randn(B, N, E), in_weight=torch.randn(rows, E), in_bias=torch.randn(rows),
        out_weight=torch.randn(E + 1, H * D), out_bias=torch.randn(E + 1), num_heads=H, scale=0.5,
        weights=WEIGHTS.get(weights, weights), batch_first=batch_first, mask=None,
    )  # fmt: skip
    if not bias:
        good |= {"in_bias": None, "out_bias": None}
    good = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in good.items()}
    return tuple((good | changes).values())


def in_parts(
    x, in_weight, in_bias, out_weight, out_bias, num_heads, scale, weights, batch_first, mask,
    *rooms, past=0, adds=True, key=None, value=None
):  # fmt: skip
    """multi_head_attention made of torch's operators, with the weights of each head."""
    key = x if key is None else key
    value = key if value is None else value
    q, k, v = (
        F.linear(y if batch_first else y.transpose(0, 1), in_weight, in_bias)
        .chunk(3, -1)[n].unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for n, y in enumerate((x, key, value))
    )  # fmt: skip
    if rooms:
        held = [y[:, :, :past] for y in rooms]
        k, v = (torch.cat(y, 2) for y in zip(held, (k, v), strict=True)) if adds else held
    scores = q @ k.mT * scale
    if rooms and adds:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(past + 1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        keeps = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if keeps else scores + mask
    attended = torch.softmax(scores, -1)
    out = F.linear((attended @ v).transpose(1, 2).flatten(2), out_weight, out_bias)
    return out if batch_first else out.transpose(0, 1), attended


def double(arguments):
    floats = (isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments)
    return [x.double() if y else x for x, y in zip(arguments, floats, strict=True)]


def mask_of(kind, keys, *lead):
    """A mask of so many keys, with strides, that keeps the first; None without a kind."""
    *lead, rows = lead or (B, 1, 1)
    kept = torch.rand(*lead, keys, 2 * rows)[..., ::2].mT > 0.4
    kept[..., 0] = True
    added = torch.randn(*lead, keys, rows).mT.masked_fill(~kept, -torch.inf)
    return {"keep": kept, "add": added, None: None}[kind]


def assert_right(found, arguments, weights, **others):
    peer = in_parts(*arguments, **others)
    exact = dict(zip(others, double(others.values()), strict=True))
    truth = in_parts(*double(arguments), **exact)
    testing.assert_within_budget(found[0], peer[0], truth[0])
    if weights == "none":
        assert found[1].shape == (0,)
    else:
        each = (lambda w: w) if weights == "full" else (lambda w: w.mean(1))
        testing.assert_within_budget(found[1], each(peer[1]), each(truth[1]))


class TestSelfAttention:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", ["none", "full", "mean"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_same_as_in_parts(self, dtype, weights, batch_first, bias):
        arguments = whole(weights, batch_first, dtype, bias)
        with testing.poisoned():
            found = multi_head_attention(*arguments)
        assert_right(found, arguments, weights)
        assert found[0].is_contiguous()

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", ["none", "full", "mean"])
    @pytest.mark.parametrize("kind", ["keep", "add"])
    @pytest.mark.parametrize("lead", [(B, 1, 1), (1, 1, N), (B, 1, N), (B, H, N), (1, 1, 1)])
    def test_masks(self, lead, kind, weights, batch_first):
        x = torch.randn(B, N, E) if batch_first else torch.randn(N, B, E)
        arguments = whole(weights, batch_first, x=x, mask=mask_of(kind, N, *lead))
        with testing.poisoned():
            found = multi_head_attention(*arguments)
        assert_right(found, arguments, weights)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tokens", TOKENS)
    def test_tokens(self, tokens, dtype, bias):
        arguments = whole(dtype=dtype, bias=bias, x=torch.randn(1, tokens, E, dtype=dtype))
        peer, truth = in_parts(*arguments), in_parts(*double(arguments))
        testing.assert_within_budget(multi_head_attention(*arguments)[0], peer[0], truth[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_large_weight(self, dtype):
        """A large weight: fewer tokens have it on the left, and half dtypes convert it in parts."""
        wide = dict(x=torch.randn(1, 9, 1024), in_weight=torch.randn(3 * H * D, 1024) / 32,
                    in_bias=None, out_weight=torch.randn(1 << 17, H * D),
                    out_bias=torch.randn(1 << 17))  # fmt: skip
        wide = {n: x if x is None else x.to(dtype) for n, x in wide.items()}
        arguments = whole(dtype=dtype, **wide)
        peer, truth = in_parts(*arguments), in_parts(*double(arguments))
        testing.assert_within_budget(multi_head_attention(*arguments)[0], peer[0], truth[0])

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 20), (20, 1)])
    def test_shapes(self, shape, batch_first):
        arguments = whole("mean", batch_first, x=torch.randn(*shape, E))
        found, peer = multi_head_attention(*arguments), in_parts(*arguments)
        torch.testing.assert_close(found, (peer[0], peer[1].mean(1)))

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_strides(self, batch_first):
        arguments = whole(batch_first=batch_first)
        wide = torch.full((N + 2, E + 3, B), torch.nan)
        wide[1:-1, 2:-1] = arguments[0].permute(1, 2, 0)
        columns = torch.full((E + 2, 3 * H * D + 1), torch.nan)
        columns[1:-1, 1:] = arguments[1].t()
        spread = torch.full((6 * H * D,), torch.nan)
        spread[1::2] = arguments[2]
        strided = wide[1:-1, 2:-1].permute(2, 0, 1), columns[1:-1, 1:].t(), spread[1::2]
        found, _ = multi_head_attention(*strided, *arguments[3:])
        torch.testing.assert_close(found, multi_head_attention(*arguments)[0])

    @pytest.mark.parametrize(
        "changes",
        [
            dict(x=torch.randn(N, E)), dict(x=torch.randn(B, N, E + 1)),
            dict(x=torch.ones(B, N, E).int()), dict(x=torch.randn(B, N, E).half()),
            dict(in_weight=torch.randn(3 * H * D + 1, E), in_bias=None),
            dict(in_weight=torch.randn(3 * H * D)), dict(in_bias=torch.randn(3 * H * D - 1)),
            dict(out_weight=torch.randn(E, H * D + 1)), dict(out_bias=torch.randn(E)),
            dict(out_weight=torch.randn(E + 1, H * D).double()),
            dict(num_heads=0), dict(num_heads=-1), dict(num_heads=5),
            dict(num_heads=2**64 // 3 + 1),  # three times it are 2 in 64 bits
            dict(weights=-1), dict(weights=3),
            dict(mask=torch.ones(B, 1, 1, N).int()), dict(mask=torch.ones(B, 1, 1, N).double()),
            *(dict(mask=torch.ones(shape, dtype=torch.bool)) for shape in
              [(B, 1, 1, N - 1), (B, N), (N,), (), (B, 1, N), (B, H + 1, 1, N), (1, 1, N - 1, N)]),
        ],
    )  # fmt: skip
    def test_rejects(self, changes):
        with pytest.raises(RuntimeError, match="fastattn: "):
            multi_head_attention(*whole(**changes))

    def test_rejects_autocast(self):
        """Autocast would make products 16-bit, whose memory is half as large."""
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
            multi_head_attention(*whole())

    def test_nan_reaches_its_sample_alone(self):
        arguments = whole()
        want, _ = multi_head_attention(*arguments)
        arguments[0][1, 2] = torch.nan
        found, _ = multi_head_attention(*arguments)
        assert found[1].isnan().all()
        assert torch.equal(found[0], want[0])


class TestCache:
    """With memory for keys and values, whose first rows are those of earlier positions."""

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", ["none", "full", "mean"])
    @pytest.mark.parametrize("past", [0, 1, 3])
    @pytest.mark.parametrize("M", [1, 2, N])
    @pytest.mark.parametrize("kind", [None, "keep", "add"])
    def test_same_as_in_parts(self, kind, M, past, weights, batch_first):
        x = torch.randn(B, M, E) if batch_first else torch.randn(M, B, E)
        arguments = whole(weights, batch_first, x=x, mask=mask_of(kind, past + M))
        wide = torch.full((2, H, B, D, 12), torch.nan).transpose(1, 2).mT
        wide[..., :past, :] = torch.randn(2, B, H, past, D)
        before, cache = wide.clone(), wide[..., : past + M, :]
        with testing.poisoned():
            found = multi_head_attention(*arguments, *cache, past)
        assert_right(found, (*arguments, *before), weights, past=past)
        rows = arguments[0] if batch_first else arguments[0].transpose(0, 1)
        packed = F.linear(rows, *arguments[1:3]).unflatten(-1, (3, H, D))
        torch.testing.assert_close(wide[..., past : past + M, :], packed.permute(2, 0, 3, 1, 4)[1:])
        assert torch.equal(wide[..., :past, :], before[..., :past, :])
        assert wide[..., past + M :, :].isnan().all()

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", ["none", "full", "mean"])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("past", [1, 3, 12])
    @pytest.mark.parametrize("kind", [None, "keep", "add"])
    def test_adds_none(self, kind, past, bias, weights, batch_first):
        """Only queries are projected, and nothing is written or causal."""
        strided = dict(in_weight=torch.randn(E, 6 * H * D).T[::2])
        if bias:
            strided |= dict(in_bias=torch.randn(6 * H * D)[::2])
        mask = mask_of(kind, past)
        arguments = whole(weights, batch_first, bias=bias, mask=mask, **strided)
        if not batch_first:
            arguments = (arguments[0].transpose(0, 1), *arguments[1:])
        cache = torch.randn(2, H, B, D, 12).transpose(1, 2).mT
        cache[..., past:, :] = torch.nan
        before = cache.clone()
        with testing.poisoned():
            found = multi_head_attention(*arguments, *cache, past, False)
        assert_right(found, (*arguments, *cache), weights, past=past, adds=False)
        assert torch.equal(cache.nan_to_num(9.0), before.nan_to_num(9.0))

    @pytest.mark.parametrize("changes", [
        dict(in_bias=torch.randn(3 * H * D + 1)), dict(in_bias=torch.randn(H * D)),
        dict(in_bias=torch.tensor(1.0)), dict(in_weight=torch.randn(3 * H * D)),
        dict(in_weight=torch.randn(H * D, E), in_bias=None), dict(mask=torch.zeros(B, 1, 1, 5)),
    ])  # fmt: skip
    def test_rejects_without_others(self, changes):
        with pytest.raises(RuntimeError, match="fastattn: "):
            multi_head_attention(*whole(**changes), *torch.randn(2, B, H, 4, D), 4, False)

    def test_none_come_before_those_of_x_without_a_cache(self):
        with pytest.raises(RuntimeError, match="fastattn: past: expected 0 without keys"):
            multi_head_attention(*whole(), None, None, 1)

    def test_adds_none_to_something(self):
        with pytest.raises(RuntimeError, match="fastattn: keys, values"):
            multi_head_attention(*whole(), None, None, 0, False)

    @pytest.mark.parametrize(
        ("keys", "values", "past"),
        [
            ((B, H, 9, D), None, 0), (None, (B, H, 9, D), 0), ((B, H, 9, D), (B, H, 7, D), 3),
            ((B, H, 9, D), (B, H, 9, D), -1), ((B, H, 9, D), (B, H, 9, D), 5),
            ((B, H, 4, D), (B, H, 4, D), 0), ((B, H, 9, D), (B, H, 9, D), 2**63 - 1),
            ((B + 1, H, 9, D), (B + 1, H, 9, D), 0), ((B, 1, 9, D), (B, H, 9, D), 0),
            ((B, H, 9, 1), (B, H, 9, D), 0), ((B, H, 9), (B, H, 9, D), 0),
            ((B, H, 9, D), (B, H, 9, D + 1), 0),
        ],
    )  # fmt: skip
    def test_rejects(self, keys, values, past):
        cache = [None if shape is None else torch.zeros(shape) for shape in (keys, values)]
        with pytest.raises(RuntimeError, match="fastattn: keys, values"):
            multi_head_attention(*whole(), *cache, past)

    def test_rejects_another_dtype(self):
        room = torch.zeros(B, H, 9, D)
        for cache in ((room.half(), room), (room, room.half())):
            with pytest.raises(RuntimeError, match="fastattn: keys, values"):
                multi_head_attention(*whole(), *cache, 0)


class TestOtherInputs:
    """With inputs of their own for keys and values, or one for both."""

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", ["none", "full", "mean"])
    @pytest.mark.parametrize("keys", [1, 3, 40])
    @pytest.mark.parametrize("kind", [None, "keep", "add"])
    @pytest.mark.parametrize("apart", [True, False])
    def test_same_as_in_parts(self, apart, kind, keys, weights, batch_first, bias):
        strided = dict(in_weight=torch.randn(E, 6 * H * D).T[::2] / 2)
        if bias:
            strided |= dict(in_bias=torch.randn(6 * H * D)[::2] / 2)
        others = dict(key=torch.randn(E, keys, B).permute(2, 1, 0))
        if apart:
            others |= dict(value=torch.randn(B, keys, E))
        x = torch.randn(B, N, E)
        if not batch_first:
            x, others = x.transpose(0, 1), {n: y.transpose(0, 1) for n, y in others.items()}
        arguments = whole(weights, batch_first, bias=bias, x=x, mask=mask_of(kind, keys), **strided)
        with testing.poisoned():
            found = multi_head_attention(*arguments, **others)
        assert_right(found, arguments, weights, **others)

    def test_values_alone(self):
        arguments, value = whole(), torch.randn(B, N, E)
        found = multi_head_attention(*arguments, value=value)
        assert_right(found, arguments, "none", value=value)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_halves(self, dtype):
        arguments, y = whole(dtype=dtype), torch.randn(B, 9, E).to(dtype)
        assert_right(multi_head_attention(*arguments, key=y), arguments, "none", key=y)

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize(("queries", "keys", "samples"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
    def test_empty(self, queries, keys, samples, batch_first):
        x, y = torch.randn(samples, queries, E), torch.randn(samples, keys, E)
        if not batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        arguments = whole("mean", batch_first, x=x)
        found = multi_head_attention(*arguments, key=y)
        peer = in_parts(*arguments, key=y)
        torch.testing.assert_close(found, (peer[0], peer[1].mean(1)))

    @pytest.mark.parametrize("changes", [
        dict(value=torch.randn(B, N + 1, E)), dict(key=None, value=torch.randn(B, N + 1, E)),
        dict(key=torch.randn(B + 1, N, E)), dict(value=torch.randn(B, N, E + 1)),
        dict(key=torch.randn(N, E)), dict(value=torch.randn(B, N, E).half()),
        dict(keys=torch.zeros(B, H, 9, D), values=torch.zeros(B, H, 9, D)),
        dict(key=None, keys=torch.zeros(B, H, 9, D), values=torch.zeros(B, H, 9, D)),
        dict(mask=torch.ones(B, 1, 1, N - 1, dtype=torch.bool)), dict(mask=torch.zeros(B, N)),
    ])  # fmt: skip
    def test_rejects(self, changes):
        y = torch.randn(B, N, E)
        given = dict(key=y, value=y, keys=None, values=None) | changes
        arguments = whole(mask=given.pop("mask", None))
        with pytest.raises(RuntimeError, match="fastattn: "):
            multi_head_attention(*arguments, **given)


@pytest.mark.slow
def test_opcheck_with_a_cache():
    for weights in ("none", "full", "mean"):
        cache = torch.randn(B, H, 9, D), torch.randn(B, H, 9, D), 3
        for adds in (True, False):
            for mask in (None, *(mask_of(kind, 8 if adds else 3) for kind in ("keep", "add"))):
                arguments = (*whole(weights, mask=mask), *cache, adds)
                torch.library.opcheck(multi_head_attention.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_opcheck_with_other_inputs(batch_first):
    y = torch.randn(B, 7, E) if batch_first else torch.randn(7, B, E)
    x = torch.randn(B, N, E) if batch_first else torch.randn(N, B, E)
    for weights in ("none", "full", "mean"):
        arguments = whole(weights, batch_first, x=x)
        others = {"key": y, "value": y.clone(), "is_causal": weights == "none"}
        torch.library.opcheck(multi_head_attention.default, arguments, others)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5, 20])
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(tokens, bias):
    for weights in ("none", "full", "mean"):
        for batch_first in (True, False):
            x = torch.randn(B, tokens, E)
            arguments = whole(weights, batch_first, bias=bias, x=x)
            torch.library.opcheck(multi_head_attention.default, arguments)


def test_no_autograd_of_its_own():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("fastattn::multi_head_attention", "CPU")
    assert not has_kernel("fastattn::multi_head_attention", "Autograd")
