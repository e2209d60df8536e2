"""Any strides of any tensor: transposed, sliced, expanded, beyond 2^31 elements."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from helpers import SCORES, assert_same_bits, attend, everything, inputs

from fastattn import Mask, testing
from fastattn.testing import Case
from fastattn.testing.cases import relaid

scores = pytest.mark.parametrize("score", SCORES)


def permuted(*order):
    """The same values, stored with the dims in this order."""

    def relay(x):
        inverse = sorted(range(4), key=lambda d: order[d])
        return x.permute(order).contiguous().permute(inverse)

    return relay


def expanded_copy(x):
    """A dim of size 1 with a meaningless stride, as broadcasting produces it."""
    return x.as_strided(
        x.shape, [s if n > 1 else 12345 for s, n in zip(x.stride(), x.shape, strict=True)]
    )


LAYOUTS = {
    "bhdm": permuted(0, 1, 3, 2),
    "mbhd": permuted(2, 0, 1, 3),
    "dmhb": permuted(3, 2, 1, 0),
    "bmhd": permuted(0, 2, 1, 3),
    "sliced": partial(relaid, "sliced"),
    "unaligned": partial(relaid, "unaligned"),
    "stride-of-1": expanded_copy,
}
BASE = Case("strides", M=18, N=35, D=12, E=9, H=4, Hkv=2, bias="bhmn", keep="bhmn", kv_len="rows",
            weights="full", lse=True)  # fmt: skip


def relayout(**how):
    """For testing.check: gives the named tensors other strides."""

    def change(t):
        in_mask = {name: how[name](getattr(t.mask, name)) for name in how if hasattr(t.mask, name)}
        beside = {name: how[name](getattr(t, name)) for name in how if name not in in_mask}
        return dataclasses.replace(t, mask=dataclasses.replace(t.mask, **in_mask), **beside)

    return change


TENSORS = ("q", "k", "v", "bias", "keep", "grad_out", "grad_weights")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tensor", TENSORS)
@scores
def test_one_tensor_in_another_layout(backend, score, tensor, layout):
    case = dataclasses.replace(BASE, score=score)
    testing.check(case, backend, relayout(**{tensor: LAYOUTS[layout]}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@scores
def test_all_tensors_in_another_layout(backend, score, layout, dtype):
    case = dataclasses.replace(BASE, score=score, dtype=dtype)
    testing.check(case, backend, relayout(**dict.fromkeys(TENSORS, LAYOUTS[layout])))


@scores
def test_each_tensor_in_a_layout_of_its_own(backend, score):
    case = dataclasses.replace(BASE, score=score)
    for shift in range(3):
        cycle = itertools.islice(itertools.cycle(LAYOUTS.values()), shift, None)
        how = dict(zip(TENSORS, cycle, strict=False))
        testing.check(case, backend, relayout(**how))


def test_strided_kv_len(backend):
    def every_third(x):
        wide = x.new_full((x.shape[0], 3 * x.shape[1]), 10**6)
        return wide[:, ::3].copy_(x)

    testing.check(BASE, backend, relayout(kv_len=every_third))
    testing.check(BASE, backend, relayout(kv_len=lambda x: x.t().contiguous().t()))


ORDERS = {  # of dims in memory, outermost first: of a query, and of the output beside it
    (0, 1, 2, 3): (0, 1, 2, 3),
    (0, 2, 1, 3): (0, 2, 1, 3),
    (2, 0, 1, 3): (2, 0, 1, 3),
    (0, 1, 3, 2): (0, 1, 2, 3),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("E", [6, 9])
@scores
def test_output_in_the_order_of_the_query(backend, score, E, order):
    """As PyTorch's function has it; test_output_in_pytorchs_layout compares the two."""
    named = inputs(score, B=3, H=4, M=5, D=6, E=E)
    named["query"] = permuted(*order)(named["query"])
    out = everything(named, backend=backend)["out"]
    assert out.permute(ORDERS[order]).is_contiguous()


def test_the_stride_of_one_head_decides_nothing(backend):
    key, value = torch.randn(3, 1, 7, 6), torch.randn(3, 1, 7, 6)
    query = torch.randn(5, 3, 6)  # sequence first
    for stride in (1, 6, 1000):
        q = query.as_strided((3, 1, 5, 6), (6, stride, 18, 1))
        out = attend(q, key, value, backend=backend)
        assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("order", ORDERS)
def test_output_in_pytorchs_layout(backend, order):
    q, k, v = (permuted(*order)(torch.randn(3, 4, 5, 6)) for _ in range(3))
    out = attend(q, k, v, backend=backend)
    assert out.stride() == torch.nn.functional.scaled_dot_product_attention(q, k, v).stride()
    # Each broadcast batch has an output of its own.
    one = q[:1].expand(3, 4, 5, 6)
    out = attend(one, k, v, backend=backend)
    assert out.stride() == torch.nn.functional.scaled_dot_product_attention(one, k, v).stride()


@scores
def test_everything_expanded(backend, score):
    """Stride 0 in batch, heads and rows: each repeats the stored one."""
    B, H, M, N, D = 3, 2, 5, 7, 4
    stored = {"query": torch.randn(1, 1, 1, D), "key": torch.randn(1, 1, N, D),
              "value": torch.randn(1, 1, N, D)}  # fmt: skip
    if score == "additive":
        stored["weight"] = torch.randn(1, D)
    shapes = {"query": (B, H, M, D), "key": (B, H, N, D), "value": (B, H, N, D), "weight": (H, D)}
    views = {name: x.expand(shapes[name]) for name, x in stored.items()}
    bias, upstream = torch.randn(1, 1, 1, N).expand(B, H, M, N), torch.ones(1).expand(B, H, M, D)
    keep = torch.tensor(True).expand(B, H, M, N)
    found = everything(views, upstream, bias=bias, mask=Mask(keep=keep), backend=backend)
    copies = {name: x.contiguous() for name, x in views.items()}
    dense = everything(copies, upstream.contiguous(), bias=bias.contiguous(), backend=backend)
    for name in found:
        torch.testing.assert_close(found[name], dense[name], msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_expanded_leaves_are_summed(backend):
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    attend(*[q.expand(3, 2, 5, 4)] * 3, backend=backend).square().sum().backward()
    dense = q.detach().clone().requires_grad_()
    attend(*[dense.repeat(3, 2, 1, 1)] * 3, backend=backend).square().sum().backward()
    torch.testing.assert_close(q.grad, dense.grad)


def test_one_tensor_as_query_key_and_value(backend):
    x = torch.randn(2, 2, 6, 4, requires_grad=True)
    attend(x, x, x, backend=backend).square().sum().backward()
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    attend(*three, backend=backend).square().sum().backward()
    torch.testing.assert_close(x.grad, sum(t.grad for t in three))


def test_slices_of_one_projection(backend):
    """q, k and v as views of a packed [B, N, 3, H, D], also for gradients."""
    packed = torch.randn(2, 9, 3, 2, 4, requires_grad=True)
    attend(
        *(x.transpose(1, 2) for x in packed.unbind(2)), backend=backend
    ).square().sum().backward()
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in packed.unbind(2)]
    attend(*leaves, backend=backend).square().sum().backward()
    expected = torch.stack([x.grad.transpose(1, 2) for x in leaves], 2)
    torch.testing.assert_close(packed.grad, expected)


# ---- offsets that need 64 bits ----

FAR = 2**31 + 8  # elements; 4 GB of address space in bf16, a few pages of which are touched


@pytest.fixture(scope="module")
def far_storage():
    try:
        return torch.empty(FAR + 4096, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch", "head", "row", "column"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "grad_out"])
@scores
def test_strides_beyond_2_to_the_31(backend, score, name, dim, far_storage):
    sizes = dict(B=2, H=2, M=2, N=2, D=2, E=2)
    named = inputs(score, **sizes, dtype=torch.bfloat16)
    named |= {
        "bias": torch.randn(2, 2, 2, 2).bfloat16(),
        "grad_out": torch.randn(2, 2, 2, 2).bfloat16(),
    }
    strides = [1, 2, 4]
    strides.insert(dim, FAR)
    far = far_storage.as_strided((2, 2, 2, 2), strides, 16).copy_(named[name])

    def run(**named):
        return everything(named, named.pop("grad_out"), bias=named.pop("bias"), backend=backend)

    near, found = run(**named), run(**(named | {name: far}))
    for result in near:
        torch.testing.assert_close(found[result], near[result])


def test_keep_beyond_2_to_the_31(backend):
    try:
        storage = torch.empty(FAR + 64, dtype=torch.bool)
    except RuntimeError as error:
        pytest.skip(f"no address space for 2^31 elements: {error}")
    keep = torch.tensor([[True, False, True], [False, True, True]])
    far = storage.as_strided((2, 3), (FAR, 1), 5).copy_(keep)
    named = inputs(M=2, N=3)
    found, expected = (everything(named, mask=Mask(keep=k), backend=backend) for k in (far, keep))
    assert_same_bits(found, expected)
