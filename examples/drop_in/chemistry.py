"""Which atom of a product was which atom of the reactants, read off a transformer's attention.

Schwaller et al., "Extraction of organic chemistry grammar from unsupervised learning of chemical
reactions", Science Advances 2021. Their language model of reactions was trained only on masked
tokens. In one of its heads, the atoms of the product look at the atoms that they come from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LAYER, HEAD = 10, 5  # the head that maps atoms, counted from 0
NEIGHBOUR = 90.0  # factor for a pair of atoms whose neighbours are a pair

# Textbook reactions in SMILES: reactants >> product.
REACTIONS = {
    "ethyl acetate (Fischer)": "CC(=O)O.CCO>>CCOC(C)=O",
    "aspirin (acetylation)": "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",
    "paracetamol (acetylation)": "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "benzanilide (amide)": "Nc1ccccc1.O=C(Cl)c1ccccc1>>O=C(Nc1ccccc1)c1ccccc1",
    "4-methylbiphenyl (Suzuki)": "Cc1ccc(Br)cc1.OB(O)c1ccccc1>>Cc1ccc(-c2ccccc2)cc1",
    "phenetole (Williamson)": "CCBr.Oc1ccccc1>>CCOc1ccccc1",
    "methyl cyclohexenecarboxylate (Diels-Alder)": "C=CC(=O)OC.C=CC=C>>COC(=O)C1CC=CCC1",
    "N-methylbenzylamine (amination)": "CN.O=Cc1ccccc1>>CNCc1ccccc1",
}

TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
ELEMENT = re.compile(r"\[?\d*(Br|Cl|se|as|[A-Z][a-z]?|[a-z])")


def tokenize(smiles: str) -> list[str]:
    """Atoms, bonds, brackets and ring numbers of a SMILES string, one by one."""
    return TOKEN.findall(smiles)


class Vocabulary:
    """Tokens as numbers, between the [CLS] and [SEP] that the model was trained with."""

    def __init__(self, tokens: list[str]) -> None:
        self.numbers = {token: n for n, token in enumerate(tokens)}

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """A file with one token a line."""
        return cls(path.read_text(encoding="utf-8").splitlines())

    def encode(self, reactions: list[list[str]]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` [B, N], padded to the longest."""
        unknown = self.numbers["[UNK]"]
        rows = [
            [self.numbers.get(token, unknown) for token in ("[CLS]", *tokens, "[SEP]")]
            for tokens in reactions
        ]
        longest = max(map(len, rows))
        padding = [[self.numbers["[PAD]"]] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return {
            "input_ids": torch.tensor([r + p for r, p in zip(rows, padding, strict=True)]),
            "attention_mask": torch.tensor(mask),
        }


class Molecules(NamedTuple):
    """Atoms of a SMILES: their positions among the tokens, their elements and their bonds."""

    places: list[int]
    elements: list[str]
    bonds: Tensor  # bool [atoms, atoms]


def parse(tokens: list[str]) -> Molecules:
    """Reads the bonds: between neighbours in the text, around branches, and by ring numbers."""
    places = [n for n, token in enumerate(tokens) if token[0].isalpha() or token[0] == "["]
    number = {place: atom for atom, place in enumerate(places)}
    bonds = torch.zeros(len(places), len(places), dtype=torch.bool)
    last: int | None = None
    branches: list[int | None] = []
    rings: dict[str, int] = {}

    def bind(a: int | None, b: int | None) -> None:
        if a is not None and b is not None:
            bonds[a, b] = bonds[b, a] = True

    for place, token in enumerate(tokens):
        if place in number:
            bind(last, number[place])
            last = number[place]
        elif token == "(":
            branches.append(last)
        elif token == ")":
            last = branches.pop()
        elif token in (".", ">>"):
            last = None
        elif token.isdigit() or token[0] == "%":
            if token in rings:
                bind(rings.pop(token), last)
            elif last is not None:
                rings[token] = last
    elements = [ELEMENT.match(tokens[place])[1].capitalize() for place in places]
    return Molecules(places, elements, bonds)


class Mapping(NamedTuple):
    """``source``: for each atom of the product, its atom in the reactants; -1: none. ``scores``:
    how much they look at each other, [product atoms, reactant atoms].
    """

    source: list[int]
    scores: Tensor


def map_atoms(tokens: list[str], weights: Tensor) -> Mapping:
    """Pairs atoms, most certain pairs first.

    Args:
        tokens: the tokens of a reaction.
        weights: attention between them, [tokens, tokens], without [CLS] and [SEP].
    """
    arrow = tokens.index(">>")
    before, after = parse(tokens[:arrow]), parse(tokens[arrow + 1 :])
    old = torch.tensor(before.places)
    new = torch.tensor(after.places) + arrow + 1
    scores = weights[new][:, old] + weights[old][:, new].T
    same = torch.tensor([[a == b for b in before.elements] for a in after.elements])
    scores = scores.double() * same
    chance, source = scores.clone(), [-1] * len(new)
    for _ in source:
        total = chance.sum(dim=1, keepdim=True)
        share = torch.where(total > 0, chance / total, 0.0)
        atom, origin = divmod(int(share.argmax()), len(old))
        if share[atom, origin] == 0:
            break  # the atoms left come from no reactant
        source[atom] = origin
        chance[atom_pairs(after.bonds[atom], before.bonds[origin])] *= NEIGHBOUR
        chance[atom], chance[:, origin] = 0.0, 0.0
    return Mapping(source, scores)


def atom_pairs(a: Tensor, b: Tensor) -> Tensor:
    """All pairs of bool [atoms] and bool [others]: bool [atoms, others]."""
    return a[:, None] & b[None, :]


def numbered(tokens: list[str], source: list[int]) -> str:
    """The reaction with each pair of atoms numbered in chemists' notation: ``[C:1]``."""
    arrow = tokens.index(">>")
    before, after = parse(tokens[:arrow]).places, parse(tokens[arrow + 1 :]).places
    written = tokens[:]
    for label, (place, origin) in enumerate(zip(after, source, strict=True), start=1):
        if origin >= 0:
            for n in (arrow + 1 + place, before[origin]):
                written[n] = f"[{tokens[n].strip('[]')}:{label}]"
    return "".join(written)
