"""examples/drop_in runs in its smoke size and equals plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from programs import META, gradients, pictures, smoke

from fastattn.testing import assert_within_budget


def test_says_the_same(tmp_path):
    result = smoke("drop_in", tmp_path)
    assert pictures(tmp_path) == {"atoms.png"}
    assert result["reactions"]["mapped alike"] == result["reactions"]["reactions"] == 8
    same = result["search"]["same five pages in the same order"]
    assert same == result["search"]["questions"] == 8


@pytest.mark.parametrize("weights", [False, True])
def test_plain_twin(weights):
    from examples.drop_in import models

    torch.manual_seed(0)
    plain = models.TinyEncoder(50)
    ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ours.set_attn_implementation(models.OURS)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    results = []
    for model in (ours, plain, truth):
        torch.manual_seed(1)
        out = model(torch.arange(27).view(3, 9), mask, output_attentions=weights)
        loss = out.last_hidden_state.square().mean()
        results.append((*out.attentions, out[0], *gradients(loss, model).values()))
    for got in zip(*results, strict=True):
        if got[0] is None:
            assert not weights
        else:
            assert_within_budget(*got)


def test_bonds():
    from examples.drop_in.chemistry import parse, tokenize

    atoms = parse(tokenize("C1CC(=O)[NH]1.[Na+]Cl"))
    assert atoms.elements == ["C", "C", "C", "O", "N", "Na", "Cl"]
    bonds = {(0, 1), (1, 2), (2, 3), (2, 4), (0, 4), (5, 6)}
    assert {(a, b) for a, b in atoms.bonds.nonzero().tolist() if a < b} == bonds


def test_maps_atoms_by_attention_and_neighbours():
    from examples.drop_in.chemistry import map_atoms, numbered, tokenize

    tokens = tokenize("CO.N>>OC")
    weights = torch.zeros(len(tokens), len(tokens))
    weights[5, 1] = 1.0  # the product's O looks at the O
    weights[6, 0] = weights[6, 3] = 0.5  # its C at the C, and at N, which is another element
    mapping = map_atoms(tokens, weights)
    assert mapping.source == [1, 0]
    assert numbered(tokens, mapping.source) == "[C:2][O:1].N>>[O:1][C:2]"
    twins = tokenize("CO.CN>>NC")  # which of the two C? the one bound to N
    weights = torch.full((len(twins), len(twins)), 0.1)
    assert map_atoms(twins, weights).source == [3, 2]


def test_on_another_device():
    from examples.drop_in import __main__ as program
    from examples.drop_in import search

    _, _, encoder, words = program.load(smoke=True)
    encoders = program.variants(encoder.to(META), ("eager", "fastattn"))
    assert program.on(encoders) == META
    batches = search.batches(words, ["one text", "another long text"], 2, 8)
    for model in encoders.values():
        assert search.embed(model, batches).is_meta
