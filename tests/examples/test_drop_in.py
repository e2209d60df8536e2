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
    from examples.drop_in import interface, models

    torch.manual_seed(0)
    plain = models.TinyEncoder(50)
    ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ours.set_attn_implementation(interface.NAME)
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


@pytest.mark.parametrize("kind", ["Albert", "Bert"])
def test_in_transformers(kind, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5")
    from examples.drop_in import interface

    called, attend = [], interface.attention
    monkeypatch.setattr(
        interface, "attention", lambda *args, **kw: called.append(1) or attend(*args, **kw)
    )
    interface.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, embedding_size=32, intermediate_size=48,
        num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=16,
    )  # fmt: skip
    config._attn_implementation = "eager"
    plain = getattr(transformers, f"{kind}Model")(config).eval()
    ours, truth = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ours.set_attn_implementation(interface.NAME)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    ids = torch.arange(27).view(3, 9)
    with torch.no_grad():
        results = [m(ids, mask, output_attentions=True) for m in (ours, plain, truth)]
    assert len(called) == 2  # layers of one of the three
    states = [r.last_hidden_state[mask.bool()] for r in results]
    assert_within_budget(*states, name="hidden states")
    for layer in zip(*(r.attentions for r in results), strict=True):
        assert_within_budget(*layer, name="weights")


def test_refuses_what_it_does_not_do():
    from examples.drop_in.interface import attention

    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="softcap"):
        attention(torch.nn.Identity(), q, q, q, None, softcap=30.0)


def test_causal_only_without_a_mask():
    from examples.drop_in.interface import attention

    q = torch.randn(1, 1, 3, 4)
    module = torch.nn.Identity()
    module.is_causal = True
    _, weights = attention(module, q, q, q, None, output_attentions=True)
    assert (weights.triu(1) == 0).all()
    everything = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    _, weights = attention(module, q, q, q, everything, output_attentions=True)
    assert (weights > 0).all()
    _, weights = attention(module, q[:, :, :1], q, q, None, output_attentions=True)
    assert (weights > 0).all()


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
    weights[6, 0] = weights[6, 3] = 0.5  # its C at the C, and at N, which it cannot have been
    mapping = map_atoms(tokens, weights)
    assert mapping.source == [1, 0]
    assert numbered(tokens, mapping.source) == "[C:2][O:1].N>>[O:1][C:2]"
    twins = tokenize("CO.CN>>NC")  # which of the two C? The one that is bound to the N
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
