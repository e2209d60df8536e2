"""fastattn.integrations.flash_attn: flash_attn's functions, beside the same in plain PyTorch."""

import inspect
import math

import pytest
import torch

from fastattn.integrations import flash_attn
from fastattn.testing import assert_within_budget

B, H, HKV, D = 2, 4, 2, 8


def draw(M, N, kv_heads=HKV):
    rng = torch.Generator().manual_seed(M * 100 + N)
    shapes = (B, M, H, D), (B, N, kv_heads, D), (B, N, kv_heads, D)
    return [torch.randn(shape, generator=rng) for shape in shapes]


def dense(M, N, causal, window):
    """As flash_attn's documentation puts it."""
    i, j = torch.arange(M)[:, None], torch.arange(N)
    left, right = window
    keep = torch.ones(M, N, dtype=torch.bool)
    if left >= 0:
        keep &= j >= i + N - M - left
    if right >= 0:
        keep &= j <= i + N - M + right
    return keep & (j <= i + N - M) if causal else keep


def plain(q, k, v, keep, bias=None, scale=None, softcap=0.0):
    """(out, lse) of the formula; rows without keys are 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias.to(q.dtype)
    some = keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep & some, -math.inf)
    out = (scores.softmax(-1) * some) @ v
    lse = scores.logsumexp(-1).masked_fill(~some.squeeze(-1), -math.inf)
    return out.transpose(1, 2), lse


def check(call, formula, tensors):
    """Both results and all gradients of ``call``, within the budget of a formula."""
    results = []
    for function, dtype in ((call, None), (formula, None), (formula, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
        out, lse = function(*leaves)
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        grads = torch.autograd.grad((out * upstream).sum() + finite.sum(), leaves)
        results.append((out, lse, *grads))
    for n, got in enumerate(zip(*results, strict=True)):
        assert_within_budget(*got, name=f"result {n}")


def test_softcap_comes_before_bias_and_mask():
    slopes = torch.tensor([0.5, 0.25])
    i, j = torch.arange(5)[:, None], torch.arange(7)
    bias = -slopes[:, None, None] * (i + 2 - j).abs()

    def call(q, k, v):
        return flash_attn.flash_attn_func(
            q, k, v, causal=True, softcap=1.5, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    def formula(q, k, v):
        return plain(q, k, v, dense(5, 7, True, (-1, -1)), bias, softcap=1.5)

    check(call, formula, [3 * torch.randn(2, n, 2, D) for n in (5, 7, 7)])


def test_softcap_of_packed_documents():
    q = 3 * torch.randn(6, 2, D)
    packed = flash_attn.flash_attn_varlen_func(q, q, q, [0, 2, 6], [0, 2, 6], 4, 4, softcap=1.5)
    alone = flash_attn.flash_attn_func(q[None, 2:], q[None, 2:], q[None, 2:], softcap=1.5)
    torch.testing.assert_close(packed[2:], alone[0])


WINDOWS = [(-1, -1), (3, 2), (0, -1), (-1, 1), (2, 0)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), [(9, 9), (5, 12), (12, 5)])
def test_func(M, N, causal, window):
    keep = dense(M, N, causal, window)

    def call(q, k, v):
        return flash_attn.flash_attn_func(
            q, k, v, 0.0, 0.3, causal, window, return_attn_probs=True
        )[:2]

    check(call, lambda *x: plain(*x, keep, scale=0.3), draw(M, N))


@pytest.mark.parametrize("batched", [False, True])
def test_alibi(batched):
    M, N = 5, 9
    slopes = torch.rand((B, H) if batched else (H,), generator=torch.Generator().manual_seed(0))
    apart = (torch.arange(M)[:, None] + N - M - torch.arange(N)).abs()
    bias = -slopes.view(-1, H, 1, 1) * apart

    def call(q, k, v):
        return flash_attn.flash_attn_func(
            q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    check(call, lambda *x: plain(*x, dense(M, N, True, (-1, -1)), bias), draw(M, N))


def test_packed():
    q, k, v = draw(6, 6, H)
    options = dict(softmax_scale=0.4, causal=True, window_size=(3, -1))
    expected = flash_attn.flash_attn_func(q, k, v, **options)
    kv, qkv = torch.stack([k, v], 2), torch.stack([q, k, v], 2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, 0.0, **options), expected)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, **options), expected)


def test_what_is_returned():
    q, k, v = draw(4, 6)
    assert flash_attn.flash_attn_func(q, k, v).shape == (B, 4, H, D)
    out, lse, weights = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (B, H, 4)
    assert weights is None
    torch.manual_seed(0)
    out, lse, weights = flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert weights.shape == (B, H, 4, 6)
    assert 0 < (weights == 0).float().mean() < 1
    heads = v.transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close((weights @ heads).transpose(1, 2), out)


# ---- sequences one after the other ----

QUERIES, KEYS = [0, 5, 5, 9], [0, 3, 4, 10]


@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal, window):
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, h, D, generator=rng) for n, h in ((9, H), (10, HKV), (10, HKV))]

    def call(q, k, v):
        offsets = lengths_of(QUERIES), lengths_of(KEYS)
        options = dict(causal=causal, window_size=window, return_attn_probs=True)
        return flash_attn.flash_attn_varlen_func(q, k, v, *offsets, 5, 6, **options)[:2]

    def formula(q, k, v):
        outs, sums = [], []
        for n in range(3):
            i, j = (slice(*x[n : n + 2]) for x in (QUERIES, KEYS))
            keep = dense(i.stop - i.start, j.stop - j.start, causal, window)
            out, lse = plain(q[None, i], k[None, j], v[None, j], keep)
            outs.append(out[0])
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, -1)

    check(call, formula, tensors)


def test_varlen_packed():
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(9, H, D, generator=rng) for _ in range(3))
    offsets = lengths_of(QUERIES)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, 5, 5, 0.0, 0.4, True)
    kv, qkv = torch.stack([k, v], 1), torch.stack([q, k, v], 1)
    got = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 5, 5, 0.0, 0.4, True)
    assert torch.equal(got, expected)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 5, 0.0, 0.4, True)
    assert torch.equal(got, expected)
    out, lse, weights = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv, offsets, 5, 0.5, return_attn_probs=True
    )
    assert (out.shape, lse.shape, weights.shape) == ((9, H, D), (H, 9), (H, 9, 9))
    assert (weights[:, :5, 5:] == 0).all()


# ---- the cache ----


def lengths_of(n):
    return torch.tensor(n, dtype=torch.int32)


@pytest.mark.parametrize("window", [(-1, -1), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("leftpad", [False, True])
def test_cache(new, causal, window, leftpad):
    M, L, before = 3, 10, [7, 4]
    q, k, v = draw(M, 3)
    _, k_cache, v_cache = draw(1, L)
    options = dict(causal=causal, window_size=window, return_softmax_lse=True)
    pads = [2, 0]
    if leftpad:
        options["cache_leftpad"] = lengths_of(pads)
    caches = k_cache.clone(), v_cache.clone()
    got, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, *((k, v) if new else ()), cache_seqlens=lengths_of(before), **options
    )
    for b, length in enumerate(before):
        total = length + new
        keys, values = k_cache[b, :length], v_cache[b, :length]
        if new:
            keys, values = torch.cat([keys, k[b]]), torch.cat([values, v[b]])
            assert torch.equal(caches[0][b, :total], keys)
            assert torch.equal(caches[1][b, :total], values)
        assert torch.equal(caches[0][b, total:], k_cache[b, total:])
        keep = dense(M, total, causal, window)
        if leftpad:
            keep &= torch.arange(total) >= pads[b]
        tensors = q[b : b + 1], keys[None], values[None]
        peer = plain(*tensors, keep)
        truth = plain(*(x.double() for x in tensors), keep)
        for ours, p, t in zip((got, lse), peer, truth, strict=True):
            assert_within_budget(ours[b : b + 1], p, t)


def test_one_length_whatever_the_default_device():
    q, k, v = draw(3, 10)
    expected = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=True)
    with torch.device("meta"):
        found = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=True)
    assert torch.equal(found, expected)


def test_softcap_of_the_cache():
    q, k, v = draw(3, 10)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, softcap=0.5)
    tensors, keep = (q, k, v), dense(3, 10, True, (-1, -1))
    peer = plain(*tensors, keep, softcap=0.5)[0]
    truth = plain(*(x.double() for x in tensors), keep, softcap=0.5)[0]
    assert_within_budget(out, peer, truth)


def test_cache_rows_and_one_length():
    q, k, v = draw(1, 1)
    _, k_cache, v_cache = draw(1, 6)
    k_cache, v_cache = (torch.cat([x, x + 1]) for x in (k_cache, v_cache))
    rows = torch.tensor([3, 0])
    expected = flash_attn.flash_attn_with_kvcache(
        q, k_cache[rows], v_cache[rows], k, v, cache_seqlens=4
    )
    got = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=4, cache_batch_idx=rows
    )
    assert torch.equal(got, expected)
    assert torch.equal(k_cache[rows, 4], k[:, 0])


NEW = {
    "samples": ((1, 2, 2, 2), (1, 2, 2, 2), ValueError, r"k: expected \[2, 2, 2, 2\] to"),
    "lengths": ((2, 2, 2, 2), (2, 1, 2, 4), ValueError, r"v: .*\[2, 2, 2, 4\] .*\[2, 1, 2, 4\]"),
    "heads": ((2, 2, 1, 2), (2, 2, 1, 4), ValueError, r"k: expected .* got \[2, 2, 1, 2\]"),
    "value-heads": ((2, 2, 2, 2), (2, 2, 1, 4), ValueError, r"v: expected .* got \[2, 2, 1, 4\]"),
    "dims": ((2, 2, 2, 2), (4,), ValueError, r"v: expected .* got \[4\]"),
    "dtype": ((2, 2, 2, 2), (2, 2, 2, 4), TypeError, "v: expected torch.float32 as of v_cache"),
}


@pytest.mark.parametrize("name", NEW)
def test_new_keys_that_do_not_fit_are_not_written(name):
    shape, value_shape, error, message = NEW[name]
    k_cache, v_cache = torch.zeros(2, 4, 2, 2), torch.zeros(2, 4, 2, 4)
    k, v = torch.ones(shape), torch.ones(value_shape).to(torch.half if name == "dtype" else None)
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_with_kvcache(
            torch.ones(2, 1, 2, 2), k_cache, v_cache, k, v, cache_seqlens=1
        )
    assert not k_cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(q=torch.ones(2, 1, 3, 2)), ValueError, "multiple of 2 heads"),
        (dict(q=torch.ones(2, 1, 2, 4)), ValueError, "query and key"),
        (dict(q=torch.ones(2, 1, 2, 2), k=torch.ones(3, 1, 2, 2)), ValueError, "k: expected"),
        (dict(q=torch.ones(2, 1, 2, 2).half()), TypeError, "key: expected the dtype of query"),
        (dict(q=torch.ones(2, 1, 2, 2, device="meta")), ValueError, "device"),
        (dict(window_size=3), TypeError, r"window_size: expected .* write \(3, 3\)"),
        (dict(window_size=(-2, 0)), ValueError, r"window_size: expected -1 \(unbounded\) or more"),
        (dict(softcap="1"), TypeError, "softcap: expected a float"),
        (dict(softmax_scale=math.inf), ValueError, "scale: expected -1e30 to 1e30"),
        (dict(k=[1], v=[2]), TypeError, "k: expected a Tensor, got list"),
        (dict(v=[2]), TypeError, "v: expected a Tensor, got list"),
        (dict(v=torch.ones(2, 1, 2, 2, device="meta")), ValueError, "v: expected the dev"),
        (dict(v_cache=torch.zeros(2, 4, 2, 2).half()), TypeError, "v: expected torch.float16"),
        (dict(k_cache=torch.zeros(2, 4, 2, 2).half(), k=torch.ones(2, 1, 2, 2).half()), TypeError,
         "key: expected the dtype of query"),
    ],
)  # fmt: skip
def test_nothing_is_written_by_a_call_that_raises(options, error, message):
    x = torch.ones(2, 1, 2, 2)
    call = dict(q=x, k=x, v=x, k_cache=torch.zeros(2, 4, 2, 2), v_cache=torch.zeros(2, 4, 2, 2))
    call |= dict(cache_seqlens=torch.tensor([0, 1])) | options
    for rows in (None, torch.tensor([1, 0])):
        with pytest.raises(error, match=message):
            flash_attn.flash_attn_with_kvcache(**call, cache_batch_idx=rows)
        assert not call["k_cache"].any()
        assert not call["v_cache"].any()


def test_new_keys_in_a_cache_of_fewer_rows_need_their_rows():
    x, cache = torch.ones(2, 1, 2, 2), torch.zeros(1, 4, 2, 2)
    with pytest.raises(ValueError, match=r"k_cache: .*\[2, L, Hkv, D\], or cache_batch_idx"):
        flash_attn.flash_attn_with_kvcache(x, cache, cache.clone(), x, x, cache_seqlens=1)
    assert not cache.any()
    own = dict(cache_seqlens=lengths_of([0, 1]), cache_batch_idx=lengths_of([0, 0]))
    flash_attn.flash_attn_with_kvcache(x, cache, cache.clone(), x, x, **own)
    assert cache.sum((2, 3)).tolist() == [[4, 4, 0, 0]]


def test_a_cache_gives_no_gradients():
    q, k, v = (x.requires_grad_() for x in draw(1, 6))
    assert not flash_attn.flash_attn_with_kvcache(q, k, v).requires_grad


def test_samples_may_share_a_cache():
    q, k, v = draw(1, 6)
    expected = flash_attn.flash_attn_with_kvcache(q, k[[0, 0]], v[[0, 0]], cache_seqlens=4)
    found = flash_attn.flash_attn_with_kvcache(q, k[:1], v[:1], cache_seqlens=4)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cache_seqlens=5), r"cache_seqlens: expected values in \[0, 4\], got \[5, 5\]"),
        (dict(cache_seqlens=lengths_of([0, -1])), r"cache_seqlens: .*\[0, 4\], got \[0, -1\]"),
        (dict(cache_leftpad=lengths_of([0, 5]), cache_seqlens=1), r"cache_leftpad: .*\[0, 4\]"),
        (dict(cache_batch_idx=lengths_of([0, -1]), cache_seqlens=1), r"_batch_idx: .*\[0, 1\]"),
        (dict(cache_batch_idx=lengths_of([0]), cache_seqlens=1), r"_batch_idx: expected \[2\]"),
    ],
)
def test_integers_out_of_range(options, message, new):
    x = torch.ones(2, 1, 2, 4)
    cache = torch.zeros(2, 4, 2, 4)
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(x, cache, cache, *([x, x] if new else []), **options)
    assert not cache.any()


@pytest.mark.parametrize("shape", [(2, 4, 2, 2), (1, 3, 2, 2), (1, 4, 1, 2)])
def test_caches_that_do_not_fit_each_other(shape):
    x, k_cache, v_cache = torch.ones(1, 1, 2, 2), torch.zeros(1, 4, 2, 2), torch.zeros(shape)
    with pytest.raises(ValueError, match=r"k_cache and v_cache: .* \[1, 4, 2, 2\] and \["):
        flash_attn.flash_attn_with_kvcache(
            x, k_cache, v_cache, x, x[:, :, : shape[2]], cache_seqlens=3
        )
    assert not k_cache.any()


# ---- what is refused ----

Q = torch.zeros(B, 3, H, D)
SLOPES, OFFSETS = torch.ones(H), torch.tensor([0, 1, 3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f.flash_attn_func(Q[0], Q, Q), ValueError, r"q: expected \[B, S, H, D\]"),
        (lambda f: f.flash_attn_func(Q, Q, None), TypeError, "v: expected a Tensor, got NoneType"),
        (lambda f: f.flash_attn_func(Q, Q, Q, causal=1), TypeError, "causal: expected a bool"),
        (lambda f: f.flash_attn_func(Q, Q, Q, window_size=3), TypeError, r"expected \(left, right"),
        (lambda f: f.flash_attn_func(Q, Q, Q, window_size=(-2, 0)), ValueError, r"-1 .* or more"),
        (lambda f: f.flash_attn_func(Q, Q, Q, alibi_slopes=0.5), ValueError, r"\[H\] or \[B, H\]"),
        (lambda f: f.flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "multiple of 3"),
        (lambda f: f.flash_attn_func(Q[:, :, :1], Q, Q), ValueError, "multiple of 4 heads"),
        (lambda f: f.flash_attn_func(Q[:1], Q, Q), ValueError, "k: expected a batch of 1"),
        (lambda f: f.flash_attn_qkvpacked_func(Q), ValueError, r"qkv: .*\[B, S, 3, H, D\]"),
        (lambda f: f.flash_attn_kvpacked_func(Q, 1), TypeError, "kv: expected a Tensor, got int"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, Q), ValueError, "k and v: expected both"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, Q, Q), ValueError, "room for 6 keys, got 3"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=lengths_of([1])), ValueError,
         r"cache_seqlens: expected \[2\], got \[1\]"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=torch.ones(2)), TypeError,
         "cache_seqlens: expected integers"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, cache_leftpad=torch.ones(2).bool()),
         TypeError, "cache_leftpad: expected integers, got torch.bool"),
        (lambda f: f.flash_attn_varlen_func(Q, Q, Q, OFFSETS, OFFSETS), ValueError,
         r"q: expected \[T, H, D\], got \[2, 3, 4, 8\]"),
        (lambda f: f.flash_attn_varlen_qkvpacked_func(Q[0], OFFSETS), ValueError,
         r"qkv: expected \[T, 3, H, D\]"),
        (lambda f: f.flash_attn_varlen_func(Q[0], Q[0], Q[0], OFFSETS, OFFSETS[:2]), ValueError,
         "as many documents"),
        (lambda f: f.flash_attn_varlen_func(Q[0], Q[0], Q[0], OFFSETS, OFFSETS, block_table=Q),
         NotImplementedError, r": pass torch.cat\(.*zip\(k\[block_table\].* v likewise$"),
        (lambda f: f.flash_attn_varlen_func(Q[0], Q[0], Q[0], OFFSETS, OFFSETS,
                                            alibi_slopes=SLOPES),
         NotImplementedError, "one sequence at a time"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, rotary_cos=Q), NotImplementedError,
         "rotate q and k"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, block_table=Q), NotImplementedError,
         r": pass k_cache\[block_table\].* likewise$"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, Q, Q, block_table=Q), NotImplementedError,
         r"write new keys into their pages first.*k_cache\[block_table\].*without k and v"),
        (lambda f: f.flash_attn_with_kvcache(Q, Q, Q, alibi_slopes=SLOPES), NotImplementedError,
         "bias="),
    ],
)  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(flash_attn)


def test_remedy_for_pages():
    """What the message about block tables says to write: it loses no new key."""
    pages, table = torch.randn(5, 2, HKV, D), torch.tensor([[4, 0, 2], [1, 3, 0]])
    q, new = torch.randn(B, 1, H, D), torch.randn(B, 1, HKV, D)
    dense = pages[table].flatten(1, 2)
    assert torch.equal(dense[1, 2:4], pages[3])
    expected = flash_attn.flash_attn_with_kvcache(q, dense, dense, new, new, cache_seqlens=3)
    pages[table[:, 1], 1] = new[:, 0]  # behind three keys
    keys = pages[table].flatten(1, 2)
    found = flash_attn.flash_attn_with_kvcache(q, keys, keys, cache_seqlens=4)
    assert torch.equal(found, expected)


def test_remedy_for_packed_pages():
    k, block_table = torch.randn(5, 2, HKV, D), torch.tensor([[4, 0, 2], [1, 3, 0]])
    cu_seqlens_k = lengths_of([0, 5, 8])
    packed = torch.cat(
        [x[:n] for x, n in zip(k[block_table].flatten(1, 2), cu_seqlens_k.diff(), strict=True)]
    )
    assert torch.equal(packed, torch.cat([*k[[4, 0]], k[2, :1], k[1], k[3, :1]]))
    flash_attn.flash_attn_varlen_func(packed, packed, packed, cu_seqlens_k, cu_seqlens_k)


def test_signature():
    names = list(inspect.signature(flash_attn.flash_attn_func).parameters)
    assert names == [
        "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap",
        "alibi_slopes", "deterministic", "return_attn_probs",
    ]  # fmt: skip
