"""The examples in docstrings of public names run, each for itself; the reference shows them."""

import doctest

import pytest
import torch
from torch import nn

import fastattn

FINDER = doctest.DocTestFinder()
EXAMPLES = {
    found.name: found.examples
    for name in fastattn.__all__
    for found in FINDER.find(getattr(fastattn, name), name, module=False, globs={})
    if found.examples
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, monkeypatch, tmp_path):
    source = "".join(example.source for example in EXAMPLES[name])
    if '"cuda"' in source and not torch.cuda.is_available():
        pytest.skip("the example wants a GPU")
    if "plot" in source:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "nn": nn, "fastattn": fastattn}
    exec(compile(source, name, "exec"), names | {x: getattr(fastattn, x) for x in fastattn.__all__})


def test_functions_and_modules_have_examples():
    records = {"AlignmentState", "Explanation", "HardChoice", "ModuleExplanation", "SdpaCalls"}
    assert set(fastattn.__all__) - records <= {name.split(".")[0] for name in EXAMPLES}
