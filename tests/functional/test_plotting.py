"""Heat maps of weights: what is drawn and labelled, and what raises."""

import io
import sys

import numpy as np
import pytest
import torch

import fastattn
from fastattn import plotting

pytest.importorskip("matplotlib")


def panels(figure):
    """The axes with weights."""
    return [axis for axis in figure.axes if axis.images and axis.get_label() != "<colorbar>"]


def labels(ticks):
    return [tick.get_text() for tick in ticks]


def test_one_panel_with_its_labels():
    weights = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
    figure = fastattn.plot_attention(weights, ["a", "b"], ["x", "yellow", "z"], title="words")
    [axis] = panels(figure)
    assert torch.equal(torch.tensor(axis.images[0].get_array()), weights)
    assert axis.images[0].get_clim() == (0.0, 1.0)
    assert labels(axis.get_yticklabels()) == ["a", "b"]
    assert labels(axis.get_xticklabels()) == ["x", "yellow", "z"]
    assert {tick.get_rotation() for tick in axis.get_xticklabels()} == {60.0}
    assert figure.get_suptitle() == "words"


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_a_panel_a_head_on_one_scale(heads):
    weights = torch.rand(heads, 4, 6, dtype=torch.bfloat16, requires_grad=True)
    figure = fastattn.plot_attention(weights)
    drawn = panels(figure)
    assert len(drawn) == heads
    assert {axis.images[0].get_clim() for axis in drawn} == {(0.0, float(weights.detach().max()))}
    titles = [axis.get_title() for axis in drawn]
    assert titles == ([""] if heads == 1 else [f"head {n}" for n in range(heads)])


def test_nan_is_blank_and_leaves_the_scale_alone():
    weights = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan], [0.1, 0.9]])
    [panel] = panels(fastattn.plot_attention(weights))
    assert panel.images[0].get_clim() == pytest.approx((0.0, 0.9))
    [panel] = panels(fastattn.plot_attention(torch.full((2, 2), torch.nan)))
    assert panel.images[0].get_clim() == (0.0, 1.0)


def test_nested_weights_are_refused():
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(3, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"write weights.unbind\(\)\[n\]"):
        fastattn.plot_attention(nested)


def test_it_can_be_saved():
    file = io.BytesIO()
    figure = fastattn.plot_attention(torch.rand(2, 40, 3))
    width, height = figure.get_size_inches()
    assert width < height
    figure.savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_labels_are_shown_as_written():
    """A matching pair of dollar signs is no formula, as it is elsewhere in matplotlib."""
    words = ["$^$", "a$b$"]
    figure = fastattn.plot_attention(torch.rand(2, 2, 2), words, words, title="$_$", names=words)
    figure.savefig(io.BytesIO())
    assert labels(panels(figure)[1].get_yticklabels()) == words


@pytest.mark.parametrize("given", [np.array(["a", "b"]), (x for x in "ab"), "ab"], ids=type)
def test_labels_of_any_sequence(given):
    [axis] = panels(fastattn.plot_attention(torch.rand(2, 3), given, "xyz"))
    assert labels(axis.get_yticklabels()) == ["a", "b"]
    assert {tick.get_rotation() for tick in axis.get_xticklabels()} == {0.0}  # single characters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=[1, 2]), r"rows: expected text, got int: write str\(x\)"),
        (dict(columns=["a", None]), "columns: expected text, got NoneType"),
        (dict(rows=2), "rows: expected 2 labels, got int"),
        (dict(title=3), r"title: expected text, got int: write str\(x\)"),
    ],
)
def test_what_is_no_text_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        fastattn.plot_attention(torch.rand(2, 2), **options)


@pytest.mark.parametrize("letters", ["好的", "かカ", "한국", "豈更"])
def test_chinese_japanese_and_korean_labels_ask_for_a_font(monkeypatch, letters):
    from matplotlib import font_manager

    class Font:
        name = plotting.CJK_FONTS[3]

    weights = torch.rand(2, 2)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [Font])
    figure = fastattn.plot_attention(weights, letters, ["a", "b"])
    assert panels(figure)[0].get_yticklabels()[0].get_fontfamily()[0] == Font.name
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    with pytest.warns(UserWarning, match="apt install fonts-wqy-zenhei"):
        fastattn.plot_attention(weights, letters, ["a", "b"])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"weights: expected \[M, N\] or \[heads, M, N\], got \[3\]"),
        ((1, 1, 3, 4), {}, r"got \[1, 1, 3, 4\]"),
        ((3, 4), dict(rows=["a"]), "rows: expected 3 labels for these weights, got 1"),
        ((3, 4), dict(columns=list("abc")), "columns: expected 4 labels"),
        ((2, 3, 4), dict(names=["one"]), "names: expected 2 labels"),
    ],
)
def test_what_does_not_fit_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        fastattn.plot_attention(torch.rand(shape), **options)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'fastattn\[plot\]'"):
        fastattn.plot_attention(torch.rand(2, 2))


def test_no_tensor_is_refused():
    with pytest.raises(TypeError, match="weights: expected a Tensor, got list"):
        fastattn.plot_attention([[1.0]])


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match=r"weights: expected .* got \[0, 2, 2\]"):
        fastattn.plot_attention(torch.rand(0, 2, 2))
