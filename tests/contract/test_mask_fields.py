"""Every field of Mask changes the result, on every way to make a call."""

import inspect

import pytest
import torch
from helpers import SCORES, attend
from properties import mask_fields
from properties.mask_fields import EXAMPLES, TENSORS, B, D, N, assert_heeded, every_field, mask_of

import fastattn
from fastattn import Mask, autograd, blocks
from fastattn.backends import registry
from fastattn.problem import Problem, schemas, validate
from fastattn.problem.record import MASK_TENSORS
from fastattn.scores import SCORES as every_score

both_scores = pytest.mark.parametrize("score", SCORES)


def test_the_tensors_of_a_mask_are_operands_in_their_order():
    assert tuple(TENSORS) == MASK_TENSORS
    expected = (*MASK_TENSORS, "seed")
    assert autograd._TENSORS[autograd._INPUTS : autograd._ALL] == expected
    operands = schemas.Call._fields
    assert operands[operands.index("bias") + 1 :][: len(expected)] == expected


@every_field
def test_the_record_has_it(field):
    """A mask that counts as saying nothing would get the cached result without a mask."""
    q = torch.randn(B, 1, 6, D)
    masked, plain = (validate.build("dot", q, q, q, mask=m).p for m in (mask_of(field), None))
    assert masked.operands != plain.operands
    assert str(masked) != str(plain)


@every_field
def test_other_tensors_take_the_place_of_the_records_own(field):
    p = validate.build("dot", *mask_fields.inputs("dot"), mask=mask_of(field)).p
    own = p.tensors()
    assert [x is not None for x in own[:-1]] == [name == field for name in MASK_TENSORS]
    bare = p.with_tensors(*[None] * len(own))
    assert bare.tensors() == (None,) * len(own)
    again = bare.with_tensors(*own)
    assert all(x is y for x, y in zip(again.tensors(), own, strict=True))
    assert again.with_tensors(*own) is again


@every_field
def test_a_record_is_made_again_of_its_operands(field):
    """As operators of ``fastattn.distributed`` do. They get causal and window beside these."""
    q, k, v = mask_fields.inputs("dot")
    p = validate.build("dot", q, k, v, mask=mask_of(field)).p
    call = schemas.Call(q, k, v, None, None, *p.operands)
    again = Problem.of(call, Mask(p.mask.causal, p.mask.window), p.origin, p.N)
    assert str(again) == str(p)
    assert torch.equal(again.kept(), p.kept())


@every_field
@pytest.mark.parametrize("first", [(0, 0), (1, 0), (0, 3), (3, 2)], ids=str)
def test_a_block_keeps_what_the_whole_keeps(first, field, backend):
    p, *tensors = validate.build(
        "dot", *mask_fields.inputs("dot"), mask=mask_of(field), return_weights="full"
    )[:6]
    (i, j), whole = first, blocks.whole(p)
    cut = whole._replace(i=(i, p.M), j=(j, p.N))
    part = blocks.block_of(p, cut)
    kept = blocks.pairs_of(p.kept().expand(p.B, p.H, p.M, p.N), cut)
    assert torch.equal(part.kept().expand_as(kept), kept)
    weights = registry.get(backend).forward(part, *blocks.tensors_of(p, cut, *tensors))[2]
    assert torch.equal(weights != 0, kept)


@every_field
def test_its_name_as_a_keyword_says_what_to_write(field):
    q = torch.randn(1, 1, 2, D)
    with pytest.raises(TypeError, match=rf"argument '{field}': write .*Mask\({field}="):
        fastattn.scaled_dot_product_attention(q, q, q, **{field: None})


@every_field
@both_scores
def test_results_and_gradients_after_calls_without_a_mask(backend, score, field):
    mask_fields.check_backend(backend, field, score, attend)


@every_field
def test_repeated_calls(field):
    """From the third call on, and in backward from the fourth, plans take the place of records."""
    tensors = mask_fields.inputs("dot", grad=True)

    def call(mask):
        for _ in range(5):
            out = fastattn.scaled_dot_product_attention(*tensors, mask=mask)
            grads = torch.autograd.grad(out.square().sum(), tensors)
        return (out.detach(), *grads)

    assert_heeded(call, field, call(None), Mask(keep=mask_fields.kept(field)[:, None]))


@every_field
@pytest.mark.parametrize("score", every_score)
def test_every_score(score, field):
    *tensors, w = mask_fields.inputs("additive", grad=True)
    options = {"weight": w} if score == "additive" else {}

    def call(mask):
        out = fastattn.attention(*tensors, score=score, mask=mask, **options)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), tensors))

    assert_heeded(call, field, call(None), Mask(keep=mask_fields.kept(field)[:, None]))


FIRST = {"batch_first": True}
MODULES = {
    "AdditiveAttention": lambda: fastattn.AdditiveAttention(D, D, D),
    "CosineAttention": lambda: fastattn.CosineAttention(),
    "HardAttention": lambda: fastattn.HardAttention(D, D),
    "LocationSensitiveAttention": lambda: fastattn.LocationSensitiveAttention(D, D, D),
    "LuongAttention": lambda: fastattn.LuongAttention(D),
    "MultiheadAdditiveAttention": lambda: fastattn.MultiheadAdditiveAttention(D, 2, **FIRST),
    "MultiheadAttention": lambda: fastattn.MultiheadAttention(D, 2, **FIRST),
    "NadarayaWatson": lambda: fastattn.NadarayaWatson(),
    "SelfAttention": lambda: fastattn.SelfAttention(D, 2),
}


def test_these_are_the_modules_that_take_a_mask():
    classes = {name: getattr(fastattn, name) for name in fastattn.__all__}
    modules = {name: x for name, x in classes.items() if hasattr(x, "forward")}
    taking = {n for n, x in modules.items() if "mask" in inspect.signature(x.forward).parameters}
    assert taking == set(MODULES)


@every_field
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_modules(name, field):
    module = MODULES[name]().eval()
    x = torch.randn(B, N, D)
    one_query = name == "LocationSensitiveAttention"
    tensors = {"SelfAttention": (x,)}.get(name, (x[:, 0] if one_query else x, x, x))

    def call(mask):
        return module(*tensors, mask=mask)

    keep = mask_fields.kept(field, rows=1 if one_query else N)
    assert_heeded(call, field, call(None), Mask(keep=keep))


@every_field
@both_scores
def test_vmap(score, field, backend):
    """Over the inputs only, and over the inputs and a tensor of the mask."""
    tensors = [torch.stack([x, x.flip(-1)]) for x in mask_fields.inputs(score)[:3]]
    w = mask_fields.inputs(score)[3:]

    def call(mask):
        def one(q, k, v):
            return attend(q, k, v, *w, mask=mask, backend=backend)

        return torch.vmap(one)(*tensors)

    unmasked = call(None)
    assert_heeded(call, field, unmasked, Mask(keep=mask_fields.kept(field)[:, None]))
    if field in TENSORS:
        value = EXAMPLES[field][0]

        def one_of_each(q, k, v, x):
            return attend(q, k, v, *w, mask=Mask(**{field: x}), backend=backend)

        mapped = torch.vmap(one_of_each)(*tensors, torch.stack([value, value.roll(1, -1)]))
        torch.testing.assert_close(mapped[0], call(mask_of(field))[0])
        assert (mapped[1] != call(mask_of(field))[1]).any()


@pytest.mark.slow
@both_scores
def test_compiled(score):
    """One function for all fields: none may take the graph of another."""
    torch.compiler.reset()  # its counter of compilations per function
    tensors = mask_fields.inputs(score, grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(mask):
        return attend(*tensors, mask=mask)

    def call(mask):
        out = compiled(mask)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), tensors))

    unmasked = call(None)
    for field in mask_fields.FIELDS:
        dense = mask_fields.kept(field)[:, None].contiguous()  # else each has strides of its own
        assert_heeded(call, field, unmasked, Mask(keep=dense))
