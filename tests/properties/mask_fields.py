"""Each field of Mask alone: an example, the pairs it keeps, and a check that a call uses it."""

import dataclasses

import pytest
import torch

from fastattn import Mask

B, H, M, N, D = 2, 2, 6, 6, 8
LENGTHS, BEGINS = torch.tensor([2, 5]), torch.tensor([1, 3])
KEEP = torch.arange(N)[None] % 3 != 1

# A value, and whether query i of sample b keeps key j. A new field needs a line here.
EXAMPLES = {
    "causal": ("top_left", lambda b, i, j: j <= i),
    "window": ((1, 0), lambda b, i, j: (j >= i - 1) & (j <= i)),
    "kv_len": (LENGTHS, lambda b, i, j: j < LENGTHS[b]),
    "keep": (KEEP, lambda b, i, j: KEEP[0, j]),
    "kv_begin": (BEGINS, lambda b, i, j: j >= BEGINS[b]),
}
FIELDS = [field.name for field in dataclasses.fields(Mask)]
TENSORS = [name for name in FIELDS if isinstance(EXAMPLES[name][0], torch.Tensor)]
every_field = pytest.mark.parametrize("field", FIELDS)


def mask_of(field: str) -> Mask:
    """A mask with one field set."""
    return Mask(**{field: EXAMPLES[field][0]})


def kept(field: str, rows: int = M) -> torch.Tensor:
    """The pairs that the example keeps, [B, rows, N]."""
    b, i, j = (torch.arange(n) for n in (B, rows, N))
    return EXAMPLES[field][1](b[:, None, None], i[:, None], j).expand(B, rows, N)


def flat(results) -> list[torch.Tensor]:
    """The tensors of a result: one, or those of a tuple."""
    results = results if isinstance(results, tuple) else (results,)
    return [x for x in results if isinstance(x, torch.Tensor)]


def assert_heeded(call, field: str, unmasked, dense: Mask, dtype=torch.float32) -> None:
    """``call(mask)`` differs from the unmasked result, and equals that of a dense mask.

    Two right results are compared, each of which is rounded in its own way.
    """
    most = 2e-3 if dtype.itemsize == 2 else 2e-5
    found, plain, wanted = (flat(x) for x in (call(mask_of(field)), unmasked, call(dense)))
    assert any((x != y).any() for x, y in zip(found, plain, strict=True)), f"{field} is ignored"
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=most, atol=most)


def inputs(score: str, dtype=torch.float32, grad: bool = False) -> list[torch.Tensor]:
    """[q, k, v], and the weight of the additive score."""
    shapes = [(B, H, M, D), (B, H, N, D), (B, H, N, D), (H, D)]
    made = [torch.randn(x).to(dtype) for x in shapes[: 4 if score == "additive" else 3]]
    return [x.requires_grad_(grad) for x in made]


def check_backend(backend: str, field: str, score: str, attend, dtype=torch.float32) -> None:
    """Results and gradients on a backend. The first call has no mask, and is then a known call.

    ``attend(*inputs, **options)`` is the function of the score.
    """
    tensors = inputs(score, dtype, grad=True)
    options = dict(backend=backend, return_weights="full", return_lse=True)

    def call(mask):
        results = attend(*tensors, mask=mask, **options)
        grads = torch.autograd.grad([x.float().square().sum() for x in results[:2]], tensors)
        return (*(x.detach() for x in results), *grads)

    for mask in (None, None, Mask(), Mask()):
        unmasked = call(mask)
    assert_heeded(call, field, unmasked, Mask(keep=kept(field)[:, None]), dtype)
